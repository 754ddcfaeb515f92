"""An embedding model on a server: an OpenAI-compatible `/v1/embeddings`, or Ollama's `/api/embed`.

Rule: called only in threads, never on the event loop. A question waits at most `question_seconds`, and after a failure
questions pause for a moment, so that a hanging server costs little. Texts to store wait longer and are retried. Every
request ends by its deadline. Errors show the server's message, but never the key. `JsonServer` also serves rerankers.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder, prefixes_of
from memd.entries import Vector
from memd.errors import EmbeddingError, MemdError
from memd.settings.model import EmbeddingSettings, basic_authorization, without_credentials

BATCH_SECONDS_MAX = 30.0
"""Time limit for one batch of texts. Questions get a part of the time of a recall."""
BATCH_TEXTS = 16
CHARACTERS_MAX = 2_000
"""Limit for one input; chunks are hardly longer. Longer texts are embedded in pieces, half of them from each end."""
PIECES_MAX = 16
CHARACTERS_MIN = 250
"""If a server refuses an input as too long, it gets its halves, down to this."""
RETRY_SECONDS = (0.5, 2.0)
"""Pauses between the attempts for texts to store."""
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 1.0, 30.0
"""Pause for questions after a failure; doubles with each further one, up to the maximum."""
_OPENAI, _OLLAMA = "/v1/embeddings", "/api/embed"
_TOO_LONG = (400, 413, 422, 500)
_TRIED_AGAIN = (408, 429, 500, 502, 503, 504)
_NO_SUCH_ROUTE = (404, 405, 501)
_LONE = "surrogatepass"


class _RefusedError(EmbeddingError):
    """The server answered, but not with vectors."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class HttpEmbedder(Embedder):
    """An `Embedder` that asks a server."""

    waits = True
    batch_texts = BATCH_TEXTS

    def __init__(
        self, settings: EmbeddingSettings, question_seconds: float, stored: Collection[tuple[int, str]] = ()
    ) -> None:
        """
        Args:
            question_seconds: limit on a question's wait.
            stored: dimension and fingerprint of the models that wrote the log. If this is one of them, the server is
                not asked yet.

        Raises:
            EmbeddingError: it is not, and the server does not give its vectors' dimension.
        """
        self.name = f"{settings.name} at {without_credentials(settings.url)}"
        self._settings = settings
        self._question_seconds = question_seconds
        self._prefixes = prefixes_of(settings, settings.name)
        self._server = JsonServer(settings.url, settings.api_key, what="embedding", error=EmbeddingError)
        path = self._server.path
        is_whole = path.endswith(("/embeddings", _OLLAMA))
        self._routes = [path] if is_whole else [path.removesuffix("/v1") + one for one in (_OPENAI, _OLLAMA)]
        """Candidates for its API, later the one that it has."""
        self._silent_until = self._pause = 0.0
        self._closed = threading.Event()
        known = (dimension for dimension, print_ in stored if print_ == self._fingerprint(dimension))
        self.dimension = next(known, 0)
        if not self.dimension:
            self.dimension = len(self._asked(["memd"], BATCH_SECONDS_MAX)[0])
        self.fingerprint = self._fingerprint(self.dimension)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`; pieces are cut by length, because the model's tokenizer is unknown."""
        if (left := self._silent_until - time.monotonic()) > 0:
            raise EmbeddingError(f"{self._server.shown} failed a moment ago; a question asks again in {left:.0f} s")
        deadline = time.monotonic() + self._question_seconds
        try:
            found = self._vectors([self._prefixes.query + piece for piece in _pieces(text)], lambda: deadline)
        except EmbeddingError:
            self._pause = min(PAUSE_SECONDS_MAX, max(PAUSE_SECONDS, 2 * self._pause))
            self._silent_until = time.monotonic() + self._pause
            raise
        return found

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`: for a long text the normalised mean of its pieces. Retries."""
        batches = [texts[start : start + BATCH_TEXTS] for start in range(0, len(texts), BATCH_TEXTS)]
        return np.concatenate([np.empty((0, self.dimension), np.float32), *map(self._patiently, batches)])

    def embed(self, text: str) -> Vector:
        """See `Embedder.embed`: a caller waits, so it is tried once, with a question's time limit."""
        deadline = time.monotonic() + self._question_seconds
        vector: Vector = self._means([text], lambda: deadline)[0]
        return vector

    def close(self) -> None:
        """End running requests with an error, from another thread."""
        self._closed.set()
        self._server.close()

    def _fingerprint(self, dimension: int) -> str:
        """Return the fingerprint. It leaves out the address, because the same model elsewhere has the same vectors."""
        identity = "\0".join(["http", self._settings.name, str(dimension), *self._prefixes])
        return hashlib.sha256(identity.encode("utf-8", _LONE)).hexdigest()[:32]

    def _patiently(self, texts: Sequence[str]) -> NDArray[np.float32]:
        seconds = BATCH_SECONDS_MAX
        for pause in RETRY_SECONDS:
            try:
                return self._means(texts, lambda: time.monotonic() + seconds)
            except EmbeddingError as error:
                if isinstance(error, _RefusedError) and error.status not in _TRIED_AGAIN:
                    raise
                if self._closed.wait(pause):
                    raise
        return self._means(texts, lambda: time.monotonic() + seconds)

    def _means(self, texts: Sequence[str], deadline: Callable[[], float]) -> NDArray[np.float32]:
        pieces = [_pieces(text) for text in texts]
        inputs = [self._prefixes.text + piece for one in pieces for piece in one]
        vectors = iter(self._vectors(inputs, deadline))
        rows = [np.mean([next(vectors) for _ in one], axis=0) for one in pieces]
        return _unit(np.array(rows, np.float32))

    def _vectors(self, inputs: Sequence[str], deadline: Callable[[], float]) -> NDArray[np.float32]:
        """Return unit vectors, one per input. A refused input gets the mean of its halves' vectors."""
        try:
            return self._asked(inputs, deadline() - time.monotonic())
        except _RefusedError as error:
            if error.status not in _TOO_LONG or (len(inputs) == 1 and len(inputs[0]) < 2 * CHARACTERS_MIN):
                raise
        if len(inputs) > 1:
            return np.concatenate([self._vectors([one], deadline) for one in inputs])
        half = len(inputs[0]) // 2
        halves = self._vectors([inputs[0][:half], inputs[0][half:]], deadline)
        return _unit(halves.mean(axis=0, keepdims=True))

    def _asked(self, inputs: Sequence[str], seconds: float) -> NDArray[np.float32]:
        """Return unit vectors, float32 `(len(inputs), dimension)`. Raises EmbeddingError: the server did not answer
        within `seconds`, or not with vectors."""
        deadline = time.monotonic() + seconds
        inputs = [one.encode("utf-8", "replace").decode() for one in inputs]
        refused: list[_RefusedError] = []
        for route in tuple(self._routes):
            try:
                vectors = self._asked_at(route, inputs, deadline)
            except _RefusedError as error:
                if error.status not in _NO_SUCH_ROUTE or len(self._routes) == 1:
                    raise
                refused.append(error)
                continue
            if self.dimension and vectors.shape[1] != self.dimension:
                raise EmbeddingError(
                    f"{self._server.shown} gives vectors of {vectors.shape[1]} components, and those in the log that "
                    f"{self._settings.name!r} made have {self.dimension}: serve the former model again, or give "
                    "another embedding.name and run `memd reembed`"
                )
            self._routes, self._pause, self._silent_until = [route], 0.0, 0.0
            return _unit(vectors)
        # If both routes fail, an error that names the model is more useful than one that names the route.
        raise next((one for one in refused[1:] if "model" in str(one)), refused[0])

    def _asked_at(self, route: str, inputs: Sequence[str], deadline: float) -> NDArray[np.float32]:
        is_ollama = route.endswith(_OLLAMA)
        body: dict[str, Any] = {"model": self._settings.name, "input": list(inputs)}
        body |= {"truncate": True} if is_ollama else {"encoding_format": "float"}
        status, answer = self._server.post(route, body, deadline)
        if status != 200:
            raise _RefusedError(
                status, f"{self._server.shown} answers {status} to {route}: {self._server.said(answer)}"
            )
        try:
            found = json.loads(answer)
            if is_ollama:
                rows = found["embeddings"]
            else:
                rows = [one["embedding"] for one in sorted(found["data"], key=lambda one: int(one["index"]))]
            with np.errstate(over="ignore"):  # values out of range become infinite and are rejected below
                vectors = np.array(rows, np.float32)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise EmbeddingError(
                f"{self._server.shown} answers {route} with something else than vectors: {error!r}"
            ) from error
        if vectors.ndim != 2 or len(vectors) != len(inputs) or not vectors.shape[1] or not np.isfinite(vectors).all():
            raise EmbeddingError(
                f"{self._server.shown} answers {route} with an array of shape {vectors.shape} for {len(inputs)} texts, "
                "or with values that are no numbers of float32; llama-server needs --embedding and a --pooling that is "
                "not none"
            )
        return vectors


def _pieces(text: str) -> list[str]:
    """Return the pieces of a text to embed; at least one."""
    if len(text) <= CHARACTERS_MAX:
        return [text]
    pieces = [text[start : start + CHARACTERS_MAX] for start in range(0, len(text), CHARACTERS_MAX)]
    return pieces if len(pieces) <= PIECES_MAX else pieces[: PIECES_MAX // 2] + pieces[-PIECES_MAX // 2 :]


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(norms == 0, 1, norms), dtype=np.float32)


ANSWER_BYTES_MAX = 64 << 20


class JsonServer:
    """Sends JSON to a server. Thread-safe: each request has its own connection."""

    def __init__(self, url: str, api_key: str, *, what: str, error: type[MemdError]) -> None:
        """
        Args:
            what: what it serves, for messages ("embedding").
            error: the class of errors to raise.
        """
        self._url, self._api_key, self._error = url, api_key, error
        self.shown = f"the {what} server at {without_credentials(url)}"
        parts = urlsplit(url)
        self.path = parts.path.rstrip("/")
        self._host, self._port, self._is_tls = parts.hostname or "", parts.port, parts.scheme == "https"
        self._open: set[socket.socket] = set()

    def post(self, route: str, body: object, deadline: float) -> tuple[int, bytes]:
        """Return status and body of the answer. Raises `error`: the server cannot be reached, or did not answer by
        `deadline` (time.monotonic)."""
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_left(deadline))
        ending = None
        try:
            connection.connect()
            sock = connection.sock  # kept, because the response may detach it
            ending = threading.Timer(_left(deadline), _end, [sock])  # covers answers that trickle
            ending.daemon = True
            ending.start()
            self._open.add(sock)
            connection.request("POST", route, json.dumps(body).encode("utf-8", "replace"), self._headers())
            response = connection.getresponse()
            answer = bytearray()
            while chunk := response.read1(65_536):
                answer += chunk
                if len(answer) > ANSWER_BYTES_MAX:
                    raise self._error(f"{self.shown} answers {route} with more than {ANSWER_BYTES_MAX} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
            return response.status, bytes(answer)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or time.monotonic() > deadline:
                raise self._error(f"{self.shown} does not answer in time") from error
            raise self._error(f"{self.shown} cannot be reached: {error}; is it running?") from error
        finally:
            if ending is not None:
                ending.cancel()
                self._open.discard(sock)
            connection.close()

    def close(self) -> None:
        """End the running requests."""
        for sock in tuple(self._open):
            _end(sock)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        elif basic := basic_authorization(self._url):
            headers["Authorization"] = basic
        return headers

    def said(self, answer: bytes) -> str:
        """Return the server's message in a refusal, without the key, which some repeat."""
        text = answer.decode("utf-8", "replace")
        try:
            error = json.loads(answer)["error"]
            text = str(error["message"] if isinstance(error, dict) else error)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        key = self._api_key
        return " ".join((text.replace(key, "***") if key else text).split())[:300] or "nothing"


def _end(sock: socket.socket) -> None:
    """End a connection that another thread uses."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS's own shutdown would take the key from the reading thread


def _left(deadline: float) -> float:
    """Return the seconds left, at least 0.001 because a socket timeout of 0 means non-blocking."""
    return min(threading.TIMEOUT_MAX, max(0.001, deadline - time.monotonic()))
