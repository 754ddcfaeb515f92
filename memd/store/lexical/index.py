"""The lexical index of one topic: the terms of its chunks, kept up to date with the log.

Rule: derived from the log and never the truth. The index may lag behind: a query reads the terms of the entries after
it itself (bm25.py). If its files are damaged or belong to another log, they are removed and rebuilt.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import NamedTuple

import numpy as np
import tantivy

from memd.errors import CorruptFile, StoreError
from memd.store.erasure.wiping import Wiper
from memd.store.lexical.analyzer import analyze
from memd.store.lexical.bm25 import (
    EVERY_TEXT,
    SCHEMA,
    LexicalQuery,
    Postings,
    indexed_terms,
    native,
)
from memd.store.lexical.entities import entities_of, key_of
from memd.store.lexical.stamp import FORMAT, Stamp, StampedFolder
from memd.store.lexical.terms import ChunkTerms, TermsCache, TermsTable
from memd.store.log.columns import uuid_bytes
from memd.store.log.extent import ahead_of_log
from memd.store.log.recovery import Finding
from memd.store.snapshot import Place, Snapshot
from memd.store.views import SegmentView

BATCH_ENTRIES = 5_000
"""Entries between two commits: an interrupted rebuild loses at most that many."""
GIVE_WAY_ENTRIES = 50
WRITER_BYTES = 32_000_000
FRESH_ENTRIES_MAX = 500
"""Unindexed entries that a query reads itself, about 0.1 ms each the first time. If there are more, the older of them
are not found by words until the index has caught up."""


class _Later(NamedTuple):
    """The entries that a snapshot has and the index not, by their terms."""

    snapshot: weakref.ref[Snapshot]
    stamp: Stamp
    """Of the index."""
    fresh: TermsTable
    """The terms of the live entries."""
    stale: TermsTable
    """Those of the indexed entries that these supersede."""


class LexicalIndex:
    """The index of one topic. Any thread may query and update; one update runs at a time, others wait for it."""

    def __init__(self, folder: StampedFolder | None, terms_cache: TermsCache) -> None:
        """`folder` holds the index's files; None: the index is kept in memory."""
        self._folder = folder
        self._lock = threading.Lock()
        self._index: tantivy.Index | None = None
        self._postings: Postings | None = None
        self._stamp = Stamp()
        self._terms_cache = terms_cache.for_index()
        self._looked_through: _Later | None = None
        self._is_begun = False
        """Whether `_index` is the topic's own; else it is empty, and the next update begins one."""
        self._closed = False

    def behind(self, snapshot: Snapshot) -> int:
        """Return how many entries of the snapshot are not indexed; all of them before the index is opened."""
        return snapshot.count_after(self._stamp.upto if self._postings else 0)

    def ahead_of(self, snapshot: Snapshot) -> list[Finding]:
        """Return the finding that the index on disk has entries which the log has not, if that is so."""
        stamp = None if self._folder is None else self._folder.read()
        if self._folder is None or stamp is None:
            return []
        return ahead_of_log(self._folder.stamp_path, stamp.extent, snapshot.count_upto)

    def lexical_query(
        self,
        text: str,
        snapshot: Snapshot,
        pending: Sequence[TermsTable] = (),
        *,
        wait_seconds: float = -1,
    ) -> LexicalQuery:
        """Prepare a query on the index as it is now, on the snapshot's unindexed entries and on pending chunks.

        Of more than `FRESH_ENTRIES_MAX` unindexed entries only the newest are looked at. The index is opened if it is
        not open, or if something else has cut its files short; nobody waits for that longer than `wait_seconds`.

        Raises:
            StoreError: the index cannot be read or written.
        """
        stamp, postings = self._usable()
        if postings is None:
            self._open_whole(snapshot, wait_seconds)
            stamp, postings = self._usable()
        later = self._later(snapshot, stamp, postings)
        fresh, stale = TermsTable.joined([later.fresh, *pending]) if pending else later.fresh, later.stale
        texts = stamp.texts + len(fresh.chunks) - len(stale.chunks)
        mean_terms = max(1.0, (stamp.terms + fresh.length - stale.length) / max(1, texts))
        return LexicalQuery(
            postings, text, mean_terms=mean_terms, terms_cache=self._terms_cache, fresh=fresh, stale=stale
        )

    def update(self, snapshot: Snapshot, give_way: Callable[[], None] = lambda: None) -> None:
        """Index the entries of the snapshot that are missing; slow if they are many.

        An index that is absent, damaged or of another log is rebuilt. `give_way` is called between small batches.

        Raises:
            StoreError: the index cannot be written; a later call rebuilds it.
        """
        with self._lock:
            if self._closed:
                return
            try:
                self._leave_if_cut_short()
                if not self._is_begun and not self._open(snapshot):
                    self._begin()
                while batch := list(_places(snapshot, self._stamp.upto, BATCH_ENTRIES)):
                    self._add(snapshot, batch, give_way)
            except StoreError:
                self._reset()
                raise

    def postings(self, snapshot: Snapshot) -> Postings | None:
        """Return the index once it has all entries of the snapshot; slow if many are missing. None: it is closed.

        Raises:
            StoreError: the index cannot be written.
        """
        self.update(snapshot)
        return self._usable()[1]

    def wipe(self, wiper: Wiper) -> None:
        """Wipe the index; the next update builds it again.

        Earlier queries may still read the files that they have mapped: while there are some, and for some seconds at
        most, nothing is overwritten; then the files are only removed.

        Raises:
            StoreWriteFailed: a file cannot be removed.
        """
        with self._lock:
            reader = None if self._postings is None else weakref.ref(self._postings)
            self._reset()
            if self._folder is not None:
                self._folder.wipe(wiper, is_read=lambda: reader is not None and reader() is not None)

    def close(self) -> None:
        """Release the files; earlier queries stay valid."""
        with self._lock:
            self._closed = True
            self._reset()

    def _usable(self) -> tuple[Stamp, Postings | None]:
        """The stamp and the postings; an empty one and None if the index is not open, or its files are cut short."""
        stamp = self._stamp  # read before the postings, which `_add` sets first: no entry can be in neither
        postings = self._postings
        return (Stamp(), None) if postings is None or self._is_cut_short(stamp) else (stamp, postings)

    def _open_whole(self, snapshot: Snapshot, wait_seconds: float) -> None:
        """Open the index on disk; reads all its files once.

        Where there is none, or it is cut short, an empty one stands in for it: no question waits for files to be made.
        """
        if self._lock.acquire(timeout=wait_seconds):
            try:
                self._leave_if_cut_short()
                if self._index is None and not self._closed and not self._open(snapshot):
                    self._use(_EMPTY, Stamp())
            finally:
                self._lock.release()

    def _later(self, snapshot: Snapshot, stamp: Stamp, postings: Postings | None) -> _Later:
        """The entries behind the index, looked through once for all questions until something is stored or indexed."""
        known = self._looked_through
        if known is None or known.snapshot() is not snapshot or known.stamp is not stamp:
            later = _newest_places(snapshot, stamp.upto, FRESH_ENTRIES_MAX)
            stale = indexed_terms(postings, _superseded(snapshot, stamp.upto, later), self._terms_cache)
            fresh = TermsTable.of(self._fresh(snapshot, later))
            known = _Later(weakref.ref(snapshot), stamp, fresh, TermsTable.of(stale))
            if stamp is self._stamp:  # else nobody asks for it again
                self._looked_through = known
        return known

    def _fresh(self, snapshot: Snapshot, later: Sequence[Place]) -> dict[int, ChunkTerms]:
        """Canonical_id → terms of the live entries at these places."""
        fresh: dict[int, ChunkTerms] = {}
        known = self._terms_cache.get_many(_canonical_id(snapshot, place) for place in later)
        for segment_id, row in later:
            view = snapshot.views[segment_id]
            if view.dead[row]:
                continue
            canonical_id = int(view.rows[row]["canonical_id"])
            terms = known.get(canonical_id) or self._read(view, row)
            if terms is not None:
                fresh[canonical_id] = terms
        return fresh

    def _read(self, view: SegmentView, row: int) -> ChunkTerms | None:
        try:
            terms = ChunkTerms.of(analyze(view.segment.read(view.rows[row]).indexed_text))
        except StoreError:
            return None  # `memd verify` reports it
        self._terms_cache.put(int(view.rows[row]["canonical_id"]), terms)
        return terms

    def _is_cut_short(self, stamp: Stamp) -> bool:
        """Whether a file that is mapped into memory is shorter than it was: to read it there ends the process."""
        return self._folder is not None and self._folder.is_cut_short(stamp)

    def _leave_if_cut_short(self) -> None:
        if self._is_cut_short(self._stamp):
            self._reset()

    def _confirm_lock(self) -> None:
        if self._folder is not None:
            self._folder.confirm_lock()

    def _reset(self) -> None:
        self._terms_cache = self._terms_cache.cache.for_index()
        self._index = self._postings = self._looked_through = None
        self._is_begun = False
        self._stamp = Stamp()

    def _open(self, snapshot: Snapshot) -> bool:
        """Open the index on disk; whether there is one that is whole and of this log."""
        try:
            if self._folder is None or (stamp := self._valid_stamp(snapshot)) is None:
                return False
            if (path := self._folder.native_path()) is not None:
                with native(path):
                    self._use(_prepared(tantivy.Index.open(path)), stamp)
                self._is_begun = True
        except CorruptFile:
            self._reset()
        return self._is_begun

    def _begin(self) -> None:
        path = None if self._folder is None else self._folder.native_path()
        if self._folder is not None:
            self._folder.clear()
        self._confirm_lock()
        with native(path or "lexical", writing=True):
            self._use(_prepared(tantivy.Index(SCHEMA, path, reuse=False)), Stamp())
        self._is_begun = True

    def _use(self, index: tantivy.Index, stamp: Stamp) -> None:
        self._index, self._postings, self._stamp = index, Postings(index.searcher()), stamp

    def _valid_stamp(self, snapshot: Snapshot) -> Stamp | None:
        """The stamp on disk, if it is of this log and vouches for the files."""
        assert self._folder is not None, "the index may be on disk"
        stamp = self._folder.read()
        newest = max((int(view.rows["canonical_id"].max(initial=0)) for view in snapshot.views.values()), default=0)
        if stamp is None or stamp.format != FORMAT or stamp.upto > newest:
            return None
        return stamp if stamp.entries == snapshot.count_upto(stamp.upto) and self._folder.matches(stamp) else None

    def _add(self, snapshot: Snapshot, batch: Sequence[Place], give_way: Callable[[], None]) -> None:
        assert self._index is not None and self._postings is not None, "open"
        superseded = _superseded(snapshot, self._stamp.upto, batch)
        removed = indexed_terms(self._postings, superseded, self._terms_cache)
        added: list[ChunkTerms] = []
        self._confirm_lock()
        with native("lexical" if self._folder is None else str(self._folder.path), writing=True):
            with _writing(self._index) as writer:
                for number, place in enumerate(batch):
                    if number % GIVE_WAY_ENTRIES == GIVE_WAY_ENTRIES - 1:
                        give_way()
                        self._confirm_lock()
                    added += _add_to(writer, snapshot, place)
                self._confirm_lock()
                writer.commit()
            self._index.reload()
        postings = Postings(self._index.searcher(), self._postings.counts_after(added, removed.values()))
        texts = self._stamp.texts + len(added) - len(removed)
        length = self._stamp.terms + sum(one.length for one in added) - _length(removed)
        upto = _canonical_id(snapshot, batch[-1])
        stamp = Stamp(upto=upto, entries=snapshot.count_upto(upto), texts=texts, terms=length)
        if self._folder is not None:  # from here on only who has looked at the files' sizes may read them
            stamp = self._folder.write(stamp, self._stamp.files)
        self._postings = postings
        self._stamp, self._looked_through = stamp, None


@contextmanager
def _writing(index: tantivy.Index) -> Iterator[tantivy.IndexWriter]:
    """The index's writer, ended whatever happens: an error, which names it in its frames, would keep it alive, and with
    it six threads, their memory and the lock that the next attempt needs."""
    writer = index.writer(WRITER_BYTES, 1)
    try:
        yield writer
    except BaseException:
        with suppress(Exception):
            writer.wait_merging_threads()
        raise
    writer.wait_merging_threads()


_SPLIT = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build()


def _prepared(index: tantivy.Index) -> tantivy.Index:
    index.config_reader("manual")  # else a thread of tantivy's reads new files half a second after each commit, and
    # if something has cut them short by then, that ends the process: nothing asks before, as a question does
    index.register_tokenizer("terms", _SPLIT)
    return index


_EMPTY = _prepared(tantivy.Index(SCHEMA))
"""Of all topics that have none; prepared once, as tantivy lets one thread at a time do that to an index."""


def _add_to(writer: tantivy.IndexWriter, snapshot: Snapshot, place: Place) -> list[ChunkTerms]:
    """Index an entry in place of the one that it supersedes, if any.

    Returns its terms; none if it does not count or cannot be read (`memd verify` reports it).
    """
    view = snapshot.views[place[0]]
    record = view.rows[place[1]]
    if _may_supersede(record):
        writer.delete_documents_by_term("uuid", _uuid(record).hex())
    if view.dead[place[1]]:
        return []
    try:
        entry = view.segment.read(record)
    except StoreError:
        return []
    terms, names = ChunkTerms.of(analyze(entry.indexed_text)), entities_of(entry.named_text)
    document = tantivy.Document()
    document.add_unsigned("canonical_id", int(record["canonical_id"]))
    document.add_text("uuid", _uuid(record).hex())
    document.add_text("terms", terms.text)
    document.add_text("terms", EVERY_TEXT)
    for name in names:
        document.add_text("entities", key_of(name))
    document.add_bytes("names", "\n".join(names).encode())
    writer.add_document(document)
    return [terms]


def _places(snapshot: Snapshot, upto: int, count: int | None = None) -> Iterator[Place]:
    """The places of the entries after `upto`, at most `count`."""
    return islice(((number, row) for number, rows in snapshot.rows_after(upto) for row in rows), count)


def _newest_places(snapshot: Snapshot, upto: int, count: int) -> list[Place]:
    """The places of the last `count` entries after `upto`, oldest first."""
    newest: list[Place] = []
    for number, rows in reversed(list(snapshot.rows_after(upto))):
        newest += ((number, row) for row in reversed(rows[len(newest) - count :]))
        if len(newest) == count:
            break
    return newest[::-1]


def _superseded(snapshot: Snapshot, upto: int, later: Iterable[Place]) -> list[int]:
    """The canonical_ids up to `upto` of the earlier entries of the chunks at these places."""
    records = (snapshot.views[number].rows[row] for number, row in later)
    earlier = (place for record in records if _may_supersede(record) for place in snapshot.places(_uuid(record)))
    return list({one for place in earlier if (one := _canonical_id(snapshot, place)) <= upto})


def _may_supersede(record: np.void) -> bool:
    return bool(record["origin_id"] != record["canonical_id"])


def _uuid(record: np.void) -> bytes:
    return uuid_bytes(record["uuid_high"], record["uuid_low"])


def _canonical_id(snapshot: Snapshot, place: Place) -> int:
    return int(snapshot.views[place[0]].rows[place[1]]["canonical_id"])


def _length(terms: Mapping[int, ChunkTerms]) -> int:
    return sum(one.length for one in terms.values())
