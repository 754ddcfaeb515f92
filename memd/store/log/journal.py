"""hot.log, the journal of a topic's hot buffer: opaque payloads in the framing of the log.

Rule: the journal serves the buffer and is not the log. Unsynced records may be lost in a power cut. If a part cannot be
read, the file is copied and the readable rest is used. For one thread.

    | header (magic "memd.hot") | record | record | ...

Between the buffer's records are the journal's own, each with the extent of the log when the following records were
written. Their statements about the log hold only if it still has that extent.
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
    """For a topic shared by several daemons: every record before this one is in the shared log too."""

    generation: int
    head: int
    """The last row of the shared log's buffer stream that is in the journal."""


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
    """The buffer's records."""
    extent: LogExtent | None
    """The journal's last own record."""
    mark: SharedMark | None
    unmarked: int
    """Number of payloads after the mark."""
    scan: Scan


class Journal:
    """An open hot.log. Use `Journal.open`."""

    def __init__(self, claim: Claim, extent: LogExtent | None = None) -> None:
        self.findings: list[Finding] = []
        """Findings of the opening."""
        self.extent = extent
        """The extent of the log when the journal was last written; None if the journal has none."""
        self.mark: SharedMark | None = None
        """The last mark at the opening, and the number of payloads after it."""
        self.unmarked = 0
        self._claim = claim
        self._bytes = self._rewritten_bytes = 0
        self._gap: StoreError | None = None
        """The error that lost records; later records would be replayed without them."""

    @classmethod
    def open(cls, claim: Claim) -> tuple[Journal, list[bytes]]:
        """Open a topic's journal; the first `append` begins its file. Return it and the payloads of its intact records.

        A torn tail is moved into a `.torn` file. If readable records follow the damage, the whole file is copied there.
        Raises ForeignFile: it is of a newer format, another kind of file, or another topic's; StoreError: it cannot be
        read, created or repaired.
        """
        files, path = claim.files, claim.layout.hot
        files.remove(path.with_name(path.name + TEMPORARY_SUFFIX))
        if files.size(path) is None:
            return cls(claim), []
        data = files.read(path)
        found = records_of(data)
        journal, payloads, end = cls(claim, found.extent), found.payloads, found.scan.end
        try:
            check_topic(files, path.parent, decode_header(data, magic=MAGIC_JOURNAL, name=str(path)), path)
            is_damaged = bool(found.scan.gaps)
        except CorruptFile:
            is_damaged = True
        if is_damaged:
            kept = save_torn_copy(files, path, data, is_whole_file=True)
            message = f"is damaged; it was copied to {kept.name} and its {len(payloads)} readable records are used"
            journal.findings.append(Finding("damaged", str(path), message))
            journal.rewrite(payloads)
            return journal, payloads
        if end < len(data):
            journal.findings.append(cut_torn_tail(files, path, data, end))
        claim.resume("hot", end)
        journal._bytes = journal._rewritten_bytes = end
        journal.mark, journal.unmarked = found.mark, found.unmarked
        return journal, payloads

    def append(
        self, payloads: Sequence[bytes], extent: LogExtent | None = None, mark: SharedMark | None = None
    ) -> None:
        """Add records, and the mark after them, without making them durable.

        `extent` is that of the log now, which includes all that the records say. Raises StoreWriteFailed: no record was
        added (DiskFull if the disk is full), and none will be until a `rewrite`.
        """
        if self._gap is not None:
            raise self._gap.with_traceback(None)
        if not self._bytes:
            self.rewrite(payloads, extent, mark=mark)
            return
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
        """Whether at least as much was added since the last rewrite as that wrote, so that rewrites at most double the
        bytes written. True for a short journal, whose rewrite is cheap."""
        return self._bytes <= SHORT_BYTES or self._bytes >= 2 * self._rewritten_bytes

    def sync(self) -> None:
        """Make everything appended durable. Raises StoreWriteFailed: an unknown part is durable; `rewrite` repairs
        it."""
        self._claim.sync("hot")

    def rewrite(
        self,
        payloads: Sequence[bytes],
        extent: LogExtent | None = None,
        wiper: Wiper | None = None,
        mark: SharedMark | None = None,
    ) -> None:
        """Replace the contents, durably: after a crash the journal is the old or the new one. `extent`: of the log now,
        None keeps the present one; `wiper`: overwrites the old file; `mark`: follows the records. Raises
        StoreWriteFailed: the old journal is still in place, and accepts no appends."""
        extent = extent or self.extent
        tag = topic_tag(self._claim.layout.topic_id)
        header = Header(magic=MAGIC_JOURNAL, dimension=0, segment_id=0, fingerprint="", topic=tag)
        data = encode_header(header) + _records(extent, payloads, mark)
        try:
            if not self._bytes:
                # Before the file is created, so that a crash in between does not skip this: the topic's directory may
                # be new, and a power cut that removes the directory removes the journal.
                self._claim.files.sync_directory(self._claim.layout.directory.parent)
            self._claim.roll("hot", data, wiper)
        except StoreError as error:
            self._gap = error
            raise
        self._gap, self.extent = None, extent
        self._bytes = self._rewritten_bytes = len(data)


def read_journal(path: Path, files: LocalDisk) -> list[bytes]:
    """Read the payloads of all intact records without repairing anything; empty if there is no journal. Raises
    ForeignFile: it is of a newer format, another kind of file, or another topic's; StoreError: it cannot be read."""
    if files.size(path) is None:
        return []
    data = files.read(path)
    with suppress(CorruptFile):  # its records may be readable anyway
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
