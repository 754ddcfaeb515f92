"""The lexical index of one topic, on disk: the words of its chunks, kept up with the log.

Rule: derived from the log and never the truth. It may lag behind: what it has not taken in yet a question looks at
itself (`words.py`). Whatever is wrong with its files costs them, not the user: they are removed and built anew. Files
that no stamp vouches for are not opened, because the native library trusts what it maps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import tantivy

from memd.entries import Entry, Status
from memd.errors import CorruptFile, StoreError
from memd.store.files import Files, replace
from memd.store.index.sealed_index import checksum_of
from memd.store.lexical.analyzer import terms
from memd.store.lexical.bm25 import SCHEMA, KnownWords, Question, Words, native
from memd.store.log.segment import Vouched
from memd.store.snapshot import Snapshot, View

FORMAT = 4
"""Raise it when the terms of a text or the fields change: indexes of another format are built anew."""
BATCH_ENTRIES = 5_000
"""Between two commits: what a rebuild that is interrupted loses."""
STAND_BACK_ENTRIES = 50
WRITER_BYTES = 32_000_000
FRESH_ENTRIES_MAX = 500
"""Entries that a question looks at itself, about 0.1 ms each the first time. If there are more, their words
are found once the index has taken them in."""
_STAMP = "stamp.json"


class _Stamp(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    upto: int = 0
    """The canonical_id of the last entry that was taken in."""
    entries: int = 0
    """How many of the log that were, of whatever status."""
    texts: int = 0
    terms: int = 0
    """Over all texts ever added: their mean length."""
    files: dict[str, Vouched] = {}


class LexicalIndex:
    """The index of one topic. Any thread may ask and update; who updates waits for who does so already."""

    def __init__(self, files: Files, directory: Path | None, known_words: KnownWords) -> None:
        """`directory`: where its files lie; None: it is only kept in memory."""
        self._files = files
        self._directory = directory
        self._lock = threading.Lock()
        self._index: tantivy.Index | None = None
        self._searcher: tantivy.Searcher | None = None
        self._stamp = _Stamp()
        self._known_words = known_words.of_one_index()
        self._closed = False

    def behind(self, snapshot: Snapshot) -> int:
        """How many entries of the snapshot it has not taken in; all of them before it was opened."""
        return sum(len(rows) for _, rows in _later(snapshot, self._stamp.upto if self._searcher else 0))

    def ask(self, text: str, snapshot: Snapshot) -> Question:
        """The question to the index as it is now, and to the snapshot's entries that it has not taken in, unless those
        are more than `FRESH_ENTRIES_MAX`.
        """
        stamp = self._stamp  # before the searcher: `_add` changes it after, so that nothing is in neither
        searcher = self._searcher
        fresh = self._fresh(snapshot, stamp.upto)
        length = stamp.terms + sum(words.length for words in fresh.values())
        mean_terms = max(1.0, length / max(1, stamp.texts + len(fresh)))
        return Question(searcher, text, mean_terms=mean_terms, known_words=self._known_words, fresh=fresh)

    def open(self, snapshot: Snapshot, *, wait_seconds: float = -1) -> None:
        """Begin with what is on disk, unless that is done; see `update`. Reads all files once.

        Raises:
            StoreError: it cannot be written.
        """
        if self._index is None and self._lock.acquire(timeout=wait_seconds):
            try:
                if self._index is None and not self._closed:
                    self._open(snapshot)
            finally:
                self._lock.release()

    def update(self, snapshot: Snapshot, stand_back: Callable[[], None] = lambda: None) -> None:
        """Take in what the snapshot has and the index not, building it anew where it is absent, damaged or of another
        log. Slow if that is much; `stand_back` is called again and again.

        Raises:
            StoreError: it cannot be written; it is built anew by a later call.
        """
        with self._lock:
            if self._closed:
                return
            try:
                if self._index is None:
                    self._open(snapshot)
                entries = _entries(snapshot, self._stamp.upto)
                while batch := list(islice(entries, BATCH_ENTRIES)):
                    self._add(snapshot, batch, stand_back)
            except StoreError:
                self._forget()
                raise

    def close(self) -> None:
        """Let the files go; questions asked before stay good."""
        with self._lock:
            self._closed = True
            self._forget()

    def _fresh(self, snapshot: Snapshot, upto: int) -> dict[int, Words]:
        """Canonical_id → words of the entries after `upto` that count; of none if there are too many."""
        found: dict[int, Words] = {}
        parts = list(_later(snapshot, upto))
        if sum(len(rows) for _, rows in parts) > FRESH_ENTRIES_MAX:
            return found
        for segment_id, rows in parts:
            view = snapshot.views[segment_id]
            for row in rows:
                if view.gone[row] or int(view.rows[row]["status"]) != Status.ACTIVE:
                    continue
                canonical_id = int(view.rows[row]["canonical_id"])
                words = self._known_words.get(canonical_id) or self._read(view, row)
                if words is not None:
                    found[canonical_id] = words
        return found

    def _read(self, view: View, row: int) -> Words | None:
        try:
            words = Words.of(terms(view.segment.read(view.rows[row]).content))
        except StoreError:
            return None  # `memd verify` says so
        self._known_words.keep(int(view.rows[row]["canonical_id"]), words)
        return words

    def _forget(self) -> None:
        self._known_words = self._known_words.known.of_one_index()
        self._index = self._searcher = None
        self._stamp = _Stamp()

    def _open(self, snapshot: Snapshot) -> None:
        name = None if self._directory is None else self._files.native_directory(self._directory)
        stamp = self._vouched(snapshot) if name is not None else None
        try:
            if name is not None and stamp is not None:
                with native(name):
                    self._use(tantivy.Index.open(name), stamp)
                return
        except CorruptFile:
            self._forget()
        self._remove()
        with native(name or "lexical", writing=True):
            self._use(tantivy.Index(SCHEMA, name, reuse=False), _Stamp())

    def _use(self, index: tantivy.Index, stamp: _Stamp) -> None:
        index.register_tokenizer("terms", _SPLIT)
        self._index, self._searcher, self._stamp = index, index.searcher(), stamp

    def _add(
        self, snapshot: Snapshot, batch: Sequence[tuple[int, Entry | None]], stand_back: Callable[[], None]
    ) -> None:
        assert self._index is not None, "open"
        texts, length = self._stamp.texts, self._stamp.terms
        with native(str(self._directory), writing=True):
            writer = self._index.writer(WRITER_BYTES, 1)
            for number, (_, entry) in enumerate(batch):
                if number % STAND_BACK_ENTRIES == STAND_BACK_ENTRIES - 1:
                    stand_back()
                if entry is not None:
                    added = _add_to(writer, entry)
                    texts, length = texts + (added > 0), length + added
            writer.commit()
            writer.wait_merging_threads()
            self._index.reload()
        upto = batch[-1][0]
        stamp = _Stamp(upto=upto, entries=_count(snapshot, upto), texts=texts, terms=length, files=self._on_disk())
        if stamp.files and self._directory is not None:
            replace(self._files, self._directory / _STAMP, msgspec.json.encode(stamp))
        self._searcher = self._index.searcher()
        self._stamp = stamp

    def _vouched(self, snapshot: Snapshot) -> _Stamp | None:
        """The stamp on disk, if the index's files are those it was written for and cover this very log."""
        assert self._directory is not None, "it has files"
        try:
            stamp = msgspec.json.decode(self._files.read(self._directory / _STAMP), type=_Stamp)
        except (StoreError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        newest = max((int(view.rows["canonical_id"].max(initial=0)) for view in snapshot.views.values()), default=0)
        if stamp.format != FORMAT or stamp.upto > newest or stamp.entries != _count(snapshot, stamp.upto):
            return None
        try:
            found = self._on_disk(known={})
        except StoreError:
            return None
        # Files that the stamp does not know are no part of the index: an update was interrupted.
        return stamp if stamp.files and {name: found.get(name) for name in stamp.files} == stamp.files else None

    def _on_disk(self, known: dict[str, Vouched] | None = None) -> dict[str, Vouched]:
        """The index's files as they are; those in `known`, by default the stamp's, are not read again."""
        known = self._stamp.files if known is None else known
        found: dict[str, Vouched] = {}
        if self._directory is None:
            return found
        for name in sorted(self._files.names(self._directory)):
            path = self._directory / name
            size = self._files.size(path)
            if name.endswith((".lock", ".tmp")) or name == _STAMP or size is None:
                continue
            is_kept = name in known and not name.endswith(".json") and known[name].bytes == size  # others never change
            found[name] = known[name] if is_kept else Vouched(size, checksum_of(self._files, path, size))
        return found

    def _remove(self) -> None:
        if self._directory is None:
            return
        for name in sorted(self._files.names(self._directory), key=lambda name: name != _STAMP):  # the stamp first
            self._files.remove(self._directory / name)


_SPLIT = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build()


def _add_to(writer: tantivy.IndexWriter, entry: Entry) -> int:
    """Take in one entry in place of the one that it supersedes, if any; how many terms it has."""
    if entry.status is not Status.ACTIVE or entry.origin_id != entry.canonical_id:
        writer.delete_documents_by_term("uuid", entry.uuid.hex())
    if entry.status is not Status.ACTIVE:
        return 0
    names = terms(entry.content)
    writer.add_document(_document(entry, names))
    return len(names)


def _document(entry: Entry, names: Sequence[str]) -> tantivy.Document:
    document = tantivy.Document()
    document.add_unsigned("canonical_id", entry.canonical_id)
    document.add_text("uuid", entry.uuid.hex())
    document.add_text("terms", Words.of(names).text)
    return document


def _later(snapshot: Snapshot, upto: int) -> Iterator[tuple[int, range]]:
    """(segment id, rows) of the entries after `upto`; ids ascend within a file and from file to file."""
    for segment_id, view in snapshot.views.items():
        if len(view.rows) and int(view.rows[-1]["canonical_id"]) > upto:
            yield segment_id, range(int(view.rows["canonical_id"].searchsorted(upto, "right")), len(view.rows))


def _entries(snapshot: Snapshot, upto: int) -> Iterator[tuple[int, Entry | None]]:
    """(canonical_id, entry) after `upto`; None for one that a later one of them supersedes, or that cannot be read."""
    for segment_id, rows in _later(snapshot, upto):
        view = snapshot.views[segment_id]
        for row in rows:
            record = view.rows[row]
            entry = None
            if not view.gone[row] or int(record["status"]) != Status.ACTIVE:
                try:
                    entry = view.segment.read(record)
                except StoreError:
                    pass  # `memd verify` says so; its words are lost with it
            yield int(record["canonical_id"]), entry


def _count(snapshot: Snapshot, upto: int) -> int:
    later = sum(len(rows) for _, rows in _later(snapshot, upto))
    return sum(len(view.rows) for view in snapshot.views.values()) - later
