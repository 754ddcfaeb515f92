"""Servers that hide their window, want a key, serve many models, or refuse: the whole daemon against each of them."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from archiver_stage import ENCODING, HashEmbedder
from daemon_in_process import Client, daemon_in_process
from daemon_process import wait_until
from recording_upstream import EVENT_STREAM, HOLD_SECONDS_MAX, Request, Response
from strict_llama import KEY, StrictLlama, rendered

from memd.daemon import app
from memd.embedding.loading import load_embedder
from memd.proxy.upstream import client
from memd.proxy.upstream.client import window_unknown
from memd.settings import model as settings

WORDS = "harbour lantern because the quietly seventeen of boats was painted "


KEY_QUESTIONS = {
    0: "Where does the spare key hang?",
    20: "Behind which bicycle is the key?",
    35: "What hangs behind the blue bicycle?",
}
"""By turn."""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of these tests are about how much is sent, not about what is found: no model embeds their texts."""
    monkeypatch.setattr(app, "cl100k_base", lambda _: ENCODING)
    monkeypatch.setattr(app, "load_embedder", lambda *_, **__: HashEmbedder())


def by_characters(parts: Sequence[str]) -> int:
    """Four characters for a token, and four tokens for each message."""
    return sum(4 + len(part) // 4 for part in parts if part)


def strict(window: int, **more: Any) -> StrictLlama:
    """A server that hides its window."""
    given: dict[str, Any] = {"told": "silent", "words": "llama.cpp", "count": by_characters}
    return StrictLlama(window, **(given | more))


def agent_of(
    server: Callable[[Request], Response], folder: Path, **upstream: Any
) -> AbstractAsyncContextManager[Client]:
    """A client with its own long history, of a daemon in front of this server."""
    return daemon_in_process(folder, answer=server, upstream=upstream, buffer=settings.BufferSettings())


async def send(agent: Client, messages: list[dict[str, Any]], *, key: str = "", **members: Any) -> tuple[int, str, Any]:
    """Status, `X-Memory-Status` and the answer."""
    return await agent.send(messages, {"Authorization": f"Bearer {key}"} if key else None, model="recorded", **members)


async def told(agent: Client, messages: list[dict[str, Any]], path: str = "chat/completions", **more: Any) -> str:
    """The answer to a request, as it came."""
    field = "input" if path == "responses" else "messages"
    body = {"model": "recorded", field: messages, **more}
    async with agent.session.post(f"{agent.daemon.base_url}/v1/{path}", json=body) as answer:
        assert answer.status == 200
        return await answer.text()


def history(count: int, words: int = 6) -> list[dict[str, Any]]:
    """So many messages of user and assistant in turn, the last one a user's."""
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": f"Message {place}: {WORDS * words}"} for place in range(count)]


@pytest.mark.parametrize("refusal", ["llama.cpp", "vllm", "silent"])
async def test_a_refusal_is_learned_from_and_the_request_is_made_to_fit(
    tmp_path: Path, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = strict(8_192, words=refusal)
    messages = history(99)
    async with agent_of(server, tmp_path) as agent:
        with caplog.at_level("WARNING"):
            assert (await send(agent, messages))[0] == 200
        [line] = [one for one in caplog.records if one.msg == "the upstream refused a prompt as too long"]
        assert vars(line)["then"] == "sent again, shorter"
        assert len(server.refused) == 1 and 10 < len(server.taken[0].messages) < 99
        messages += [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": "And now?"}]
        assert (await send(agent, messages))[0] == 200
        known = agent.daemon.upstream.first.windows.of("recorded").tokens
    assert len(server.refused) == 1, "what was learned is kept"
    assert known == 8_192 if refusal != "silent" else known is not None and known < server.refused[0].tokens


def with_pictures(messages: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """The same, with a picture in each so manieth message of the user."""
    users = [message for message in messages if message["role"] == "user"][::every]
    for place, message in enumerate(users):
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,iVBORw0KGgo{place:04}"}}
        message["content"] = [{"type": "text", "text": message["content"]}, picture]
    return messages


@pytest.mark.parametrize("told", [True, False], ids=["told", "hidden"])
@pytest.mark.parametrize("refusal", ["llama.cpp", "vllm", "vllm images"])
async def test_images_that_take_more_than_we_think_are_made_to_fit_too(
    tmp_path: Path, refusal: str, told: bool
) -> None:
    """An image takes 2,500 tokens, as a large one does with Qwen2.5-VL; memd counts 576."""
    server = strict(32_768, told="vllm" if told else "silent", words=refusal, image_tokens=2_500)
    messages = with_pictures(history(61, words=20), every=2)
    async with agent_of(server, tmp_path) as agent:
        for turn in range(4):
            assert (await send(agent, messages))[0] == 200, turn
            messages += [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": f"Turn {turn}?"}]
        factor = agent.daemon.counter.drift.factor("recorded")
    assert len(server.refused) == 1, "what was learned is kept"
    assert min(prompt.tokens for prompt in server.taken) > 32_768 * 0.4, "no more leaves than is needed"
    assert factor < 1.3, "the text counts as before"


async def test_where_nobody_says_how_much_images_take_each_refusal_teaches_a_little(tmp_path: Path) -> None:
    server = strict(32_768, words="uncounted", image_tokens=2_500)
    messages = with_pictures(history(61, words=20), every=2)
    async with agent_of(server, tmp_path) as agent:
        statuses = [(await send(agent, messages))[0] for _ in range(3)]
        assert statuses[-1] == 200 and agent.daemon.upstream.first.windows.of("recorded").tokens == 32_768
    assert server.taken[-1].tokens > 32_768 * 0.3


async def test_a_server_that_is_slow_to_tell_its_window_keeps_nobody_waiting_and_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ready = strict(8_192, told="props"), threading.Event()

    def slow(request: Request) -> Response:
        return server(request)._replace(gate=ready if request.method == "GET" else None)

    async with agent_of(slow, tmp_path) as agent:
        facts = agent.daemon.upstream.facts
        assert facts.is_slow and "asked again in the background" in window_unknown(facts)
        monkeypatch.setattr(client, "ASK_SECONDS", 600.0)  # who waits now, waits for the gate
        monkeypatch.setattr(client.Upstream.ask, "__defaults__", (600.0,))
        async with asyncio.timeout(HOLD_SECONDS_MAX - 10):  # only the start has waited
            for count in (1, 3, 5):
                assert (await send(agent, history(count)))[0] == 200
        ready.set()
        upstream = agent.daemon.upstream
        await asyncio.to_thread(wait_until, lambda: upstream.facts.window == 8_192, lambda: repr(upstream.facts))
        assert not agent.daemon.upstream.facts.is_slow and agent.daemon.upstream.facts.reachable


async def test_settings_that_promise_more_than_the_server_has_do_not_fail_again_and_again(tmp_path: Path) -> None:
    server = strict(4_096)
    async with agent_of(server, tmp_path, window=16_384) as agent:
        for count in (99, 101, 103):
            assert (await send(agent, history(count)))[0] == 200
    assert len(server.refused) == 1 and len(server.taken) == 3


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_refusal_with_status_200_is_learned_from_before_anything_goes_to_the_client(
    tmp_path: Path, stream: bool
) -> None:
    """LM Studio's `event: error`, SGLang's and OpenRouter's `error` in a body with status 200."""
    server = strict(8_192, words="vllm", refuses_with_200=True)
    async with agent_of(server, tmp_path) as agent:
        said = await told(agent, history(99), stream=stream)
        assert "error" not in said and "Noted." in said
        said = await told(agent, [{"role": "user", "content": WORDS * 1_000}], stream=stream)
        assert said.count("maximum context length") == 1, "nothing may leave: it passes"
        assert said.startswith("event: error\n" if stream else '{"error"')
    assert len(server.refused) == 2 and len(server.taken) == 1


async def test_a_refusal_later_in_a_stream_is_learned_for_the_next_request(tmp_path: Path) -> None:
    def answer(request: Request) -> Response:
        body = json.loads(request.body or b"{}")
        tokens = by_characters(rendered(body))
        if tokens <= 2_048 or not body.get("stream"):
            return strict(1_000_000)(request)
        said = (
            f"This model's maximum context length is 2048 tokens. However, your messages resulted in {tokens} tokens."
        )
        begun = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n'
        return Response(
            (begun, b"data: " + json.dumps({"error": {"message": said}}).encode() + b"\n\n"), headers=EVENT_STREAM
        )

    async with daemon_in_process(tmp_path, answer=answer) as agent:
        for is_refused in (True, False):
            assert ("maximum context length" in await told(agent, history(99), stream=True)) is is_refused


async def test_where_it_cannot_be_made_to_fit_the_client_gets_the_server_s_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = strict(1_024)
    async with agent_of(server, tmp_path) as agent:
        status, _, answer = await send(agent, [{"role": "user", "content": WORDS * 200}])
        assert status == 400 and answer["error"]["type"] == "exceed_context_size_error"
        assert len(server.refused) == 1, "it was not sent again"
        assert [vars(one)["then"] for one in caplog.records if "too long" in one.msg] == ["nothing more may leave"]
        assert (await send(agent, [{"role": "user", "content": "Something short."}]))[0] == 200


async def test_a_second_refusal_is_not_followed_by_a_third_try(tmp_path: Path) -> None:
    server = strict(2_048, words="silent")
    messages = history(199)
    async with agent_of(server, tmp_path) as agent:
        status, _, answer = await send(agent, messages)
        assert status == 400 and "context window" in answer["error"] and len(server.refused) == 2
        for _ in range(3):  # each refusal teaches a little more
            status = (await send(agent, messages))[0]
        assert status == 200


@pytest.mark.parametrize("shown_by", ["client", "settings"])
async def test_the_window_of_a_server_that_wants_a_key_is_asked_with_a_key(tmp_path: Path, shown_by: str) -> None:
    server = strict(4_096, told="key")
    given = {"api_key": KEY} if shown_by == "settings" else {}
    async with agent_of(server, tmp_path, **given) as agent:
        assert agent.daemon.upstream.facts.window == (4_096 if given else None)
        assert (await send(agent, history(1)))[0] == 401, "memd lends nobody its key"
        assert (await send(agent, history(99), key=KEY))[0] == 200
        assert agent.daemon.upstream.facts.window == 4_096
    assert not server.refused and len(server.taken) == 1


async def test_a_router_has_a_window_for_each_of_its_models(tmp_path: Path) -> None:
    server = strict(4_096, told="router")
    async with agent_of(server, tmp_path) as agent:
        assert agent.daemon.upstream.facts.window is None
        assert (await send(agent, history(99)))[0] == 200
    assert not server.refused


async def test_that_max_tokens_counts_is_learned_from_a_refusal(tmp_path: Path) -> None:
    server = strict(8_192, counts_reply=True, words="vllm")
    async with agent_of(server, tmp_path, window=8_192) as agent:
        assert (await send(agent, history(99), max_tokens=5_000))[0] == 200
        assert (await send(agent, history(101), max_tokens=5_000))[0] == 200
    assert len(server.refused) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("window", "standing", "max_tokens"), [(32_768, 18_000, 32_000), (16_384, 6_000, 8_192)], ids=["32k", "16k"]
)
async def test_a_large_system_prompt_and_max_tokens_leave_history_and_memory_their_room(
    tmp_path: Path, window: int, standing: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "load_embedder", load_embedder)  # here something is asked about
    system = {"role": "system", "content": WORDS * (standing * 4 // len(WORDS))}
    server = strict(window, told="props")
    messages: list[dict[str, Any]] = []
    async with agent_of(server, tmp_path) as agent:
        await send(agent, [system, {"role": "user", "content": "The spare key hangs behind the blue bicycle."}])
        await agent.stored()
        for turn in range(36):
            asked = KEY_QUESTIONS.get(turn, f"Turn {turn}. {WORDS * 25}")
            messages.append({"role": "user", "content": asked})
            status, memory, answer = await send(agent, [system, *messages], max_tokens=max_tokens)
            messages.append(answer["choices"][0]["message"])
            assert status == 200
            assert turn not in KEY_QUESTIONS or memory == "injected", "there is room for memory"
            heard = server.taken[-1].messages
            assert len(heard) >= min(len(messages), 12), "more than the system prompt and the last message"
            await agent.settled()  # what has to leave has left, however busy the machine is
    assert not server.refused
    assert max(prompt.tokens for prompt in server.taken) > window * 0.75, "the window is used"


@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_requests_of_other_apis_are_made_to_fit_too(tmp_path: Path, path: str) -> None:
    server = strict(4_096)
    async with agent_of(server, tmp_path) as agent:
        await told(agent, history(99), path, max_tokens=100)
    [taken] = server.taken
    assert len(server.refused) == 1 and 5 < len(taken.messages) < 99
