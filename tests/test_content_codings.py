"""Bodies that are packed, or not quite what they should be: read as far as they can be, forwarded as they came.

Rule: nothing is unpacked beyond its bound, and what memd could not read has a status and a log line.
"""

import gzip
import http.client
import json
import re
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import brotli
import pytest
from conftest import MakeDaemon
from daemon_process import Answer, DaemonProcess, ask, wait_until
from hypothesis import given
from hypothesis import strategies as st
from recording_upstream import EVENT_STREAM, RecordingUpstream, Request, Response, chat_answer

from memd.wire import content_codings
from memd.wire.content_codings import BadCoding, TooLarge, Unpacker, unpacked_parts

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FACT = "The spare key of the workshop hangs behind the blue bicycle."
QUESTION = "Where does the spare key of the workshop hang?"
BODIES_MAX = 24_000_000
BODY_MAX = 8_000_000

Pack = Callable[[bytes], bytes]


def without_header(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def in_members(data: bytes) -> bytes:
    return gzip.compress(data[:20]) + gzip.compress(data[20:]) + b"\0" * 10


PACKED: dict[str, tuple[str, Pack]] = {
    "gzip": ("gzip", gzip.compress),
    "members": ("x-gzip", in_members),
    "deflate": ("deflate", zlib.compress),
    "raw": ("Deflate", without_header),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", zstd.compress),
    "frames": ("zstd", lambda data: zstd.compress(data[:20]) + zstd.compress(data[20:])),
    "both": ("br, GZIP", lambda data: gzip.compress(brotli.compress(data))),
}
each_coding = pytest.mark.parametrize(("coding", "pack"), PACKED.values(), ids=PACKED)


def chat_of(text: str, **more: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}], **more}).encode()


def post(daemon: DaemonProcess, packed: bytes, coding: str, **headers: str) -> Answer:
    return ask(f"{daemon.base_url}/v1/chat/completions", packed, headers={"Content-Encoding": coding, **headers})


@pytest.fixture(scope="module")
def memd_settings() -> dict[str, object]:
    return {"limits": {"body_bytes_max": BODY_MAX, "bodies_bytes_max": BODIES_MAX}}


@pytest.fixture
def upstream(kept_upstream: RecordingUpstream) -> RecordingUpstream:
    return kept_upstream


@pytest.fixture
def daemon(in_topic: DaemonProcess) -> DaemonProcess:
    """In front of an upstream that records what reaches it."""
    return in_topic


@each_coding
def test_a_packed_request_is_remembered_and_forwarded_as_it_came_or_plain_where_it_changes(
    daemon: DaemonProcess, upstream: RecordingUpstream, coding: str, pack: Pack
) -> None:
    fact = pack(chat_of(FACT))
    assert post(daemon, fact, coding).headers["X-Memory-Status"] == "none"
    assert (upstream.chats[-1].body, upstream.chats[-1].header("Content-Encoding")) == (fact, coding)
    daemon.wait_stored(FACT)
    assert post(daemon, pack(chat_of(QUESTION)), coding).headers["X-Memory-Status"] == "injected"
    assert upstream.chats[-1].header("Content-Encoding") is None
    assert FACT.encode() in upstream.chats[-1].body


@each_coding
def test_a_bomb_is_refused_before_it_goes_off(daemon: DaemonProcess, coding: str, pack: Pack) -> None:
    answer = post(daemon, pack(b" " * (BODY_MAX + 1)), coding)
    assert answer.status == 413 and answer.headers["X-Memory-Status"] == "none"


def test_what_packed_bodies_unpack_to_has_its_room_too(daemon: DaemonProcess, upstream: RecordingUpstream) -> None:
    gate, size = threading.Event(), BODIES_MAX // 3
    upstream.answer = lambda request: chat_answer(request)._replace(gate=gate)
    packed = zstd.compress(chat_of(FACT) + b" " * (size - 1_000))
    answers: list[Answer] = []
    waiting = [
        threading.Thread(target=lambda: answers.append(post(daemon, packed, "zstd"))) for _ in range(BODIES_MAX // size)
    ]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(upstream.chats) == len(waiting), lambda: f"{len(upstream.chats)} came")
    refused = post(daemon, packed, "zstd")
    gate.set()
    for thread in waiting:
        thread.join()
    assert refused.status == 503 and "body_bytes_max" in refused.body.decode()


@pytest.mark.parametrize(
    ("coding", "pack", "stream"), [(*one, number % 2 == 1) for number, one in enumerate(PACKED.values())], ids=PACKED
)
def test_an_answer_that_is_packed_although_nobody_asked_is_remembered(
    daemon: DaemonProcess, upstream: RecordingUpstream, coding: str, pack: Pack, stream: bool
) -> None:
    packed = b""

    def packing(request: Request) -> Response:
        nonlocal packed
        plain = chat_answer(request, "Hamburg.")
        packed = pack(b"".join(plain.parts))
        headers = (*plain.headers, ("Content-Encoding", coding))
        return Response((packed[:7], packed[7:30], packed[30:]), headers=headers)

    upstream.answer = packing
    answer = ask(f"{daemon.base_url}/v1/chat/completions", chat_of("Where is the boat?", stream=stream))
    assert upstream.chats[-1].header("Accept-Encoding") == "identity"
    assert (answer.body, answer.headers["Content-Encoding"]) == (packed, coding)
    daemon.wait_stored("Hamburg.")
    if not stream:
        told = ask(f"{daemon.base_url}/v1/chat/completions", chat_of("And now?", memory_in={}))
        assert told.reply == "Hamburg." and "memory_out" in told.json
        assert told.headers["Content-Encoding"] is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_cannot_be_unpacked_passes_and_the_log_says_so(
    daemon: DaemonProcess, upstream: RecordingUpstream, stream: bool
) -> None:
    kind = "text/event-stream" if stream else "application/json"
    headers = (("Content-Type", kind), ("Content-Encoding", "gzip"))
    upstream.answer = lambda _: Response((b"no gzip", b" at all"), headers=headers)
    answer = ask(f"{daemon.base_url}/v1/chat/completions", chat_of("Where is the boat?", stream=stream))
    assert answer.body == b"no gzip at all"
    said = re.compile(f"an answer is not remembered: memd cannot read it.*turn={answer.headers['X-Memory-Turn']} ")
    wait_until(lambda: bool(said.search(daemon.log.read_text())), daemon.log.read_text)  # read when its client had it


def test_a_packed_refusal_for_length_is_understood(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    refused = gzip.compress(b'{"error": {"message": "maximum context length is 2500 tokens"}}')

    def answer(request: Request) -> Response:
        if len(request.body) < 10_000:
            return chat_answer(request)
        headers = (("Content-Type", "application/json"), ("Content-Encoding", "gzip"))
        return Response((refused,), status=400, headers=headers)

    upstream.answer = answer
    daemon = make_daemon(upstream.url).start()  # one of its own, which then takes the window for smaller
    history = [{"role": role, "content": f"{n} word " * 90} for n in range(9) for role in ("user", "assistant")]
    answered = daemon.chat([*history, {"role": "user", "content": "And now?"}])
    assert answered.status == 200


@pytest.mark.parametrize("mode", ["off", "full"])
def test_a_chunked_request_reaches_the_model_with_its_length(
    daemon: DaemonProcess, upstream: RecordingUpstream, mode: str
) -> None:
    url = urlsplit(daemon.base_url)
    connection = http.client.HTTPConnection(url.netloc)
    body = chat_of(FACT, stream=True)
    parts = iter([body[:10], body[10:]])
    connection.request("POST", f"{url.path}/v1/chat/completions", parts, {"X-Memory-Mode": mode}, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["X-Accel-Buffering"] == "no"
    answer.read()
    connection.close()
    assert upstream.chats[-1].body == body
    assert upstream.chats[-1].header("Content-Length") == str(len(body))
    assert upstream.chats[-1].header("Transfer-Encoding") is None


def test_a_stream_is_not_held_back_by_nginx_unless_the_upstream_says_otherwise(
    daemon: DaemonProcess, upstream: RecordingUpstream
) -> None:
    with daemon.stream([{"role": "user", "content": FACT}]) as stream:
        assert stream.headers["X-Accel-Buffering"] == "no"
    assert daemon.chat([{"role": "user", "content": FACT}]).headers["X-Accel-Buffering"] is None
    own = ("X-Accel-Buffering", "yes")
    upstream.answer = lambda request: (made := chat_answer(request))._replace(headers=(*made.headers, own))
    with daemon.stream([{"role": "user", "content": FACT}]) as stream:
        assert stream.headers.get_all("X-Accel-Buffering") == ["yes"]


@given(st.binary(max_size=2_000), st.sampled_from(list(PACKED.values())), st.data())
def test_parts_may_be_cut_anywhere(body: bytes, packed_as: tuple[str, Pack], data: st.DataObject) -> None:
    coding, pack = packed_as
    packed = pack(body)
    codings = tuple(coding.lower().split(", "))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(packed)), max_size=5)))
    unpacker = Unpacker(codings, len(packed) + len(body))
    pieces = [packed[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(packed)], strict=True)]
    assert b"".join(part for piece in pieces for part in unpacker.feed(piece)) == body
    assert unpacker.is_finished


@given(st.binary(), st.sampled_from(["gzip", "deflate", "br", "zstd"]))
def test_arbitrary_bytes_raise_nothing_but_the_declared_errors(noise: bytes, coding: str) -> None:
    for packed in (noise, {"gzip": gzip, "deflate": zlib, "br": brotli, "zstd": zstd}[coding].compress(b"x") + noise):
        with suppress(BadCoding, TooLarge):
            assert len(b"".join(unpacked_parts(packed, [coding], 1_000))) <= 1_000


def test_a_body_of_many_empty_members_is_read_in_time_that_grows_with_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = list[int]()

    class Noted:
        def __init__(self, member: Any) -> None:
            self._member = member

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._member, name)
            copied.append(len(found) if name == "unused_data" else 0)
            return found

    monkeypatch.setitem(content_codings._CODINGS, "zstd", lambda _: Noted(zstd.ZstdDecompressor()))
    body = zstd.compress(b"") * 5_000 + zstd.compress(b"said")
    assert b"".join(Unpacker(["zstd"], 1_000).feed(body)) == b"said"
    assert sum(copied) < 25_000_000
    with pytest.raises(BadCoding, match="more than 10,000 members"):
        list(Unpacker(["zstd"], 1_000).feed(zstd.compress(b"") * 10_001))


# Bodies that are not quite what they should be: read as far as they can be, forwarded as they came, never silently


ASKED = b"Where does the spare key of the workshop hang?"
CUT = rb"The log ends with \ud83d"
"""As JavaScript leaves it where it cuts a string in the middle of an emoji."""


def sent(told: DaemonProcess, body: bytes, path: str = "/v1/chat/completions") -> Answer:
    return ask(f"{told.base_url}{path}", body)


def chat_with(*texts: bytes) -> bytes:
    """A chat of user and assistant texts in turn, each the inside of a JSON string."""
    roles = (b"user", b"assistant")
    messages = [b'{"role": "%b", "content": "%b"}' % (roles[place % 2], text) for place, text in enumerate(texts)]
    return b'{"model": "tiny", "messages": [%b]}' % b", ".join(messages)


@pytest.fixture
def told(in_topic: DaemonProcess) -> DaemonProcess:
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
    told: DaemonProcess, upstream: RecordingUpstream, odd: bytes, stored: str
) -> None:
    as_it_came = chat_with(odd, b"Noted.", odd)
    assert sent(told, as_it_came).headers["X-Memory-Status"] == "none"
    assert upstream.chats[-1].body == as_it_came
    answer = sent(told, chat_with(odd, b"Noted.", odd + b" " + ASKED))
    assert answer.headers["X-Memory-Status"] == "injected"
    assert FACT.encode() in upstream.chats[-1].body
    for piece in (odd, odd + b" " + ASKED):
        assert piece.replace(rb"\uDE00", rb"\ude00") in upstream.chats[-1].body
    told.wait_stored(stored)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
def test_each_api_reads_half_an_emoji(told: DaemonProcess, upstream: RecordingUpstream, path: str) -> None:
    name = b"input" if path == "/v1/responses" else b"messages"
    result = b'{"type": "text", "text": "%b"}' % CUT if path == "/v1/messages" else b'"%b"' % CUT
    content = b"[%b]" % result if path == "/v1/messages" else result
    body = b'{"%b": [{"role": "user", "content": %b}, {"role": "assistant", "content": "Yes."}, ' % (name, content)
    body += b'{"role": "user", "content": "%b"}], "model": "tiny", "stream": false}' % ASKED
    assert sent(told, body, path).headers["X-Memory-Status"] == "injected"
    assert CUT in upstream.requests[-1].body and FACT.encode() in upstream.requests[-1].body


def test_what_memory_is_told_may_have_half_an_emoji(told: DaemonProcess) -> None:
    note = rb'{"notes": [{"content": "The lamp is \ud83d green."}]}'
    for number, memory_in in enumerate((note, json.dumps(note.decode().replace("lamp", "door")).encode())):
        body = chat_with(b"Number %d." % number)[:-1] + b', "memory_in": %b}' % memory_in
        assert sent(told, body).json["memory_out"]["notes"][0]["chunk_ids"]
    told.wait_stored("The lamp is \ufffd green.", "The door is \ufffd green.")


def test_an_answer_that_is_cut_in_an_emoji_is_remembered(told: DaemonProcess, upstream: RecordingUpstream) -> None:
    whole = rb'{"choices": [{"message": {"role": "assistant", "content": "Half \ud83d of it."}, "index": 0}]}'
    upstream.answer = lambda _: Response((whole,))
    asked = chat_with(b"One?")[:-1] + b', "memory_in": {}}'
    answer = sent(told, asked)
    assert answer.json["memory_out"] and answer.body.startswith(whole[:-1])
    told.wait_stored("Half \ufffd of it.")

    def in_halves(_: Request) -> Response:
        pieces = (b"A face ", rb"\ud83d", rb"\ude00", b" and \xff")
        events = [b'data: {"choices": [{"index": 0, "delta": {"content": "%b"}}]}\n\n' % piece for piece in pieces]
        return Response((*events, b"data: [DONE]\n\n"), headers=EVENT_STREAM)

    upstream.answer = in_halves
    sent(told, chat_with(b"Two?")[:-1] + b', "stream": true}')
    told.wait_stored("A face \U0001f600 and \ufffd")


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
def test_what_may_be_odd_in_json_costs_no_memory(told: DaemonProcess, upstream: RecordingUpstream, odd: bytes) -> None:
    answer = sent(told, chat_with(ASKED)[:-1] + b", " + odd + b"}")
    assert answer.headers["X-Memory-Status"] == "injected"
    assert FACT.encode() in upstream.chats[-1].body
    assert odd.rpartition(b": ")[2] in upstream.chats[-1].body


@pytest.mark.parametrize(
    ("body", "coding", "where"),
    [
        (b"packed by nobody", "compress", "content coding is 'compress'"),
        (chat_of(FACT), "gzip", "cannot be unpacked"),
        (zstd.compress(chat_of(FACT))[:-3], "zstd", "its end is missing"),
        (b"", "br", "its end is missing"),
        (gzip.compress(b"no json"), "gzip", "not a readable JSON object"),
        (b"four", "gzip, gzip, gzip, gzip", "4 content codings"),
        (chat_with(ASKED)[:-1] + b', "tools": %b%b}' % (b"[" * 5000, b"]" * 5000), None, "around byte"),
        (chat_with(ASKED)[:-1] + b', "temperature": NaN}', None, f"byte {len(chat_with(ASKED)) + 16}"),
        (chat_with(b"A line\nbreak"), None, f"byte {chat_with(b'A line').index(b'A line') + 6}"),
        (chat_with(ASKED)[:-1], None, "truncated"),
        (chat_with(ASKED).decode().encode("utf-16"), None, "byte 0"),
        (b'{"messages": ["no object"]}', None, "messages[0]"),
        (b'{"model": "tiny"}', None, "`messages`"),
        (b"[1,2,3]", None, "object"),
        (b"", None, "truncated"),
        (chat_with(rb"\ud83d \udbff\udfff"), None, "hex escape"),
    ],
    ids=[
        *("unknown coding", "unpacked", "half a packing", "empty packing", "packed text", "four codings"),
        *("deep", "nan", "control", "half", "utf-16", "strings", "none", "list", "empty", "taken"),
    ],
)
def test_what_cannot_be_read_passes_and_says_so(
    told: DaemonProcess, upstream: RecordingUpstream, body: bytes, coding: str | None, where: str
) -> None:
    answer = sent(told, body) if coding is None else post(told, body, coding)
    assert answer.headers["X-Memory-Status"] == "degraded:unreadable"
    assert (upstream.chats[-1].body, upstream.chats[-1].header("Content-Encoding")) == (body, coding)
    turn, said = f"turn={answer.headers['X-Memory-Turn']} ", told.log.read_text().splitlines()
    [line] = [line for line in said if "memd cannot read its body" in line and turn in line]
    assert where in line


def test_of_a_conversation_that_the_upstream_keeps_what_is_known_is_stored(
    told: DaemonProcess, upstream: RecordingUpstream
) -> None:
    def answer(request: Request) -> Response:
        text = f"Answer {len(upstream.requests)} from the server."
        output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
        return Response((json.dumps({"id": "resp_2", "status": "completed", "output": output}).encode(),))

    upstream.answer = answer
    result = {"type": "function_call_output", "call_id": "call_1", "output": "The pump stands still since Tuesday."}
    body = json.dumps({"model": "tiny", "previous_response_id": "resp_1", "input": [result]}).encode()
    assert sent(told, body, "/v1/responses").headers["X-Memory-Status"] == "none"
    assert upstream.requests[-1].body == body
    reply = f"Answer {len(upstream.requests)} from the server."
    told.wait_stored("The pump stands still since Tuesday.", reply)
    for text in ("And the boat lies in the harbour.", "And the goat is in the garden."):
        body = json.dumps({"conversation": "conv_1", "input": text}).encode()
        sent(told, body, "/v1/responses")
        assert upstream.requests[-1].body == body
        told.wait_stored(text)


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/chat/completions//?beta=true", "/api/chat/"])
def test_a_slash_at_the_end_of_the_path_changes_nothing_for_memory(
    told: DaemonProcess, upstream: RecordingUpstream, path: str
) -> None:
    assert sent(told, chat_with(ASKED), path).headers["X-Memory-Status"] == "injected"
    assert FACT.encode() in upstream.requests[-1].body
    assert upstream.requests[-1].target == path
