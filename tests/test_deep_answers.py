"""Answers nested as deeply as a decoder takes them, and deeper: nothing that reads them fails."""

from __future__ import annotations

import asyncio

import pytest
from conftest import Connect
from daemon_process import DaemonProcess
from raw_wire import Peer, RawUpstream, answer, raw_upstream, request

from memd.cli.check.upstream import probed
from memd.settings.model import Config, UpstreamSettings

DEPTHS = [500, 900, 990, 100_000]
CHAT = b"/v1/chat/completions"
OK, REFUSED = b"200 OK", b"400 Bad Request"


def deep(opening: bytes, depth: int, closing: bytes) -> bytes:
    return opening * depth + b'"x"' + closing * depth


@pytest.mark.parametrize("nested", [(b"[", b"]"), (b'{"error":', b"}")])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
@pytest.mark.parametrize(
    ("path", "status"), [(CHAT, OK), (CHAT, REFUSED), (b"/v1/responses", OK), (b"/v1/messages", OK)]
)
def test_a_deep_answer_passes_as_it_is(
    memd: DaemonProcess,
    raw: RawUpstream,
    connect: Connect,
    nested: tuple[bytes, bytes],
    kind: bytes,
    path: bytes,
    status: bytes,
) -> None:
    member = b"input" if b"responses" in path else b"messages"
    for depth in DEPTHS:
        body = b'{"error":' + deep(nested[0], depth, nested[1]) + b"}"
        body = b"data: " + body + b"\n\n" if b"event" in kind else body

        def script(peer: Peer, body: bytes = body) -> None:
            peer.read_body()
            peer.send(answer(body, b"Content-Type: " + kind, status=status))

        raw.script = script
        client = connect(memd.base_url)
        client.send(request(b"POST", path, body=b'{"max_tokens":9,"%s":[{"role":"user","content":"hi"}]}' % member))
        assert client.read_head().startswith(b"HTTP/1.1 " + status)
        assert client.read_body() == body
    assert "Traceback" not in memd.log.read_text()


@pytest.mark.parametrize("nested", [(b"[", b"]"), (b'{"default_generation_settings":', b"}"), (b'{"data":[', b"]}")])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_server_whose_own_facts_are_deep_tells_nothing(nested: tuple[bytes, bytes], depth: int) -> None:
    said = deep(nested[0], depth, nested[1])
    with raw_upstream(props=said) as upstream:
        upstream.script = lambda peer: peer.send(answer(said))
        probe = asyncio.run(probed(Config(upstream=UpstreamSettings(url=upstream.url))))
    assert (probe.model, probe.window) == ("", None) and "does not answer" not in str(probe.unusable)


def test_a_server_whose_own_facts_have_no_end_tells_nothing() -> None:
    with raw_upstream(props=b"[" + b" " * (20 << 20) + b"]") as upstream:
        upstream.script = lambda peer: peer.send(answer(b"{}"))
        probe = asyncio.run(probed(Config(upstream=UpstreamSettings(url=upstream.url))))
    assert (probe.model, probe.window) == ("", None) and "does not answer" not in str(probe.unusable)
