"""One topic's part of a recall: its candidates by meaning and by words, with all evidence for each.

Rule: every candidate gets the same evidence, its exact cosine and its lexical score, whichever search found it. The
neighbours of the strongest are candidates too, and neighbouring chunks count as evidence for each other. Chunks that
are not stored yet have words and neighbours only, and so have all where the question could not be embedded.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memd.entries import Entry, Status
from memd.errors import StoreError
from memd.recall.corrections import replacement_of
from memd.recall.echoes import Superseded
from memd.recall.fusion import Evidence, Standing, own_scores
from memd.recall.pending import PENDING_SEGMENT, Pending
from memd.recall.ranking import stream_of
from memd.recall.read_before import ReadBefore
from memd.recall.standing import CommonParts, apart
from memd.recall.times import Span, TimedQuestion
from memd.settings.model import RetrievalSettings
from memd.store.choice import chosen, live_ids, places_of, without
from memd.store.lexical.bm25 import LexicalHit, LexicalQuery
from memd.store.lexical.terms import TermsTable
from memd.store.pending import PendingRun, UnstoredText
from memd.store.snapshot import Place
from memd.store.store import Hit, Snapshot
from memd.wanted import EVERYTHING, Wanted

log = logging.getLogger("memd")

LEXICAL_ROUNDS = 64
"""At most so many times `retrieval.top_k` chunks are searched by words, where the first ones are in the prompt already:
common words are in nearly every chunk, so no score ends that list."""
NEIGHBOURED_SHARE = 3 / 8
"""The share of the `k` strongest chunks whose neighbours become candidates. A larger one costs time and finds nothing
more (bench/NOTES.md, 2026-11-22)."""
SUPERSEDED_MAX = 64
"""Corrected chunks that are looked up for one question."""
SUCCESSORS_MAX = 64
"""Updates of one thing, one after the other, that are followed to its present state."""
AMONG_MAX = 1_000
"""If no more chunks are wanted, words are searched among these alone."""
NO_QUERIES: NDArray[np.float32] = np.empty((0, 0), np.float32)
_NO_WORDS = LexicalHit(0, 0.0, 0.0, False)


class Searchable(Protocol):
    """A topic that can be searched: a live log, or a topic as of an earlier time."""

    @property
    def topic_id(self) -> str:
        """The topic."""

    def snapshot(self) -> Snapshot:
        """Its present content."""

    def unstored(self) -> UnstoredText:
        """Return the text that was said and is not in its log yet; asked on the event loop."""

    def lexical_query(self, text: str, pending: Sequence[TermsTable] = ()) -> LexicalQuery:
        """Prepare a search for `text` in the lexical index and in the terms of pending chunks; raises StoreError if the
        index cannot be searched."""


class TopicSearch:
    """A search for one question in one snapshot of a topic, and in what waits to be stored."""

    def __init__(
        self,
        snapshot: Snapshot,
        queries: NDArray[np.float32],
        words: LexicalQuery | None,
        pending: Pending | None = None,
        wanted: Wanted = EVERYTHING,
        visible_digests: Collection[bytes] = (),
        favoured: Sequence[Span] = (),
        read_before: ReadBefore | None = None,
    ) -> None:
        """
        Args:
            queries: float32 of shape (q, dimension); without a row: search by words only. See `by_meaning`.
            words: the same question as a lexical query; None: search by meaning only.
            wanted: the chunks that may be candidates.
            visible_digests: of messages; chunks of these alone take no places among the best (see `places_of`), but
                speak for their neighbours.
            favoured: the times whose best chunks are candidates whatever else there is.
            read_before: the entries that other questions have read.
        """
        self.snapshot = snapshot
        self._chosen = chosen(snapshot, wanted)
        self._visible = dict.fromkeys(places_of(self._chosen, visible_digests))
        self.searched, self.cosines = without(self._chosen, self._visible), dict[int, NDArray[np.float64]]()
        """The snapshot of all that may be shown; and the cosines in it that are known (see `Snapshot.search`)."""
        self._favoured = [(span, chosen(self.searched, Wanted(*span))) for span in favoured]
        self._is_few = wanted != EVERYTHING and self._chosen.live_count <= AMONG_MAX
        self.pending = Pending(()) if pending is None else pending
        self._has_all_by_meaning = False
        self._last_by_words: Place | None = None
        self._queries = queries
        self._words = words
        self._included: list[Place] = []
        self._lexical: tuple[int, dict[Place, LexicalHit]] = 0, {}
        self._found: tuple[int, dict[Place, Hit]] = 0, {}
        self._hits: dict[Place, Hit] = {}
        self._read_before = read_before or ReadBefore()
        self._entries: dict[Place, Entry] = {}  # read for this question: an entry is needed up to three times

    def look_up_words(self, k: int) -> None:
        """Do what `evidence` does with this `k` and what needs no vector of the question: it may not be known yet."""
        self.read_ahead(place for place in self._best_by_words(k) if self._is_read_for_its_vector(place))

    def by_meaning(self, queries: NDArray[np.float32]) -> None:
        """Search by meaning too, before `evidence` is asked for."""
        self._queries, self.cosines = queries, {}

    def is_exhausted_by(self, strong: Iterable[Hit]) -> bool:
        """Whether a larger `k` would find nothing strong: what words find behind a weak chunk is weaker still."""
        return self._has_all_by_meaning and self._last_by_words not in {(hit.segment, hit.row) for hit in strong}

    @property
    def has_words(self) -> bool:
        """Whether the topic is searched by words too; becomes False when that fails."""
        return self._words is not None

    @property
    def chunk_count(self) -> int:
        """The chunks that can be found."""
        return self._chosen.live_count + len(self.pending)

    @property
    def can_stand_apart(self) -> bool:
        """Whether it is searched by meaning and by words, and the question's vectors are as the model makes them.

        Those of a calibrated model have a column more, and lost a share of the mean already.
        """
        dimensions = {view.segment.header.dimension for view in self.snapshot.views.values()}
        return self.has_words and len(self._queries) > 0 and self._queries.shape[1] in dimensions

    def read(self, place: Place) -> Entry:
        """The entry at a place, read from disk the first time.

        Raises:
            StoreError: it cannot be read.
        """
        if place[0] == PENDING_SEGMENT:
            return self.pending.entry(place[1])
        if place not in self._entries:
            self._entries[place] = self.snapshot.read(place)
        return self._entries[place]

    def read_ahead(self, places: Iterable[Place]) -> None:
        """Read the stored entries at these places together; what cannot be read so is left to `read`."""
        stored = (place for place in dict.fromkeys(places) if place[0] != PENDING_SEGMENT)
        if wanted := [place for place in stored if place not in self._entries]:
            self._entries |= self._read_before.read(self.snapshot, wanted)

    def was_then(self, hit: Hit) -> bool:
        """Whether a chunk was said at one of the times that are favoured."""
        if hit.segment == PENDING_SEGMENT:
            said = self.pending.entry(hit.row).said
            return any(begin <= said < end for (begin, end), _ in self._favoured)
        return any(then.is_live((hit.segment, hit.row)) for _, then in self._favoured)

    def include(self, uuids: Iterable[bytes]) -> None:
        """Make the live ones of these chunks candidates, however they match."""
        places = (place for uuid in uuids for place in self.snapshot.places(uuid))
        self.include_at(filter(self._chosen.is_live, places))

    def include_at(self, places: Iterable[Place]) -> None:
        """Make the chunks at these places candidates, however they match."""
        self._included += places

    def superseded(self, uuids: Iterable[bytes]) -> dict[bytes, Superseded]:
        """Of some chunks those that an Update has taken out, with what it put in their place."""
        found = {}
        for uuid in itertools.islice(self.snapshot.deprecated(set(uuids)), SUPERSEDED_MAX):
            try:
                *before, last = self.snapshot.history(uuid)
                new = self._successor(last)
            except StoreError:  # a damaged entry costs this check and nothing else
                continue
            old = next((entry.content for entry in reversed(before) if entry.content), "")
            found[uuid] = Superseded(old, new.content if new is not None else None)
        return found

    def _successor(self, last: Entry) -> Entry | None:
        """The chunk that an Update put in the place of another, or a later Update in the place of that; None if none.

        `last`: the entry that took the other out.
        """
        for _ in range(SUCCESSORS_MAX):
            place = self.snapshot.place(last.canonical_id)
            made = None if place is None else replacement_of(self.snapshot, place, last.uuid)
            new = None if made is None else self.snapshot.find(made)
            if new is None or new.status is Status.ACTIVE:
                return new
            last = new
        return None

    def found(self, k: int, settings: RetrievalSettings) -> dict[bytes, Entry]:
        """The chunks found with this `k` by meaning, words and time; not visible ones, nor what cannot be read."""
        hits = {place: hit for place, hit in self._find(k, settings).items() if place not in self._visible}
        self.read_ahead(hits)
        known = {place: self._entries.get(place) for place in hits}
        known |= {place: self.read(place) for place in hits if place[0] == PENDING_SEGMENT}
        return {hit.uuid: entry for place, hit in hits.items() if (entry := known[place]) is not None}

    def evidence(self, k: int, settings: RetrievalSettings) -> tuple[list[Hit], Evidence]:
        """Find the best `k` by meaning, the best `k` by words, and the neighbours of the strongest."""
        hits = self._find(k, settings)
        hits |= self._hits_at(place for place in self._included if place not in hits)
        words = {one.canonical_id: one for one in self._best_by_words(k).values()}
        beside: dict[Place, tuple[Place, ...]] = {}
        if settings.neighbour_weight:
            count = k + len(hits.keys() & self._visible.keys())
            beside = self._beside(self._strongest(hits, words, settings, math.ceil(NEIGHBOURED_SHARE * count)), hits)
            hits |= self._hits_at([place for place in beside if place not in hits])
        return list(hits.values()), _evidence(hits, self._words_of(hits.values(), words), beside)

    def _find(self, k: int, settings: RetrievalSettings) -> dict[Place, Hit]:
        """The best `k` by meaning, the best `k` by words, and those of the times that are favoured."""
        if self._found[0] != k:
            dense = self.searched.search(self._queries, k, self.cosines)
            hits = {(hit.segment, hit.row): hit for hit in [*dense, *self._visible_by_meaning(dense, k)]}
            hits |= self._of_favoured_times(k)
            lexical = self._best_by_words(k)
            if k >= LEXICAL_ROUNDS * settings.top_k:
                self._last_by_words = None
            self._has_all_by_meaning = len(dense) < k or dense[-1].score < settings.min_score
            hits |= self._hits_at(place for place in lexical if place not in hits)
            self._found = k, hits
        return dict(self._found[1])

    def _visible_by_meaning(self, dense: Sequence[Hit], k: int) -> list[Hit]:
        """The visible chunks that are among the best `k`; `dense`: the best of the others."""
        if not len(self._queries) or not self._visible:
            return []
        least = dense[-1].score if len(dense) == k else 0.0
        found = self.snapshot.hits_at(self._queries, self._visible, least=least, most=k).values()
        best = sorted([*dense, *found], key=lambda hit: (-hit.score, -hit.canonical_id))[:k]
        return [hit for hit in best if (hit.segment, hit.row) in self._visible]

    def _of_favoured_times(self, k: int) -> dict[Place, Hit]:
        """The best `k` by meaning of each time, without a question's vector the latest, and what is pending since."""
        hits: dict[Place, Hit] = {}
        for span, then in self._favoured:
            if len(self._queries):
                hits |= {(hit.segment, hit.row): hit for hit in then.search(self._queries, k, self.cosines)}
            else:
                hits |= self._hits_at(itertools.islice(filter(then.is_live, then.latest_places()), k))
            hits |= self.pending.hits(self.pending.said_in(span)[-k:])
        return hits

    def standing(self, hits: Sequence[Hit], commons: CommonParts, fingerprint: str) -> Standing:
        """How these chunks stand to the question without the part that all of the topic have in common.

        `fingerprint`: of the model of the question's vectors.
        """
        common = commons.of(self.snapshot, self._queries.shape[1], fingerprint)
        places = [(hit.segment, hit.row) for hit in hits]
        self.read_ahead(places)
        unknown = bytes(4 * len(common))
        found = [
            unknown if math.isnan(hit.cosine) or place not in self._entries else self._entries[place].vector
            for place, hit in zip(places, hits, strict=True)
        ]
        vectors = np.frombuffer(b"".join(found), "<f4").reshape(len(found), len(common))
        vectors = apart(vectors, common)
        cosine = (vectors @ apart(self._queries, common).T).max(axis=1).astype(np.float64)
        return Standing(np.where(vectors.any(axis=1), cosine, np.nan), vectors)

    def _hits_at(self, places: Iterable[Place]) -> dict[Place, Hit]:
        places = list(places)
        stored = [place for place in places if place[0] != PENDING_SEGMENT]
        if new := [place for place in stored if place not in self._hits]:
            if not len(self._queries):
                self._hits |= self.snapshot.unscored_hits(new)
            else:
                self.read_ahead(filter(self._is_read_for_its_vector, new))
                self._hits |= self.snapshot.hits_at(self._queries, new, self._entries)
        known = {place: self._hits[place] for place in stored if place in self._hits}
        return known | self.pending.hits(place for place in places if place[0] == PENDING_SEGMENT)

    def _is_read_for_its_vector(self, place: Place) -> bool:
        return place[0] in self.snapshot.indexed_segments

    def _strongest(
        self, hits: dict[Place, Hit], words: Mapping[int, LexicalHit], settings: RetrievalSettings, count: int
    ) -> list[Place]:
        score, places = own_scores(_evidence(hits, words, {}), settings.lexical_weight), list(hits)
        return [places[row] for row in np.argsort(-score, kind="stable")[:count].tolist()]

    def _beside(self, places: Sequence[Place], hits: Iterable[Place]) -> dict[Place, tuple[Place, ...]]:
        """Return for each chunk its neighbours in its stream; each neighbour also has the chunk as its own.

        `hits`: all that were found so far.
        """
        beside: dict[Place, dict[Place, None]] = {}
        stored = [place for place in places if place[0] != PENDING_SEGMENT]
        pairs: list[tuple[Place, Sequence[Place | None]]] = [
            (place, [one for one in others if one is not None and self._chosen.is_live(one)])
            for place, others in zip(stored, self.snapshot.neighbours(stored), strict=True)
        ]
        pairs += [(place, self.pending.beside(place[1])) for place in places if place[0] == PENDING_SEGMENT]
        near = [one for place, others in pairs for one in (place, *others) if one is not None and any(others)]
        self.read_ahead([*near, *hits] if self.can_stand_apart else near)  # all at once, if all are read anyway
        for place, others in pairs:
            for other in others:
                if other is not None and self._is_one_stream(place, other):
                    beside.setdefault(place, {})[other] = None
                    beside.setdefault(other, {})[place] = None
        return {place: tuple(others) for place, others in beside.items()}

    def _is_one_stream(self, place: Place, other: Place) -> bool:
        try:
            return stream_of(self.read(place)) == stream_of(self.read(other))
        except StoreError:  # an entry that cannot be read is nobody's neighbour
            return False

    def _best_by_words(self, k: int) -> dict[Place, LexicalHit]:
        if self._words is None:
            return {}
        if self._lexical[0] == k:
            return self._lexical[1]
        places: dict[int, Place] = {}
        seen = set[int]()

        def live(canonical_ids: Sequence[int]) -> dict[int, Place]:
            if new := [one for one in canonical_ids if one not in seen]:
                seen.update(new)
                pending = self.pending.places(new)
                places.update(self._chosen.live_places([one for one in new if one not in pending]))
                places.update(pending)
            return places

        def unseen(canonical_ids: Sequence[int]) -> dict[int, Place]:
            return {one: place for one, place in live(canonical_ids).items() if place not in self._visible}

        try:
            among = live_ids(self._chosen) if self._is_few else None
            best = self._words.best(k, unseen if self._visible else live, among, len(self._visible))
            self._last_by_words = None if len(best) < k else places[best[-1].canonical_id]
            if self._visible:
                best += self._words.best(k, live, among)
            self._lexical = k, {places[one.canonical_id]: one for one in best}
            return self._lexical[1]
        except StoreError as error:
            log.error("searched without its words", extra={"topic": self.snapshot.topic_id, "error": error})
            self._words = self._last_by_words = None
            return {}

    def _words_of(self, hits: Iterable[Hit], known: Mapping[int, LexicalHit]) -> dict[int, LexicalHit]:
        """Return `known` with the lexical scores of these hits added."""
        if self._words is None:
            return {}
        rest = [hit.canonical_id for hit in hits if hit.canonical_id not in known]
        return {**known, **self._words.hits_of(rest)}


def search_by_words(
    topic: Searchable,
    told: Sequence[PendingRun],
    question: TimedQuestion,
    k: int,
    wanted: Wanted,
    visible_digests: Collection[bytes],
    read_before: ReadBefore,
) -> TopicSearch:
    """Begin a search whose `by_meaning` is to follow, with the best `k` by words; 0: without words.

    `told`: what waits to be stored, as it was before this.
    """
    snapshot, pending = topic.snapshot(), Pending(told)
    pending.keep(wanted, snapshot)
    words = None
    if k:
        try:
            words = topic.lexical_query(question.text, pending.terms)
        except StoreError as error:
            log.error("searched without its words", extra={"topic": topic.topic_id, "error": error})
    choice = wanted, visible_digests, question.spans
    search = TopicSearch(snapshot, NO_QUERIES, words, pending, *choice, read_before)
    search.look_up_words(k)
    return search


def _evidence(
    hits: Mapping[Place, Hit], words: Mapping[int, LexicalHit], beside: Mapping[Place, Iterable[Place]]
) -> Evidence:
    found = [words.get(hit.canonical_id, _NO_WORDS) for hit in hits.values()]
    row = {place: number for number, place in enumerate(hits)}
    pairs = [(row[place], row[other]) for place in beside for other in beside[place] if place in row and other in row]
    return Evidence(
        cosine=np.array([hit.cosine for hit in hits.values()], np.float64),
        multiplier=np.array([hit.multiplier for hit in hits.values()], np.float64),
        lexical=np.array([one.score for one in found], np.float64),
        coverage=np.array([one.coverage for one in found], np.float64),
        is_exact=np.array([one.is_exact for one in found], np.bool_),
        beside=np.array(pairs, np.intp).reshape(-1, 2),
    )
