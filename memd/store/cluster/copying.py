"""One topic from a shelf to another, byte by byte, written through its claim there.

Rule: of what the other shelf has nothing is lost: a topic there is left alone unless it is the same, the beginning of
this one, or a copy of an earlier attempt. Until it is whole there it has a mark, with which nobody opens it; an
interrupted copy is compared and gone on with. The lexical index and interrupted writes that were set aside are the
folder's own and do not go along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from memd.errors import MoveRefused
from memd.store.erasure.forbidden import read_forbidden
from memd.store.files import TEMPORARY_SUFFIX, Files, only_whole, write_beside
from memd.store.layout import TopicLayout
from memd.store.log.format import ModelId, scan_records
from memd.store.log.journal import Journal, read_journal
from memd.store.log.recovery import Finding, torn_files
from memd.store.log.segment import read_header
from memd.store.opening import open_topic
from memd.store.shelf import Claim, Stream

PIECE_BYTES = 1 << 20
"""Also of a row in the database."""


class TopicFiles:
    """The files of a topic that go along."""

    def __init__(self, files: Files, layout: TopicLayout) -> None:
        self.files = files
        self.layout = layout
        self.full = layout.segment_ids(files)
        header = read_header(files, layout.active)
        self.growing = None if header is None else header.segment_id
        """The number of the segment in `active.bin`."""
        torn = torn_files(files, [layout.segments])
        left = {layout.moving, *torn, *map(layout.bin, self.full)}
        paths = [layout.segments / name for name in files.names(layout.segments)]
        self.beside = [path for path in paths if path not in left and not path.name.endswith(TEMPORARY_SUFFIX)]
        """Indexes."""
        own = (layout.forbidden, layout.former_names)
        self.beside += [path for path in own if files.size(path) is not None]

    @classmethod
    def of(cls, claim: Claim) -> TopicFiles:
        """Those in the folder of a claim."""
        return cls(claim.files, claim.layout)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing of a log or a journal."""
        return self.growing is None and not self.full and not read_journal(self.layout.hot, self.files)

    @property
    def log(self) -> dict[int, Path]:
        """The files of the log by number, ascending."""
        found = {number: self.layout.bin(number) for number in self.full}
        return found if self.growing is None else found | {self.growing: self.layout.active}

    def size(self, path: Path) -> int:
        """The size of a file; 0: there is none."""
        return self.files.size(path) or 0

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(map(self.size, (*self.log.values(), self.layout.hot, *self.beside)))


def mended(claim: Claim) -> list[Finding]:
    """Mend what an interrupted write left in a topic's folder, as every start does; returns what is damaged."""
    files, layout = claim.files, claim.layout
    paths = [layout.active, *map(layout.bin, layout.segment_ids(files))]
    header = next((found for path in paths if (found := read_header(files, path)) is not None), None)
    model = ModelId(0, "") if header is None else ModelId(header.dimension, header.fingerprint)
    findings = open_topic(claim, model).findings
    journal, _ = Journal.open(claim)
    return [one for one in (*findings, *journal.findings) if one.kind in ("damaged", "foreign")]


def check_target(source: TopicFiles, target: TopicFiles, *, is_as_moved: bool) -> None:
    """Make sure that nothing is lost of a topic that is written over.

    Args:
        is_as_moved: nobody has written to it since it was moved the last time.

    Raises:
        MoveRefused: something would be.
    """
    name, wanted = source.layout.topic_id, source.log
    is_marked = target.files.size(target.layout.moving) is not None
    if not (is_marked or is_as_moved) and _forbids_more(target, source):
        raise MoveRefused(
            f"topic {name}: on the other side it has text that is never to be stored again, and it would be; erase it "
            "here too, with --forbid"
        )
    if target.is_empty:
        return
    for number, path in target.log.items():
        is_last, size = number == max(target.log), target.size(path)
        is_longer = number not in wanted or size > source.size(wanted[number])
        is_short = not is_last and not is_longer and size < source.size(wanted[number])
        if is_longer or is_short or not _begins(source, wanted[number], target, path):
            raise MoveRefused(
                f"topic {name}: the one of this name on the other side has something that this one has not; nothing is "
                "moved: move it back into an empty folder, or erase one of the two"
            )
    hot = target.layout.hot
    if is_marked or is_as_moved or not read_journal(hot, target.files):
        return
    if target.size(hot) > source.size(source.layout.hot) or not _begins(source, source.layout.hot, target, hot):
        raise MoveRefused(
            f"topic {name}: the one that is there has conversations of its own (hot.log) beside the same log; nothing "
            "is moved"
        )


def differences(source: TopicFiles, target: TopicFiles) -> list[str]:
    """Return the names of the files that are not the same on both sides."""
    found = []
    folders = (source.layout.directory, target.layout.directory)
    mine, theirs = (
        {path.relative_to(folder).as_posix(): path for path in (*one.log.values(), one.layout.hot, *one.beside)}
        for folder, one in zip(folders, (source, target), strict=True)
    )
    if source.files.size(source.layout.hot) is None and not read_journal(target.layout.hot, target.files):
        theirs.pop(target.layout.hot.name, None)
        mine.pop(source.layout.hot.name)
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(name), theirs.get(name)
        is_there = here is not None and there is not None and source.size(here) == target.size(there)
        if here is None or there is None or not is_there or not _begins(source, here, target, there):
            found.append(name)
    return found


def copy_topic(source: TopicFiles, claim: Claim, mark: str, tell: Callable[[int], None]) -> None:
    """Make a topic that was checked equal to `source`, but for the mark that it is not whole.

    Args:
        claim: to the topic on the other shelf.
        mark: for people: what the mark holds.
        tell: called with the bytes of each step.

    Raises:
        StoreError: done again, it goes on.
    """
    _Copying(source, claim, tell).run(mark)


def lift_mark(claim: Claim) -> None:
    """Let a topic be opened that is whole; durably, or the mark might come back when it is in use."""
    claim.publish({}, [claim.layout.moving])
    for folder in (claim.layout.directory, claim.layout.segments):
        claim.files.sync_directory(folder)


def count_records(topic: TopicFiles) -> int:
    """Return how many records the log has."""
    return sum(len(scan_records(topic.files.read(path)).spans) for path in topic.log.values())


class _Copying:
    def __init__(self, source: TopicFiles, claim: Claim, tell: Callable[[int], None]) -> None:
        self._source, self._claim, self._tell = source, claim, tell
        self._target = TopicFiles.of(claim)

    def run(self, mark: str) -> None:
        claim, source, files = self._claim, self._source, self._claim.files
        if files.size(claim.layout.moving) is None:
            temporary = write_beside(files, claim.layout.moving, mark.encode())
            claim.publish({claim.layout.moving: temporary})
        ours = source.log
        if ours:
            last = max(ours)
            for number in ours:
                if number != last:
                    self._full(number)
            self._last(last, ours[last])
        self._journal()
        self._others()

    def _full(self, number: int) -> None:
        """Put a full segment there, with its index."""
        layout = self._claim.layout
        if number == self._target.growing:
            self._go_on(number, self._source.layout.bin(number))
            self._claim.rotate(number)
            self._target = TopicFiles.of(self._claim)
        theirs = self._source.layout
        pairs = {layout.bin(number): theirs.bin(number)}
        derived = {layout.meta(number): theirs.meta(number), layout.hnsw(number): theirs.hnsw(number)}
        pairs |= {path: one for path, one in derived.items() if self._source.files.size(one) is not None}
        if all(self._is_there(path, one) for path, one in pairs.items()):
            return
        bin_is_there = self._is_there(layout.bin(number), theirs.bin(number))
        written = {path: self._copied(path, one) for path, one in pairs.items() if path != layout.bin(number)}
        full = layout.bin(number)
        self._claim.publish({full: full if bin_is_there else self._copied(full, theirs.bin(number)), **written})

    def _last(self, number: int, path: Path) -> None:
        """Write the end of the log as what it is there: a stream."""
        is_full = number != self._source.growing
        if is_full and number in self._target.full:
            self._full(number)
            return
        self._go_on(number, path)
        if is_full:
            self._claim.rotate(number)
            self._target = TopicFiles.of(self._claim)
            self._full(number)

    def _go_on(self, number: int, path: Path) -> None:
        """Append what the segment that is written lacks; begin it where it is another one."""
        if self._target.growing == number:
            at = self._target.size(self._claim.layout.active)
            if at == self._source.size(path):
                return
            self._claim.resume("log", at)
        else:
            at = self._begun("log", self._claim.layout.active, path)
        self._append("log", path, at)

    def _journal(self) -> None:
        hot, source = self._claim.layout.hot, self._source.layout.hot
        if self._source.files.size(source) is not None and not self._is_there(hot, source):
            self._append("hot", source, self._begun("hot", hot, source))

    def _others(self) -> None:
        """Remove what is only there, and bring the rest."""
        source, layout = self._source, self._claim.layout
        wanted = {layout.directory / path.relative_to(source.layout.directory): path for path in source.beside}
        written = {path: self._copied(path, one) for path, one in wanted.items() if not self._is_there(path, one)}
        useless = [path for path in TopicFiles.of(self._claim).beside if path not in wanted]
        if written or useless:
            self._claim.publish(written, useless)

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _begun(self, stream: Stream, path: Path, source: Path) -> int:
        """Begin a stream with its first piece; where it goes on."""
        data = self._source.files.read_at(source, 0, PIECE_BYTES)
        temporary = write_beside(self._claim.files, path, data)
        self._claim.roll(stream, temporary)
        self._tell(len(data))
        return len(data)

    def _append(self, stream: Stream, source: Path, at: int) -> None:
        for data in self._pieces(source, at):
            self._claim.append(stream, at, data)
            at += len(data)

    def _copied(self, path: Path, source: Path) -> Path:
        """Copy a file beside its place."""
        files, temporary = self._claim.files, path.with_name(path.name + TEMPORARY_SUFFIX)
        with only_whole(files, temporary), closing(files.create(temporary)) as appender:
            for data in self._pieces(source, 0):
                appender.write(data)
            appender.sync()
        return temporary

    def _pieces(self, source: Path, at: int) -> Iterator[bytes]:
        while data := self._source.files.read_at(source, at, PIECE_BYTES):
            yield data
            at += len(data)
            self._tell(len(data))

    def _is_there(self, path: Path, source: Path) -> bool:
        files = self._claim.files
        is_as_long = files.size(path) is not None and files.size(path) == self._source.files.size(source)
        return is_as_long and _same(self._source.files, source, files, path, files.size(path) or 0)


def _forbids_more(one: TopicFiles, other: TopicFiles) -> bool:
    """Whether something is forbidden in a topic that is not in another one."""
    ours, theirs = (read_forbidden(each.files, each.layout) for each in (one, other))
    return not (ours.messages <= theirs.messages and ours.contents <= theirs.contents and ours.texts <= theirs.texts)


def _begins(source: TopicFiles, path: Path, target: TopicFiles, begun: Path) -> bool:
    """Whether a file begins with all of another one."""
    return _same(source.files, path, target.files, begun, target.size(begun))


def _same(files: Files, path: Path, others: Files, other: Path, size: int) -> bool:
    return all(
        files.read_at(path, at, min(PIECE_BYTES, size - at)) == others.read_at(other, at, min(PIECE_BYTES, size - at))
        for at in range(0, size, PIECE_BYTES)
    )
