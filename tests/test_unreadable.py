"""Bodies that are not quite what they should be: read as far as they can be, forwarded as they came, never silently.

Rule: `X-Memory-Status: none` means that nothing was found; what memd could not read has a status and a log line.
"""

from __future__ import annotations

import json

import pytest
from daemon_process import Answer, DaemonProcess, ask
from recording_upstream import RecordingUpstream, Request, Response

FACT = "The spare key of the workshop hangs behind the blue bicycle."
QUESTION = b"Where does the spare key of the workshop hang?"
CUT = rb"The log ends with \ud83d"
"""As JavaScript leaves it where it cuts a string in the middle of an emoji."""


def post(daemon: DaemonProcess, body: bytes, path: str = "/v1/chat/completions") -> Answer:
    return ask(f"{daemon.base_url}{path}", body)


def chat_of(*texts: bytes) -> bytes:
    """A chat of user and assistant texts in turn, each the inside of a JSON string."""
    roles = (b"user", b"assistant")
    messages = [b'{"role": "%b", "content": "%b"}' % (roles[place % 2], text) for place, text in enumerate(texts)]
    return b'{"model": "tiny", "messages": [%b]}' % b", ".join(messages)


@pytest.fixture
def upstream(kept_upstream: RecordingUpstream) -> RecordingUpstream:
    return kept_upstream


@pytest.fixture
def daemon(in_topic: DaemonProcess) -> DaemonProcess:
    """In front of an upstream that records what reaches it, with a fact in memory."""
    in_topic.chat([{"role": "user", "content": FACT}])
    in_topic.wait_stored(FACT)
    return in_topic


@pytest.mark.parametrize(
    ("odd", "stored"),
    [
        (rb"The log ends with \ud83d", "The log ends with \ufffd"),
        (rb"The log begins with \uDE00 and an oak", "The log begins with \ufffd and an oak"),
        (rb"A path C:\\ud83d and \ud83d\ude00 and \ud83d\ud83d", "A path C:\\ud83d and \U0001f600 and \ufffd\ufffd"),
        (b"The umlaut \xe4 of Latin-1", "The umlaut \ufffd of Latin-1"),
        (b"A surrogate \xed\xa0\xbd as bytes", "A surrogate \ufffd\ufffd\ufffd as bytes"),
    ],
    ids=["high", "low", "escapes", "latin", "bytes"],
)
def test_text_that_is_no_unicode_is_remembered_and_reaches_the_model_as_it_came(
    daemon: DaemonProcess, upstream: RecordingUpstream, odd: bytes, stored: str
) -> None:
    as_it_came = chat_of(odd, b"Noted.", odd)
    assert post(daemon, as_it_came).headers["X-Memory-Status"] == "none"
    assert upstream.chats[-1].body == as_it_came
    answer = post(daemon, chat_of(odd, b"Noted.", odd + b" " + QUESTION))
    assert answer.headers["X-Memory-Status"] == "injected"
    assert FACT.encode() in upstream.chats[-1].body
    for piece in (odd, odd + b" " + QUESTION):
        assert piece.replace(rb"\uDE00", rb"\ude00") in upstream.chats[-1].body
    daemon.wait_stored(stored)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
def test_each_api_reads_half_an_emoji(daemon: DaemonProcess, upstream: RecordingUpstream, path: str) -> None:
    name = b"input" if path == "/v1/responses" else b"messages"
    result = b'{"type": "text", "text": "%b"}' % CUT if path == "/v1/messages" else b'"%b"' % CUT
    content = b"[%b]" % result if path == "/v1/messages" else result
    body = b'{"%b": [{"role": "user", "content": %b}, {"role": "assistant", "content": "Yes."}, ' % (name, content)
    body += b'{"role": "user", "content": "%b"}], "model": "tiny", "stream": false}' % QUESTION
    assert post(daemon, body, path).headers["X-Memory-Status"] == "injected"
    assert CUT in upstream.requests[-1].body and FACT.encode() in upstream.requests[-1].body


def test_what_memory_is_told_may_have_half_an_emoji(daemon: DaemonProcess) -> None:
    told = rb'{"notes": [{"content": "The lamp is \ud83d green."}]}'
    for number, memory_in in enumerate((told, json.dumps(told.decode().replace("lamp", "door")).encode())):
        body = chat_of(b"Number %d." % number)[:-1] + b', "memory_in": %b}' % memory_in
        assert post(daemon, body).json["memory_out"]["notes"][0]["chunk_ids"]
    daemon.wait_stored("The lamp is \ufffd green.", "The door is \ufffd green.")


def test_an_answer_that_is_cut_in_an_emoji_is_remembered(daemon: DaemonProcess, upstream: RecordingUpstream) -> None:
    whole = rb'{"choices": [{"message": {"role": "assistant", "content": "Half \ud83d of it."}, "index": 0}]}'
    upstream.answer = lambda _: Response((whole,))
    asked = chat_of(b"One?")[:-1] + b', "memory_in": {}}'
    answer = post(daemon, asked)
    assert answer.json["memory_out"] and answer.body.startswith(whole[:-1])
    daemon.wait_stored("Half \ufffd of it.")

    def in_halves(_: Request) -> Response:
        pieces = (b"A face ", rb"\ud83d", rb"\ude00", b" and \xff")
        events = [b'data: {"choices": [{"index": 0, "delta": {"content": "%b"}}]}\n\n' % piece for piece in pieces]
        return Response((*events, b"data: [DONE]\n\n"), headers=(("Content-Type", "text/event-stream"),))

    upstream.answer = in_halves
    post(daemon, chat_of(b"Two?")[:-1] + b', "stream": true}')
    daemon.wait_stored("A face \U0001f600 and \ufffd")


@pytest.mark.parametrize(
    "odd",
    [
        b'"temperature": 1e999',
        b'"max_tokens": %b' % (b"9" * 5000),
        b'"seed": -%b' % (b"1" * 400),
        b'"model": "one", "model": "two"',
        b'"tools": %b%b' % (b"[" * 100, b"]" * 100),
        b'"cut\\ud83d": "in a key"',
    ],
    ids=["float", "bound", "integer", "twice", "nested", "key"],
)
def test_what_may_be_odd_in_json_costs_no_memory(
    daemon: DaemonProcess, upstream: RecordingUpstream, odd: bytes
) -> None:
    answer = post(daemon, chat_of(QUESTION)[:-1] + b", " + odd + b"}")
    assert answer.headers["X-Memory-Status"] == "injected"
    assert FACT.encode() in upstream.chats[-1].body
    assert odd.rpartition(b": ")[2] in upstream.chats[-1].body


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (chat_of(QUESTION)[:-1] + b', "tools": %b%b}' % (b"[" * 5000, b"]" * 5000), "around byte"),
        (chat_of(QUESTION)[:-1] + b', "temperature": NaN}', f"byte {len(chat_of(QUESTION)) + 16}"),
        (chat_of(b"A line\nbreak"), f"byte {chat_of(b'A line').index(b'A line') + 6}"),
        (chat_of(QUESTION)[:-1], "truncated"),
        (chat_of(QUESTION).decode().encode("utf-16"), "byte 0"),
        (b'{"messages": ["no object"]}', "messages[0]"),
        (b'{"model": "tiny"}', "`messages`"),
        (b"[1,2,3]", "object"),
        (b"", "truncated"),
        (chat_of(rb"\ud83d \udbff\udfff"), "hex escape"),
    ],
    ids=["deep", "nan", "control", "half", "utf-16", "strings", "none", "list", "empty", "taken"],
)
def test_what_cannot_be_read_passes_and_says_so(
    daemon: DaemonProcess, upstream: RecordingUpstream, body: bytes, where: str
) -> None:
    answer = post(daemon, body)
    assert answer.headers["X-Memory-Status"] == "degraded:unreadable"
    assert upstream.chats[-1].body == body
    turn, said = f"turn={answer.headers['X-Memory-Turn']} ", daemon.log.read_text().splitlines()
    [line] = [line for line in said if "memd cannot read its body" in line and turn in line]
    assert where in line


def test_of_a_conversation_that_the_upstream_keeps_what_is_known_is_stored(
    daemon: DaemonProcess, upstream: RecordingUpstream
) -> None:
    def answer(request: Request) -> Response:
        text = f"Answer {len(upstream.requests)} from the server."
        output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
        return Response((json.dumps({"id": "resp_2", "status": "completed", "output": output}).encode(),))

    upstream.answer = answer
    result = {"type": "function_call_output", "call_id": "call_1", "output": "The pump stands still since Tuesday."}
    body = json.dumps({"model": "tiny", "previous_response_id": "resp_1", "input": [result]}).encode()
    assert post(daemon, body, "/v1/responses").headers["X-Memory-Status"] == "none"
    assert upstream.requests[-1].body == body
    reply = f"Answer {len(upstream.requests)} from the server."
    daemon.wait_stored("The pump stands still since Tuesday.", reply)
    for text in ("And the boat lies in the harbour.", "And the goat is in the garden."):
        body = json.dumps({"conversation": "conv_1", "input": text}).encode()
        post(daemon, body, "/v1/responses")
        assert upstream.requests[-1].body == body
        daemon.wait_stored(text)


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/chat/completions//?beta=true", "/api/chat/"])
def test_a_slash_at_the_end_of_the_path_changes_nothing_for_memory(
    daemon: DaemonProcess, upstream: RecordingUpstream, path: str
) -> None:
    assert post(daemon, chat_of(QUESTION), path).headers["X-Memory-Status"] == "injected"
    assert FACT.encode() in upstream.requests[-1].body
    assert upstream.requests[-1].target == path
