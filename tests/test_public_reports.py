"""What people reported of other memory layers, proxies and local model servers, tried on memd; bench/NOTES.md has the
table with the reports.

Rule: each test does what a report tells, with a small input, through the doors that users have.
"""

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_in_process import Client
from daemon_process import DaemonProcess, ask, clean_environment, user, wait_until
from raw_wire import connected, request
from recording_upstream import (
    EVENT_STREAM,
    RecordingUpstream,
    Response,
    answered,
    chat_answer,
    delta_event,
    event,
    recording_upstream,
    streamed,
)
from test_other_apis import response_answer

from memd.proxy import relay

Json = dict[str, Any]

FACT = "The spare key of the lighthouse hangs behind the blue barrel."
QUESTION = "Where does the spare key of the lighthouse hang?"


async def streamed_text(client: Client, *texts: str, **body: Any) -> bytes:
    async with client.post(*texts, stream=True, **body) as answer:
        assert answer.status == 200
        body_read: bytes = await answer.read()
        return body_read


async def recalled(client: Client, question: str = QUESTION) -> str:
    """The prompt of a new chat that asks."""
    await client.settled()
    await client.ask(question)
    return client.upstream.prompts[-1]


# litellm 33687, 39355: cache_control was dropped on the way, or refused for its ttl.
async def test_marks_for_a_cache_stay_where_the_client_set_them(client: Client) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    await client.ask(FACT)
    await client.settled()
    parts = [{"type": "text", "text": QUESTION, "cache_control": mark}]
    prompt = await client.chat([{"role": "user", "content": parts}])
    assert json.dumps(mark) in prompt and "blue barrel" in prompt


# getsentry/junior 1669: a write that was tried again after a replacement brought the old memory back.
async def test_a_note_that_is_sent_again_after_it_was_corrected_does_not_come_back(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    note = {"notes": [{"content": FACT}]}
    key = {"Idempotency-Key": "n1"}
    [taken] = ask(f"{served.own_url}/memd/notes", note, headers=key).json["notes"]
    correction = {
        "topic_id": "default",
        "chunk_ids": [taken["chunk_ids"][0]],
        "action": "Update",
        "content": "The spare key of the lighthouse hangs in the shed.",
        "reason": "it was moved",
    }
    assert ask(f"{served.own_url}/memd/corrections", correction).status == 200
    assert ask(f"{served.own_url}/memd/notes", note, headers=key).status == 200
    served.chat([user(QUESTION)])
    assert "in the shed" in upstream.prompts[-1] and "blue barrel" not in upstream.prompts[-1]


# AgentFlocks/flocks 728, anomalyco/opencode 37913: arguments that were cut off at max_tokens ended the whole session.
async def test_a_call_whose_arguments_were_cut_off_passes_and_the_session_goes_on(client: Client) -> None:
    half = '{"path": "key.txt", "text": "' + "The key hangs " * 2_000
    called = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": half}}
    client.upstream.answer = lambda _: answered({"role": "assistant", "tool_calls": [called]}, finish="length")
    _, _, answer = await client.ask(FACT)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == half
    client.upstream.answer = chat_answer
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "error: the arguments are no JSON"}
    assert "the arguments are no JSON" in await client.chat([user(FACT), message, result])
    assert FACT in await recalled(client)


# lmstudio-ai/lms 610: speculative decoding failed in the middle of a stream.
async def test_an_error_inside_a_stream_reaches_the_client_and_what_was_said_is_remembered(client: Client) -> None:
    error = event(error={"code": 500, "message": "failed to process speculative batch", "type": "server_error"})
    client.upstream.answer = lambda _: Response((delta_event({"content": "It hangs "}), error), headers=EVENT_STREAM)
    assert (await streamed_text(client, FACT)).endswith(error)
    client.upstream.answer = chat_answer
    assert FACT in await recalled(client)


# ggml-org/llama.cpp 25158, mozilla-ai/otari 528, mozilla-ai/clawbolt 1548: long silences before the first word.
async def test_comments_in_a_long_silence_before_the_first_word_pass(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "WAIT_SECONDS", 0.1)
    gate, whole = threading.Event(), streamed("It hangs there.").parts
    client.upstream.answer = lambda _: Response((b": ping\n\n", b"".join(whole)), headers=EVENT_STREAM, gate=gate)
    async with client.post(FACT, stream=True) as answer:
        assert await answer.content.readuntil(b"\n\n") == b": ping\n\n"
        gate.set()
        assert b"there." in await answer.read()


# Soju06/codex-lb 1757, lmstudio-ai/lms 1079: clients in Java offer HTTP/2 with each request: 400, or silence.
@pytest.mark.process
def test_a_client_that_offers_http_2_is_answered_in_http_1(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    served.chat([user(FACT)])
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
    body = json.dumps({"model": "tiny", "messages": [user(QUESTION)]}).encode()
    client = connected(served.base_url)
    for _ in range(2):  # and the connection can be used again
        client.send(request(b"POST", b"/v1/chat/completions", b"Content-Type: application/json", *offer, body=body))
        head = client.read_head()
        assert head.startswith(b"HTTP/1.1 200") and b"x-memory-status: injected" in head.lower()
        assert b"Noted." in client.read_body()
    client.close()
    asked = dict(upstream.requests[-1].headers)
    assert "HTTP2-Settings" not in asked and "Upgrade" not in asked


# decolua/9router 912, router-for-me/CLIProxyAPI 1684, farion1231/cc-switch 4190: audio and files were dropped silently.
@pytest.mark.parametrize(
    ("path", "part", "text", "stands"),
    [
        (
            "chat/completions",
            {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}},
            "text",
            "[audio]",
        ),
        ("chat/completions", {"type": "file", "file": {"file_data": "QQ==", "filename": "a.pdf"}}, "text", "[file]"),
        ("responses", {"type": "input_file", "file_data": "QQ==", "filename": "a.pdf"}, "input_text", "[file]"),
        ("responses", {"type": "input_audio", "input_audio": {"data": "QQ=="}}, "input_text", "[audio]"),
    ],
)
@pytest.mark.process
def test_sound_and_files_reach_the_model_as_they_came_and_are_stored_as_a_word(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, path: str, part: Json, text: str, stands: str
) -> None:
    if is_responses := path == "responses":
        upstream.answer = response_answer
    daemon = make_daemon(upstream.url).start()
    said = {"role": "user", "content": [{"type": text, "text": FACT}, part]}
    ask(f"{daemon.base_url}/v1/{path}", {"model": "tiny", "input" if is_responses else "messages": [said]})
    daemon.wait_stored(FACT)
    stored = daemon.said()
    assert any(FACT in one and stands in one for one in stored) and not any("QQ==" in one for one in stored)
    asked = {"role": "user", "content": [{"type": text, "text": QUESTION}, part]}
    ask(f"{daemon.base_url}/v1/{path}", {"model": "tiny", "input" if is_responses else "messages": [asked]})
    assert json.dumps(part) in upstream.requests[-1].body.decode() and b"blue barrel" in upstream.requests[-1].body


# agent0ai/agent-zero 1857, mnfst/llm-gateway 2290: pictures in the history are sent again with each request, megabytes.
@pytest.mark.process
def test_pictures_of_megabytes_in_each_request_pass_and_are_not_stored(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    picture = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(bytes(3 << 20)).decode()}"},
    }
    history = [{"role": "user", "content": [{"type": "text", "text": FACT}, picture]}]
    for _ in range(3):
        history += [{"role": "assistant", "content": "I see it."}, user("And now?")]
        assert served.chat(history).reply == "Noted."
        assert upstream.requests[-1].body.count(b"base64,") == 1, "the window has room for it"
    served.wait_stored(FACT)
    size = sum(path.stat().st_size for path in served.data_dir.rglob("*") if path.is_file())
    assert size < 1 << 20 and [one for one in served.said() if FACT in one and "[image]" in one]


# mem0ai/mem0 4068: with IPv6 a name leads to ::1, where nobody listens.
@pytest.mark.process
def test_memd_listens_and_asks_by_ipv6_and_its_commands_find_it(make_daemon: MakeDaemon) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with recording_upstream(host="::1") as upstream:
        daemon = make_daemon(upstream.url, {"listen": {"host": "::1"}}).start()
        assert daemon.base_url.startswith("http://[::1]:")
        assert daemon.chat([user(FACT)]).reply == "Noted."
        daemon.wait_stored(FACT)
        assert "blue barrel" in daemon.run("search", QUESTION).stdout, "beside the daemon"
        assert ask(f"{daemon.own_url}/memd/health").json["status"] == "ok"
        assert daemon.chat([user(QUESTION)]).headers["X-Memory-Status"] == "injected"
        assert daemon.terminate() == 0


ODD_SYSTEM = """
import os
opened = os.open
os.umask(0)
os.umask = lambda mask: 0
os.open = lambda path, flags, mode=0o777, **more: opened(path, flags, 0o777, **more)
os.chmod = os.fchmod = lambda *_, **__: None
"""


# DeusData/codebase-memory-mcp 1687, Dicklesworthstone/beads_rust 491: below /mnt/c of WSL all is open to everybody, and
# chmod changes nothing.
@pytest.mark.process
def test_on_a_windows_drive_of_wsl_where_all_is_open_and_chmod_is_in_vain_memory_works(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    (tmp_path / "wsl").mkdir()
    (tmp_path / "wsl" / "sitecustomize.py").write_text(ODD_SYSTEM)
    daemon = make_daemon(upstream.url)
    paths = [str(tmp_path / "wsl"), *filter(None, [os.environ.get("PYTHONPATH")])]
    daemon.environment = {"PYTHONPATH": os.pathsep.join(paths)}
    daemon.start()
    assert daemon.chat([user(FACT)]).reply == "Noted."
    daemon.wait_stored(FACT)
    assert any(path.stat().st_mode & 0o077 for path in daemon.data_dir.rglob("*.bin")), "as on such a drive"
    assert daemon.restart().chat([user(QUESTION)]).headers["X-Memory-Status"] == "injected"
    assert "Traceback" not in daemon.log.read_text()


# basicmachines-co/basic-memory 277, recyclarr/recyclarr 111: in a container the user has a number and no name or home.
@pytest.mark.process
def test_a_user_without_a_name_and_a_home_runs_memd(upstream: RecordingUpstream, free_for_all: Path) -> None:
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("only root may become another user")
    daemon = DaemonProcess(free_for_all, upstream.url)
    daemon.config.chmod(0o644)
    nobody = ["setpriv", "--reuid", "41234", "--regid", "41234", "--clear-groups"]
    environment = {name: value for name, value in clean_environment().items() if name in ("PATH", "PYTHONPATH")}
    if subprocess.run([*nobody, sys.executable, "-c", "import memd"], env=environment, cwd="/", check=False).returncode:
        pytest.skip("another user cannot run this Python, which lies in a closed folder")
    log = free_for_all / "said"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*nobody, *daemon.command()],
            env=environment,
            cwd="/",
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
    try:
        wait_until(lambda: process.poll() is not None or "look into" in log.read_text(), lambda: log.read_text())
        assert process.poll() is None, log.read_text()
        url = log.read_text().split("point your client at")[1].split()[0]
        body = {"model": "tiny", "messages": [user(FACT)]}
        assert ask(f"{url}/chat/completions", body).headers["X-Memory-Status"] == "none"
    finally:
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.fixture
def free_for_all() -> Iterator[Path]:
    """A folder that everybody may enter and write to; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="memd-container-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


# BerriAI/litellm 26395, anomalyco/opencode 25000: the thoughts of a step were lost on the way back.
async def test_thoughts_stay_with_the_step_that_they_belong_to(client: Client) -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    thought = {"role": "assistant", "content": None, "reasoning_content": "I must look.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "t1", "content": "A barrel."}
    await client.ask(FACT)
    await client.settled()
    prompt = await client.chat([user(QUESTION), thought, result])
    assert json.loads(prompt)[1:] == [thought, result] and "blue barrel" in prompt
    await client.settled()
    assert "I must look" not in (await recalled(client, "What must I look at?"))
