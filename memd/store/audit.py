"""The audit: who did what with the memory, one act a line, in a file a month.

    {"n":7,"at":1763912000000000,"act":"search","who":"ann","from":"10.0.0.7",…,"hash":"9f2c…"}

Rule: `hash` is the SHA-256 of the previous line's `hash` (64 hexadecimal digits; zeros before line 1) and of this line
up to `,"hash":`. A user who can write the files can rewrite all of them. That shows only if a head, the number and hash
of a line, was kept elsewhere. A line has names, ids and numbers; no text of the memory.

Several processes append to the files. Each holds the audit's own lock for an append and first reads the appends of the
others, so a command may write beside a running daemon. Acts are durable when `append` returns. The next process removes
a line that a killed process did not finish, and records that in a line.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

import msgspec

from memd.errors import StoreError, StoreLocked
from memd.store.claim import AppendFile
from memd.store.disk import LocalDisk, Lock, replace_file
from memd.store.layout import AuditLayout

ActKind = Literal[
    "read", "search", "write", "correct", "erase", "export", "import", "backup", "restore", "audit", "token",
    "settings", "refused", "start", "stop", "file", "recovered", "lost", "removed",
]  # fmt: skip
"""restore: the folder came out of a backup. start, stop: of a daemon. file: the first line of a file. recovered: an
unfinished line of a killed process was removed. lost: the number of acts that could not be written. removed: old files
were, by `audit.keep_months`."""
KINDS: tuple[ActKind, ...] = get_args(ActKind)
BEFORE_ALL = "0" * 64
LINE_BYTES_MAX = 1 << 20
"""Enough for a daemon's start with the most tokens that settings allow, which is one line."""
DETAIL_CHARACTERS_MAX = 4_096
_HASH_MEMBER = b',"hash":"'

LOCK_SECONDS_MAX = 10.0
"""Longest wait for another process's append."""
LOCK_RETRY_SECONDS = 0.05


def not_done(error: StoreError) -> StoreError:
    """Return the refusal of an act whose line could not be written."""
    return StoreError(f"this was not done, as the audit cannot have its line: {error}")


class Act(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One act."""

    at: int
    """Microseconds since the epoch, by this machine's clock."""
    act: str
    """One of `KINDS`, or of a later memd's."""
    who: str
    """The name of a principal; for a command without a daemon, the user's name in the system."""
    source: str = msgspec.field(default="", name="from")
    """The address of the client, or the command."""
    what: str = ""
    """The route."""
    topics: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    """Ids of the chunks that were returned or changed; the first `IDS_MAX`."""
    count: int | None = None
    """Number of chunks, entries, files or bytes."""
    turn: str = ""
    """Of the receipt that has the rest."""
    status: int | None = None
    """The HTTP status of the answer; None without one."""
    times: int = 1
    """Number of attempts that the line stands for."""
    begins: bool = False
    """Whether the line was written before the act, which required it; a line with `ends` records the end."""
    ends: int = 0
    """The number of the line that began the act; for restore, of the line that began the backup."""
    detail: str = ""
    """The folder of a backup, or the error."""
    previous: str = ""
    """In the first line of a file: the hash of the previous file's last line."""
    upto: int = 0
    """removed: the number of the last removed line."""
    settings: dict[str, str] = {}
    """start: the beginning of the SHA-256 of each group of settings; `auth` without its secrets."""
    tokens: tuple[str, ...] = ()
    """start: the names of principals with a token."""


class Head(msgspec.Struct, frozen=True):
    """The last line of a chain at some moment. A copy kept elsewhere reveals changes of lines up to it."""

    n: int = 0
    hash: str = BEFORE_ALL

    def __str__(self) -> str:
        return f"{self.n}:{self.hash}"


class _NumberedAct(Act, frozen=True, kw_only=True):
    n: int
    hash: str


class KnownHead(msgspec.Struct, frozen=True):
    """A head and the place where it was kept."""

    head: Head
    kept: str


class Checked(msgspec.Struct, frozen=True):
    """The outcome of `check`."""

    head: Head
    findings: tuple[str, ...]
    """Lines that were changed or are missing; empty if the chain is intact."""
    notices: tuple[str, ...]
    """Facts that are correct but may surprise."""
    acts: tuple[tuple[int, Act], ...]
    """The wanted acts, with their numbers."""


_decoder = msgspec.json.Decoder(_NumberedAct)


def encoded(act: Act, before: Head) -> tuple[bytes, Head]:
    """Return the line of an act, with its line break, and the new head.

    A detail is cut, and invalid UTF-8 in it escaped: a client that chooses it must not keep its act, and others pending
    with it, out of the chain.
    """
    detail = act.detail[:DETAIL_CHARACTERS_MAX].encode(errors="backslashreplace").decode()
    act, number = msgspec.structs.replace(act, detail=detail), before.n + 1
    body = b'{"n":%d,%b' % (number, msgspec.json.encode(act)[1:-1])
    digest = _digest(before.hash, body)
    line = b'%b%b%b"}\n' % (body, _HASH_MEMBER, digest.encode())
    assert len(line) <= LINE_BYTES_MAX, f"a line of {len(line)} bytes: whoever makes an act bounds its ids and topics"
    return line, Head(number, digest)


def head_of(line: bytes) -> Head | None:
    """Return the head after a line; None if it is no line."""
    found = _decoded(line)
    return None if found is None else Head(found.n, found.hash)


def head_from(text: str) -> Head:
    """Read a head as it is printed. Raises ValueError: it is not one."""
    number, colon, digest = text.strip().partition(":")
    if not (
        colon and number.isdecimal() and len(digest) == len(BEFORE_ALL) and not set(digest) - set("0123456789abcdef")
    ):
        raise ValueError(f"{text[:100]!r} is no head of an audit; give one as `memd audit --head` prints it")
    return Head(int(number), digest)


def check(
    files: Iterable[tuple[str, bytes]], wanted: Callable[[Act], bool], known: Sequence[KnownHead] = ()
) -> Checked:
    """Read a chain and report where it was changed. `files`: names and contents, oldest first. `known`: heads that were
    kept; the chain must contain them."""
    walk, name = _ChainWalk(wanted, {one.head.n for one in known}), ""
    for name, data in files:
        walk.file(name, data)
    head, findings, notices = walk.head, walk.findings, list[str]()
    if walk.tail:
        notices.append(f"the last {len(walk.tail)} bytes of {name} are of a line that was not finished")
    if walk.upto:
        notices.append(f"lines 1 to {walk.upto:,} are not kept any more (audit.keep_months)")
    for n, digest, kept in ((one.head.n, one.head.hash, one.kept) for one in known):
        if n > head.n:
            findings.append(f"{_lines(head.n + 1, n)} missing at the end: {kept} has line {n}")
        elif n > walk.upto and walk.hashes[n] not in ("", digest):
            findings.append(f"line {n} is not the one that {kept} has: what stands before it was written anew")
    gaps = sorted((max(first, walk.upto + 1), last, where) for first, last, where in walk.gaps)
    missing = [f"{where}: {_lines(first, last)} missing before it" for first, last, where in gaps if first <= last]
    return Checked(head, (*missing, *findings), tuple(notices), tuple(walk.acts))


class _ChainWalk:
    """The lines of a chain, one by one."""

    def __init__(self, wanted: Callable[[Act], bool], numbers: set[int]) -> None:
        """`numbers`: of the lines whose hashes are wanted."""
        self._wanted = wanted
        self.head = Head()
        """The last line in the right place."""
        self._befores: set[str] | None = {BEFORE_ALL}
        """Hashes that the next line may follow; None if unknown."""
        self._unreadable = 0
        """Number of unreadable lines since the head."""
        self.gaps: list[tuple[int, int, str]] = []
        """First and last number of missing lines, and the place of the line after them."""
        self.upto = 0
        """The last of the lines that are not kept any more."""
        self.hashes = dict.fromkeys(numbers, "")
        self.tail = b""
        """The rest of the last file, without a line break."""
        self.findings: list[str] = []
        self.acts: list[tuple[int, Act]] = []

    def file(self, name: str, data: bytes) -> None:
        if self.tail:
            self.findings.append(f"{len(self.tail)} bytes before {name} are no line")
        *lines, self.tail = data.split(b"\n")
        for position, line in enumerate(lines, 1):
            found = _decoded(line)
            if found is None:
                self.findings.append(f"{name}:{position} cannot be read")
                self._unreadable += 1
                self._befores = None
            else:
                self._line(found, line, f"{name}:{position}")

    def _line(self, line: _NumberedAct, raw: bytes, where: str) -> None:
        if self._wanted(line):
            self.acts.append((line.n, line))
        self.upto = max(self.upto, line.upto)
        if line.n in self.hashes:
            self.hashes[line.n] = line.hash
        expected = self.head.n + 1 + self._unreadable
        if line.n < self.head.n + 1:
            self._misplaced(line, where)
            return
        if line.n != expected:
            if line.n > expected:
                self.gaps.append((expected, line.n - 1, where))
            self._befores = {line.previous} if line.previous else None
        body = raw[: raw.rindex(_HASH_MEMBER)]
        if self._befores is not None and line.hash not in {_digest(before, body) for before in self._befores}:
            after = f"does not follow line {line.n - 1}: one of the two was changed" if line.n > 1 else "was changed"
            self.findings.append(f"{where}: line {line.n} {after}")
        self.head, self._befores, self._unreadable = Head(line.n, line.hash), {line.hash}, 0

    def _misplaced(self, line: _NumberedAct, where: str) -> None:
        """Report a line whose number should have come before."""
        for gap in self.gaps:
            first, last, place = gap
            if first <= line.n <= last:
                self.gaps.remove(gap)
                rest = ((first, line.n - 1, place), (line.n + 1, last, place))
                self.gaps += [one for one in rest if one[0] <= one[1]]
                self.findings.append(f"{where}: line {line.n} stands behind line {self.head.n}")
                return
        self.findings.append(f"{where}: there is another line {line.n}: one of the two was put in")
        if line.n == self.head.n and self._befores is not None:
            self._befores.add(line.hash)  # the next line shows which of them it followed


def _lines(first: int, last: int) -> str:
    return f"line {first} is" if first == last else f"lines {first} to {last} are"


def _decoded(line: bytes) -> _NumberedAct | None:
    try:
        found = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    end = b'%b%b"}' % (_HASH_MEMBER, found.hash.encode())
    return found if found.n > 0 and len(found.hash) == len(BEFORE_ALL) and line.endswith(end) else None


def _digest(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


class AuditBook:
    """The audit of one data directory, for one process. Thread-safe."""

    def __init__(self, files: LocalDisk, data_dir: Path, keep_months: int = 0) -> None:
        """`keep_months`: number of files to keep, one a month; 0 for all."""
        self._files = files
        self._layout = AuditLayout(data_dir)
        self._keep_months = keep_months
        self._mutex = threading.Lock()
        self._head: Head | None = None
        """Head of the file `_name` of `_size` bytes; None if it must be read."""
        self._name, self._size = "", 0

    def is_kept(self, record: str) -> bool:
        """Return whether acts are recorded. `record`: the setting `audit.record`."""
        return record == "always" or (record == "auto" and self._layout.names(self._files) != [])

    def append(self, acts: Sequence[Act]) -> Head:
        """Append acts in this order, durably; return the new head. Raises StoreError: none of them was written."""
        with self._mutex, self._locked():
            try:
                head = self._caught_up()
                month = f"{datetime.fromtimestamp(acts[-1].at / 1e6, UTC):%Y-%m}"
                name = max(f"{month}.jsonl", self._name)  # a clock that was set back opens no older file
                if name != self._name:
                    head = self._begin_file(name, head, acts[0].at)
                return self._write(head, acts)
            except StoreError:
                self._head = None
                raise

    def keep_head(self) -> Head:
        """Store the present head in a separate file, so that a lost end is detected; return it. Raises StoreError: it
        was not stored."""
        with self._mutex, self._locked():
            head = self._caught_up()
            if head.n:
                replace_file(self._files, self._layout.head, str(head).encode())
            return head

    def _write(self, head: Head, acts: Sequence[Act]) -> Head:
        lines = []
        for act in acts:
            line, head = encoded(act, head)
            lines.append(line)
        data = b"".join(lines)
        file = AppendFile(self._files, self._layout.folder / self._name, self._size)
        try:
            file.append(data, sync=True)
        finally:
            file.close()
        self._size += len(data)
        self._head = head
        return head

    def _begin_file(self, name: str, head: Head, at: int) -> Head:
        folder = self._layout.folder
        self._files.make_directory(folder)
        self._files.sync_directory(folder.parent)
        self._files.create(folder / name)
        self._files.close(folder / name)
        self._files.sync_directory(folder)
        self._name, self._size = name, 0
        head = self._write(head, [Act(at=at, act="file", who="memd", previous=head.hash)])
        # Files older than the kept months go, after a line that says so.
        names = self._layout.names(self._files)
        old = names[: -self._keep_months] if self._keep_months else []  # by number: a clock may be wrong for a moment
        if old and (kept := head_of(self._files.read_at(folder / names[len(old)], 0, LINE_BYTES_MAX).split(b"\n")[0])):
            head = self._write(head, [Act(at=at, act="removed", who="memd", count=len(old), upto=kept.n - 1)])
            for name in old:
                self._files.remove(folder / name)
        return head

    def _caught_up(self) -> Head:
        """Return the head, after reading appends of other processes."""
        folder, names = self._layout.folder, self._layout.names(self._files)
        name = names[-1] if names else ""
        size = (self._files.size(folder / name) or 0) if name else 0
        if self._head is not None and (name, size) == (self._name, self._size):
            return self._head
        known, self._head = self._head or noted_head(self._files, self._layout) or Head(), None
        self._name, self._size = name, size
        torn, head = 0, Head()
        for one in reversed(names):  # an older file has the head if the newest has no line yet
            length = size if one == name else self._files.size(folder / one) or 0
            start = max(0, length - 2 * LINE_BYTES_MAX)
            *lines, tail = self._files.read_at(folder / one, start, length - start).split(b"\n")
            torn = len(tail) if one == name else torn  # after the last line break
            if (found := next(filter(None, map(head_of, reversed(lines))), None)) is not None:
                head = found
                break
        if head.n < known.n:  # the end is gone: its numbers stay unused, so that the gap shows
            head = known
        if torn:
            self._size -= torn  # the next append cuts off the rest
            recovered = Act(at=time.time_ns() // 1000, act="recovered", who="memd", count=torn)
            head = self._write(head, [recovered])
        self._head = head
        return head

    def _locked(self) -> Lock:
        self._files.make_directory(self._layout.folder)
        until = time.monotonic() + LOCK_SECONDS_MAX
        while True:
            try:
                return self._files.lock(self._layout.lock)
            except StoreLocked:
                if time.monotonic() > until:
                    raise
                time.sleep(LOCK_RETRY_SECONDS)


def noted_head(files: LocalDisk, layout: AuditLayout) -> Head | None:
    """Return the head stored beside the monthly files; None if it is missing or unreadable."""
    try:
        return head_from(files.read(layout.head).decode())
    except (StoreError, ValueError):
        return None


def read_book(
    files: LocalDisk, data_dir: Path, wanted: Callable[[Act], bool], known: Sequence[KnownHead] = ()
) -> Checked | None:
    """Read and check the audit of a data directory or a backup; None if it has none. Needs no lock. Raises StoreError:
    a file cannot be read."""
    layout = AuditLayout(data_dir)
    noted = noted_head(files, layout)  # before the files, which may grow meanwhile
    names = layout.names(files)
    if not names and noted is None and not known:
        return None
    heads = [*known, *([KnownHead(noted, str(layout.head))] if noted is not None else [])]
    return check(((name, files.read(layout.folder / name)) for name in names), wanted, heads)
