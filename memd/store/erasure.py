"""Erasure, the one thing that changes what is stored, because its owner asks for that: what is being erased and what
was, the text that is never to be stored again, and the rewriting of the log's files without the text of some chunks.

Rule: what is to be erased is written down first, as ids and never as text; every step can be done again; so whatever
interrupts an erasure, the next start finishes it. There is one small file for each, in the folder `memd.erasures`,
which says when all of it is done. Those of one request are begun together: before the last of their files is there,
none of them counts, and the next start drops them. A file stays when it is done: that is how a restored backup is
noticed that brings back what was erased, and how ids stay above those that are gone. The digests of the messages, with
which who guesses the text could check his guess, are in a file beside it as long as they are needed, which is encrypted
where the topics are.

What is never to be stored again in a topic is in one small file beside its log, which is replaced as a whole: digests
of erased messages and chunks, never their words. So it is kept only for who asks for it.

A new file is written beside the old one, synced and renamed, so that a crash leaves one or the other; the old one is
overwritten afterwards. Both have every record at the same place. Unreadable bytes stay as they are: nobody knows whose
they were. The record that stands in place of one whose text was erased (a stub) is exactly as long as that was, so that
everything behind it keeps its place and whoever reads the file meanwhile finds what he looks for. It keeps the entry's
identity and its times, and says when and by whom it was erased; who wrote it goes with the text, as a name may be what
had to go. To a memd that does not know of erasures it is a Deprecated entry. A chunk that names an erased call loses
its name and nothing else.
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
from msgspec import UNSET

from memd.entries import ChunkState, Entry, Erased, Status
from memd.errors import CorruptFile, InDoubt, StoreError
from memd.messages import Message
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, make_folder, replace_file
from memd.store.layout import DIGESTS_SUFFIX, TopicLayout, erasures_dir
from memd.store.log.columns import Records, digest_word, text_hash, uuid_bytes, uuid_halves
from memd.store.log.format import decode_entry, encode_entry, encode_record, payload_at, payload_of, scan_records
from memd.store.log.recovery import Finding
from memd.wording import counted, day_and_time

Kind = Literal["chunks", "age", "topic"]
"""chunks: those that were named; age: those that were said before a time; topic: all of it, with its folder."""
_SUFFIX = ".json"

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
    """When it was asked for, in microseconds since the epoch."""
    by: str
    chunks: int
    entries: int = 0
    highest_id: int = 0
    """Of a topic: no entry that was erased has a higher canonical_id."""
    uuids: bytes = b""
    """Of the chunks, 16 bytes each; none of a topic."""
    digests: bytes = b""
    """Of their messages, and of their calls as other chunks name them (`call_digest`), 16 bytes each, until it is done:
    what is still to be found in `hot.log` and in other chunks. In a file beside."""
    forbid: bool = False
    """Whether the messages are never to be stored again."""
    is_moved: bool = False
    """Of a topic: whether its folder has been put aside, so that one of the same name is another one."""
    request_end: int = 0
    """The id of the last erasure of the same request, without which this one was not begun; 0: it has itself alone."""
    done_at: int | None = None

    @property
    def mark(self) -> Erased:
        """The fact, as entries have it."""
        return Erased(at=self.at, by=self.by)

    @property
    def chunk_uuids(self) -> frozenset[bytes]:
        """The uuids of the chunks."""
        return frozenset(self.uuids[at : at + 16] for at in range(0, len(self.uuids), 16))

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
    """All erasures, done and under way, oldest first. Any thread may read and write."""

    def __init__(self, known: Iterable[Erasure] = ()) -> None:
        """`known`: those that are kept already."""
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
        """Write an erasure, durably. Raises StoreWriteFailed: it is as it was."""

    def __iter__(self) -> Iterator[Erasure]:
        return iter(begun(list(self._known.values())))

    @property
    def pending(self) -> list[Erasure]:
        """Those that are not done, oldest first."""
        return [one for one in self if one.done_at is None]

    @property
    def highest_id(self) -> int:
        """An id that all ids which are known to have been given out and erased are not above; 0 if none were."""
        return max((max(one.id, one.highest_id, one.request_end) for one in list(self._known.values())), default=0)


class ErasureLedger(Erasures):
    """The erasures of one data directory. See Erasures: each has a file of its own."""

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        self._files = files
        self._folder = erasures_dir(data_dir)
        found, problems = read_erasures(files, self._folder)
        super().__init__(begun(found))
        if problems:
            return  # what cannot be read may be the last of a request
        self._drop([one for one in found if one.id not in self._known])
        needed = {_digests_file(self._folder, one) for one in self.pending}
        with suppress(StoreError):  # on a disk that is read-only
            for name in files.names(self._folder):
                if name.endswith((DIGESTS_SUFFIX, TEMPORARY_SUFFIX)) and self._folder / name not in needed:
                    files.wipe(self._folder / name)

    def write(self, erasure: Erasure) -> None:
        """Write an erasure, durably. Raises StoreWriteFailed: the file is as it was (DiskFull if the disk is full)."""
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
        with suppress(StoreError):  # on a disk that is read-only
            for erasure in reversed(erasures):  # the last first: without it none counts
                self._known.pop(erasure.id, None)
                self._files.remove(self._folder / f"{erasure.id}{_SUFFIX}")
                self._files.wipe(_digests_file(self._folder, erasure))


def read_erasures(files: LocalDisk, folder: Path) -> tuple[list[Erasure], list[Finding]]:
    """Return the erasures in a folder, also those that were not `begun`, and a finding for each file that cannot be
    read."""
    found, problems = [], []
    for name in files.names(folder):
        if not name.endswith(_SUFFIX):
            continue  # what is being erased, or half a file
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
    """Return those whose request was written down as a whole, oldest first."""
    ids = {one.id for one in erasures}
    counting = (one for one in erasures if one.done_at is not None or (one.request_end or one.id) in ids)
    return sorted(counting, key=lambda one: one.id)


def _digests_file(folder: Path, erasure: Erasure) -> Path:
    return folder / f"{erasure.id}{DIGESTS_SUFFIX}"


def returned(erasures: Collection[Erasure], layout: TopicLayout, records: list[Records]) -> list[Finding]:
    """Return a finding for each erasure that is done and whose text is in the topic again: a backup was restored.
    `records`: the columns of all the topic's entries."""
    return [
        Finding(
            "returned",
            str(layout.directory),
            f"{one} is there again, as a backup had it; `memd erase --resume` erases it once more",
        )
        for one in erasures
        if one.topic_id == layout.topic_id and one.done_at is not None and _is_back(one, records)
    ]


def _is_back(erasure: Erasure, records: list[Records]) -> bool:
    if erasure.kind == "topic":
        return any(int(rows["canonical_id"].min(initial=1 << 63)) <= erasure.highest_id for rows in records)
    halves = [uuid_halves(uuid) for uuid in erasure.chunk_uuids]
    high = np.array([one for one, _ in halves], dtype=np.uint64)
    lows = {int(low) for _, low in halves}
    for rows in records:
        found = rows[np.isin(rows["uuid_high"], high) & (rows["status"] == 0)]
        if any(int(low) in lows for low in found["uuid_low"].tolist()):
            return True
    return False


def finding_of(erasure: Erasure, folder: Path) -> Finding:
    """Return the erasure as a fact; one that is not done is more than that."""
    if erasure.done_at is None:
        return Finding("unfinished", str(folder), f"{erasure}; start memd, or run `memd erase --resume`: it goes on")
    return Finding("notice", str(folder), str(erasure))


class ForbiddenText(msgspec.Struct, frozen=True, kw_only=True):
    """Digests, as hexadecimal digits in the file."""

    messages: frozenset[str] = frozenset()
    """The first 8 bytes of digests of messages in their place (see `messages.chain`)."""
    contents: frozenset[str] = frozenset()
    """Of those of messages wherever they stand."""
    texts: frozenset[str] = frozenset()
    """Of chunks: `columns.text_hash`."""
    sent: dict[str, tuple[str, str]] = {}
    """The answers to those who may not read and sent such a text, by a digest of it and of who they are: the id of a
    chunk that there is not, and the note that had it first."""

    def __bool__(self) -> bool:
        return bool(self.messages or self.contents or self.texts)

    def has_digest(self, digest: bytes) -> bool:
        """Whether this is the digest of a forbidden message in its place."""
        return bool(self.messages) and _hex(digest_word(digest)) in self.messages

    def has_message(self, digest: bytes, message: Message) -> bool:
        """Whether a message is forbidden, in its place or wherever it stands."""
        if self.has_digest(digest):
            return True
        forms = (message.content_digest, message.former_digest) if self.contents else ()
        return any(_hex(digest_word(one)) in self.contents for one in forms)

    def has_text(self, text: str) -> bool:
        """Whether this is the content of a forbidden chunk."""
        return bool(self.texts) and _hex(text_hash(text)) in self.texts

    def also(
        self, *, messages: Iterable[int] = (), contents: Iterable[bytes] = (), texts: Iterable[int] = ()
    ) -> ForbiddenText:
        """Return this with further ones. `messages`: `digest_word`s. `texts`: `text_hash`es."""
        return msgspec.structs.replace(
            self,
            messages=self.messages | set(map(_hex, messages)),
            contents=self.contents | {_hex(digest_word(one)) for one in contents},
            texts=self.texts | set(map(_hex, texts)),
        )


def read_forbidden(files: LocalDisk, layout: TopicLayout) -> ForbiddenText:
    """Return what a topic is never to store again. Raises StoreError: the file cannot be read (CorruptFile if it is
    damaged): then the topic is not opened, because it would store what its owner has forbidden."""
    if files.size(layout.forbidden) is None:
        return ForbiddenText()
    try:
        found = msgspec.json.decode(files.read(layout.forbidden), type=_StoredForbidden)
        forbidden = ForbiddenText(messages=found.messages, contents=found.contents, texts=found.texts)
        if found.crc not in (None, _crc(forbidden)):
            raise msgspec.ValidationError("does not match its checksum")
        return forbidden
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptFile(
            f"{layout.forbidden}: cannot be read ({error}); put it back out of a backup, or remove it if what was "
            "erased may be stored again"
        ) from error


def encode_forbidden(forbidden: ForbiddenText) -> bytes:
    """Encode the file."""
    stored = _StoredForbidden(**msgspec.structs.asdict(forbidden), crc=_crc(forbidden))
    return msgspec.json.encode(stored, order="sorted")


class _StoredForbidden(ForbiddenText, frozen=True, kw_only=True):
    crc: int | None = None
    """CRC32 of the file without this member; None: an older memd wrote it."""


def _crc(forbidden: ForbiddenText) -> int:
    return zlib.crc32(msgspec.json.encode(forbidden, order="sorted"))


def _hex(word: int) -> str:
    return f"{word:016x}"


def call_digest(author: str, call: str) -> bytes:
    """Return the 16-byte digest of a call as an author's chunks name it (`Speaker.call`)."""
    return hashlib.blake2b(f"{author}\0{call}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def named_in(entry: ChunkState, calls: Collection[bytes]) -> list[str]:
    """Return those of some calls, by their `call_digest`s, that an entry names."""
    return [call for call in entry.calls if call_digest(entry.author or "", call) in calls]


def without_text(
    data: bytes, uuids: Collection[bytes], mark: Erased, calls: Collection[bytes] = ()
) -> tuple[bytes, int, int]:
    """Return the bytes of a log file in which every record of these chunks is a stub and no record names one of these
    calls (`call_digest`), how many stubs were made, and how many records were changed beside these. Unreadable bytes
    stay."""
    changed, count, unnamed = bytearray(data), 0, 0
    for span in scan_records(data).spans:
        payload = payload_of(data, span)
        try:
            entry = decode_entry(payload, dimension=None)
        except CorruptFile:
            continue  # no entry, so nobody's
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
    """Whether the bytes of a log file are earlier ones in which nothing has changed but that text was erased."""
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
    """Return the payload of `length` bytes, those of the entry's own, that keeps its identity alone."""
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
        unknown={},
        kind=entry.kind if entry.kind in ("turn", "note", "document") else "",
    )
    marked = (msgspec.structs.replace(bare, erased=one) for one in (mark, msgspec.structs.replace(mark, by="")))
    stubs = (_padded(one, length) for one in marked)
    return next(filter(None, stubs), None) or _filled(bare, length)


def _without_names(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry.without_calls(), terms=UNSET, pad=UNSET)


def _padded(entry: Entry, length: int) -> bytes | None:
    """The payload of an entry, made as long as this by its `pad`; None: it is too long."""
    base, key = encode_entry(msgspec.structs.replace(entry, pad=UNSET)), _encoder.encode("pad")
    if (room := length - len(base) - len(key) - _BIN32.size) < 0:
        return None
    assert base[0] == 0xDE, "a map of more than fifteen fields"
    fields = int.from_bytes(base[1:3], "big") + 1
    return b"\xde" + fields.to_bytes(2, "big") + base[3:] + key + _BIN32.pack(0xC6, room) + bytes(room)


def _filled(bare: Entry, length: int) -> bytes:
    """The stub of an entry that had next to nothing beside its identity: blanks take the place of its reason."""
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
    """Whether there is an entry of one of these chunks whose text is there. `read` gives that of a row, or raises
    StoreError: it is asked where the columns say that it was erased."""
    wanted = np.array([uuid_halves(uuid)[0] for uuid in uuids], dtype=np.uint64)
    rows = records[np.isin(records["uuid_high"], wanted)]
    own = [row for row in rows if uuid_bytes(row["uuid_high"], row["uuid_low"]) in uuids]
    return any(not row["is_erased"] or _has_text(row, read) for row in own)


def _has_text(row: np.void, read: Callable[[np.void], Entry]) -> bool:
    with suppress(StoreError):
        return read(row).erased is UNSET
    return False
