"""The lexical index of one topic: the terms of its chunks, kept up to date with the log.

Rule: derived from the log and never the truth. The index may lag behind: a query reads the terms of the entries after
it itself (bm25.py). If its files are damaged or belong to another log, they are removed and rebuilt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import tantivy

from memd.entries import Entry, Status
from memd.errors import CorruptFile, StoreError
from memd.store.lexical.analyzer import analyze
from memd.store.lexical.bm25 import SCHEMA, ChunkTerms, LexicalQuery, TermsCache, native
from memd.store.lexical.stamp import FORMAT, Stamp, StampedFolder
from memd.store.log.extent import ahead_of_log
from memd.store.log.recovery import Finding
from memd.store.snapshot import SegmentView, Snapshot

BATCH_ENTRIES = 5_000
"""Entries between two commits: an interrupted rebuild loses at most that many."""
GIVE_WAY_ENTRIES = 50
WRITER_BYTES = 32_000_000
FRESH_ENTRIES_MAX = 500
"""Unindexed entries that a query reads itself, about 0.1 ms each the first time. If there are more, none of them is
found by words until the index has caught up."""


class LexicalIndex:
    """The index of one topic. Any thread may query and update; one update runs at a time, others wait for it."""

    def __init__(self, folder: StampedFolder | None, terms_cache: TermsCache) -> None:
        """`folder` holds the index's files; None: the index is kept in memory."""
        self._folder = folder
        self._lock = threading.Lock()
        self._index: tantivy.Index | None = None
        self._searcher: tantivy.Searcher | None = None
        self._stamp = Stamp()
        self._terms_cache = terms_cache.for_index()
        self._closed = False

    def behind(self, snapshot: Snapshot) -> int:
        """Return how many entries of the snapshot are not indexed; all of them before the index is opened."""
        return snapshot.count_after(self._stamp.upto if self._searcher else 0)

    def ahead_of(self, snapshot: Snapshot) -> list[Finding]:
        """Return the finding that the index on disk has entries which the log has not, if that is so."""
        stamp = None if self._folder is None else self._folder.read()
        if self._folder is None or stamp is None:
            return []
        return ahead_of_log(self._folder.stamp_path, stamp.extent, snapshot.count_upto)

    def lexical_query(
        self, text: str, snapshot: Snapshot, pending: Mapping[int, ChunkTerms] | None = None
    ) -> LexicalQuery:
        """Prepare a query on the index as it is now, on the snapshot's unindexed entries and on pending chunks.

        If the unindexed entries are more than `FRESH_ENTRIES_MAX`, they are left out.
        """
        stamp = self._stamp  # read before the searcher, which `_add` sets first: no entry can be in neither
        searcher = self._searcher
        if self._is_cut_short(stamp):  # while another thread holds the lock under which it is replaced
            stamp, searcher = Stamp(), None
        fresh = self._fresh(snapshot, stamp.upto) | dict(pending or {})
        length = stamp.terms + sum(terms.length for terms in fresh.values())
        mean_terms = max(1.0, length / max(1, stamp.texts + len(fresh)))
        return LexicalQuery(searcher, text, mean_terms=mean_terms, terms_cache=self._terms_cache, fresh=fresh)

    def open(self, snapshot: Snapshot, *, wait_seconds: float = -1) -> None:
        """Open the index on disk unless it is open, or begin an empty one; see `update`. Reads all its files once.

        An open index whose files something else has cut short is left and begun anew.

        Raises:
            StoreError: it cannot be written.
        """
        if (self._index is None or self._is_cut_short(self._stamp)) and self._lock.acquire(timeout=wait_seconds):
            try:
                self._leave_if_cut_short()
                if self._index is None and not self._closed:
                    self._open(snapshot)
            finally:
                self._lock.release()

    def update(self, snapshot: Snapshot, give_way: Callable[[], None] = lambda: None) -> None:
        """Index the entries of the snapshot that are missing; slow if they are many.

        An index that is absent, damaged or of another log is rebuilt. `give_way` is called between small batches.

        Raises:
            StoreError: the index cannot be written; a later call rebuilds it.
        """
        with self._lock:
            if self._closed:
                return
            try:
                self._leave_if_cut_short()
                if self._index is None:
                    self._open(snapshot)
                entries = _entries(snapshot, self._stamp.upto)
                while batch := list(islice(entries, BATCH_ENTRIES)):
                    self._add(snapshot, batch, give_way)
            except StoreError:
                self._reset()
                raise

    def close(self) -> None:
        """Release the files; earlier queries stay valid."""
        with self._lock:
            self._closed = True
            self._reset()

    def _fresh(self, snapshot: Snapshot, upto: int) -> dict[int, ChunkTerms]:
        """Canonical_id → terms of the live entries after `upto`; empty if there are too many."""
        fresh: dict[int, ChunkTerms] = {}
        parts = list(snapshot.rows_after(upto))
        if sum(len(rows) for _, rows in parts) > FRESH_ENTRIES_MAX:
            return fresh
        for segment_id, rows in parts:
            view = snapshot.views[segment_id]
            for row in rows:
                if view.dead[row]:
                    continue
                canonical_id = int(view.rows[row]["canonical_id"])
                terms = self._terms_cache.get(canonical_id) or self._read(view, row)
                if terms is not None:
                    fresh[canonical_id] = terms
        return fresh

    def _read(self, view: SegmentView, row: int) -> ChunkTerms | None:
        try:
            terms = ChunkTerms.of(analyze(view.segment.read(view.rows[row]).content))
        except StoreError:
            return None  # `memd verify` reports it
        self._terms_cache.put(int(view.rows[row]["canonical_id"]), terms)
        return terms

    def _is_cut_short(self, stamp: Stamp) -> bool:
        """Whether a file that is mapped into memory is shorter than it was: to read it there ends the process."""
        return self._folder is not None and self._folder.is_cut_short(stamp)

    def _leave_if_cut_short(self) -> None:
        if self._is_cut_short(self._stamp):
            self._reset()

    def _reset(self) -> None:
        self._terms_cache = self._terms_cache.cache.for_index()
        self._index = self._searcher = None
        self._stamp = Stamp()

    def _open(self, snapshot: Snapshot) -> None:
        path = None if self._folder is None else self._folder.native_path()
        try:
            if path is not None and (stamp := self._valid_stamp(snapshot)) is not None:
                with native(path):
                    self._use(tantivy.Index.open(path), stamp)
                return
        except CorruptFile:
            self._reset()
        if self._folder is not None:
            self._folder.clear()
        with native(path or "lexical", writing=True):
            self._use(tantivy.Index(SCHEMA, path, reuse=False), Stamp())

    def _use(self, index: tantivy.Index, stamp: Stamp) -> None:
        index.register_tokenizer("terms", _SPLIT)
        self._index, self._searcher, self._stamp = index, index.searcher(), stamp

    def _valid_stamp(self, snapshot: Snapshot) -> Stamp | None:
        """The stamp on disk, if it is of this log and vouches for the files."""
        assert self._folder is not None, "the index is on disk"
        stamp = self._folder.read()
        newest = max((int(view.rows["canonical_id"].max(initial=0)) for view in snapshot.views.values()), default=0)
        if stamp is None or stamp.format != FORMAT or stamp.upto > newest:
            return None
        return stamp if stamp.entries == snapshot.count_upto(stamp.upto) and self._folder.matches(stamp) else None

    def _add(self, snapshot: Snapshot, batch: Sequence[tuple[int, Entry | None]], give_way: Callable[[], None]) -> None:
        assert self._index is not None, "open"
        texts, length = self._stamp.texts, self._stamp.terms
        with native("lexical" if self._folder is None else str(self._folder.path), writing=True):
            writer = self._index.writer(WRITER_BYTES, 1)
            for number, (_, entry) in enumerate(batch):
                if number % GIVE_WAY_ENTRIES == GIVE_WAY_ENTRIES - 1:
                    give_way()
                if entry is not None:
                    added = _add_to(writer, entry)
                    texts, length = texts + (added > 0), length + added
            writer.commit()
            writer.wait_merging_threads()
            self._index.reload()
        upto = batch[-1][0]
        stamp = Stamp(upto=upto, entries=snapshot.count_upto(upto), texts=texts, terms=length)
        if self._folder is not None:
            stamp = self._folder.write(stamp, self._stamp.files)
        self._searcher = self._index.searcher()
        self._stamp = stamp


_SPLIT = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build()


def _add_to(writer: tantivy.IndexWriter, entry: Entry) -> int:
    """Index an entry in place of the one that it supersedes, if any; returns how many terms it has."""
    if entry.status is not Status.ACTIVE or entry.origin_id != entry.canonical_id:
        writer.delete_documents_by_term("uuid", entry.uuid.hex())
    if entry.status is not Status.ACTIVE:
        return 0
    terms = analyze(entry.content)
    writer.add_document(_document(entry, terms))
    return len(terms)


def _document(entry: Entry, terms: Sequence[str]) -> tantivy.Document:
    document = tantivy.Document()
    document.add_unsigned("canonical_id", entry.canonical_id)
    document.add_text("uuid", entry.uuid.hex())
    document.add_text("terms", ChunkTerms.of(terms).text)
    return document


def _entries(snapshot: Snapshot, upto: int) -> Iterator[tuple[int, Entry | None]]:
    """(canonical_id, entry) after `upto`; None in place of an entry that is dead or cannot be read."""
    for segment_id, rows in snapshot.rows_after(upto):
        view = snapshot.views[segment_id]
        for row in rows:
            record = view.rows[row]
            entry = None
            if not view.dead[row] or int(record["status"]) != Status.ACTIVE:
                try:
                    entry = view.segment.read(record)
                except StoreError:
                    pass  # `memd verify` reports it
            yield int(record["canonical_id"]), entry
