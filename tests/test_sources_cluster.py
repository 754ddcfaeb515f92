"""Sources in a cluster: the files are one daemon's, and their topic may be another one's."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from owner_daemons import Ground, ground, owner_of, tell
from recording_upstream import RecordingUpstream

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def shared() -> Iterator[Ground]:
    with ground() as made:
        yield made


class Shelves(NamedTuple):
    """A daemon whose settings have a folder, and another one that has its topic."""

    reader: DaemonProcess
    owner: DaemonProcess
    docs: Path
    settings: dict[str, Any]


@pytest.fixture(params=[{}, {"auth": {"token": "a-token-that-is-long-enough-for-anybody"}}], ids=["open", "token"])
def shelves(
    shared: Ground,
    make_daemon: MakeDaemon,
    upstream: RecordingUpstream,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Shelves:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("lamp", "oil"):
        (docs / f"{name}.md").write_text(f"What stands in the file of the {name}.")
    settings = shared.settings(**request.param)
    owner = make_daemon(upstream.url, settings).start()
    assert owner_of(tell(owner, "papers", "The papers are kept in the tower.", **shown(settings))) is None
    reader = make_daemon(upstream.url, {**settings, "sources": [{"path": str(docs), "topic": "papers"}]})
    return Shelves(reader.start(), owner, docs, settings)


def shown(settings: dict[str, Any]) -> dict[str, str]:
    token = settings.get("auth", {}).get("token")
    return {"X-Memory-Token": token} if token else {}


def documents(daemon: DaemonProcess, settings: dict[str, Any]) -> set[str]:
    """As one daemon knows them, which has their topic or passes the question on."""
    told = ask(f"{daemon.own_url}/memd/documents?topic=papers", headers=shown(settings))
    return {one["source"] for one in told.json.get("documents", ())}


def state_of(shelves: Shelves) -> dict[str, Any]:
    told: dict[str, Any] = ask(f"{shelves.reader.own_url}/memd/index", headers=shown(shelves.settings)).json["sources"][
        0
    ]
    return told


def wait_known(shelves: Shelves, *names: str, by: DaemonProcess | None = None) -> None:
    daemon, wanted = by or shelves.owner, {f"docs/{name}.md" for name in names}
    wait_until(
        lambda: documents(daemon, shelves.settings) == wanted, lambda: f"{state_of(shelves)}: {shelves.reader!r}"
    )


def test_a_folder_goes_to_whichever_daemon_has_its_topic(shelves: Shelves) -> None:
    wait_known(shelves, "lamp", "oil")
    wait_until(lambda: state_of(shelves)["state"] == "fine" and state_of(shelves)["is_watched"], lambda: repr(shelves))
    (shelves.docs / "lamp.md").unlink()
    (shelves.docs / "lens.md").write_text("What stands in the file of the lens.")
    wait_known(shelves, "oil", "lens")
    for daemon in (shelves.owner, shelves.reader):
        for named in ("", "?topic=papers"):
            told = ask(f"{daemon.own_url}/memd/sources{named}", headers=shown(shelves.settings))
            assert [(one["path"], one["daemon"]) for one in told.json["sources"]] == [
                (str(shelves.docs), shelves.reader.base_url)
            ]
    answer = tell(shelves.reader, "papers", "What stands in the file of the lens?", **shown(shelves.settings))
    assert owner_of(answer) == shelves.owner.base_url

    shelves.owner.send_signal(signal.SIGKILL)
    shelves.owner.wait()
    (shelves.docs / "wick.md").write_text("What stands in the file of the wick.")
    wait_known(shelves, "oil", "lens", "wick", by=shelves.reader)
    shelves.owner.start()
    assert documents(shelves.owner, shelves.settings) == {f"docs/{name}.md" for name in ("oil", "lens", "wick")}
    refused = ask(
        f"{shelves.reader.own_url}/memd/documents/remove",
        {"topic_id": "papers", "sources": ["docs/oil.md"]},
        headers=shown(shelves.settings),
    )
    assert refused.status == 400 and "would come back" in refused.body.decode()


def test_documents_that_are_added_through_one_daemon_are_taken_by_the_one_that_has_the_topic(
    shelves: Shelves, tmp_path: Path
) -> None:
    wait_known(shelves, "lamp", "oil")
    (more := tmp_path / "more").mkdir()
    (more / "keeper.md").write_text("What stands in the file of the keeper.")
    flags = ("--config", str(shelves.reader.config), "--topic", "papers")
    added = shelves.reader.run("add", *flags, str(more))
    assert added.returncode == 0 and "1 chunk written" in added.stdout, added.stderr + added.stdout
    assert "more/keeper.md" in documents(shelves.owner, shelves.settings)
    looked = shelves.reader.run("index", "--force", "--config", str(shelves.reader.config))
    assert looked.returncode == 0 and "2 files; 0 chunks written" in looked.stdout, looked.stderr + looked.stdout
    removed = shelves.reader.run("sources", *flags, "--remove", "more")
    assert removed.returncode == 0 and "1 document taken out" in removed.stdout, removed.stderr + removed.stdout
    assert documents(shelves.owner, shelves.settings) == {"docs/lamp.md", "docs/oil.md"}
