"""hot.log, the journal of a topic's hot buffer: opaque payloads in the framing of the log.

Rule: the journal serves the buffer and is not the log: records that were not synced may be lost in a power cut, and
where a part cannot be read, the file is copied and the readable rest is used. For one thread.

    | header (magic "memd.hot") | record | record | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memd.errors import CorruptFile
from memd.store.files import TEMPORARY_SUFFIX, Files, replace_file
from memd.store.log.append_file import AppendFile
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_JOURNAL,
    Header,
    Scan,
    decode_header,
    encode_header,
    encode_record,
    payload_at,
    scan_records,
    topic_tag,
)
from memd.store.log.recovery import Finding, cut_torn_tail, save_torn_copy


class Journal:
    """An open hot.log. Use `Journal.open`."""

    def __init__(self, path: Path, files: Files, end: int, findings: list[Finding]) -> None:
        self.findings = findings
        """Noticed while opening."""
        self._path = path
        self._files = files
        self._header = _header(path)
        self._file = AppendFile(files, path, end)

    @classmethod
    def open(cls, path: Path, files: Files) -> tuple[Journal, list[bytes]]:
        """Open the journal at `path`, created if there is none; returns it and the payloads of its intact records.

        A torn tail is moved into a `.torn` file. If readable records follow the damage, the whole file is copied there.

        Raises:
            ForeignFile: it is of a newer format, or another kind of file.
            StoreError: it cannot be read, created or repaired.
        """
        files.remove(path.with_name(path.name + TEMPORARY_SUFFIX))
        if files.size(path) is None:
            # Before the file is there, so that a crash in between is no reason to leave it out: the topic's directory
            # may be new, and a journal in a directory that a power cut takes is as good as none.
            files.sync_directory(path.parent.parent)
            journal = cls(path, files, HEADER_BYTES, [])
            journal.rewrite([])
            return journal, []
        data = files.read(path)
        scanned = scan_records(data)
        payloads = _payloads(data, scanned)
        try:
            decode_header(data, magic=MAGIC_JOURNAL, name=str(path))
            is_damaged = bool(scanned.gaps)
        except CorruptFile:
            is_damaged = True
        if is_damaged:
            kept = save_torn_copy(files, path, data)
            message = f"is damaged; it was copied to {kept.name} and its {len(payloads)} readable records are used"
            journal = cls(path, files, HEADER_BYTES, [Finding("damaged", str(path), message)])
            journal.rewrite(payloads)
            return journal, payloads
        torn = [cut_torn_tail(files, path, data, scanned.end)] if scanned.end < len(data) else []
        return cls(path, files, scanned.end, torn), payloads

    def append(self, payloads: Sequence[bytes]) -> None:
        """Add records without making them durable.

        Raises:
            StoreWriteFailed: none of them was added (DiskFull if the disk is full).
        """
        self._file.append(b"".join(map(encode_record, payloads)), sync=False)

    def sync(self) -> None:
        """Make everything appended durable.

        Raises:
            StoreWriteFailed: how much is durable is not known; `rewrite` repairs it.
        """
        self._file.sync()

    def rewrite(self, payloads: Sequence[bytes]) -> None:
        """Replace the contents, durably: after a crash the journal is the old or the new one.

        Raises:
            StoreWriteFailed: the old journal is still in place.
        """
        data = encode_header(self._header) + b"".join(map(encode_record, payloads))
        self._file.close()
        replace_file(self._files, self._path, data)
        self._file = AppendFile(self._files, self._path, len(data))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path, files: Files) -> list[bytes]:
    """Read the payloads of all intact records without repairing anything; none if there is no journal.

    Raises:
        StoreError: it cannot be read.
    """
    if files.size(path) is None:
        return []
    data = files.read(path)
    return _payloads(data, scan_records(data))


def _payloads(data: bytes, scanned: Scan) -> list[bytes]:
    return [payload for span in scanned.spans if (payload := payload_at(data, span.offset)) is not None]


def _header(path: Path) -> Header:
    return Header(magic=MAGIC_JOURNAL, dimension=0, segment_id=0, fingerprint="", topic=topic_tag(path.parent.name))
