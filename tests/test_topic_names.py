"""Topics whose names differ only in case: some file systems would give them one folder, so no store gets both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import MakeDaemon
from daemon_process import Answer, DaemonProcess, ask
from drafts import draft, live_contents, open_store
from recording_upstream import RecordingUpstream

from memd.cli.main import main
from memd.errors import BadTopicId

FACT = {"role": "user", "content": "The code of the boathouse is 5511."}


def test_a_store_that_has_both_keeps_opening(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    store.topic("garden").append([draft(1)])
    store.topic("other").append([draft(2)])
    store.close()
    (tmp_path / "other").rename(tmp_path / "Garden")  # an older memd let both be made
    (tmp_path / "Garden" / "former_names").write_text("other\n")
    store = open_store(None, tmp_path)
    assert [live_contents(store.topic(name)) for name in ("Garden", "garden")]
    with pytest.raises(BadTopicId):
        store.topic("GARDEN")
    store.close()
    done = CliRunner().invoke(
        main, ["check", "--json", "--data-dir", str(tmp_path), "--upstream", "http://127.0.0.1:9"]
    )
    found = json.loads(done.stdout)["checks"]
    assert [one["mark"] for one in found if "'Garden' and 'garden' differ only in case" in one["said"]] == ["warning"]


def test_a_request_for_one_is_answered_400_or_goes_on_without_memory(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    assert ask(f"{served.base_url}/t/garden/v1/chat/completions", {"messages": [FACT]}).status == 200
    seen = len(upstream.requests)
    refused = ask(f"{served.base_url}/t/Garden/v1/chat/completions", {"messages": [FACT]})
    assert refused.status == 400 and "'garden', which is there" in refused.json["error"]["message"]
    assert len(upstream.requests) == seen
    answered = served.chat([FACT], memory_in={"topic_id": "Garden"})
    assert answered.reply and answered.headers["X-Memory-Status"] == "bad-memory-in"
    assert "'garden', which is there" in served.log.read_text()
    assert (
        served.chat([FACT], memory_in={"related_topic_ids": ["Garden"]}).headers["X-Memory-Status"] != "bad-memory-in"
    )
    assert sorted(path.name for path in served.data_dir.iterdir() if path.is_dir()) == ["default", "garden"]


def test_an_import_stops_at_the_line_that_names_one(tmp_path: Path) -> None:
    data_dir, file = tmp_path / "memory", tmp_path / "told.jsonl"
    store = open_store(None, tmp_path / "other")
    store.topic("garden").append([draft(1)])
    store.close()
    exported = CliRunner().invoke(main, ["export", "--data-dir", str(tmp_path / "other")]).stdout.strip()
    file.write_text(f"{exported}\n{exported.replace('garden', 'Garden')}\n")
    done = CliRunner().invoke(main, ["import", "--data-dir", str(data_dir), str(file)])
    assert done.exit_code == 1
    assert "line 2: topic_id 'Garden' differs only in case from 'garden'" in done.stderr and "--topic" in done.stderr
    assert [path.name for path in data_dir.iterdir() if path.is_dir()] == ["garden"]


# Topics and conversations that headers name, as programs send them that many people share


USER, CHAT = "X-OpenWebUI-User-Id", "X-OpenWebUI-Chat-Id"
ADA, BEN = "5f0f1d52-6a9c-4f6e-8f60-0d3b1c9e7a11", "9b1d3c7e-2f54-4d0e-9d0a-7c1e6b2f4a22"
QUESTION = {"role": "user", "content": "What is the code of the boathouse?"}


@pytest.fixture
def daemon(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    settings = {"topics": {"header": USER.lower()}, "conversation": {"header": CHAT}, "buffer": {"idle_seconds": 0}}
    return make_daemon(upstream.url, settings).start()


def topic_of(daemon: DaemonProcess, answer: Answer) -> str:
    return str(daemon.receipt(answer.headers["X-Memory-Turn"])["topic_id"])


def said(daemon: DaemonProcess, headers: Mapping[str, str], path: str = "/v1", **more: Any) -> Answer:
    return ask(f"{daemon.base_url}{path}/chat/completions", {"model": "m", "messages": [FACT], **more}, headers=headers)


def test_each_user_has_a_memory_of_their_own_and_nobody_elses(
    daemon: DaemonProcess, upstream: RecordingUpstream
) -> None:
    daemon.chat([FACT], {USER: ADA, CHAT: "1"})
    for user, chat, is_shown in ((ADA, "2", True), (BEN, "3", False), (BEN, "2", False)):
        answer = daemon.chat([QUESTION], {USER: user, CHAT: chat})
        assert topic_of(daemon, answer) == user
        assert ("5511" in upstream.requests[-1].body.decode()) is is_shown
    sent = upstream.requests[-1]
    assert sent.header(USER) == BEN, "what is the client's own is forwarded"


def test_the_most_particular_name_counts(daemon: DaemonProcess, upstream: RecordingUpstream) -> None:
    both = {"X-Memory-Topic": "named", USER: ADA}
    assert topic_of(daemon, said(daemon, {**both}, memory_in={"topic_id": "asked"})) == "asked"
    assert topic_of(daemon, said(daemon, both, path="/t/path/v1")) == "named"
    assert upstream.requests[-1].header("X-Memory-Topic") is None
    assert topic_of(daemon, said(daemon, {"X-Memory-Topic": " ", USER: ADA}, path="/t/path/v1")) == ADA
    assert topic_of(daemon, said(daemon, {USER: ""}, path="/t/path/v1")) == "path"
    assert topic_of(daemon, said(daemon, {})) == "default"


@pytest.mark.parametrize("name", ["ada@example.org", "../etc", "a" * 129, "user ada", "NAMED"])
def test_a_name_that_cannot_be_a_topic_costs_the_memory_and_nothing_is_stored_elsewhere(
    daemon: DaemonProcess, name: str
) -> None:
    said(daemon, {"X-Memory-Topic": "named"})
    answer = said(daemon, {"X-Memory-Topic": name})
    assert (answer.status, answer.headers["X-Memory-Status"]) == (200, "bad-topic")
    assert repr(name)[1:40] in daemon.log.read_text()
    [topic] = ask(f"{daemon.base_url}/memd/topics").json["topics"]
    assert topic["topic_id"] == "named"


def test_chats_that_a_header_tells_apart_are_no_branches_of_each_other(daemon: DaemonProcess) -> None:
    for chat in ("1", "2", "1"):
        daemon.chat([FACT], {USER: ADA, CHAT: chat})
    [topic] = ask(f"{daemon.base_url}/memd/topics").json["topics"]
    assert topic["conversations"] == 2


def test_openai_s_user_separates_where_it_is_asked_for(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    plain = make_daemon(upstream.url).start()
    assert topic_of(plain, said(plain, {}, user=ADA)) == "default"
    daemon = make_daemon(upstream.url, {"topics": {"from_user": True}, "buffer": {"idle_seconds": 0}}).start()
    daemon.chat([FACT], user=ADA)
    for user, is_shown in ((ADA, True), (BEN, False)):
        answer = daemon.chat([QUESTION], user=user)
        assert topic_of(daemon, answer) == user
        assert ("5511" in upstream.requests[-1].body.decode()) is is_shown
    assert topic_of(daemon, said(daemon, {"X-Memory-Topic": "named"}, user=ADA)) == "named"
    assert topic_of(daemon, said(daemon, {}, path="/t/path/v1", user=BEN)) == BEN
    assert topic_of(daemon, said(daemon, {}, path="/t/path/v1", user=" ")) == "path"
    assert topic_of(daemon, said(daemon, {}, user={"id": 5})) == "default"
    assert said(daemon, {}, user="ada@example.org").headers["X-Memory-Status"] == "bad-topic"
