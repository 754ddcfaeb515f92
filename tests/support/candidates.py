"""Chunks as a search finds them, for the tests of what is shown and what is corrected."""

import hashlib
from typing import Any

import numpy as np

from memd.entries import Entry, Status
from memd.recall.explained import Verdict
from memd.recall.relevance import Parts
from memd.recall.retrieve import Candidate


def entry(name: str, content: str = "", *, at: int = 1, public_id: str | None = None, **members: Any) -> Entry:
    """The entry of a chunk whose uuid begins with `name` where that is hexadecimal, else follows from it.

    `at` is its canonical id, and its origin as well unless another `origin_id` is given.
    """
    rest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    digits = (name + rest)[:32] if set(name) <= set("0123456789abcdef") else rest
    given: dict[str, Any] = {
        "uuid": bytes.fromhex(digits),
        "public_id": public_id or digits[:4],
        "canonical_id": at,
        "vector": _vector(rest),
        "content": content or f"user: {name}",
        "status": Status.ACTIVE,
        "origin_id": at,
        "utility_steps": 0,
        "created_at": members.get("origin_id", at),
        "roles": ("user",),
    }
    return Entry(**(given | members))


def _vector(digits: str) -> bytes:
    vector = np.frombuffer(bytes.fromhex(digits), np.uint8).astype("<f4") - 127.5
    return (vector / np.linalg.norm(vector)).astype("<f4").tobytes()


def candidate(
    name: str, score: float = 0.5, content: str = "", *, topic_id: str = "own", at: int = 1, **members: Any
) -> Candidate:
    """A chunk found with that score."""
    parts = Parts(meaning=score, words=0.0, feedback=0.0, neighbours=0.0, cosine=score)
    return Candidate(entry(name, content, at=at, **members), topic_id, 7, parts, Verdict.INJECTED)
