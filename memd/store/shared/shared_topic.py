"""A replica of one topic: the folder here is a copy of rows that several daemons append to.

Rule: a row is in the shared log before anything of it is in the copy, so a copy has nothing that others cannot read,
and may be removed. If another daemon was faster, its rows are taken first. Drafts independent of them are then
appended; for dependent ones the caller has to make new drafts.

    row of the log   | header of a log file | record | record | ...    one group; numbered by the id of its last entry
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from memd.entries import Draft, Entry
from memd.errors import Behind, MadeAnew, Rewritten, StoreError
from memd.store.claim import Claim
from memd.store.erasure import ForbiddenText, encode_forbidden
from memd.store.log.format import HEADER_BYTES, Header, ModelId, Span, encode_header
from memd.store.log.recovery import LogFile, read_log_file
from memd.store.log.segment import GrowingSegment, new_header
from memd.store.shared.postgres import News, Row, SharedLog, Stream
from memd.store.snapshot import after_append
from memd.store.topic import StoreShared, TopicLog, WithoutText

_TRIES = 20
"""Attempts at an append while other daemons are faster."""


class SharedTopicLog(TopicLog):
    """See TopicLog. `catch_up` for any thread."""

    head = 0
    """See TopicLog: the end of the log's stream in the copy, whatever the clocks of other daemons say."""

    def __init__(self, shared: StoreShared, claim: Claim, kept: SharedLog, generation: int) -> None:
        """`generation`: of the copy; 0 if there is none."""
        super().__init__(shared, claim)
        self._kept = kept
        self.generation = generation
        self._kept_head = 0
        """Head of the stream `kept`, which is small and so read at each start."""
        rows = [view.segment.rows for view in self.snapshot().views.values()]
        self.head = max((int(one["canonical_id"].max(initial=0)) for one in rows), default=0)
        self.is_sound = not self.is_incomplete and all(
            one.kind in ("derived", "foreign", "notice") for one in self.findings
        )
        """Whether the copy has lost nothing; otherwise it is read again once the log is reachable."""
        self.noticed: Callable[[Sequence[Entry]], None] = lambda entries: None
        """Called with entries of other daemons, in any thread."""
        self.is_current = False
        """Whether the copy had everything when the log was last asked; False if it was unreachable."""

    def has_all(self, ends: News, hot: int) -> bool:
        """Return whether this copy had everything when the ends were read. `hot`: the known row of the buffer."""
        known = self._known(hot)
        is_same = all(known[stream] == head for stream, head in ends.heads.items())
        self.is_current = self.is_sound and ends.generation == self.generation and is_same
        return self.is_current

    def catch_up(self, hot: int | None = None) -> list[Row]:
        """Take the rows that other daemons have appended.

        Args:
            hot: the known row of the hot buffer; None to leave out its stream.

        Returns:
            The rows of the hot buffer after it.

        Raises:
            Rewritten: this copy is void.
            StoreError: the log is unreachable, or the copy cannot be written.
        """
        self.is_current = False
        found: list[Row] = []
        while True:
            after = self._known(hot)
            news = self._kept.since(self.topic_id, after)
            self._check(news, after)
            for row in news.of("kept"):
                self._keep(row)
            self._take(news.of("log"))
            if hot is not None and (rows := news.of("hot")):
                found, hot = found + rows, rows[-1].last
            known = self._known(hot)
            if not news.rows or all(known[stream] >= news.heads[stream] for stream in known):
                break
        with self._state:
            if news.generation and self.head < news.heads["log"]:
                self.head = news.heads["log"]  # of a topic that was removed: ids do not go back
                self._shared.clock.observe(self.head)
        self.is_current = True
        return found

    def append(self, drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        """See TopicLog. Raises MadeAnew: another daemon has stored related entries, which are in the snapshot now."""
        made_at = self.head if made_at is None else made_at
        for _ in range(_TRIES):
            with self._state:
                if self._active is not None and not self._shared.model.wrote(self._active.header):
                    self._rotate(self._active)
            try:
                return super().append(drafts, made_at)
            except Behind:
                self.catch_up()
        raise Behind(f"topic {self.topic_id}: other daemons store so much at this moment that it is tried again later")

    def append_hot(self, after: int, data: bytes, *, base: bool = False) -> bool:
        """Append a row to the stream of the hot buffer; False if others were faster. Raises as `SharedLog.append`."""
        done = self._kept.append(
            self.topic_id, after, Row("hot", after + 1, data, is_base=base), generation=self.generation
        )
        self.generation = self.generation or int(done)
        return done

    def forbid(self, forbidden: ForbiddenText) -> None:
        """Share with all daemons that this must never be stored again."""
        self.catch_up()
        last, data = self._kept_head + 1, encode_forbidden(forbidden)
        if not self._kept.append(
            self.topic_id, self._kept_head, Row("kept", last, data, is_base=True), generation=self.generation
        ):
            raise Behind(f"topic {self.topic_id}: another daemon erases in it at this moment; try again")
        self.generation, self._kept_head = self.generation or 1, last
        super().forbid(forbidden)

    # -- private ------------------------------------------------------------------------------------------------

    def _erase_elsewhere(self, uuids: Collection[bytes], without: WithoutText) -> None:
        """See TopicLog: in the rows, so that all daemons drop their copies."""
        self.catch_up()
        rows: dict[tuple[Stream, int], bytes] = {}
        snapshot, after = self.snapshot(), 0
        places = (place for uuid in uuids for place in snapshot.places(uuid))
        for number in sorted(int(snapshot.views[segment].rows[row]["canonical_id"]) for segment, row in places):
            if number <= after:
                continue
            for row in self._kept.since(self.topic_id, {"log": number - 1}, limit=1).of("log"):
                after = row.last
                data, erased, unnamed = without(row.data)
                if erased or unnamed:
                    rows["log", row.last] = data
        if rows:
            generation = self._kept.rewrite(self.topic_id, self.generation, rows)
            if not generation:
                raise Rewritten(f"topic {self.topic_id}: another daemon erases in it at this moment; it is done again")
            self.generation = generation

    def _known(self, hot: int | None) -> dict[Stream, int]:
        """Return the last known row of each stream."""
        known: dict[Stream, int] = {"log": self.head, "kept": self._kept_head}
        return known if hot is None else {**known, "hot": hot}

    def _check(self, news: News, known: dict[Stream, int]) -> None:
        """Raise Rewritten unless the copy is the beginning of the log."""
        if not self.generation and self.head == 0:
            self.generation = news.generation
        is_ahead = any(known.get(stream, 0) > head for stream, head in news.heads.items())
        if news.generation != self.generation or is_ahead or not self.is_sound:
            raise Rewritten(f"topic {self.topic_id}: the copy here is not what there is now; it is read anew")

    def _check_made(self, drafts: Sequence[Draft], made_at: int) -> None:
        """Raise MadeAnew if drafts might differ had their maker known the entries since."""
        if made_at >= self.head:
            return
        places = [(number, row) for number, rows in self._snapshot.rows_after(made_at) for row in rows]
        new = self._snapshot.read_many(places).values()
        uuids = {uuid for one in new for uuid in (one.uuid, *one.supersedes)}
        digests = {digest for one in new for digest in one.digests}
        contents = {one.content for one in new if one.content}
        is_other = len(new) < len(places) or any(
            draft.uuid in uuids
            or not uuids.isdisjoint(draft.supersedes)
            or not digests.isdisjoint(draft.digests)
            or draft.content in contents
            for draft in drafts
        )
        if is_other:
            raise MadeAnew(f"topic {self.topic_id}: another daemon has stored something of the same; it is made anew")

    def _write(self, entries: Sequence[Entry], data: bytes) -> int:
        last = entries[-1].canonical_id
        row = encode_header(new_header(self._layout, self._shared.model, 1)) + data
        if not self._kept.append(self.topic_id, self.head, Row("log", last, row), generation=self.generation):
            raise Behind(f"topic {self.topic_id}: another daemon was faster")
        self.generation = self.generation or 1
        start = self.claim.append("log", data, sync=False)  # a lost row is read again
        self.head = last
        return start

    def _take(self, rows: Sequence[Row]) -> None:
        """Append rows to the copy, each once. `head` is updated last: for a `made_at` read before drafts are
        made, `_check_made` then misses no row."""
        with self._state:
            for row in rows:
                if row.last <= self.head:
                    continue  # another thread was faster
                name = f"topic {self.topic_id}, row {row.last}"
                group = read_log_file(row.data, name=name, dimension=None)
                last = group.entries[-1].canonical_id if group.entries else 0
                if group.header is None or group.gaps or last != row.last:
                    raise StoreError(f"{name}: is damaged; restore the database")
                self._shared.clock.observe(row.last)
                self._take_group(group.header, group, row.data)
                self.noticed(group.entries)
                self.head = row.last
        self._seal_soon()

    def _take_group(self, header: Header, group: LogFile, data: bytes) -> None:
        active = self._active_of(header)
        start = self.claim.append("log", data[HEADER_BYTES:], sync=False) - HEADER_BYTES
        spans = [Span(start + one.offset, one.length) for one in group.spans]
        fresh = {one.uuid for one in group.entries if not self._snapshot.knows(one.uuid)}
        self._unreserve(fresh)
        self._snapshot = after_append(self._snapshot, active, group.entries, spans, fresh)
        if active.count >= self._shared.segment_entries_max:
            self._rotate(active)

    def _active_of(self, header: Header) -> GrowingSegment:
        """Return the active segment, if this model writes it; else a new one."""
        model = ModelId(header.dimension, header.fingerprint)
        if self._active is not None and not model.wrote(self._active.header):
            self._rotate(self._active)
        return self._open_active(model)

    def _keep(self, row: Row) -> None:
        try:
            forbidden = msgspec.json.decode(row.data, type=ForbiddenText)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(f"topic {self.topic_id}: its row of forbidden text cannot be read: {error}") from None
        super().forbid(forbidden)
        self._kept_head = row.last


def remove_topic(kept: SharedLog, topic_id: str, forbidden: bytes) -> None:
    """Remove all rows of a topic, for all daemons. `forbidden`: the file of text that a topic of this name must never
    store; empty if there is none. Raises StoreError: the log is unreachable. Resumable."""
    generation = 0
    while not generation:
        news = kept.since(topic_id, {"kept": 0}, limit=1)
        if not news.generation:
            return
        generation = kept.rewrite(topic_id, news.generation, None)
    if forbidden:
        head = news.heads["kept"]
        kept.append(topic_id, head, Row("kept", head + 1, forbidden, is_base=True), generation=generation)
