"""The two addresses of a daemon: that of the model and memd's own."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import Serving
from daemon_process import Answer, DaemonProcess, ask
from recording_upstream import RecordingUpstream
from reserved_port import reserved_port

from memd.errors import MemdError
from memd.proxy.connections import addresses_of, bound, leading_back, own_port
from memd.settings.model import AdminSettings, Config, ListenSettings, UpstreamSettings


def unfollowed(url: str, method: str = "GET", **headers: str) -> Answer:
    """An answer as it comes, redirects included."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=120)) as connection:
        connection.request(method, f"{parts.path}?{parts.query}" if parts.query else parts.path, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())


def test_the_clients_address_leads_to_memd_s_own(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    for method, path in (
        ("GET", "/memd/search?q=a%20b"),
        ("POST", "/memd/corrections"),
        ("GET", "/memd"),
        ("GET", "/memd/"),
    ):
        answer = unfollowed(served.base_url + path, method)
        assert answer.status == 307 and answer.headers["Location"] == served.own_url + path
        assert answer.headers["Cache-Control"] == "no-store"
        assert served.own_url in answer.json["error"]["message"]
    assert not [request for request in upstream.requests if "/memd" in request.target]


def test_it_leads_to_the_host_that_the_client_knows(served: DaemonProcess) -> None:
    port = urlsplit(served.own_url).port
    led = {"localhost:1": f"http://localhost:{port}/memd/", "[::1]:80": f"http://[::1]:{port}/memd/"}
    for host, location in led.items():
        assert unfollowed(f"{served.base_url}/memd/", Host=host).headers["Location"] == location
    assert unfollowed(f"{served.base_url}/memd/", Host="evil.example").status == 403
    for odd in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "http://["}):
        assert unfollowed(f"{served.own_url}/memd/health", **odd).status == 403, odd


def test_health_is_answered_at_both_and_names_both(served: DaemonProcess) -> None:
    told = [unfollowed(f"{url}/memd/health") for url in (served.base_url, served.own_url)]
    assert [answer.status for answer in told] == [200, 200] and told[0].json == told[1].json
    assert (told[0].json["model_url"], told[0].json["own_url"]) == (served.base_url, served.own_url)


def test_models_are_not_at_memd_s_own_address(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    seen = len(upstream.requests)
    answer = ask(f"{served.own_url}/v1/chat/completions", {"messages": []})
    assert answer.status == 404 and f"{served.base_url}/v1" in answer.json["error"]["message"]
    assert len(upstream.requests) == seen


def test_the_token_is_wanted_at_memd_s_own_address_but_not_to_be_led_there(serving: Serving) -> None:
    served = serving({"auth": {"token": "of some length"}})
    assert unfollowed(f"{served.base_url}/memd/turns").status == 307
    odd = unfollowed(f"{served.base_url}/memd/turns", Host="[::1")
    assert (odd.status, odd.headers["Location"]) == (307, f"{served.own_url}/memd/turns")
    assert (
        unfollowed(f"{served.base_url}/memd/health").status == unfollowed(f"{served.own_url}/memd/turns").status == 401
    )
    assert unfollowed(f"{served.own_url}/memd/").status == 200
    assert unfollowed(f"{served.own_url}/v1/models").status == 401
    assert ask(f"{served.base_url}/memd/turns", headers={"X-Memory-Token": "of some length"}).status == 200


def test_a_port_that_is_taken_stops_a_start_only_where_it_was_asked_for(tmp_path: Path) -> None:
    with two_free_ports() as (port, taken):
        with pytest.raises(MemdError, match=rf"127.0.0.1:{taken}: .*--admin-port"):
            bound(config(tmp_path, port, taken))
        listeners = bound(config(tmp_path, port, "auto"))
        try:
            assert f"127.0.0.1:{taken}" in listeners.moved
            model, own, _ = addresses_of(config(tmp_path, port, "auto"), listeners)
            assert model.endswith(f":{port}") and own != model and not own.endswith(f":{taken}")
        finally:
            listeners.close()


def test_memd_s_own_port_is_one_above_the_clients_unless_it_is_set(tmp_path: Path) -> None:
    assert own_port(Config()) == 8766
    assert own_port(config(tmp_path, 9000, "auto")) == 9001
    assert own_port(config(tmp_path, 9000, 9900)) == 9900
    assert own_port(config(tmp_path, 0, "auto")) == own_port(config(tmp_path, 65_535, "auto")) == 0


def test_an_address_that_cannot_be_taken_is_told_with_what_helps() -> None:
    for listen, remedy in (("192.0.2.1", "--host"), ("no-such-host.invalid", "--host")):
        with pytest.raises(MemdError, match=f"{listen}:0: .*; give an address of this machine with {remedy}"):
            bound(Config(listen=ListenSettings(host=listen, port=0)))


@pytest.mark.process
def test_memd_is_not_started_in_front_of_itself(tmp_path: Path) -> None:
    for listens, named in (("127.0.0.1", "localhost"), ("::1", "[::1]"), ("0.0.0.0", "127.0.0.1")):
        assert leading_back(in_front_of(f"http://{named}:8765", listens))
    for other in ("http://127.0.0.1:8080", "http://127.0.0.2:8765", "http://model.example:8765", "https://localhost"):
        assert not leading_back(in_front_of(other, "127.0.0.1"))
    served = DaemonProcess(tmp_path, None)
    refused = served.run("serve", "--port", "18765", "--upstream", "http://127.0.0.1:18765/v1")
    assert refused.returncode == 2 and "in circles" in refused.stderr and "give the model server's" in refused.stderr


def in_front_of(url: str, host: str) -> Config:
    return Config(listen=ListenSettings(host=host), upstream=UpstreamSettings(url=url))


def config(folder: Path, port: int, own: int | str) -> Config:
    admin = AdminSettings(port="auto") if own == "auto" else AdminSettings(port=int(own))
    return Config(listen=ListenSettings(port=port), admin=admin, data_dir=folder)


@contextmanager
def two_free_ports() -> Iterator[tuple[int, int]]:
    """A free port, and the one above it, on which somebody listens."""
    while True:
        with reserved_port() as port:
            try:
                second = socket.create_server(("127.0.0.1", port + 1))
            except OSError:
                continue
            with second:
                yield port, port + 1
            return
