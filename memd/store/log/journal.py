"""hot.log, the journal of a topic's hot buffer: opaque payloads in the framing of the log.

Rule: the journal serves the buffer and is not the log: records that were not synced may be lost in a power cut, and
where a part cannot be read, the file is copied and the readable rest is used. For one thread.

    | header (magic "memd.hot") | record | record | ...

Among the buffer's records are the journal's own, each with the extent that the log had when the records behind it were
written: what those say of the log can be trusted only if it still reaches so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from memd.errors import CorruptFile, StoreError
from memd.store.claim import Claim
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, Wiper
from memd.store.layout import check_topic
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_JOURNAL,
    Header,
    Scan,
    decode_header,
    encode_header,
    encode_record,
    payload_of,
    scan_records,
    topic_tag,
)
from memd.store.log.recovery import Finding, LogExtent, cut_torn_tail, save_torn_copy


class SharedMark(msgspec.Struct, frozen=True, tag="shared"):
    """Of a topic that several daemons have: every record before this one is in the shared log too."""

    generation: int
    head: int
    """Of the shared log's stream of the buffer: the last row that is in the journal."""


SHORT_BYTES = 64 << 10
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LogExtent)
_mark_decoder = msgspec.msgpack.Decoder(SharedMark)
_EXTENT_BEGINS = b"\x83\xa4type\xa3log"
"""The first bytes of an encoded LogExtent: a map of three, opened by its tag."""
_MARK_BEGINS = b"\x83\xa4type\xa6shared"


class JournalRecords(msgspec.Struct, frozen=True):
    """The records of a journal."""

    payloads: list[bytes]
    """The buffer's."""
    extent: LogExtent | None
    """The journal's own last one."""
    mark: SharedMark | None
    unmarked: int
    """How many of the payloads are behind the mark."""
    scan: Scan


class Journal:
    """An open hot.log. Use `Journal.open`."""

    def __init__(self, claim: Claim, findings: list[Finding], extent: LogExtent | None = None) -> None:
        self.findings = findings
        """Noticed while opening."""
        self.extent = extent
        """The extent of the log when the journal was last written; None in a journal that does not say."""
        self.mark: SharedMark | None = None
        """The last one when it was opened, and how many payloads are behind it."""
        self.unmarked = 0
        self._claim = claim
        self._bytes = self._rewritten_bytes = 0
        self._gap: StoreError | None = None
        """The error that has cost records; what is appended behind them would be replayed without them."""

    @classmethod
    def open(cls, claim: Claim) -> tuple[Journal, list[bytes]]:
        """Open a topic's journal, created if there is none; returns it and the payloads of its intact records.

        A torn tail is moved into a `.torn` file. If readable records follow the damage, the whole file is copied there.

        Raises:
            ForeignFile: it is of a newer format, another kind of file, or another topic's.
            StoreError: it cannot be read, created or repaired.
        """
        files, path = claim.files, claim.layout.hot
        files.remove(path.with_name(path.name + TEMPORARY_SUFFIX))
        if files.size(path) is None:
            # Before the file is there, so that a crash in between is no reason to leave it out: the topic's directory
            # may be new, and a journal in a directory that a power cut takes is as good as none.
            files.sync_directory(path.parent.parent)
            journal = cls(claim, [])
            journal.rewrite([])
            return journal, []
        data = files.read(path)
        found = records_of(data)
        scanned, payloads, extent = found.scan, found.payloads, found.extent
        try:
            check_topic(files, path.parent, decode_header(data, magic=MAGIC_JOURNAL, name=str(path)), path)
            is_damaged = bool(scanned.gaps)
        except CorruptFile:
            is_damaged = True
        if is_damaged:
            kept = save_torn_copy(files, path, data, is_whole_file=True)
            message = f"is damaged; it was copied to {kept.name} and its {len(payloads)} readable records are used"
            journal = cls(claim, [Finding("damaged", str(path), message)])
            journal.rewrite(payloads, extent)
            return journal, payloads
        torn = [cut_torn_tail(files, path, data, scanned.end)] if scanned.end < len(data) else []
        claim.resume("hot", scanned.end)
        journal = cls(claim, torn, extent)
        journal._bytes = journal._rewritten_bytes = scanned.end
        journal.mark, journal.unmarked = found.mark, found.unmarked
        return journal, payloads

    def append(
        self, payloads: Sequence[bytes], extent: LogExtent | None = None, mark: SharedMark | None = None
    ) -> None:
        """Add records without making them durable, and the mark behind them.

        `extent` is that of the log now, at least as far as the records say. Raises StoreWriteFailed: none of them was
        added (DiskFull if the disk is full), and none is until a `rewrite`.
        """
        if self._gap is not None:
            raise self._gap.with_traceback(None)
        is_new = extent is not None and extent != self.extent
        data = _records(extent if is_new else None, payloads, mark)
        try:
            self._claim.append("hot", data, sync=False)
        except StoreError as error:
            self._gap = error
            raise
        self.extent = extent if is_new else self.extent
        self._bytes += len(data)

    @property
    def is_long(self) -> bool:
        """Whether as much was added since the last rewrite as there was then, so that all rewrites together cost no
        more than what is written; a short one costs nothing."""
        return self._bytes <= SHORT_BYTES or self._bytes >= 2 * self._rewritten_bytes

    def sync(self) -> None:
        """Make everything appended durable. Raises StoreWriteFailed: how much is durable is not known; `rewrite`
        repairs it."""
        self._claim.sync("hot")

    def rewrite(
        self,
        payloads: Sequence[bytes],
        extent: LogExtent | None = None,
        wiper: Wiper | None = None,
        mark: SharedMark | None = None,
    ) -> None:
        """Replace the contents, durably: after a crash the journal is the old or the new one.

        Args:
            extent: of the log now; None: as it was.
            wiper: overwrites what it was.
            mark: comes behind them.

        Raises:
            StoreWriteFailed: the old journal is still in place, and nothing is appended to it.
        """
        extent = extent or self.extent
        tag = topic_tag(self._claim.layout.topic_id)
        header = Header(magic=MAGIC_JOURNAL, dimension=0, segment_id=0, fingerprint="", topic=tag)
        data = encode_header(header) + _records(extent, payloads, mark)
        try:
            self._claim.roll("hot", data, wiper)
        except StoreError as error:
            self._gap = error
            raise
        self._gap, self.extent = None, extent
        self._bytes = self._rewritten_bytes = len(data)


def read_journal(path: Path, files: LocalDisk) -> list[bytes]:
    """Read the payloads of all intact records without repairing anything; none if there is no journal. Raises
    ForeignFile: it is of a newer format, another kind of file, or another topic's; StoreError: it cannot be read."""
    if files.size(path) is None:
        return []
    data = files.read(path)
    with suppress(CorruptFile):  # its records may be readable all the same
        check_topic(files, path.parent, decode_header(data, magic=MAGIC_JOURNAL, name=str(path)), path)
    return records_of(data).payloads


def records_of(data: bytes, start: int = HEADER_BYTES) -> JournalRecords:
    """Return the intact records in these bytes of a journal."""
    payloads, scan = list[bytes](), scan_records(data, start)
    extent, mark, unmarked = None, None, 0
    for span in scan.spans:
        payload = payload_of(data, span)
        if payload.startswith(_EXTENT_BEGINS):
            extent = _decoder.decode(payload)
        elif payload.startswith(_MARK_BEGINS):
            mark, unmarked = _mark_decoder.decode(payload), 0
        else:
            payloads.append(payload)
            unmarked += 1
    return JournalRecords(payloads, extent, mark, unmarked, scan)


def _records(extent: LogExtent | None, payloads: Sequence[bytes], mark: SharedMark | None) -> bytes:
    first, last = ([] if own is None else [_encoder.encode(own)] for own in (extent, mark))
    return b"".join(map(encode_record, [*first, *payloads, *last]))
