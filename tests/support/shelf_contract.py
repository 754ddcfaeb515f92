"""The contract of a shelf: the same tests for each, whatever it keeps its topics in.

Rule: a shelf is known by what it grants, takes and gives back, and topics are opened as the store opens them. Subclass
`ShelfContract` and give it a `ground`. Counterpart of memd/store/shelf.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import pytest
from drafts import DIMENSION, FINGERPRINT, draft

from memd.errors import Fenced, StoreLocked, StoreWriteFailed, TopicHeld
from memd.store.files import write_beside
from memd.store.log.format import HEADER_BYTES, ModelId, encode_entry, encode_record, scan_records
from memd.store.log.journal import Journal
from memd.store.log.recovery import read_log_file
from memd.store.log.segment import create_active
from memd.store.opening import open_topic
from memd.store.shelf import Claim, Position, Shelf, Stream

MODEL = ModelId(DIMENSION, FINGERPRINT)
TOPIC = "talk"


class Ground(Protocol):
    """What a shelf stands on, with its troubles."""

    def shelf(self) -> Shelf:
        """The shelf of the one daemon that there is."""

    def another(self) -> Shelf:
        """The shelf of a further daemon; raises StoreLocked where there can be none."""

    def lose_answer(self) -> None:
        """Nobody is told what becomes of the next append, which is called "two"."""

    def crashes(self, work: Callable[[Shelf], object]) -> Iterator[Shelf]:
        """Do some work again and again on a new ground, with a crash at one step after the other: what is there after
        each restart."""


class Witness:
    """Groups that were attempted, and those that were acknowledged."""

    def __init__(self) -> None:
        self.attempted: list[str] = []
        self.acknowledged: list[str] = []

    def append(self, log: Log, name: str) -> None:
        self.attempted.append(name)
        log.append(name)
        self.acknowledged.append(name)


class Log:
    """The log of a topic, as `TopicLog` writes it, of groups of three entries."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        opened = open_topic(claim, MODEL)
        self.findings = opened.findings
        self.segment = max(opened.segments, default=0)
        self.end = opened.active_end
        if opened.active is None:
            self.begin()

    def begin(self) -> None:
        self.segment += 1
        create_active(self.claim, MODEL, self.segment)
        self.end = HEADER_BYTES

    def append(self, name: str) -> None:
        data = group(name)
        self.claim.append("log", self.end, data)
        self.end += len(data)

    def rotate(self) -> None:
        self.claim.rotate(self.segment)
        self.begin()


def group(name: str) -> bytes:
    """An append of three entries."""
    drafts = [draft(f"{name}.{i}") for i in range(3)]
    entries = [
        one.as_entry(public_id=one.uuid.hex()[:4], canonical_id=1 + i, group_left=2 - i, now_us=1)
        for i, one in enumerate(drafts)
    ]
    return b"".join(encode_record(encode_entry(entry)) for entry in entries)


def groups_in(shelf: Shelf, segments: int) -> list[str]:
    """The groups that the log has, in their order: each is there with all of its entries."""
    found: list[str] = []
    for number in range(1, segments + 1):
        log_file = read_log_file(shelf.read(TOPIC, "log", Position(number, 0)), name="log", dimension=DIMENSION)
        assert not log_file.gaps and not log_file.has_tail
        contents = [entry.content.removeprefix("user: chunk ") for entry in log_file.entries]
        names = [content.partition(".")[0] for content in contents[::3]]
        assert contents == [f"{name}.{i}" for name in names for i in range(3)]
        found += names
    return found


def end_of(shelf: Shelf, stream: Stream = "log") -> int:
    heads = shelf.heads([TOPIC])[TOPIC]
    return (heads.log if stream == "log" else heads.hot).end


class ShelfContract:
    """See the module."""

    def test_an_append_at_the_end_is_there_and_one_at_another_place_changes_nothing(self, ground: Ground) -> None:
        shelf = ground.shelf()
        log = Log(shelf.claim(TOPIC))
        log.append("one")
        log.append("two")
        for at in (0, HEADER_BYTES, log.end - 1, log.end + 1):
            with pytest.raises(Fenced, match=r"talk.*(restart|another|anew)"):
                log.claim.append("log", at, group("three"))
        assert end_of(shelf) == log.end
        assert groups_in(shelf, 1) == ["one", "two"]
        log.append("four")
        assert groups_in(shelf, 1) == ["one", "two", "four"]

    def test_after_a_crash_at_any_step_groups_are_whole_and_all_that_was_acknowledged_is_there(
        self, ground: Ground
    ) -> None:
        witness = Witness()

        def work(shelf: Shelf) -> None:
            nonlocal witness
            witness = Witness()
            log = Log(shelf.claim(TOPIC))
            witness.append(log, "one")
            witness.append(log, "two")
            log.rotate()
            witness.append(log, "three")
            log.claim.release()
            witness.append(Log(shelf.claim(TOPIC)), "four")

        for shelf in ground.crashes(work):
            log = Log(shelf.claim(TOPIC))
            found = groups_in(shelf, log.segment)
            assert witness.acknowledged == found[: len(witness.acknowledged)]
            assert found == witness.attempted[: len(found)]
            assert {finding.kind for finding in log.findings} <= {"torn", "derived"}
            log.append("later")
            assert groups_in(shelf, log.segment) == [*found, "later"]

    def test_a_journal_that_is_rolled_is_the_old_or_the_new_one_whenever_it_crashes(self, ground: Ground) -> None:
        states: list[list[bytes]] = [[], [b"one"], [b"one", b"two"], [b"three"], [b"three", b"four"]]
        reached = 0

        def work(shelf: Shelf) -> None:
            nonlocal reached
            reached = 0
            journal, _ = Journal.open(shelf.claim(TOPIC))
            for number, payload in enumerate((b"one", b"two"), start=1):
                journal.append([payload])
                journal.sync()
                reached = number
            journal.rewrite([b"three"])
            reached = 3
            journal.append([b"four"])
            journal.sync()
            reached = 4

        for shelf in ground.crashes(work):
            journal, payloads = Journal.open(shelf.claim(TOPIC))
            assert payloads in states[reached:]
            journal.append([b"later"])
            journal.sync()
            assert Journal.open(shelf.claim(TOPIC))[1] == [*payloads, b"later"]

    def test_a_roll_leaves_nothing_of_the_stream_and_appends_go_on_behind_it(self, ground: Ground) -> None:
        shelf = ground.shelf()
        claim = shelf.claim(TOPIC)
        for number, data in enumerate((b"first, and long", b"second"), start=1):
            claim.roll("hot", write_beside(claim.files, claim.layout.hot, data))
            claim.append("hot", len(data), b" and more", sync=number == 2)
        claim.sync("hot")
        number = shelf.heads([TOPIC])[TOPIC].hot.number
        assert shelf.read(TOPIC, "hot", Position(number, 0)) == b"second and more"
        assert claim.files.read(claim.layout.hot) == b"second and more"
        assert end_of(shelf, "hot") == len(b"second and more")

    def test_a_full_log_is_read_under_its_number_and_the_next_begins_anew(self, ground: Ground) -> None:
        shelf = ground.shelf()
        log = Log(shelf.claim(TOPIC))
        log.append("one")
        full = shelf.read(TOPIC, "log", Position(1, 0))
        log.rotate()
        assert shelf.read(TOPIC, "log", Position(1, 0)) == log.claim.files.read(log.claim.layout.bin(1)) == full
        assert shelf.heads([TOPIC])[TOPIC].log == Position(2, HEADER_BYTES)
        log.append("two")
        assert groups_in(shelf, 2) == ["one", "two"]

    def test_what_is_published_is_there_and_what_is_trimmed_is_not_and_a_crash_leaves_no_part(
        self, ground: Ground
    ) -> None:
        reached = 0

        def publish(claim: Claim, contents: Sequence[bytes], trims: Sequence[str]) -> None:
            nonlocal reached
            paths = [claim.layout.segments / f"seg_000{i}.meta" for i in range(1, 1 + len(contents))]
            written = {path: write_beside(claim.files, path, data) for path, data in zip(paths, contents, strict=True)}
            claim.publish(written, [claim.layout.segments / name for name in trims])
            assert not [name for name in claim.files.names(claim.layout.segments) if name.endswith(".tmp")]
            reached += 1

        def work(shelf: Shelf) -> None:
            nonlocal reached
            reached = 0
            claim = Log(shelf.claim(TOPIC)).claim
            publish(claim, [b"first", b"second"], [])
            publish(claim, [b"changed"], ["seg_0002.meta"])

        work(ground.shelf())
        assert reached == 2
        for shelf in ground.crashes(work):
            claim = shelf.claim(TOPIC)
            files, folder = claim.files, claim.layout.segments
            found = [None if files.size(path) is None else files.read(path) for path in map(claim.layout.meta, (1, 2))]
            states = [(None, None), (b"first", None), (b"first", b"second"), (b"first", None), (b"changed", None)]
            assert tuple(found) in states[(0, 2, 4)[reached] :]
            open_topic(claim, MODEL)
            assert not [name for name in files.names(folder) if name.endswith(".tmp")]

    def test_a_later_claim_fences_the_earlier_one_in_all_that_it_could_write(self, ground: Ground) -> None:
        shelf = ground.shelf()
        earlier = Log(shelf.claim(TOPIC))
        earlier.append("one")
        claim = shelf.claim(TOPIC)
        assert claim.epoch > earlier.claim.epoch
        assert shelf.heads([TOPIC])[TOPIC].epoch == claim.epoch
        assert shelf.renew([earlier.claim, claim]) == [earlier.claim]
        later = Log(claim)
        later.append("two")
        layout, files = claim.layout, claim.files
        writes: list[Callable[[], object]] = [
            lambda: earlier.append("three"),
            lambda: earlier.claim.append("log", later.end, group("three")),
            lambda: earlier.claim.rotate(1),
            lambda: earlier.claim.sync("log"),
            lambda: earlier.claim.roll("hot", write_beside(files, layout.hot, b"theirs")),
            lambda: earlier.claim.publish({layout.meta(1): write_beside(files, layout.meta(1), b"theirs")}),
            lambda: earlier.claim.publish({}, [layout.active]),
        ]
        for write in writes:
            with pytest.raises(Fenced, match=TOPIC):
                write()
        assert {*files.names(layout.directory)} - {layout.key.name} == {"active.bin", "segments"}
        assert files.names(layout.segments) == []
        later.append("four")
        assert groups_in(shelf, 1) == ["one", "two", "four"]

    def test_after_a_release_nothing_is_written_and_the_next_claim_finds_all(self, ground: Ground) -> None:
        shelf = ground.shelf()
        log = Log(shelf.claim(TOPIC))
        log.append("one")
        log.claim.release()
        log.claim.release()
        with pytest.raises(Fenced):
            log.append("two")
        again = Log(shelf.claim(TOPIC))
        again.append("three")
        assert groups_in(shelf, 1) == ["one", "three"]

    def test_of_two_daemons_one_has_the_topic(self, ground: Ground) -> None:
        log = Log(ground.shelf().claim(TOPIC))
        with pytest.raises((TopicHeld, StoreLocked)):
            ground.another().claim(TOPIC)
        log.append("one")

    def test_an_append_whose_answer_is_lost_is_settled_by_the_head(self, ground: Ground) -> None:
        shelf = ground.shelf()
        log = Log(shelf.claim(TOPIC))
        log.append("one")
        ground.lose_answer()
        with suppress(StoreWriteFailed):
            log.append("two")
        again = Log(shelf.claim(TOPIC))
        before = HEADER_BYTES + len(group("one"))
        assert again.end == end_of(shelf)
        assert again.end in (before, before + len(group("two")))
        if again.end == before:
            again.append("two")
        assert groups_in(shelf, 1) == ["one", "two"]

    def test_a_stream_is_read_from_any_place_in_it(self, ground: Ground) -> None:
        shelf = ground.shelf()
        log = Log(shelf.claim(TOPIC))
        log.append("one")
        middle = log.end
        log.append("two")
        assert shelf.read(TOPIC, "log", Position(1, middle)) == group("two")
        for position in (Position(1, log.end), Position(1, log.end + 9), Position(7, 0)):
            assert shelf.read(TOPIC, "log", position) == b""
        number = shelf.heads([TOPIC])[TOPIC].hot.number
        assert shelf.read(TOPIC, "hot", Position(number, 0)) == b""
        assert shelf.read("nobody", "log", Position(1, 0)) == b""
        journal, _ = Journal.open(log.claim)
        journal.append([b"said"])
        journal.sync()
        hot = shelf.heads([TOPIC])[TOPIC].hot
        assert len(scan_records(shelf.read(TOPIC, "hot", Position(hot.number, 0))).spans) == 1

    def test_topics_are_listed_page_by_page_and_only_those_that_have_something(self, ground: Ground) -> None:
        shelf = ground.shelf()
        names = [f"topic{number}" for number in range(7)]
        for name in names:
            Log(shelf.claim(name)).claim.release()
        shelf.claim("zero")
        pages, after = [], ""
        while page := shelf.topics(after, 3):
            pages.append(page)
            after = page[-1]
        assert pages == [names[:3], names[3:6], names[6:]]
        assert list(shelf.heads(["topic1", "zero", "nobody"])) == ["topic1"]
