"""packaging/cluster/: the compose file says nothing that memd does not know, and nginx runs as it stands there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from conftest import MakeDaemon
from daemon_process import Answer, DaemonProcess, ask
from nginx_server import running_nginx
from recording_upstream import RecordingUpstream
from reserved_port import reserved_port

from memd.settings.loading import KEYS, load_config, variable_of

FOLDER = Path(__file__).parent.parent / "packaging" / "cluster"
DAEMONS = ("memd1", "memd2")
TOKEN = "a token of some length"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return loaded


def filled(text: str) -> str:
    """As compose does, with something in the place of each variable that has to be given."""
    return re.sub(r"\$\{(\w+)(?::\?[^}]*|:-([^}]*))\}", lambda found: found[2] or f"http://{found[1]}-0123456789", text)


@pytest.mark.parametrize("name", DAEMONS)
def test_the_settings_of_each_daemon_are_settings_of_memd(name: str) -> None:
    given = compose()["services"][name]["environment"]
    assert set(given) <= {variable_of(key) for key in KEYS}
    in_container = {"MEMD_DATA_DIR": "/data", "MEMD_LISTEN_HOST": "0.0.0.0"}
    loaded = load_config(None, {key: filled(value) for key, value in given.items()} | in_container, {})
    assert loaded.cluster.is_on


def test_all_that_the_daemons_need_of_each_other_is_there() -> None:
    services, volumes = compose()["services"], compose()["volumes"]
    one, two = (services[name]["environment"] for name in DAEMONS)
    assert one == two
    database = services["postgres"]["environment"]["POSTGRES_DB"]
    assert one["MEMD_CLUSTER_DATABASE"].rpartition("@")[2] == f"postgres/{database}"
    used = {line.split(":")[0] for one in services.values() for line in one["volumes"]}
    assert {name for name in used if not name.startswith(".")} == set(volumes)
    assert services["memd1"]["build"]["dockerfile"] == "packaging/Dockerfile"
    assert "[cluster]" in services["memd1"]["build"]["args"]["EXTRAS"]


def test_the_example_of_the_environment_has_what_the_compose_file_asks_for() -> None:
    asked = set(re.findall(r"\$\{(\w+)", (FOLDER / "compose.yaml").read_text()))
    assert set(re.findall(r"^(\w+)=", (FOLDER / "environment.example").read_text(), re.MULTILINE)) == asked


@contextmanager
def nginx(folder: Path, one: DaemonProcess, two: DaemonProcess, clients: int, own: int) -> Iterator[str]:
    """The configuration with this machine's addresses in the place of the containers'; where clients reach it."""
    conf = (FOLDER / "nginx.conf").read_text()
    places = {"listen 8765": f"listen 127.0.0.1:{clients}", "listen 8766": f"listen 127.0.0.1:{own}"}
    for name, daemon in zip(DAEMONS, (one, two), strict=True):
        places |= {f"{name}:8765": urlsplit(daemon.base_url).netloc, f"{name}:8766": urlsplit(daemon.own_url).netloc}
    for example, here in places.items():
        assert example in conf
        conf = conf.replace(example, here)
    with running_nginx(folder, conf, lambda: is_up(clients)):
        yield f"http://127.0.0.1:{clients}"


def is_up(port: int) -> bool:
    try:
        return bool(ask(f"http://127.0.0.1:{port}/memd/health").status)
    except OSError:
        return False


def said(url: str, topic: str, text: str) -> Answer:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    return ask(f"{url}/t/{topic}/v1/chat/completions", body, headers=SHOWN)


def has(daemon: DaemonProcess, topic: str) -> bool:
    return (daemon.data_dir / topic).exists()


def test_the_balancer_keeps_a_topic_at_one_daemon_and_goes_to_the_other_when_that_is_gone(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    """Of two daemons that share nothing, so that it shows who was asked."""
    one, two = (make_daemon(upstream.url, {"auth": {"token": TOKEN}}).start() for _ in DAEMONS)
    folder = tmp_path / "nginx"
    folder.mkdir()
    topics = [f"team-{number}" for number in range(12)]
    with reserved_port() as clients, reserved_port() as own, nginx(folder, one, two, clients, own) as url:
        for topic in topics * 2:
            assert said(url, topic, "The gate is painted green.").reply
        assert all(has(one, topic) != has(two, topic) for topic in topics)
        assert any(has(one, topic) for topic in topics) and any(has(two, topic) for topic in topics)
        note = {"topic_id": "default", "notes": [{"content": "The ferry leaves at noon."}]}
        assert ask(f"http://127.0.0.1:{own}/memd/notes", note, headers=SHOWN).status == 200
        assert ask(f"{url}/memd/health").status == 401
        one.kill()
        for topic in topics:
            assert said(url, topic, "The gate is painted red.").reply
        assert all(has(two, topic) for topic in topics)
