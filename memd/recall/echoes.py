"""Which candidates only repeat others: answers that memory itself gave the words for, and questions asked again.

Rule: decided from values alone, words and provenance (`ChunkState.shown`), never by judging what is true. A chunk that
says something of its own is left alone; one that does not never outranks its source.

An assistant's answer to a question about the past contains what memory showed it, or that it does not know. Stored, it
matches the next such question better than the fact does. So:

- An *echo* answers nothing, or what one of the chunks that its prompt showed says, and its user tells nothing: it
  scores at most `ECHO_SHARE` of the best of those. (Measured with `bench/recall.py`: all shown chunks together have
  most words of anything, which cost 3 points, and a user's own words are no echo, which cost 1.)
- A chunk in which the model *retells* what was corrected since (words of a shown chunk that its replacement has not)
  counts half, and is shown only if there is nothing else. What a user states, what a tool reports and what is said of
  another thing is new: "ticket 102 is Marta's, too" stays true when ticket 101 is no longer hers.
- Of chunks that *ask the same* the newest with an answer of its own is a candidate, and those that say far more.

Two questions are the same if the cosine of their words is at least `SAME_QUESTION_COSINE`. It is computed from text, so
it costs nothing when a chunk is stored, and holds for logs of every version.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from memd.caching import cached
from memd.entries import Entry, Speaker
from memd.recall.ranking import Candidate, Verdict
from memd.store.lexical.analyzer import analyze_query

ECHO_SHARE = 0.9
RETOLD_SHARE = 0.5
SAME_QUESTION_COSINE = 0.95
DIFFERING_WORDS_MIN = 10
"""Sets of fewer words that differ at all are less similar: 9 of 10 have a cosine of 0.949."""
REPEATED_SHARE = 2 / 3
"""A chunk repeats another that has so many of the words that it adds to the question."""
TOLD_MIN = 3
"""Fewer words that a user puts beside a question tell nothing ("Hi!", "Sorry to bother you.")."""
ELSE_MIN = 6
"""A sentence of fewer other words, none of which is about the old chunk, may answer a question that is."""
FAR_MORE = 2
"""An older answer with more than so many times the own words of a newer one stays a candidate beside it."""
SOURCE_MIN = 4
"""A chunk that so many of those found had been shown, and that was not found itself, becomes a candidate."""
SOURCES_MAX = 8
REPEATING_SHARE, OWN_WORDS_SHARE = 0.5, 0.4
"""The most that a chunk loses in a turn under way for repeating the question, and for being the model's own words."""
SMALL_DIGITS_MAX = 3
_CACHE_BYTES_MAX = 16 * 1024 * 1024
"""Of each of two caches, of the words of the chunks that were candidates last: about 2,000 chunks."""
_WORD_BYTES = 8
"""Of a word in a set: many chunks share it (measured with tracemalloc)."""

# Words with which answers are wrapped, and with which they say that there is none; as the analyzer leaves them.
_EMPTY = frozenset(
    word
    for text in (
        "sorry unfortunately afraid apologize apologies unsure sure certain know knowledge information detail details "
        "data find found see seem have access available provide provided able unable cannot context conversation chat "
        "history memory record records excerpt excerpts remember recall mention mentioned previously earlier before "
        "tell told say said ask asked question answer help assist let need anything something else yes no noted note "
        "okay happy glad course certainly according based stored specify specific share shared give given memd",
    )
    for word in analyze_query(text)
)
_QUESTION_MARKS = ("?", "？", "؟", "\u037e")
_LINE_END = re.compile(r"\n|(?<=[.!?])\s")
_SENTENCE = re.compile(r"[^.!?。！？؟۔।\n]*+[.!?。！？؟۔।\n]?+")


def cache_bytes() -> int:
    """Memory that the words of chunks take which are kept from one question to the next."""
    return _spoken.bytes_held + _lines.bytes_held


class Superseded(NamedTuple):
    """A chunk that an Update replaced or took out."""

    content: str
    replacement: str | None


class _Spoken(NamedTuple):
    asked: frozenset[str]
    """The words of the user."""
    answered: frozenset[str]
    """Those of everybody else."""
    told: frozenset[str]
    """Those of the user's sentences that are no questions."""
    is_question: bool


class _Read:
    """The words of a question, and those of its candidates as far as they were asked for: each is looked up once."""

    def __init__(self, asked: frozenset[str]) -> None:
        self.asked = asked
        self._spoken: dict[bytes, _Spoken] = {}
        self._said: dict[bytes, frozenset[str]] = {}
        self._words: dict[bytes, frozenset[str]] = {}

    def spoken(self, entry: Entry) -> _Spoken:
        """Who says which words in an entry."""
        if (found := self._spoken.get(entry.uuid)) is None:
            speakers = () if entry.speakers is UNSET else entry.speakers
            found = self._spoken[entry.uuid] = _spoken(entry.content, speakers)
        return found

    def words(self, entry: Entry) -> frozenset[str]:
        """All of them."""
        if (found := self._words.get(entry.uuid)) is None:
            spoken = self.spoken(entry)
            found = self._words[entry.uuid] = spoken.asked | spoken.answered
        return found

    def said(self, entry: Entry) -> frozenset[str]:
        """The words that an answer adds to its own question."""
        if (found := self._said.get(entry.uuid)) is None:
            spoken = self.spoken(entry)
            found = self._said[entry.uuid] = spoken.answered - spoken.asked - _EMPTY
        return found

    def is_told(self, entry: Entry) -> bool:
        """Whether the user tells something in it: that is no echo, whatever is answered."""
        spoken = self.spoken(entry)
        return len(spoken.told.difference(_EMPTY, self.asked)) >= (TOLD_MIN if spoken.is_question else 1)

    def own_words(self, entry: Entry) -> int:
        """How many words an entry says of its own; what its user tells counts as one more."""
        return len(self.said(entry)) + self.is_told(entry)


def missing_sources(found: Mapping[bytes, Entry]) -> list[bytes]:
    """The chunks that many of those `found`, by uuid, had been shown and that are not among them, most often first."""
    counts = Counter(itertools.chain.from_iterable(map(_shown, found.values())))
    often = [uuid for uuid, count in counts.items() if count >= SOURCE_MIN and uuid not in found]
    return sorted(often, key=lambda uuid: -counts[uuid])[:SOURCES_MAX]


def shown_to(candidates: Sequence[Candidate]) -> set[bytes]:
    """All chunks that were shown to one of the candidates."""
    return set().union(*(_shown(candidate.entry) for candidate in candidates))


def by_itself(visible_digests: Collection[bytes], asked: frozenset[str] | None, candidate: Candidate) -> Candidate:
    """The candidate with what it loses whatever else there is; `asked`: the words of a question within a turn."""
    left = unseen(candidate, visible_digests)
    return left if asked is None else telling(left, asked)


def unseen(candidate: Candidate, visible_digests: Collection[bytes]) -> Candidate:
    """The candidate with the share of its score that is left for what the prompt does not show already."""
    entry = candidate.entry
    if entry.speakers is UNSET or len(entry.speakers) != len(entry.digests):
        return candidate
    if not any(digest in visible_digests for digest in entry.digests):
        return candidate
    said = zip(_lengths(entry), entry.digests, strict=True)
    seen = sum(length for length, digest in said if digest in visible_digests)
    return _held(candidate, 1 - seen / len(entry.content), candidate.aside) if seen else candidate


def telling(candidate: Candidate, asked: frozenset[str]) -> Candidate:
    """A candidate for a question about a turn under way, with what it loses if it only repeats its words, `asked`.

    A model at work says again and again what it looks for, and all that is as near to the question as the answer is:
    its own words count less than results, and of any chunk the lines that have words of the question and no others.
    (Measured with `bench/agents.py`: of 222 facts needed and no longer in the prompt blocks of 512 tokens show 131
    without either, 145 with the second, 173 with both.)
    """
    left = 1 - REPEATING_SHARE * _repeating(candidate.entry.content, asked)
    return _held(candidate, left * (1 - OWN_WORDS_SHARE * _own_share(candidate.entry)), candidate.aside)


def without_echoes(
    candidates: Sequence[Candidate],
    asked: frozenset[str],
    superseded: Mapping[bytes, Superseded],
    *,
    min_score: float,
) -> list[Candidate]:
    """The candidates with what echoes lose, in any order.

    Args:
        asked: the words of the question.
        superseded: of the chunks that were shown to a candidate, those that were corrected since.
    """
    read = _Read(asked)
    oldest_first = sorted(candidates, key=lambda one: one.entry.origin_id)
    held: dict[bytes, Candidate] = {}
    echoing: set[bytes] = set()
    sources: dict[bytes, set[bytes]] = {}
    for one in oldest_first:
        shown = [held[uuid] for uuid in _shown(one.entry) if uuid in held]
        repeated = _repeated(one.entry, shown, read)
        if repeated:
            echoing.add(one.entry.uuid)
            one = msgspec.structs.replace(one, is_echo=_adds_nothing(one.entry, repeated, read))
        if superseded:
            known = sources[one.entry.uuid] = superseded.keys() & _shown(one.entry)
            known.update(*(sources[source.entry.uuid] for source in shown))
            if any(_retells(one.entry, superseded[uuid], read) for uuid in known):
                one = _held(one, RETOLD_SHARE, Verdict.RETELLS)
        if repeated and one.score > 0:
            best = max(source.score for source in repeated)
            one = _held(one, min(1.0, ECHO_SHARE * best / one.score), one.aside)
        held[one.entry.uuid] = one
    _set_aside_asked_again(held, read, echoing)
    if not any(one.aside is None and one.parts.strength >= min_score for one in held.values()):
        return [msgspec.structs.replace(one, aside=None) for one in held.values()]
    return list(held.values())


def is_echo(entry: Entry, known: Mapping[bytes, Candidate], asked: frozenset[str]) -> bool:
    """Whether an entry says nothing that those of `known`, by uuid, which were shown to it do not say."""
    shown, read = [known[uuid] for uuid in _shown(entry) if uuid in known], _Read(asked)
    return _adds_nothing(entry, _repeated(entry, shown, read), read)


def _lengths(entry: Entry) -> list[int]:
    """How many characters of a content each of its speakers says, in order."""
    starts = [] if entry.speakers is UNSET else [speaker.offset for speaker in entry.speakers]
    return [end - start for start, end in itertools.pairwise([*starts, len(entry.content)])]


def _own_share(entry: Entry) -> float:
    """The share of a content that the model said itself."""
    speakers = () if entry.speakers is UNSET else entry.speakers
    said = zip(_lengths(entry), speakers, strict=True)
    return sum(length for length, speaker in said if speaker.role == "assistant") / max(1, len(entry.content))


def _said_by(content: str, speakers: Sequence[Speaker]) -> list[tuple[str, str]]:
    """The role and the text of each stretch; without speakers all is the model's."""
    ends = [speaker.offset for speaker in speakers[1:]] + [len(content)]
    stretches = [(one.role, content[one.offset : end]) for one, end in zip(speakers, ends, strict=False)]
    return stretches or [("assistant", content)]


def _repeating(content: str, asked: Collection[str]) -> float:
    """Of the words that a content shares with a question, the share in lines that say nothing beyond it."""
    shared = [(len(words.intersection(asked)), words.issubset(asked)) for words in _lines(content)]
    return sum(count for count, repeats in shared if repeats) / max(1, sum(count for count, _ in shared))


def _held(one: Candidate, factor: float, verdict: Verdict | None) -> Candidate:
    parts = msgspec.structs.replace(one.parts, echo=one.parts.echo * factor)
    return msgspec.structs.replace(one, parts=parts, aside=verdict)


def _repeated(entry: Entry, shown: Sequence[Candidate], read: _Read) -> list[Candidate]:
    """Those of the chunks shown to it that say all that an entry says: nearly all of its words; all of them if none."""
    if not shown or read.is_told(entry):
        return []
    said = read.said(entry)
    least = REPEATED_SHARE * len(said)
    return [one for one in shown if len(said & read.words(one.entry)) >= least] if said else [*shown]


def _adds_nothing(entry: Entry, repeated: Sequence[Candidate], read: _Read) -> bool:
    """Whether an entry has no word of its own beside the chunks that it repeats. The result of a tool is no echo: what
    is read once more holds once more."""
    if not repeated or not {"tool", "function"}.isdisjoint(entry.roles):
        return False
    return read.said(entry).issubset(frozenset[str]().union(*(read.words(one.entry) for one in repeated)))


def _retells(entry: Entry, old: Superseded, read: _Read) -> bool:
    """Whether an entry repeats what a correction took out: a number or name that differs, else half of the words.

    Of a chunk that was taken out as a whole it has to have half of the numbers and names: many share one of them.
    """
    former = _words(old.content) - _EMPTY
    present = _words(old.replacement) if old.replacement is not None else frozenset[str]()
    gone = former - (present or read.asked)
    codes = _codes(gone)
    gone = codes or gone
    if gone.isdisjoint(read.words(entry)):
        return False
    repeated = len(gone & _repeatable(entry, former, present, read.spoken(entry).told))
    return repeated > 0 and (bool(codes and present) or 2 * repeated >= len(gone))


def _repeatable(entry: Entry, former: frozenset[str], present: frozenset[str], told: frozenset[str]) -> frozenset[str]:
    """The words of what the model says and its user asks in an entry, without sentences that are about something else
    than the chunk with the words `former`, which are `present` now. What a user states, and what a tool reports, is
    new, and so is an answer that says it again."""
    kept, found = former & (present or former), set[str]()
    for role, text in _said_by(entry.content, () if entry.speakers is UNSET else entry.speakers):
        for sentence in _LINE_END.split(text) if role in ("user", "assistant") else ():
            if role == "user" and not sentence.endswith(_QUESTION_MARKS):
                continue
            words = _words(sentence)
            gone = words & former - kept
            is_user_s = gone <= told and words & kept <= told
            if not is_user_s and not _is_about_another(words, former, present, kept):
                found |= words
    return frozenset(found)


def _is_about_another(
    words: frozenset[str], former: frozenset[str], present: frozenset[str], kept: frozenset[str]
) -> bool:
    """Whether a sentence says the like of another thing (ticket 102, where `former` is about ticket 101), or much and
    nothing of this one ("Marta waters the plants")."""
    subject, frame = _codes(kept), kept - _codes(kept)
    if subject and not subject & words and _codes(words) - former - present:
        return 2 * len(words & frame) >= len(frame)
    return not _codes(words & former) and not words & kept and len(words - former) >= ELSE_MIN


def _codes(words: frozenset[str]) -> frozenset[str]:
    return frozenset(word for word in words if any(character.isdecimal() for character in word))


def _set_aside_asked_again(held: dict[bytes, Candidate], read: _Read, echoing: Collection[bytes]) -> None:
    """Of chunks that ask the same, set aside all but the newest with an answer of its own and those that say more."""

    def own_words(one: Candidate) -> int:
        return 0 if one.entry.uuid in echoing else read.own_words(one.entry)

    for group in _asking_the_same(held.values(), read):
        newest = next((one for one in group if own_words(one)), group[0])
        most = max(1, own_words(newest)) * FAR_MORE
        for one in group:
            if one is not newest and own_words(one) <= most:
                held[one.entry.uuid] = msgspec.structs.replace(one, aside=Verdict.ASKED_AGAIN)


def _asking_the_same(candidates: Iterable[Candidate], read: _Read) -> list[list[Candidate]]:
    """The groups of more than one, each newest first. Each word is a bit: there are hundreds of pairs to compare."""
    groups: list[tuple[int, int, list[Candidate]]] = []
    short: dict[frozenset[str], list[Candidate]] = {}
    bits: dict[str, int] = {}
    may_ask = [one for one in candidates if one.aside is None and _may_ask(one.entry)]
    for one in sorted(may_ask, key=lambda one: -one.entry.origin_id):
        spoken = read.spoken(one.entry)
        if not (spoken.asked and spoken.answered and spoken.is_question):
            continue
        count = len(spoken.asked)
        if count < DIFFERING_WORDS_MIN:
            short.setdefault(spoken.asked, []).append(one)
            continue
        mask = sum([1 << bits.setdefault(word, len(bits)) for word in spoken.asked])
        for other, others, group in groups:
            if (mask & other).bit_count() / math.sqrt(others * count) >= SAME_QUESTION_COSINE:
                group.append(one)
                break
        else:
            groups.append((mask, count, [one]))
    return [group for group in (*short.values(), *(group for _, _, group in groups)) if len(group) > 1]


def _may_ask(entry: Entry) -> bool:
    """Whether there is a question in what people say in an entry and an answer beside it, as far as one look tells."""
    has_both = entry.speakers is not UNSET and len(entry.speakers) > 1
    return has_both and any(mark in entry.content for mark in _QUESTION_MARKS)


def _shown(entry: Entry) -> tuple[bytes, ...]:
    return () if entry.shown is UNSET else entry.shown


def _sizes(sets: Iterable[frozenset[str]]) -> int:
    return sum(sys.getsizeof(words) + _WORD_BYTES * len(words) for words in sets)


def _size_of_spoken(spoken: _Spoken) -> int:
    return _sizes({spoken.asked, spoken.answered, spoken.told})


@cached(_CACHE_BYTES_MAX, _size_of_spoken)
def _spoken(content: str, speakers: tuple[Speaker, ...]) -> _Spoken:
    said = _said_by(content, speakers)
    asked = [text for role, text in said if role == "user"]
    answered = [text for role, text in said if role != "user"]
    sentences = [sentence for text in asked for sentence in _SENTENCE.findall(text)]
    told = [sentence for sentence in sentences if not sentence.endswith(_QUESTION_MARKS)]
    is_question = len(told) < len(sentences)
    words = _words("\n".join(asked))
    return _Spoken(words, _words("\n".join(answered)), _words("\n".join(told)) if is_question else words, is_question)


@cached(_CACHE_BYTES_MAX, _sizes)
def _lines(content: str) -> tuple[frozenset[str], ...]:
    """The words of each line and sentence, without the numbers of lines and compounds beside their parts."""
    lines = (_words(line) - _EMPTY for line in _LINE_END.split(content))
    plain = (frozenset(word for word in words if word.isalnum() and not _is_small_number(word)) for words in lines)
    return tuple(words for words in plain if words)


def _is_small_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= SMALL_DIGITS_MAX


def _words(text: str) -> frozenset[str]:
    return frozenset(map(sys.intern, analyze_query(text)))  # the same words in hundreds of chunks are one each
