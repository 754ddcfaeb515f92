"""Sources: folders of the settings, looked at again and again; one look at a time, whatever happens to the files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, token_setting, wait_until
from recording_upstream import RecordingUpstream

from memd.ingest.readers.text import GivenDocument
from memd.ingest.sources import look as looks
from memd.ingest.sources.documents import KnownDocument, TakenDocument
from memd.ingest.sources.look import Chosen, Look, Seen, Source, claude_code_folders, look, project_name
from memd.ingest.sources.watch import topic_of


class Kept:
    """Documents in a dictionary: what a look hands over, and takes out."""

    def __init__(self) -> None:
        self.documents: dict[str, GivenDocument] = {}
        self.taken: list[str] = []

    def known(self) -> Sequence[KnownDocument]:
        return [KnownDocument("t", one.source, one.hash, 1, 0, one.root) for one in self.documents.values()]

    def take(self, document: GivenDocument) -> TakenDocument:
        self.taken.append(document.source)
        self.documents.pop(document.renamed_from or "", None)
        self.documents[document.source] = document
        return TakenDocument(1, 0, document.source)

    def remove(self, sources: Sequence[str]) -> TakenDocument:
        for source in sources:
            del self.documents[source]
        return TakenDocument(0, len(sources))

    def texts(self) -> dict[str, str]:
        return {source: one.sections[0].text for source, one in sorted(self.documents.items())}


class Looker:
    """Looks at one folder again and again, as a daemon does."""

    def __init__(self, root: Path, kept: Kept | None = None, name: str = "") -> None:
        self.root, self.kept, self.name = root, kept or Kept(), name
        self.seen: dict[str, Seen] = {}

    def look(self, step: Callable[[], None] = lambda: None, *, force: bool = False, **chosen: Any) -> Look:
        self.kept.taken.clear()
        told = Look()
        source = Source(path=self.root, name=self.name, chosen=Chosen(**chosen))
        look(source, self.kept, self.seen, told, force=force, step=step)
        return told


def aged(*files: Path) -> None:
    """Let files have been written some time ago, so that they are known by their size and time."""
    for file in files:
        os.utime(file, (time.time() - 60, time.time() - 60))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "one" / "docs"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.md", "b.md", "deep/c.md"):
        (folder / name).write_text(f"text of {name}")
        aged(folder / name)
    return folder


def test_only_what_changed_is_read_and_only_what_is_gone_taken_out(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looker = Looker(docs)
    assert looker.look().written == 3
    with monkeypatch.context() as patched:
        patched.setattr(looks, "read_at_one_moment", lambda found, _: pytest.fail(f"{found.path} is read again"))
        assert looker.look().unchanged == 3
    (docs / "a.md").write_text("another text")
    (docs / "b.md").rename(docs / "deep" / "b.md")
    assert looker.look().unchanged == 1 and looker.kept.taken == ["docs/a.md", "docs/deep/b.md"]
    assert looker.kept.documents["docs/deep/b.md"].renamed_from == "docs/b.md"
    (docs / "a.md").unlink()
    assert looker.look().taken_out == 1 and sorted(looker.kept.documents) == ["docs/deep/b.md", "docs/deep/c.md"]
    assert looker.look(force=True).done == 2 and len(looker.kept.taken) == 2
    looker.kept.documents.clear()  # somebody took them out
    assert looker.look().written == 2


def test_a_folder_that_is_locked_keeps_its_documents(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looker, listed = Looker(docs), os.scandir
    looker.look()

    def refuse(folder: str) -> Any:
        if folder.endswith("deep"):  # whoever runs the tests may be allowed to read everything
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    (docs / "b.md").unlink()
    told = looker.look()
    assert told.problems == [("docs/deep", "the folder cannot be read (Permission denied)")]
    assert sorted(looker.kept.documents) == ["docs/a.md", "docs/deep/c.md"]


def test_a_file_that_vanishes_between_listing_and_reading_is_gone_and_no_problem(docs: Path) -> None:
    looker = Looker(docs)
    looker.look()
    told = looker.look(step=lambda: (docs / "b.md").unlink(missing_ok=True))
    assert not told.problems and sorted(looker.kept.documents) == ["docs/a.md", "docs/deep/c.md"]


def test_a_file_that_is_written_to_while_it_is_read_is_never_taken_half(docs: Path) -> None:
    looker, file, ended = Looker(docs, name="docs"), docs / "a.md", threading.Event()
    texts = ["".join(f"Row {row} of version {version}.\n" for row in range(1_000)) for version in range(2)]
    seen: set[str] = set()
    held_up_seconds = 0.0

    def edit() -> None:
        nonlocal held_up_seconds
        version = 0
        while not ended.is_set():
            with file.open("r+") as opened:  # in place, in pieces: the worst that an editor does
                began = time.monotonic()
                for start in range(0, len(texts[version]), 1_250):
                    opened.write(texts[version][start : start + 1_250])
                    opened.flush()
                held_up_seconds = max(held_up_seconds, time.monotonic() - began)
            version = 1 - version
            ended.wait(0.25)  # else nobody ever sees a whole one

    file.write_text(texts[1])
    editor = threading.Thread(target=edit)
    editor.start()
    try:
        for _ in range(10):
            looker.look()
            if "docs/a.md" in looker.kept.documents:
                seen.add(looker.kept.texts()["docs/a.md"] + "\n")
    finally:
        ended.set()
        editor.join()
    # On a machine that let the editor wait in mid-sentence its file had not changed for long enough to be taken.
    assert seen <= set(texts) or held_up_seconds > looks.SETTLED_SECONDS / 2
    looker.look()
    assert looker.kept.texts()["docs/a.md"] + "\n" == file.read_text()


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_link_in_the_place_of_a_listed_file_or_folder_is_not_followed(docs: Path, tmp_path: Path, where: str) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "c.md").write_text("a secret")
    place, target = (docs / "deep", apart) if where == "folder" else (docs / "deep" / "c.md", apart / "c.md")

    def swap() -> None:  # after the listing, before the first file
        if not place.is_symlink():
            place.rename(tmp_path / "was")
            place.symlink_to(target)

    looker = Looker(docs)
    told = looker.look(swap)
    assert "a secret" not in str(looker.kept.documents)
    assert [source for source, _ in told.problems] == ["docs/deep/c.md"] and told.written == 2


def test_a_pipe_that_takes_the_place_of_a_listed_file_keeps_nobody_waiting(docs: Path) -> None:
    def swap() -> None:
        if (docs / "a.md").is_file():
            (docs / "a.md").unlink()
            os.mkfifo(docs / "a.md")

    told = Looker(docs).look(swap)
    assert told.problems == [("docs/a.md", "it is no file with a content")] and told.written == 2


def test_a_folder_that_is_too_deep_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    root = tmp_path / "docs"
    deep = root.joinpath(*["d"] * 300)
    deep.mkdir(parents=True)
    for folder in (root, deep):
        (folder / "a.md").write_text("text")
    told = Looker(root).look()
    assert told.written == 1 and "more than 200 folders deep" in told.problems[0][1]


def test_what_cannot_be_read_is_named_each_time_and_read_once(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (docs / "b.md").write_bytes(b"\0")
    os.mkfifo(docs / "pipe.md")
    aged(docs / "b.md")
    looker = Looker(docs)
    problem = [("docs/b.md", "it is no text: it has bytes of something else in it")]
    assert looker.look().problems == problem
    monkeypatch.setattr(looks, "read_at_one_moment", lambda found, _: pytest.fail(f"{found.path} is read again"))
    assert looker.look().problems == problem


def test_what_claude_code_noted_is_found_with_the_project_that_it_is_about(tmp_path: Path) -> None:
    def noted(project: str, *sessions: str) -> None:
        folder = tmp_path / "projects" / project_name(project)
        (folder / "memory").mkdir(parents=True)
        (folder / "memory" / "MEMORY.md").write_text("- [Build](build.md)\n")
        lines = [json.dumps({"type": "summary"}), *(json.dumps({"cwd": cwd, "type": "user"}) for cwd in sessions)]
        (folder / "1.jsonl").write_text("\n".join([*lines, "{"]))

    noted("/Users/me/my_shop", "/Users/me", "/Users/me/my_shop")
    noted("/Users/me/a/app", "/Users/me/a/app")
    noted("/Users/me/b/app", "/Users/me/b/app")
    noted("/srv/gone")
    (tmp_path / "projects" / "-empty" / "memory").mkdir(parents=True)
    found = claude_code_folders({"CLAUDE_CONFIG_DIR": str(tmp_path)})
    assert {one.name: topic_of(one.project) for one in found} == {
        "claude-code/my_shop": "my_shop",
        "claude-code/Users-me-a-app": "app",
        "claude-code/Users-me-b-app": "app",
        "claude-code/srv-gone": "srv-gone",
    }


# -- as a daemon does it ----------------------------------------------------------------------------------------------


def state_of(daemon: DaemonProcess, number: int = 0) -> dict[str, Any]:
    state: dict[str, Any] = ask(f"{daemon.own_url}/memd/index").json["sources"][number]
    return state


def live(daemon: DaemonProcess) -> Counter[str]:
    lines = ask(f"{daemon.own_url}/memd/export?live=1").body.splitlines()
    return Counter(msgspec.json.decode(line)["content"] for line in lines)


def test_a_folder_of_the_settings_is_watched_kept_while_it_is_missing_and_found_from_every_topic(
    serving: Serving, upstream: RecordingUpstream, docs: Path, tmp_path: Path
) -> None:
    settings = {
        "sources": [{"path": str(docs), "topic": "auto", "exclude": ["deep"]}, str(tmp_path / "later")],
        "retrieval": {"global_topics": ["docs"]},
    }
    daemon = serving(settings)
    wait_until(lambda: state_of(daemon)["state"] == "fine", lambda: f"not looked at: {daemon!r}")
    assert live(daemon) == Counter(["text of a.md", "text of b.md"])
    missing = "later: cannot be read (No such file or directory)"
    wait_until(lambda: missing in state_of(daemon, 1)["error"], lambda: f"not looked for: {daemon!r}")
    wait_until(lambda: state_of(daemon)["is_watched"], lambda: f"not watched: {daemon!r}")

    (docs / "b.md").write_text("The spare key hangs behind the clock on the second landing.")
    wait_until(lambda: any("spare key" in text for text in live(daemon)), lambda: f"not seen: {daemon!r}")
    daemon.chat([{"role": "user", "content": "Where does the spare key hang?"}], memory_in={"topic_id": "chat"})
    assert "(docs/b.md) The spare key" in upstream.prompts[-1]

    refused = daemon.run("sources", "--remove", "docs")
    assert refused.returncode == 2 and "docs would come back: `sources` of the settings has it" in refused.stderr
    known = ask(f"{daemon.own_url}/memd/sources?topic=docs").json
    assert [(one["name"], one["documents"], one["chunks"]) for one in known["known"]] == [("docs", 2, 2)]

    docs.rename(tmp_path / "later")  # one is missing now, and the other one is there
    asked = daemon.run("index", "--force", "--config", str(daemon.config))
    assert asked.returncode == 1 and "what is known of it stays" in asked.stdout
    assert "topic default: " in asked.stdout and "3 files; " in asked.stdout
    (tmp_path / "later").rename(docs)
    wait_until(lambda: state_of(daemon)["state"] == "fine", lambda: f"not seen that it is back: {daemon!r}")
    assert daemon.run("verify").returncode == 0


OWNER, GUEST = "a secret of the owner's own", "a secret of somebody who may write"


@pytest.mark.parametrize(
    ("source", "root"),
    [("docs/zz.md", "22" * 8), ("docs/b.md", "22" * 8), ("docs/b.md", "")],
    ids=["name", "file", "hash"],
)
def test_what_others_hand_over_under_the_name_of_a_folder_changes_nothing_of_it(
    serving: Serving, docs: Path, source: str, root: str
) -> None:
    auth = {"token": OWNER, "tokens": [token_setting("guest", GUEST, "write")]}
    daemon = serving({"sources": [{"path": str(docs), "topic": "t"}], "auth": auth})

    def asked(path: str, body: object = None, token: str = OWNER) -> Any:
        answer = ask(daemon.own_url + path, body, headers={"X-Memory-Token": token})
        assert answer.status == 200, answer.body
        return answer.json

    def texts() -> set[tuple[str, str]]:
        chunks = asked("/memd/chunks?topic=t")["chunks"]
        return {(one["author"], one["content"]) for one in chunks}

    def is_fine() -> bool:
        [state] = asked("/memd/index")["sources"]
        return bool(state["state"] == "fine")

    wait_until(lambda: is_fine() and len(texts()) == 3, lambda: f"not looked at: {daemon!r}")
    new = "The spare key hangs behind the clock on the second landing."
    document = {"source": source, "hash": hashlib.sha256(new.encode()).hexdigest(), "sections": [{"text": "Ropes."}]}
    asked("/memd/documents", {"topic_id": "t", "document": document | {"root": root}}, GUEST)
    (docs / "b.md").write_text(new)
    asked("/memd/index", {"force": False})
    wait_until(lambda: is_fine() and ("", new) in texts(), lambda: f"not seen: {texts()} {daemon!r}")
    own = {("", "text of a.md"), ("", new), ("", "text of deep/c.md")}
    assert texts() == own | {("guest", "Ropes.")}, "beside it"
    assert {one["source"].partition("/")[0] for one in asked("/memd/documents?topic=t")["documents"]} == {"docs"}


def test_killed_while_it_reads_a_folder_nothing_is_there_twice_and_nothing_is_lost(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    texts = {f"The lamp number {number} stands on its own landing." for number in range(150)}
    for number, text in enumerate(sorted(texts)):
        (docs / f"{number}.md").write_text(text)
    daemon = make_daemon(upstream.url, {"sources": [str(docs)]})
    for documents in (1, 60):
        daemon.start()
        wait_until(partial(lambda least: len(live(daemon)) >= least, documents), lambda: f"nothing read: {daemon!r}")
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
    assert 1 <= len({entry["content"] for entry in daemon.export()}) <= 150
    done = daemon.run("index", "--config", str(daemon.config))  # without a daemon, the command does it
    assert done.returncode == 0, done.stderr + done.stdout
    assert Counter(entry["content"] for entry in daemon.export()) == Counter(texts)
    daemon.start()
    wait_until(lambda: state_of(daemon)["state"] == "fine", lambda: f"not looked at: {daemon!r}")
    assert live(daemon) == Counter(texts) and state_of(daemon)["written"] == 0
