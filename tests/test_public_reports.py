"""What people reported of other memory layers, proxies and local model servers, tried on memd; bench/NOTES.md has the
table with the reports.

Rule: each test does what a report tells, with a small input, through the doors that users have.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_process import ask
from recording_upstream import COMMON, RecordingUpstream, Response, chat_answer, recording_upstream, streamed
from test_turn import Client, daemon_in_process

from memd.errors import EmbeddingError

Json = dict[str, Any]

FACT = "The spare key of the lighthouse hangs behind the blue barrel."
QUESTION = "Where does the spare key of the lighthouse hang?"
EVENTS = (("Content-Type", "text/event-stream"),)


def event(**members: object) -> bytes:
    return b"data: " + json.dumps({"object": "chat.completion.chunk", **COMMON, **members}).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **said: object) -> bytes:
    return event(choices=[{"index": 0, "delta": said, "finish_reason": finish_reason}])


def stream_of(*parts: bytes, gate: threading.Event | None = None) -> Response:
    return Response((*parts, b"data: [DONE]\n\n"), headers=EVENTS, gate=gate)


def calling(arguments: str, finish_reason: str = "tool_calls") -> Response:
    """An answer that calls a tool, and may break off in its arguments."""
    call = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": finish_reason}
    return Response((json.dumps({"choices": [choice], "object": "chat.completion", **COMMON}).encode(),))


def user(text: str) -> Json:
    return {"role": "user", "content": text}


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


# litellm 36553, 30761: a bridge broke on the chunk without choices that tells usage.
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("asked", [{}, {"memory_in": {}}])
async def test_a_chunk_without_choices_passes_wherever_it_stands(tmp_path: Path, place: str, asked: Json) -> None:
    usage = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12})
    words = [delta(role="assistant", content="It hangs "), delta(content="there."), delta("stop")]
    parts = [usage, *words] if place == "first" else [*words, usage]
    async with daemon_in_process(tmp_path) as client:
        client.upstream.answer = lambda _: stream_of(*parts)
        told = await streamed_text(client, FACT, stream_options={"include_usage": True}, **asked)
        assert usage in told and told.endswith(b"data: [DONE]\n\n") and told.count(b'"memory_out"') == len(asked)
        await client.settled()
        assert (await client.receipt())["completion_tokens"] == 3


# litellm 38926: with include_usage the pieces of a call's arguments came in one burst at the end.
async def test_pieces_of_a_calls_arguments_come_as_they_are_written(tmp_path: Path) -> None:
    gate = threading.Event()
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "write", "arguments": '{"text": "'}}
    more = {"index": 0, "function": {"arguments": 'half"}'}}
    first, rest = delta(tool_calls=[call]), delta(tool_calls=[more])
    async with daemon_in_process(tmp_path) as client:
        client.upstream.answer = lambda _: stream_of(first, rest, delta("tool_calls"), gate=gate)
        usage = {"include_usage": True}
        async with client.post(FACT, stream=True, stream_options=usage, memory_in={}) as answer:
            seen = b""
            while b"half" not in seen:
                seen += await answer.content.readany()
            assert b"[DONE]" not in seen, "the end is not there yet"
            gate.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")


# litellm 33687, 39355: cache_control was dropped on the way, or refused for its ttl.
async def test_marks_for_a_cache_stay_where_the_client_set_them(tmp_path: Path) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    async with daemon_in_process(tmp_path) as client:
        await client.ask(FACT)
        await client.settled()
        parts = [{"type": "text", "text": QUESTION, "cache_control": mark}]
        prompt = await client.chat([{"role": "user", "content": parts}])
        assert json.dumps(mark) in prompt and "blue barrel" in prompt


# open-webui 28400: with its memory tool the context was lost from the first follow-up on.
async def test_a_chat_with_open_webuis_memory_tool_keeps_its_history(tmp_path: Path) -> None:
    call = {"id": "m1", "type": "function", "function": {"name": "search_memories", "arguments": '{"query": "key"}'}}
    history = [
        user(FACT),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "m1", "content": '{"results": []}'},
        {"role": "assistant", "content": "I noted it."},
        user("And the barrel, what is its colour?"),
    ]
    async with daemon_in_process(tmp_path) as client:
        for end in (1, 3, 5):
            prompt = await client.chat(history[:end])
            await client.settled()
        sent = json.loads(prompt)
        assert sent[:4] == history[:4] and sent[4]["content"].endswith(history[4]["content"])


# Sophomoresty/gemini-web2api 98: a new chat in Open WebUI remembered nothing.


# MystenLabs/MemWal 386: what was just remembered was not found.
async def test_what_was_just_said_is_found_before_it_is_stored(make_daemon: MakeDaemon, upstream: Any) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 3600}}).start()
    daemon.chat([user(FACT)])
    assert daemon.chat([user(QUESTION)]).headers["X-Memory-Status"] == "injected"


# getsentry/junior 1669: a write that was tried again after a replacement brought the old memory back.
async def test_a_note_that_is_sent_again_after_it_was_corrected_does_not_come_back(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url).start()
    note = {"notes": [{"content": FACT}]}
    key = {"Idempotency-Key": "n1"}
    [taken] = ask(f"{daemon.own_url}/memd/notes", note, headers=key).json["notes"]
    correction = {
        "topic_id": "default",
        "chunk_ids": [taken["chunk_ids"][0]],
        "action": "Update",
        "content": "The spare key of the lighthouse hangs in the shed.",
        "reason": "it was moved",
    }
    assert ask(f"{daemon.own_url}/memd/corrections", correction).status == 200
    assert ask(f"{daemon.own_url}/memd/notes", note, headers=key).status == 200
    daemon.chat([user(QUESTION)])
    assert "in the shed" in upstream.prompts[-1] and "blue barrel" not in upstream.prompts[-1]


# moorcheh-ai/memanto 1408: an update had deleted the old version when the new one could not be written.
async def test_a_correction_that_cannot_be_embedded_leaves_what_it_corrects(tmp_path: Path) -> None:
    async with daemon_in_process(tmp_path) as client:
        await client.ask(FACT)
        await recalled(client)
        await client.settled()  # its receipt is written
        [shown] = (await client.receipt())["shown"]

        def fails(*_: object) -> None:
            raise EmbeddingError("the model is not there")

        whole, client.daemon.encoder.embed_text = client.daemon.encoder.embed_text, fails  # type: ignore[method-assign, assignment]
        url = f"{client.daemon.own_url}/memd/corrections"
        body = {
            "topic_id": "default",
            "chunk_ids": [shown],
            "action": "Update",
            "reason": "moved",
            "content": "It hangs in the shed.",
        }
        async with client._session.post(url, json=body) as answer:
            assert answer.status >= 500
        client.daemon.encoder.embed_text = whole  # type: ignore[method-assign]
        assert FACT in await recalled(client, "Say once more where the spare key of the lighthouse hangs.")


# AgentFlocks/flocks 728, anomalyco/opencode 37913: arguments that were cut off at max_tokens ended the whole session.
async def test_a_call_whose_arguments_were_cut_off_passes_and_the_session_goes_on(tmp_path: Path) -> None:
    half = '{"path": "key.txt", "text": "' + "The key hangs " * 20_000
    async with daemon_in_process(tmp_path) as client:
        client.upstream.answer = lambda _: calling(half, "length")
        _, _, answer = await client.ask(FACT)
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == half
        client.upstream.answer = chat_answer
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c1", "content": "error: the arguments are no JSON"}
        assert "the arguments are no JSON" in await client.chat([user(FACT), message, result])
        assert FACT in await recalled(client)


# lmstudio-ai/lms 610: speculative decoding failed in the middle of a stream.
async def test_an_error_inside_a_stream_reaches_the_client_and_what_was_said_is_remembered(tmp_path: Path) -> None:
    error = event(error={"code": 500, "message": "failed to process speculative batch", "type": "server_error"})
    async with daemon_in_process(tmp_path) as client:
        client.upstream.answer = lambda _: Response((delta(content="It hangs "), error), headers=EVENTS)
        assert (await streamed_text(client, FACT)).endswith(error)
        client.upstream.answer = chat_answer
        assert FACT in await recalled(client)


# ggml-org/llama.cpp 25158, mozilla-ai/otari 528, mozilla-ai/clawbolt 1548: long silences before the first word.
async def test_comments_in_a_long_silence_before_the_first_word_pass(tmp_path: Path) -> None:
    gate, whole = threading.Event(), streamed("It hangs there.").parts
    async with daemon_in_process(tmp_path) as client:
        client.upstream.answer = lambda _: Response((b": ping\n\n", b"".join(whole)), headers=EVENTS, gate=gate)
        async with client.post(FACT, stream=True) as answer:
            assert await answer.content.readuntil(b"\n\n") == b": ping\n\n"
            gate.set()
            assert b"there." in await answer.read()


# oneprolabs/sourcelens 4: nginx held a stream back until its end.


# mostlygeek/llama-swap 796: a path that the model server has was not passed on.
async def test_paths_that_memd_does_not_know_are_the_model_servers(make_daemon: MakeDaemon) -> None:
    with recording_upstream(answer=lambda request: Response((request.target.encode(),))) as upstream:
        daemon = make_daemon(upstream.url).start()
        assert ask(f"{daemon.base_url}/cors-proxy?url=x", method="GET").body == b"/cors-proxy?url=x"


# archestra-ai/archestra 6015, tashfeenahmed/freellmapi 737: in a container `localhost` is the container.
async def test_who_cannot_reach_the_model_server_hears_its_address_and_the_remedy(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("http://localhost:1").start()
    answer = daemon.chat([user(FACT)])
    assert answer.status == 502 and "http://localhost:1" in answer.json["error"]["message"]


# JustVugg/colibri 990: a server in a container refused the Host header of its own address.
async def test_another_machines_name_in_the_host_header_is_answered_with_a_token(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, {"auth": {"token": "a-secret-of-this-test"}}).start()
    headers = {"Host": "my-server:36873", "Authorization": "Bearer a-secret-of-this-test"}
    assert ask(f"{daemon.own_url}/memd/stats", headers=headers).status == 200
    assert daemon.chat([user(FACT)], headers=headers).headers["X-Memory-Status"] == "none"


# zosmaai/pi-llm-wiki 92, EasyMetaAu/helm-api 231: recall in the system prompt made the server read all of it again.
