"""hot.log, the journal of a topic's buffer: opaque payloads in the framing of the log.

Rule: the journal is a convenience of the buffer, not the log: what was appended and not synced may be gone after a
power cut, and a part that cannot be read is set aside and the rest is used. For one thread.

    | header (magic "memd.hot") | record | record | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memd.errors import CorruptFile
from memd.store.files import TEMPORARY_SUFFIX, Files, replace
from memd.store.log.append_file import Tail
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_JOURNAL,
    Header,
    decode_header,
    encode_header,
    encode_record,
    payload_at,
    scan,
    topic_tag,
)
from memd.store.log.recovery import Finding, keep_aside, set_tail_aside


class Journal:
    """An open hot.log. Use `Journal.open`."""

    def __init__(self, path: Path, files: Files, end: int, findings: list[Finding]) -> None:
        self.findings = findings
        """What was noticed while opening."""
        self._path = path
        self._files = files
        self._header = _header(path)
        self._tail = Tail(files, path, end)

    @classmethod
    def open(cls, path: Path, files: Files) -> tuple[Journal, list[bytes]]:
        """The journal at `path`, created if there is none, and the payloads of all its whole records in order.

        A torn tail is moved into a `.torn` file; where readable records follow the damage, the whole file is copied
        there.

        Raises:
            ForeignFile: it is of a newer format, or another kind of file.
            StoreError: it cannot be read, created or put in order.
        """
        files.remove(path.with_name(path.name + TEMPORARY_SUFFIX))
        if files.size(path) is None:
            journal = cls(path, files, HEADER_BYTES, [])
            journal.rewrite([])
            return journal, []
        data = files.read(path)
        found = scan(data)
        payloads = [payload for span in found.spans if (payload := payload_at(data, span.offset)) is not None]
        try:
            decode_header(data, magic=MAGIC_JOURNAL, name=str(path))
        except CorruptFile:
            header_whole = False
        else:
            header_whole = True
        if not header_whole or found.gaps:
            kept = keep_aside(files, path, data)
            message = f"is damaged; it was copied to {kept.name} and its {len(payloads)} readable records are used"
            journal = cls(path, files, HEADER_BYTES, [Finding("damaged", str(path), message)])
            journal.rewrite(payloads)
            return journal, payloads
        torn = [set_tail_aside(files, path, data, found.end)] if found.end < len(data) else []
        return cls(path, files, found.end, torn), payloads

    def append(self, payloads: Sequence[bytes]) -> None:
        """Add records without making them durable.

        Raises:
            StoreWriteFailed: none of them was added (DiskFull if the disk is full).
        """
        self._tail.append(b"".join(map(encode_record, payloads)), sync=False)

    def sync(self) -> None:
        """Make everything appended durable.

        Raises:
            StoreWriteFailed: how much of it is durable is not known; `rewrite` makes it good.
        """
        self._tail.sync()

    def rewrite(self, payloads: Sequence[bytes]) -> None:
        """Replace the contents, durably: after a crash the journal is the old or the new one.

        Raises:
            StoreWriteFailed: the old journal is still in place.
        """
        data = encode_header(self._header) + b"".join(map(encode_record, payloads))
        self._tail.close()
        replace(self._files, self._path, data)
        self._tail = Tail(self._files, self._path, len(data))

    def close(self) -> None:
        """Close the file."""
        self._tail.close()


def peek(path: Path, files: Files) -> list[bytes]:
    """The payloads of all whole records, without putting anything in order; none if there is no journal.

    Raises:
        StoreError: it cannot be read.
    """
    if files.size(path) is None:
        return []
    data = files.read(path)
    return [payload for span in scan(data).spans if (payload := payload_at(data, span.offset)) is not None]


def _header(path: Path) -> Header:
    return Header(magic=MAGIC_JOURNAL, dimension=0, segment_id=0, fingerprint="", topic=topic_tag(path.parent.name))
