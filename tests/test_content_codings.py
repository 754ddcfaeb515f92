"""Bodies that are packed: read like any others, forwarded as they came, and never unpacked beyond their bound."""

from __future__ import annotations

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
from recording_upstream import RecordingUpstream, Request, Response, chat_answer

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


@pytest.mark.parametrize(
    ("packed", "coding", "why"),
    [
        (b"packed by nobody", "compress", "content coding is 'compress'"),
        (chat_of(FACT), "gzip", "cannot be unpacked"),
        (zstd.compress(chat_of(FACT))[:-3], "zstd", "its end is missing"),
        (b"", "br", "its end is missing"),
        (gzip.compress(b"no json"), "gzip", "not a readable JSON object"),
        (b"four", "gzip, gzip, gzip, gzip", "4 content codings"),
    ],
    ids=["unknown", "unpacked", "half", "empty", "no-json", "four"],
)
def test_what_cannot_be_unpacked_passes_and_says_so(
    daemon: DaemonProcess, upstream: RecordingUpstream, packed: bytes, coding: str, why: str
) -> None:
    answer = post(daemon, packed, coding)
    assert answer.headers["X-Memory-Status"] == "degraded:unreadable"
    assert (upstream.chats[-1].body, upstream.chats[-1].header("Content-Encoding")) == (packed, coding)
    turn, said = f"turn={answer.headers['X-Memory-Turn']} ", daemon.log.read_text().splitlines()
    [line] = [line for line in said if "memd cannot read its body" in line and turn in line]
    assert why in line


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
    ("coding", "pack", "stream"),
    [(*one, number % 2 == 1) for number, one in enumerate(PACKED.values())],
    ids=PACKED,
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
