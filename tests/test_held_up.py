"""One huge request: it is answered, and nobody else waits for it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from urllib.parse import urlsplit

from conftest import MakeDaemon
from daemon_process import ask
from recording_upstream import RecordingUpstream, Response

CALLS = 100_000
SHARE_MAX = 1 / 3
"""Of the time that the request takes; it was 3/4 when it was read on the event loop."""


def test_a_request_with_a_hundred_thousand_calls_holds_up_nobody(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    upstream.answer = lambda _: Response(
        (b'{"choices":[{"index":0,"message":{"role":"assistant","content":"Yes."}}]}',)
    )
    daemon = make_daemon(upstream.url).start()
    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": f"call_{number}", "type": "function", "function": function} for number in range(CALLS)]
    messages = [
        {"role": "user", "content": "Look everywhere."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "Here it is."},
    ]
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    daemon.chat([{"role": "user", "content": "Hello."}])  # what is loaded when it is needed first
    waited: list[float] = []
    is_answered = threading.Event()

    def others() -> None:
        connection = http.client.HTTPConnection(urlsplit(daemon.base_url).netloc)
        while not is_answered.is_set():
            began = time.monotonic()
            connection.request("GET", "/memd/health")
            connection.getresponse().read()
            waited.append(time.monotonic() - began)
        connection.close()

    beside = threading.Thread(target=others)
    beside.start()
    began = time.monotonic()
    answer = ask(f"{daemon.base_url}/v1/chat/completions", body)
    took = time.monotonic() - began
    is_answered.set()
    beside.join()
    assert (answer.status, answer.headers["X-Memory-Status"]) == (200, "none")
    assert upstream.chats[-1].body == body
    assert max(waited) < took * SHARE_MAX, (took, sorted(waited)[-5:])
