"""An upstream that writes down what it is sent, byte for byte, and answers as it is told.

Rule: it is plain `http.server` and threads: nothing of the daemon's own libraries is between the test and the wire.
With a server `behind` it, it is that one that answers.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from daemon_process import ask

HOLD_SECONDS_MAX = 60


class Request(NamedTuple):
    """One request as it came; header names as they were written."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of a header, whatever the case of its name."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


class Response(NamedTuple):
    """What is sent back: the parts of the body one after the other, waiting for `gate` before the last part."""

    parts: tuple[bytes, ...]
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    gate: threading.Event | None = None


class RecordingUpstream:
    """What was asked, and `answer`, which decides what is said to a request that is not llama-server's own."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answer: Callable[[Request], Response] = chat_answer
        self.url = ""
        self.is_loading = False
        """Whether it answers everything as llama-server does until its model is loaded."""
        self.answers_all = False
        """Whether `answer` is asked about llama-server's own routes, too."""
        self.behind = ""
        """The base URL of a server that is to answer all requests."""

    @property
    def chats(self) -> list[Request]:
        """The chat completion requests."""
        return [request for request in self.requests if request.target.endswith("/chat/completions")]

    @property
    def prompts(self) -> list[str]:
        """The messages of each chat request, as JSON text."""
        return [json.dumps(json.loads(request.body)["messages"], ensure_ascii=False) for request in self.chats]


@contextmanager
def recording_upstream(
    *, window: int | None = 4096, answer: Callable[[Request], Response] | None = None, host: str = "127.0.0.1"
) -> Iterator[RecordingUpstream]:
    """Serve on a free loopback port; `/props` tells a window of `window` tokens, if any; there is no template probe.

    With `answer` it is that which decides about every request, those for llama-server's own addresses too.
    """
    upstream = RecordingUpstream()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are two writes: 40 ms otherwise

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, BrokenPipeError):
                self.close_connection = True  # the daemon was killed, or its client left

        def _any(self) -> None:
            body = self._read_body()
            request = Request(self.command, self.path, self.headers.items(), body)
            upstream.requests.append(request)
            if upstream.is_loading:
                error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
                self._send(Response((json.dumps({"error": error}).encode(),), status=503))
            elif upstream.behind:
                self._send(passed_on(request, upstream.behind))
            elif upstream.answers_all:
                self._send(upstream.answer(request))
            elif answer is not None:
                self._send(answer(request))
            elif self.path == "/props" and window is not None:
                told = {"default_generation_settings": {"n_ctx": window}, "model_alias": "recorded"}
                self._send(Response((json.dumps(told).encode(),)))
            elif self.path in ("/props", "/apply-template", "/v1/chat/completions/input_tokens"):
                self._send(Response((b"{}",), status=404))
            else:
                self._send(upstream.answer(request))

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _any  # noqa: N815  # http.server's

        def _read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _send(self, response: Response) -> None:
            self.send_response(response.status)
            for name, value in response.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(sum(map(len, response.parts))))
            self.end_headers()
            if self.command == "HEAD":
                return
            for position, part in enumerate(response.parts):
                if response.gate is not None and position == len(response.parts) - 1:
                    response.gate.wait(HOLD_SECONDS_MAX)
                self.wfile.write(part)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name http.server gave it
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    upstream.url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
    try:
        yield upstream
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def passed_on(request: Request, base_url: str) -> Response:
    """What the server at `base_url` says to `request`."""
    answer = ask(base_url + request.target, request.body or None, method=request.method)
    return Response((answer.body,), answer.status, (("Content-Type", answer.headers["Content-Type"]),))


COMMON = {"id": "chatcmpl-1", "created": 1, "model": "recorded"}
EVENT_STREAM = (("Content-Type", "text/event-stream"),)
Json = dict[str, Any]


def chat_answer(request: Request, text: str = "Noted.", **more: Any) -> Response:
    """A reply of one short sentence, streamed if asked to; `more` as for `answered`."""
    try:
        stream = json.loads(request.body).get("stream", False)
    except ValueError:
        stream = False
    return answered({"role": "assistant", "content": text}, stream=stream, **more)


def streamed(text: str, gate: threading.Event | None = None) -> Response:
    """A reply word by word; the end waits for `gate`."""
    return answered({"content": text}, stream=True)._replace(gate=gate)


def answered(message: Json, *, stream: bool = False, usage: Json | None = None, finish: str | None = None) -> Response:
    """An answer with this message of the assistant's, whole, or its text word by word as server-sent events."""
    finish = finish or ("tool_calls" if message.get("tool_calls") else "stop")
    counted = {} if usage is None else {"usage": usage}
    if not stream:
        choice = {"index": 0, "message": message, "finish_reason": finish}
        whole = {"choices": [choice], "object": "chat.completion", **COMMON, **counted}
        return Response((json.dumps(whole).encode(),))
    first, *words = (message.get("content") or "").split(" ")
    deltas: list[Json] = [{"role": "assistant", "content": None}]
    deltas += [{"content": word} for word in (first, *(f" {word}" for word in words)) if word]
    deltas += [{"tool_calls": [{**call, "index": at}]} for at, call in enumerate(message.get("tool_calls") or ())]
    end = delta_event({}, finish) + (event(choices=[], **counted) if counted else b"") + b"data: [DONE]\n\n"
    return Response((*map(delta_event, deltas), end), headers=EVENT_STREAM)


def delta_event(delta: Json, finish: str | None = None) -> bytes:
    """A part of the reply."""
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])


def event(**members: object) -> bytes:
    """A chunk of a streamed chat completion."""
    return b"data: " + json.dumps({"object": "chat.completion.chunk", **COMMON, **members}).encode() + b"\n\n"
