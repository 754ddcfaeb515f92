"""The official openai package in TypeScript: the base URL is changed, and nothing else has to be."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import REPLY, REPLY_WITH_MEMORY
from daemon_process import DaemonProcess
from typescript_client import TypeScriptClient

FACT = "The release word for the lighthouse lamp is cinnamon-42."
QUESTION = "What is the release word for the lighthouse lamp?"


def test_the_typescript_client_type_checks_strictly(typescript: TypeScriptClient) -> None:
    typescript.check_types()


@pytest.mark.parametrize("stream", [False, True], ids=["create", "stream"])
def test_openai_in_typescript_works_with_only_the_base_url_changed(
    typescript: TypeScriptClient, daemon: DaemonProcess, stream: bool
) -> None:
    told = typescript.chat(f"{daemon.base_url}/v1", FACT, stream=stream)
    assert told["reply"] == "".join(REPLY)
    assert told["finish_reason"] == "stop"
    assert told["memory_status"] == "none"
    told = typescript.chat(f"{daemon.base_url}/v1", QUESTION, stream=stream)
    assert told["reply"] == "".join(REPLY_WITH_MEMORY)
    assert told["memory_status"] == "injected"
    assert told["memory_out"] == []


@pytest.mark.parametrize("stream", [False, True], ids=["create", "stream"])
def test_openai_in_typescript_sends_memory_in_and_reads_memory_out(
    typescript: TypeScriptClient, daemon: DaemonProcess, stream: bool
) -> None:
    def ask(question: str, **memory_in: Any) -> dict[str, Any]:
        memory_in["topic_id"] = "lighthouse"
        return typescript.chat(f"{daemon.base_url}/v1", question, stream=stream, memory_in=memory_in)

    assert ask(FACT)["memory_out"] == [{"injected_chunks": []}]
    daemon.wait_stored("cinnamon-42")
    told = ask(QUESTION)
    assert told["reply"] == "".join(REPLY_WITH_MEMORY)
    [memory_out] = told["memory_out"]  # once, also in a stream
    [chunk] = memory_out["injected_chunks"]
    [stored] = [entry for entry in daemon.export() if entry["id"] == chunk["id"]]
    assert "cinnamon-42" in stored["content"]
    assert chunk == {"id": stored["id"], "topic_id": "lighthouse", "canonical_id": stored["origin_id"]}
    forget = {"chunk_ids": [chunk["id"], "ffffffff"], "action": "Update", "reason": "no longer true"}
    [memory_out] = ask("Forget the release word.", corrections=[forget])["memory_out"]
    assert {"type": "correction_failed", "chunk_id": "ffffffff"} in memory_out["signals"]
    assert chunk["id"] not in {entry["id"] for entry in daemon.export() if entry["live"]}
