"""Topics whose names differ only in case: some file systems would give them one folder, so no store gets both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from daemon_process import DaemonProcess, ask
from drafts import draft, live_contents, open_store
from recording_upstream import RecordingUpstream

from memd.cli.main import main
from memd.errors import BadTopicId

FACT = {"role": "user", "content": "The code of the boathouse is 5511."}


def test_a_name_that_differs_only_in_case_is_refused_with_the_one_that_is_there(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    store.topic("Garden").append([draft(1)])
    for name in ("garden", "GARDEN"):
        with pytest.raises(BadTopicId, match=f"'{name}' .* 'Garden', which is there"):
            store.topic(name)
    with pytest.raises(BadTopicId, match=r"'memd\.lock'"):
        store.topic("MEMD.Lock")
    assert store.topic_ids() == ["Garden"]
    store.close()
    assert open_store(None, tmp_path).topic("Garden").snapshot()


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
