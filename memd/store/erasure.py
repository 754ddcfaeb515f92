"""Erasure, the only change of stored content, at its owner's request: finished and pending erasures, text that must
never be stored again, and the rewriting of log files without the text of some chunks.

Rule: what is to be erased is recorded first, by ids and never as text, and every step can be repeated; so the next
start finishes an interrupted erasure. Each has a small file in the folder `memd.erasures`, which says when all of it is
done. Erasures of one request begin together: they count only once the last of their files exists; otherwise the next
start drops them. A finished erasure keeps its file: so a restored backup with erased text is noticed, and new ids stay
above erased ones. The digests of the messages, by which a guess of the text could be verified, are in a file beside it
only as long as they are needed; it is encrypted if the topics are.

Text that a topic must never store again is in one small file beside its log, which is replaced as a whole: digests of
erased messages and chunks, never their words. The file exists only on request.

A new file is written beside the old one, synced and renamed, so that a crash leaves one or the other; then the old one
is overwritten. Unreadable bytes stay as they are, because their owner is unknown. The record that replaces an erased
one (a stub) has the same length, so all records keep their offsets and concurrent readers find theirs. It keeps the
entry's identity and times, and the time and author of the erasure. The entry's author is removed with the text, because
a name may be what had to go. A memd without erasures reads it as a Deprecated entry. A chunk that names an erased call
loses only that name.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from memd.entries import ChunkState, Entry, Erased, Status
from memd.errors import CorruptFile, InDoubt, StoreError
from memd.messages import Message
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, make_folder, replace_file
from memd.store.layout import DIGESTS_SUFFIX, TopicLayout, erasures_dir
from memd.store.log.columns import KINDS, Bits, Records, digest_word, text_hash, uuid_bytes, uuid_halves
from memd.store.log.format import (
    decode_entry,
    encode_entry,
    encode_record,
    payload_at,
    payload_of,
    scan_records,
    topic_tag,
)
from memd.store.log.recovery import Finding
from memd.wording import counted, day_and_time

Kind = Literal["chunks", "age", "topic"]
"""chunks: the named ones; age: those said before a time; topic: all of it, with its folder."""
_SUFFIX = ".json"
_TURN = KINDS.index("turn")

_encoder = msgspec.msgpack.Encoder()
_BIN32 = struct.Struct(">BI")
"""The head of a MessagePack bin of any length: 0xc6 and its length, big-endian."""
_FIXSTR_MAX = 31


class Erasure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One erasure, in one topic."""

    id: int
    """A canonical_id that no entry has."""
    kind: Kind
    topic_id: str
    at: int
    """Time of the request, in microseconds since the epoch."""
    by: str
    chunks: int
    entries: int = 0
    highest_id: int = 0
    """For a topic: upper bound of the erased canonical_ids."""
    names: tuple[str, ...] = ()
    """For a topic: its former names, which files of its log may still have (see `layout.check_topic`)."""
    uuids: bytes = b""
    """Uuids of the chunks, 16 bytes each; empty for a topic."""
    digests: bytes = b""
    """Until it is done: digests of their messages, and of their calls as other chunks name them (`call_digest`), 16
    bytes each, to find in `hot.log` and other chunks. Stored in a separate file."""
    forbid: bool = False
    """Whether the messages must never be stored again."""
    is_moved: bool = False
    """For a topic: whether its folder was moved aside, so that one of the same name is another one."""
    request_end: int = 0
    """The id of the request's last erasure, without which this one has not begun; 0 if it is the only one."""
    done_at: int | None = None

    @property
    def mark(self) -> Erased:
        """The mark of the erasure in stubs."""
        return Erased(at=self.at, by=self.by)

    @property
    def chunk_uuids(self) -> frozenset[bytes]:
        """The uuids of the chunks."""
        return frozenset(self.uuids[at : at + 16] for at in range(0, len(self.uuids), 16))

    @property
    def tags(self) -> frozenset[bytes]:
        """The marks of the topic's files, under all its names (`format.topic_tag`)."""
        return frozenset(map(topic_tag, (self.topic_id, *self.names)))

    @property
    def text_digests(self) -> frozenset[bytes]:
        """The digests of the messages that the chunks came from, and of the calls in them."""
        return frozenset(self.digests[at : at + 16] for at in range(0, len(self.digests), 16))

    def __str__(self) -> str:
        what = f"topic {self.topic_id}" if self.kind == "topic" else counted(self.chunks, "chunk")
        where = f" ({counted(self.chunks, 'chunk')})" if self.kind == "topic" else f" of topic {self.topic_id}"
        is_being = "" if self.done_at is not None else "is being "
        return f"{what}{where} {is_being}erased on {day_and_time(self.at)} by {self.by}"


class Erasures(ABC):
    """All erasures, finished and pending, oldest first. Thread-safe."""

    def __init__(self, known: Iterable[Erasure] = ()) -> None:
        """`known`: the erasures recorded so far."""
        self._known = {one.id: one for one in known}

    def begin(self, erasures: Sequence[Erasure]) -> list[Erasure]:
        """Write the new erasures of one request, durably; return them as written. Raises StoreError: none was begun
        (InDoubt: that is not known)."""
        end = erasures[-1].id if len(erasures) > 1 else 0
        erasures = [msgspec.structs.replace(one, request_end=end) for one in erasures]
        try:
            for erasure in erasures:
                self.write(erasure)
        except StoreError as error:
            told = "it is not known whether the erasure was" if isinstance(error, InDoubt) else "the erasure was not"
            raise type(error)(f"{told} begun: {error}") from error
        return erasures

    @abstractmethod
    def write(self, erasure: Erasure) -> None:
        """Write an erasure, durably. Raises StoreWriteFailed: nothing changed."""

    def __iter__(self) -> Iterator[Erasure]:
        return iter(begun(list(self._known.values())))

    @property
    def pending(self) -> list[Erasure]:
        """The unfinished erasures, oldest first."""
        return [one for one in self if one.done_at is None]

    @property
    def highest_id(self) -> int:
        """Upper bound of all ids known to be used by erasures and erased entries; 0 without erasures."""
        return max((max(one.id, one.highest_id, one.request_end) for one in list(self._known.values())), default=0)


class ErasureLedger(Erasures):
    """The erasures of one data directory, each in its own file. See Erasures."""

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        self._files = files
        self._folder = erasures_dir(data_dir)
        found, problems = read_erasures(files, self._folder)
        super().__init__(begun(found))
        if problems:
            return  # an unreadable file may be the last of a request
        self._drop([one for one in found if one.id not in self._known])
        needed = {_digests_file(self._folder, one) for one in self.pending}
        with suppress(StoreError):  # on a read-only disk
            for name in files.names(self._folder):
                if name.endswith((DIGESTS_SUFFIX, TEMPORARY_SUFFIX)) and self._folder / name not in needed:
                    files.wipe(self._folder / name)

    def write(self, erasure: Erasure) -> None:
        """Write an erasure, durably. Raises StoreWriteFailed: the file is unchanged (DiskFull if the disk is full)."""
        make_folder(self._files, self._folder)
        digests = _digests_file(self._folder, erasure)
        if erasure.digests:
            replace_file(self._files, digests, erasure.digests)
        bare = msgspec.structs.replace(erasure, digests=b"")
        replace_file(self._files, self._folder / f"{erasure.id}{_SUFFIX}", msgspec.json.encode(bare))
        if not erasure.digests:
            self._files.wipe(digests)
        self._known[erasure.id] = erasure

    def begin(self, erasures: Sequence[Erasure]) -> list[Erasure]:
        """See Erasures."""
        try:
            return super().begin(erasures)
        except StoreError:
            self._drop(erasures)
            raise

    def _drop(self, erasures: Sequence[Erasure]) -> None:
        with suppress(StoreError):  # on a read-only disk
            for erasure in reversed(erasures):  # the last first: without it none counts
                self._known.pop(erasure.id, None)
                self._files.remove(self._folder / f"{erasure.id}{_SUFFIX}")
                self._files.wipe(_digests_file(self._folder, erasure))


def read_erasures(files: LocalDisk, folder: Path) -> tuple[list[Erasure], list[Finding]]:
    """Return the erasures in a folder, also those not `begun`, and a finding for each unreadable file."""
    found, problems = [], []
    for name in files.names(folder):
        if not name.endswith(_SUFFIX):
            continue  # a folder being erased, or half a file
        try:
            erasure = msgspec.json.decode(files.read(folder / name), type=Erasure)
            digests = _digests_file(folder, erasure)
            if erasure.done_at is None and files.size(digests) is not None:
                erasure = msgspec.structs.replace(erasure, digests=files.read(digests))
            found.append(erasure)
        except (StoreError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            problems.append(Finding("damaged", str(folder / name), f"says nothing readable of an erasure: {error}"))
    return found, problems


def begun(erasures: Collection[Erasure]) -> list[Erasure]:
    """Return the erasures whose whole request was recorded, oldest first."""
    ids = {one.id for one in erasures}
    counting = (one for one in erasures if one.done_at is not None or (one.request_end or one.id) in ids)
    return sorted(counting, key=lambda one: one.id)


def _digests_file(folder: Path, erasure: Erasure) -> Path:
    return folder / f"{erasure.id}{DIGESTS_SUFFIX}"


Log = tuple[bytes | None, Records]
"""The columns of a log file's entries, and the topic that it names (`Header.topic`); None if its header is damaged."""


def returned(erasures: Collection[Erasure], layout: TopicLayout, logs: Sequence[Log]) -> list[Finding]:
    """Return a finding for each finished erasure whose text is in the topic again, because a backup was restored."""
    return [
        Finding(
            "returned",
            str(layout.directory),
            f"erased text is there again, as a backup had it: {one}; `memd erase --resume` erases it once more",
        )
        for one in erasures
        if one.topic_id == layout.topic_id and one.done_at is not None and rows_again(one, logs)
    ]


def rows_again(erasure: Erasure, logs: Sequence[Log]) -> list[Records]:
    """Return the rows that have the text of a finished erasure, out of all files of the topic."""
    if erasure.kind != "topic":
        own = [_rows_of(rows, erasure.chunk_uuids) for _, rows in logs]
        return [one for rows in own if len(one := rows[rows["status"] == Status.ACTIVE])]
    others = {tag for tag, _ in logs} - {None, *erasure.tags}  # of a topic that was renamed to this since
    own = [rows for tag, rows in logs if tag in erasure.tags or (tag is None and not others)]
    is_its: list[Bits] = [(rows["canonical_id"] <= erasure.highest_id) & (rows["is_erased"] == 0) for rows in own]
    if any(bits.any() for bits in is_its):  # what waited in the journal came back with it, and may have been stored
        before = [
            (rows["said_at"] <= erasure.at) & (rows["kind"] == _TURN) & (rows["source_hash"] == 0) for rows in own
        ]
        is_its = [
            bits | (early & (rows["is_erased"] == 0)) for rows, bits, early in zip(own, is_its, before, strict=True)
        ]
    return [rows[bits] for rows, bits in zip(own, is_its, strict=True) if bits.any()]


def finding_of(erasure: Erasure, folder: Path) -> Finding:
    """Return a finding for an erasure: "unfinished" or "notice"."""
    if erasure.done_at is None:
        return Finding("unfinished", str(folder), f"{erasure}; start memd, or run `memd erase --resume`: it goes on")
    return Finding("notice", str(folder), str(erasure))


class ForbiddenText(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of text that must never be stored again, as hexadecimal digits in the file."""

    messages: frozenset[str] = frozenset()
    """The first 8 bytes of digests of messages in their place (see `messages.chain`)."""
    contents: frozenset[str] = frozenset()
    """The same of messages in any place."""
    texts: frozenset[str] = frozenset()
    """The `columns.text_hash`es of chunks."""
    sent: dict[str, tuple[str, str]] = {}
    """Answers to senders of such a text without the right to read, by a digest of text and sender: the id of a chunk
    that does not exist, and the note that had it first."""
    crc: int | UnsetType = UNSET
    """In the file: CRC32 of the file without this member; UNSET if an older memd wrote it."""

    def __bool__(self) -> bool:
        return bool(self.messages or self.contents or self.texts)

    def has_digest(self, digest: bytes) -> bool:
        """Return whether this is the digest of a forbidden message in its place."""
        return bool(self.messages) and _hex(digest_word(digest)) in self.messages

    def has_message(self, digest: bytes, message: Message) -> bool:
        """Return whether a message is forbidden, in its place or in any."""
        if self.has_digest(digest):
            return True
        forms = (message.content_digest, message.former_digest) if self.contents else ()
        return any(_hex(digest_word(one)) in self.contents for one in forms)

    def has_text(self, text: str) -> bool:
        """Return whether this is the content of a forbidden chunk."""
        return bool(self.texts) and _hex(text_hash(text)) in self.texts

    def also(
        self, *, messages: Iterable[int] = (), contents: Iterable[bytes] = (), texts: Iterable[int] = ()
    ) -> ForbiddenText:
        """Return a copy with further digests. `messages`: `digest_word`s. `texts`: `text_hash`es."""
        return msgspec.structs.replace(
            self,
            messages=self.messages | set(map(_hex, messages)),
            contents=self.contents | {_hex(digest_word(one)) for one in contents},
            texts=self.texts | set(map(_hex, texts)),
        )


def read_forbidden(files: LocalDisk, layout: TopicLayout) -> ForbiddenText:
    """Return the text that a topic must never store again. Raises StoreError: the file cannot be read (CorruptFile if
    it is damaged); the topic is then not opened, because it would store forbidden text."""
    if files.size(layout.forbidden) is None:
        return ForbiddenText()
    try:
        found = msgspec.json.decode(files.read(layout.forbidden), type=ForbiddenText)
        if found.crc not in (UNSET, _crc(found)):
            raise msgspec.ValidationError("does not match its checksum")
        return msgspec.structs.replace(found, crc=UNSET)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptFile(
            f"{layout.forbidden}: cannot be read ({error}); put it back out of a backup, or remove it if what was "
            "erased may be stored again"
        ) from error


def encode_forbidden(forbidden: ForbiddenText) -> bytes:
    """Encode the file."""
    return msgspec.json.encode(msgspec.structs.replace(forbidden, crc=_crc(forbidden)), order="sorted")


def _crc(forbidden: ForbiddenText) -> int:
    return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(forbidden, crc=UNSET), order="sorted"))


def _hex(word: int) -> str:
    return f"{word:016x}"


def call_digest(author: str, call: str) -> bytes:
    """Return the 16-byte digest of a call as an author's chunks name it (`Speaker.call`)."""
    return hashlib.blake2b(f"{author}\0{call}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def named_in(entry: ChunkState, calls: Collection[bytes]) -> list[str]:
    """Return the calls that an entry names, among those with these `call_digest`s."""
    return [call for call in entry.calls if call_digest(entry.author or "", call) in calls]


def without_text(
    data: bytes, uuids: Collection[bytes], mark: Erased, calls: Collection[bytes] = ()
) -> tuple[bytes, int, int]:
    """Return the bytes of a log file with a stub for every record of these chunks and without the names of these calls
    (`call_digest`); the number of new stubs; and the number of other changed records. Unreadable bytes stay."""
    changed, count, unnamed = bytearray(data), 0, 0
    for span in scan_records(data).spans:
        payload = payload_of(data, span)
        try:
            entry = decode_entry(payload, dimension=None)
        except CorruptFile:
            continue  # not an entry, so no chunk's
        if entry.uuid in uuids and entry.erased is UNSET:
            changed[span.offset : span.end] = encode_record(stub_payload(entry, mark, len(payload)))
            count += 1
        elif calls and (gone := named_in(entry, calls)):
            bare = msgspec.structs.replace(entry.without_calls(gone), terms=UNSET)
            padded = _padded(bare, len(payload))
            assert padded is not None, "a name is longer than the field that pads"
            changed[span.offset : span.end] = encode_record(padded)
            unnamed += 1
    return bytes(changed), count, unnamed


def is_erasure_of(after: bytes, before: bytes) -> bool:
    """Return whether the bytes of a log file differ from earlier ones only by erased text."""
    if len(after) != len(before):
        return False
    rest = bytearray(before)
    for span in scan_records(before).spans:
        if after[span.offset : span.end] == before[span.offset : span.end]:
            continue
        try:
            new, old = (decode_entry(payload_at(one, span.offset) or b"", dimension=None) for one in (after, before))
        except CorruptFile:
            return False
        is_stub = not (new.content or new.vector) and (new.uuid, new.canonical_id) == (old.uuid, old.canonical_id)
        if not is_stub and _without_names(new) != _without_names(old):
            return False
        rest[span.offset : span.end] = after[span.offset : span.end]
    return bytes(rest) == after


def stub_payload(entry: Entry, mark: Erased, length: int) -> bytes:
    """Return a payload of `length` bytes, that of the entry's own, with only the entry's identity."""
    bare = msgspec.structs.replace(
        entry,
        vector=b"",
        content="",
        status=Status.DEPRECATED,
        roles=(),
        digests=(),
        completes=UNSET,
        source=None,
        action=None,
        reason=None,
        speakers=UNSET,
        shown=UNSET,
        asked_by=UNSET,
        author=UNSET,
        action_by=UNSET,
        line_tokens=UNSET,
        terms=UNSET,
        part=UNSET,
        tags=UNSET,
        columns=UNSET,
        unknown={},
        kind=entry.kind if entry.kind in ("turn", "note", "document") else "",
    )
    marked = (msgspec.structs.replace(bare, erased=one) for one in (mark, msgspec.structs.replace(mark, by="")))
    stubs = (_padded(one, length) for one in marked)
    return next(filter(None, stubs), None) or _filled(bare, length)


def _without_names(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry.without_calls(), terms=UNSET, pad=UNSET)


def _padded(entry: Entry, length: int) -> bytes | None:
    """Return the payload of an entry, extended to this length by its `pad`; None if it is too long."""
    base, key = encode_entry(msgspec.structs.replace(entry, pad=UNSET)), _encoder.encode("pad")
    if (room := length - len(base) - len(key) - _BIN32.size) < 0:
        return None
    assert base[0] == 0xDE, "a map of more than fifteen fields"
    fields = int.from_bytes(base[1:3], "big") + 1
    return b"\xde" + fields.to_bytes(2, "big") + base[3:] + key + _BIN32.pack(0xC6, room) + bytes(room)


def _filled(bare: Entry, length: int) -> bytes:
    """Return the stub of an entry that had little besides its identity: blanks take the place of its reason."""
    payload = encode_entry(bare)
    missing = length - len(payload)
    assert missing >= 0, "it has less than the entry had"
    head = _encoder.encode("reason")
    blanks = b" " * missing
    if missing <= _FIXSTR_MAX:
        text = bytes([0xA0 | missing]) + blanks
    else:
        text = b"\xdb" + (missing - 4).to_bytes(4, "big") + blanks[4:]
    return payload.replace(head + b"\xc0", head + text, 1)


def holds(records: Records, uuids: Collection[bytes], read: Callable[[np.void], Entry]) -> bool:
    """Return whether an entry of one of these chunks still has its text. `read` reads a row's entry or raises
    StoreError; it is called for rows marked as erased."""
    for row in _rows_of(records, uuids):
        with suppress(StoreError):
            if not row["is_erased"] or read(row).erased is UNSET:
                return True
    return False


def _rows_of(records: Records, uuids: Collection[bytes]) -> Records:
    """Return the rows of the entries of these chunks."""
    high = np.array([uuid_halves(uuid)[0] for uuid in uuids], dtype=np.uint64)
    rows = records[np.isin(records["uuid_high"], high)]
    is_own = [uuid_bytes(row["uuid_high"], row["uuid_low"]) in uuids for row in rows]
    return rows[np.array(is_own, np.bool_)]
