"""The lexical index of one topic: which chunks have the words of a question, and how much that says (BM25).

Rule: derived from the log and never the truth. It may lag behind and is then topped up; whatever is wrong with its
files costs them, not the user: they are removed and built anew. Files that no stamp vouches for are not opened, because
the native library trusts what it maps. tantivy keeps the postings and finds candidates; its BM25 has fixed textbook
parameters, so the candidates' scores are computed here from the terms that are stored with each chunk.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import tantivy

from memd.chunks import Entry, Status
from memd.errors import CorruptFile, StoreError, StoreWriteFailed
from memd.store.files import Files, replace
from memd.store.indexes import checksum_of
from memd.store.segment import Vouched
from memd.store.snapshot import Snapshot
from memd.store.terms import query_terms, terms

FORMAT = 3
"""Raise it when the terms of a text or the fields change: indexes of another format are built anew."""
K1 = 0.9
B = 0.4
"""BM25; measured better on conversations than the textbook's 1.2 and 0.75."""
EXACT_WEIGHT = 3
"""As many words a rare identifier counts for; it is found by its parts besides."""
QUERY_TERMS_MAX = 64
"""Of a long question (a stack trace, pasted code) the rarest terms count."""
BATCH_ENTRIES = 5_000
"""Between two commits: what a rebuild that is interrupted loses."""
STAND_BACK_ENTRIES = 50
WRITER_BYTES = 32_000_000
SLACK = 2
"""Candidates that are asked for per result: the order by tantivy's parameters differs from ours, and some are gone."""
KNOWN_WORDS_MAX = 4096
"""Chunks whose words are kept in memory per topic, about 4 KB each."""
_STAMP = "stamp.json"


class LexicalHit(msgspec.Struct, frozen=True):
    """What the words of a chunk have to do with those of a question."""

    canonical_id: int
    score: float
    """BM25; comparable within one question."""
    coverage: float
    """The share of the question's idf mass that the chunk has, 0 to 1: comparable between questions."""
    is_exact: bool
    """Whether the chunk has a rare identifier of the question as a whole."""


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


class _Term(NamedTuple):
    name: str
    idf: float
    weight: float
    """What it counts in a score: no handful of common words outweighs a name."""
    is_exact: bool


class _Words(NamedTuple):
    """The words of one chunk: how often it has each, and how many it has in all."""

    counts: dict[str, int]
    length: int


class _KnownWords:
    """The words of the chunks that were looked at last: what one question finds, the next one often finds again."""

    def __init__(self) -> None:
        self._known: dict[int, _Words] = {}
        self._lock = threading.Lock()

    def get(self, canonical_id: int) -> _Words | None:
        return self._known.get(canonical_id)

    def keep(self, canonical_id: int, words: _Words) -> None:
        with self._lock:
            self._known[canonical_id] = words
            while len(self._known) > KNOWN_WORDS_MAX:
                del self._known[next(iter(self._known))]


class Question:
    """A question to the index as it was at one moment; any thread."""

    def __init__(
        self, searcher: tantivy.Searcher | None, text: str, mean_terms: float, known_words: _KnownWords
    ) -> None:
        """Use `LexicalIndex.ask`."""
        self._searcher = searcher
        self._mean_terms = mean_terms
        self._known_words = known_words
        known = {} if searcher is None else query_terms(text)
        weighed = [self._weighed(name, is_exact) for name, is_exact in known.items()]
        weighed.sort(key=lambda term: -term.weight)
        self._terms = sorted(weighed[:QUERY_TERMS_MAX])  # sorted: sums do not depend on the question's order
        self._mass = sum(term.idf for term in self._terms)

    def best(self, k: int, counts: Callable[[int], bool] = lambda canonical_id: True) -> list[LexicalHit]:
        """The best `k` by score, ties by canonical_id, of those that `counts` says yes to.

        Raises:
            CorruptFile: the index cannot be read.
        """
        if self._searcher is None or not self._terms or k < 1:
            return []
        wanted = [
            (tantivy.Occur.Should, tantivy.Query.boost_query(_with_term(term.name), term.weight / term.idf))
            for term in self._terms
        ]
        query, limit = tantivy.Query.boolean_query(wanted), k * SLACK
        while True:
            found = self._found(query, limit)
            hits = [hit for hit in found if counts(hit.canonical_id)]
            if len(hits) >= k or len(found) < limit:
                return sorted(hits, key=lambda hit: (-hit.score, hit.canonical_id))[:k]
            limit *= SLACK

    def about(self, canonical_ids: Sequence[int]) -> dict[int, LexicalHit]:
        """The evidence for these chunks; those without any, or not in the index, are absent.

        Raises:
            CorruptFile: the index cannot be read.
        """
        if self._searcher is None or not self._terms or not canonical_ids:
            return {}
        query = tantivy.Query.term_set_query(_SCHEMA, "canonical_id", list(canonical_ids))
        return {hit.canonical_id: hit for hit in self._found(query, len(canonical_ids)) if hit.score > 0}

    def _weighed(self, name: str, is_exact: bool) -> _Term:
        assert self._searcher is not None, "a question without an index has no terms"
        with _native("lexical"):
            count, having = self._searcher.num_docs, self._searcher.doc_freq("terms", name)
        rare = max(1, min(count // 2, max(3, count // 100)))
        idf = math.log1p((max(count, having) - having + 0.5) / (having + 0.5))
        counts_as_exact = is_exact and having <= rare
        return _Term(name, idf, idf * (EXACT_WEIGHT if counts_as_exact else 1), counts_as_exact)

    def _found(self, query: tantivy.Query, limit: int) -> list[LexicalHit]:
        assert self._searcher is not None, "a question without an index finds nothing"
        with _native("lexical"):
            addresses = [address for _, address in self._searcher.search(query, limit=limit, count=False).hits]
            ids = map(int, self._searcher.fast_field_values("canonical_id", addresses))  # type: ignore[arg-type]  # u64
            return [self._hit(one, self._words(one, at)) for one, at in zip(ids, addresses, strict=True)]

    def _words(self, canonical_id: int, address: tantivy.DocAddress) -> _Words:
        words = self._known_words.get(canonical_id)
        if words is None:
            assert self._searcher is not None, "it has found the address"
            names = self._searcher.doc(address)["terms"][0].split(" ")
            words = _Words(Counter(names), len(names))
            self._known_words.keep(canonical_id, words)
        return words

    def _hit(self, canonical_id: int, words: _Words) -> LexicalHit:
        slowdown = K1 * (1 - B + B * words.length / self._mean_terms)
        score = covered = 0.0
        has_exact = False
        for name, idf, weight, is_exact in self._terms:
            frequency = words.counts.get(name)
            if frequency:
                score += weight * frequency * (K1 + 1) / (frequency + slowdown)
                covered += idf
                has_exact = has_exact or is_exact
        return LexicalHit(canonical_id, score, min(1.0, covered / self._mass) if self._mass else 0.0, has_exact)


class LexicalIndex:
    """The index of one topic. Any thread may ask and update; who updates waits for who does so already."""

    def __init__(self, files: Files, directory: Path | None) -> None:
        """`directory`: where its files lie; None: it is only kept in memory."""
        self._files = files
        self._directory = directory
        self._lock = threading.Lock()
        self._index: tantivy.Index | None = None
        self._searcher: tantivy.Searcher | None = None
        self._stamp = _Stamp()
        self._known_words = _KnownWords()
        self._closed = False

    def behind(self, snapshot: Snapshot) -> int:
        """How many entries of the snapshot it has not taken in; all of them before it was opened."""
        return sum(len(rows) for _, rows in _later(snapshot, self._stamp.upto if self._searcher else 0))

    def ask(self, text: str) -> Question:
        """The question to the index as it is now; before the first `update` there is nothing in it."""
        stamp = self._stamp
        return Question(self._searcher, text, max(1.0, stamp.terms / max(1, stamp.texts)), self._known_words)

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

    def update(
        self, snapshot: Snapshot, stand_back: Callable[[], None] = lambda: None, *, wait_seconds: float = -1
    ) -> None:
        """Take in what the snapshot has and the index not, building it anew where it is absent, damaged or of another
        log. Slow if that is much; `stand_back` is called again and again. Does nothing where another thread is at it
        for longer than `wait_seconds`, if that is not negative.

        Raises:
            StoreError: it cannot be written; it is built anew by a later call.
        """
        if not self._lock.acquire(timeout=wait_seconds):
            return
        try:
            if self._closed:
                return
            if self._index is None:
                self._open(snapshot)
            entries = _entries(snapshot, self._stamp.upto)
            while batch := list(islice(entries, BATCH_ENTRIES)):
                self._add(snapshot, batch, stand_back)
        except StoreError:
            self._forget()
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Let the files go; questions asked before stay good."""
        with self._lock:
            self._closed = True
            self._forget()

    def _forget(self) -> None:
        self._known_words = _KnownWords()
        self._index = self._searcher = None
        self._stamp = _Stamp()

    def _open(self, snapshot: Snapshot) -> None:
        name = None if self._directory is None else self._files.native_directory(self._directory)
        stamp = self._vouched(snapshot) if name is not None else None
        try:
            if name is not None and stamp is not None:
                with _native(name):
                    self._use(tantivy.Index.open(name), stamp)
                return
        except CorruptFile:
            self._forget()
        self._remove()
        with _native(name or "lexical", writing=True):
            self._use(tantivy.Index(_SCHEMA, name, reuse=False), _Stamp())

    def _use(self, index: tantivy.Index, stamp: _Stamp) -> None:
        index.register_tokenizer("terms", _SPLIT)
        self._index, self._stamp, self._searcher = index, stamp, index.searcher()

    def _add(
        self, snapshot: Snapshot, batch: Sequence[tuple[int, Entry | None]], stand_back: Callable[[], None]
    ) -> None:
        assert self._index is not None, "open"
        texts, length = self._stamp.texts, self._stamp.terms
        with _native(str(self._directory), writing=True):
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
        self._stamp = stamp
        self._searcher = self._index.searcher()

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


_SCHEMA = (
    tantivy.SchemaBuilder()
    .add_unsigned_field("canonical_id", indexed=True, fast=True)
    .add_text_field("uuid", tokenizer_name="raw", index_option="basic")
    .add_text_field("terms", stored=True, tokenizer_name="terms", index_option="freq")
    .build()
)
_SPLIT = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build()


def _with_term(name: str) -> tantivy.Query:
    return tantivy.Query.term_query(_SCHEMA, "terms", name, index_option="freq")


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
    document.add_text("terms", " ".join(names))
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


@contextmanager
def _native(name: str, *, writing: bool = False) -> Iterator[None]:
    """What tantivy raises, as one of ours; its PanicException is no Exception and cannot be imported."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ValueError | OSError | RuntimeError) and type(error).__name__ != "PanicException":
            raise
        kind = StoreWriteFailed if writing else CorruptFile
        raise kind(f"{name}: the lexical index cannot be used ({error}); it is built anew from the log") from error
