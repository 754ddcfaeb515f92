"""Chunks that say what the topic, or their batch, has already, and which of them are stored all the same.

Rule: pure, and words decide. Vectors alone make no two texts one: "the port is 8081" and "the port is 8082", rows of a
table, and a file that was read again after one number of it had changed are as near to each other (cosine above 0.995)
as many a text is to itself in other white space.

What was said before is stored once, unless something else has come in its place since: "deploy on Monday", "no, on
Tuesday", "on Monday after all" are three chunks, or memory would take for the newest what was taken back.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import ChunkState, Draft, Entry

ALIKE_COSINE = 0.7
"""From here on, as the bundled model measures it, two texts may be about the same thing."""
AGAIN_CHARACTERS_MIN = 12
"""Shorter texts ("ok", "thanks") say nothing that could be out of date."""
AGAIN_CHUNKS_MAX = 4
"""A message of more chunks is a file or a page: read again and again, it would fill the log."""

_MARK = re.compile(r"(?<=[\w)\]}\"'”’])[.,;:!…]++(?!\S)")
"""Marks behind a word that change nothing of what is said; a question mark does."""


class BatchDraft(msgspec.Struct, frozen=True):
    """A chunk of a batch, and what the topic has of it."""

    draft: Draft
    is_kept: bool = False
    """It is stored whatever else there is."""
    may_return: bool = False
    """It may be stored again; see `may_return`."""
    copy: Entry | None = None
    """The topic's newest chunk with the same text."""
    since: Sequence[Entry] = ()
    """The topic's chunks that came after the copy and are alike (`ALIKE_COSINE`)."""


def words_of(text: str) -> str:
    """The words of a text in their order, as texts are compared: the same for two that differ in white space, in marks
    behind words, and in capitals that open words. Numbers, identifiers, paths, signs and questions stay what they are.
    """
    words = _MARK.sub("", text).split()
    return " ".join(word.lower() if word.isalpha() and word[1:].islower() else word for word in words)


def may_return(drafts: Sequence[Draft]) -> list[bool]:
    """For each chunk of a batch whether it may be stored again: not what is short, no part of something long, and of
    notes and documents nothing."""
    counts = Counter(digest for draft in drafts for digest in draft.digests)
    return [
        draft.kind == "turn"
        and len(draft.content) >= AGAIN_CHARACTERS_MIN
        and 0 < max((counts[digest] for digest in draft.digests), default=0) <= AGAIN_CHUNKS_MAX
        for draft in drafts
    ]


def is_outdated(copy: ChunkState, again: ChunkState, since: Iterable[ChunkState], to_come: Container[str] = ()) -> bool:
    """Whether a text that is said again is to be stored again: another has come in the place of its copy.

    That is one that is alike, was said between the two in the same stream (kind and source) and by another message than
    they were. It must not be said again itself behind this: who sends "Monday" and "Tuesday" again, in this order,
    changes nothing.

    Args:
        since: what is alike and came after the copy.
        to_come: the words (see `words_of`) of what follows.
    """
    digests, words = {*copy.digests, *again.digests}, words_of(again.embedded_text)
    between = (
        words_of(one.embedded_text)
        for one in since
        if (one.kind, one.source) == (again.kind, again.source)
        and copy.said <= one.said <= again.said
        and digests.isdisjoint(one.digests)
    )
    return any(other != words and other not in to_come for other in between)


def standing_for(
    batch: Sequence[BatchDraft], vectors: NDArray[np.float32], same_cosine: float, alike_cosine: float
) -> list[int | None]:
    """For each of a batch's chunks the index of the one that is stored for it: its own, or that of an earlier one with
    the same words; None where the topic's copy stands for it.

    Args:
        vectors: unit vectors, shape `(n, dimension)`.
        same_cosine: from which similarity on the same words are the same text; the very same text always is.
        alike_cosine: `ALIKE_COSINE` by this model.
    """
    texts = [one.draft.embedded_text for one in batch]
    words = [words_of(text) for text in texts]
    to_come = Counter(words)
    stored: list[int] = []
    with_words = defaultdict[str, list[int]](list)
    standing: list[int | None] = []
    for index, one in enumerate(batch):
        to_come[words[index]] -= 1
        like = reversed(with_words[words[index]])
        same = (i for i in like if texts[i] == texts[index] or vectors[i] @ vectors[index] >= same_cosine)
        first = next(same, None)
        copy, since = (one.copy, one.since) if first is None else (batch[first].draft, ())
        is_new = copy is None or one.is_kept
        if copy is not None and one.may_return and not is_new:
            behind = [i for i in stored if first is None or i > first]
            alike = [batch[i].draft for i in behind if vectors[i] @ vectors[index] >= alike_cosine]
            is_new = is_outdated(copy, one.draft, [*since, *alike], {word for word in to_come if to_come[word]})
        if is_new:
            stored.append(index)
            with_words[words[index]].append(index)
        standing.append(index if is_new else first)
    return standing
