"""Rights in a cluster, as two daemons have them: what is made, changed or taken back at one holds at the other."""

from __future__ import annotations

import http.client
import json
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from conftest import MakeDaemon
from daemon_process import Answer, DaemonProcess, ask, wait_until
from recording_upstream import RecordingUpstream
from test_cluster_core import settings  # noqa: F401  # a fixture
from test_oauth import CALLBACK, CHALLENGE, VERIFIER

pytestmark = pytest.mark.process
SPEAKS = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}


@pytest.fixture
def pair(
    make_daemon: MakeDaemon,
    upstream: RecordingUpstream,
    settings: dict[str, Any],  # noqa: F811
) -> tuple[DaemonProcess, DaemonProcess]:
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    return first, second


def status(daemon: DaemonProcess, secret: str) -> int:
    return ask(f"{daemon.own_url}/memd/me", headers={"X-Memory-Token": secret} if secret else {}).status


def made(daemon: DaemonProcess, *arguments: str) -> str:
    done = daemon.run("token", *arguments, "--config", str(daemon.config))
    assert done.returncode == 0, done.stderr
    return str(done.stdout.strip())


def test_a_token_is_made_exchanged_and_taken_back_for_all_daemons_with_any_of_them_running(
    pair: tuple[DaemonProcess, DaemonProcess],
) -> None:
    first, second = pair
    assert status(first, "") == status(second, "") == first.chat([{"role": "user", "content": "Hello."}]).status == 200
    ann = made(first, "add", "ann", "--topics", "team-*", "--rights", "read")
    assert status(first, "") == 401
    assert status(second, ann) == 200, "also in the second before it has heard of her"
    wait_until(lambda: status(second, "") == 401, second.log.read_text)
    rotated = made(second, "rotate", "ann")
    assert [status(one, secret) for one in (second, first) for secret in (rotated,)] == [200, 200]
    wait_until(lambda: status(first, ann) == 401, first.log.read_text)
    connection = http.client.HTTPConnection(urlsplit(second.own_url).netloc, timeout=60)
    connection.request("GET", "/memd/events", headers={"X-Memory-Token": rotated})
    events = connection.getresponse()
    assert events.status == 200
    assert made(first, "revoke", "ann") == "revoked ann"
    assert "data:" not in events.read().decode(), "it ends by itself"
    connection.close()
    assert status(second, rotated) == status(first, rotated) == 401
    refused = first.run("token", "list")
    assert refused.returncode == 1 and "is the cache of a cluster, which has the topics and tokens" in refused.stderr
    told = second.run("audit", "--config", str(second.config))
    assert "each one of a cluster has an audit of what it answered" in told.stdout
    for one in pair:
        assert one.terminate() == 0
    bob = made(first, "add", "bob", "--topics", "*", "--rights", "read")
    assert json.loads(made(second, "list", "--json"))[0]["name"] == "bob"
    assert [status(one.start(), bob) for one in pair] == [200, 200]


def form(daemon: DaemonProcess, path: str, **fields: Any) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(daemon.own_url).netloc, timeout=60)
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    connection.request("POST", path, urlencode(fields, doseq=True), headers)
    answer = connection.getresponse()
    told = answer.status, answer.read().decode()
    connection.close()
    return told


def tools(daemon: DaemonProcess, token: str, name: str = "list_topics", **arguments: str) -> Answer:
    called = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
    return ask(f"{daemon.own_url}/mcp", called, headers={**SPEAKS, "Authorization": f"Bearer {token}"})


def test_a_program_that_registers_at_one_daemon_is_let_in_at_another_and_ended_at_a_third(
    pair: tuple[DaemonProcess, DaemonProcess],
) -> None:
    first, second = pair
    ann = made(first, "add", "ann", "--topics", "*", "--rights", "read,write")
    wait_until(lambda: status(second, "") == 401, second.log.read_text)
    registered = ask(f"{first.own_url}/oauth/register", {"redirect_uris": [CALLBACK], "client_name": "An editor"}).json
    client = registered["client_id"]
    asked = {"response_type": "code", "client_id": client, "redirect_uri": CALLBACK, "code_challenge": CHALLENGE}
    query = urlencode({**asked, "code_challenge_method": "S256"})
    _, page = form(
        second, "/oauth/authorize", request=query, right=["read", "write"], topics="", token=ann, answer="allow"
    )
    back = unescape(page.partition('href="http://localhost')[2].partition('"')[0])
    [code] = parse_qs(urlsplit(back).query)["code"]
    exchange = {"grant_type": "authorization_code", "code": code, "code_verifier": VERIFIER, "redirect_uri": CALLBACK}
    told, body = form(first, "/oauth/token", client_id=client, **exchange)
    assert told == 200, body
    tokens = json.loads(body)
    assert tools(second, tokens["access_token"]).status == tools(first, tokens["access_token"]).status == 200
    renewal = {"grant_type": "refresh_token", "refresh_token": tokens["refresh_token"], "client_id": client}
    told, body = form(second, "/oauth/token", **renewal)
    renewed = json.loads(body)["access_token"]
    assert told == 200 and tools(first, renewed).status == 200
    chat = [{"role": "user", "content": "The lamp is in the attic."}]
    assert first.chat(chat, headers={"X-Memory-Token": ann, "X-Memory-Topic": "team"}).status == 200
    noted = tools(second, renewed, "remember", content="The keeper is Ada.", topic="team")
    assert "Remembered in topic team" in noted.body.decode(), "which the first has, and that knows no secret of MCP's"
    assert "An editor, as ann: read, write in" in made(first, "list")
    assert made(first, "revoke", "ann") == "revoked ann"
    for one in pair:
        wait_until(lambda one=one: tools(one, renewed).status == 401, one.log.read_text)  # type: ignore[misc]
    assert json.loads(made(second, "list", "--json")) == []
