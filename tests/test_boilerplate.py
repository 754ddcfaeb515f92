"""What programs wrap around a user's words, on its way through the whole daemon: in the prompt, and nowhere else."""

from __future__ import annotations

from daemon_in_process import STANDING_TASKS, Client, until
from recording_upstream import chat_answer
from test_turn import FACT, QUESTION

# Where the programs write theirs: Cline (sdk/packages/agents/src/agent-runtime.ts,
# apps/vscode/src/core/prompts/responses.ts), Roo Code (src/core/environment/getEnvironmentDetails.ts,
# src/core/task/Task.ts), Codex (codex-rs/core), Open WebUI (DEFAULT_RAG_TEMPLATE in backend/open_webui/config.py),
# Aider (aider/coders/base_coder.py).
DETAILS = "<environment_details>\n# Current Time\n10:05, workshop key bicycle\n</environment_details>"


async def stored(client: Client) -> list[str]:
    """What the log has, as people read it, once everything is stored."""
    await until(lambda: not client.daemon.tasks.names - STANDING_TASKS)
    topic = await client.daemon.topics.get("default")
    for conversation in topic.buffer.conversations():
        await client.daemon.archiver.store(topic, conversation, len(conversation))
    snapshot = topic.log.snapshot()
    return [snapshot.read(place).displayed for place in reversed(list(snapshot.latest_places()))]


async def test_wrapping_is_in_the_prompt_and_neither_stored_nor_asked(client: Client) -> None:
    await client.ask(f"<task>\n{FACT}\n</task>\n\n{DETAILS}")
    assert f"<task>\\n{FACT}\\n</task>\\n\\n<environment_details>" in client.upstream.prompts[-1]
    assert await stored(client) == [f"user: {FACT}\nassistant: Noted."]
    await client.ask(f"{QUESTION}\n{DETAILS}")
    await client.settled()
    assert (await client.receipt())["question"] == QUESTION
    assert FACT in client.upstream.prompts[-1]


async def test_a_message_of_wrapping_alone_is_not_stored(client: Client) -> None:
    await client.ask(DETAILS)
    assert await stored(client) == ["assistant: Noted."]


async def test_thinking_is_neither_stored_nor_missed_when_the_client_drops_it(client: Client) -> None:
    client.upstream.answer = lambda request: chat_answer(request, text="<think>\nHm.\n</think>\n\nBehind it.")
    await client.ask(QUESTION)
    await stored(client)
    await client.ask(QUESTION, "Behind it.", "Thanks!")
    texts = await stored(client)
    assert len(texts) == len(set(texts)) and not any("Hm." in text for text in texts)
    topic = await client.daemon.topics.get("default")
    assert [len(one) for one in topic.buffer.conversations()] == [4], "it is the same conversation"
