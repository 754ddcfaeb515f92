"""Reorders the best candidates by a reranker at `rerank.url`.

Rule: it changes only the order: no candidate passes a threshold by it, and a failed or late reranker leaves the order
unchanged. After a failure it backs off, so that a hanging server costs little.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence

from memd.embedding.http import JsonServer
from memd.errors import RerankError
from memd.settings.model import RerankSettings, without_credentials

CHARACTERS_MAX = 2_000
"""Limit of a chunk, from its beginning, and of a question, from its end, where people ask."""
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 1.0, 30.0
"""Back-off after a failure and its maximum; it doubles with each further failure."""
SHARE = 0.8
"""Share of a recall's time within which the answer must come; the block is made after it."""
_JINA, _TEI = "/v1/rerank", "/rerank"
_OTHER_FORM = (400, 404, 405, 422, 501)
"""Statuses of a server that has the other of the two APIs."""

log = logging.getLogger("memd")


CANDIDATES = 32
"""Number of best chunks that are reranked."""


class Reranker:
    """A client of the server, in Jina's format (llama-server, vLLM) or that of Text Embeddings Inference (TEI)."""

    def __init__(self, settings: RerankSettings) -> None:
        self.name = f"{settings.name} at {without_credentials(settings.url)}".removeprefix(" at ")
        self._settings = settings
        self._server = JsonServer(settings.url, settings.api_key, what="rerank", error=RerankError)
        path = self._server.path
        base = path.removesuffix("/v1")
        routes = [path, path] if path.endswith(_TEI) else [base + _JINA, base + _TEI]
        self._routes = list(zip(routes, (False, True), strict=True))
        """(route, is it in TEI's format); only the first that answers is kept."""
        self._silent_until = self._pause = 0.0

    def order(self, question: str, texts: Sequence[str], seconds: float | None) -> tuple[list[int], str | None]:
        """Return the indices of all texts, the best `CANDIDATES` in the reranker's order; and a note if it failed, with
        the order unchanged.

        Args:
            texts: best first.
            seconds: time for the recall; None if unlimited.
        """
        numbers = list(range(len(texts)))
        first = texts[:CANDIDATES]
        if len(first) < 2:
            return numbers, None
        until = math.inf if seconds is None else time.monotonic() + SHARE * seconds
        try:
            scores = self.scores(question, first, until)
        except RerankError as error:
            return numbers, f"Not reranked: {error}."
        return [*sorted(numbers[: len(first)], key=lambda one: (-scores[one], one)), *numbers[len(first) :]], None

    def scores(self, question: str, texts: Sequence[str], until: float = math.inf) -> list[float]:
        """Return the score of each text; the scale is arbitrary, higher is better. Raises RerankError: the server did
        not answer in time, gave an invalid answer, or is backed off."""
        if (left := self._silent_until - time.monotonic()) > 0:
            raise RerankError(f"{self._server.shown} failed a moment ago; a question asks again in {left:.0f} s")
        deadline = min(until, time.monotonic() + self._settings.timeout_ms / 1000)
        try:
            scores = self._asked(question[-CHARACTERS_MAX:], [text[:CHARACTERS_MAX] for text in texts], deadline)
        except RerankError as error:
            if not self._pause:
                log.error("the reranker fails: the order stays as it is until it works again", extra={"error": error})
            self._pause = min(PAUSE_SECONDS_MAX, max(PAUSE_SECONDS, 2 * self._pause))
            self._silent_until = time.monotonic() + self._pause
            raise
        if self._pause:
            log.info("the reranker works again")
            self._pause = 0.0
        return scores

    def close(self) -> None:
        """End running requests with an error, from another thread."""
        self._server.close()

    def _asked(self, question: str, texts: Sequence[str], deadline: float) -> list[float]:
        refusals = []
        for route, is_tei in tuple(self._routes):
            body: dict[str, object] = {"query": question}
            body |= {"texts": texts, "truncate": True} if is_tei else {"model": self._settings.name, "documents": texts}
            status, answer = self._server.post(route, body, deadline)
            if status == 200:
                scores = self._scores(route, answer, len(texts))
                self._routes = [(route, is_tei)]
                return scores
            is_there = status not in (404, 405)
            refusals.append(
                (is_there, f"{self._server.shown} answers {status} to {route}: {self._server.said(answer)}")
            )
            if status not in _OTHER_FORM:
                break
        raise RerankError(max(refusals, key=lambda one: one[0])[1])

    def _scores(self, route: str, answer: bytes, count: int) -> list[float]:
        try:
            told = json.loads(answer)
            rows = told["results"] if isinstance(told, dict) else told
            scores = {int(one["index"]): float(one.get("relevance_score", one.get("score"))) for one in rows}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RerankError(f"{self._server.shown} answers {route} without scores: {error!r}") from error
        if sorted(scores) != list(range(count)) or not all(map(math.isfinite, scores.values())):
            raise RerankError(f"{self._server.shown} answers {route} with scores of other texts than the {count} given")
        return [scores[number] for number in range(count)]
