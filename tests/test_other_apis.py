"""Anthropic's messages and OpenAI's responses through the whole daemon on the real llama.cpp: one memory with chat.

Rule: the model is the witness of what was in its prompt, the upstream asked directly the witness of what it would say.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from conftest import REPLY, REPLY_WITH_MEMORY, WINDOW, MakeDaemon
from daemon_process import Answer, DaemonProcess, Headers, ask, user
from recording_upstream import RecordingUpstream, Request, Response, recording_upstream

FACT = "Please note: the release word for the lighthouse lamp is cinnamon-42, written on the brass plate."
QUESTION = "What is the release word for the lighthouse lamp?"
FORGETFUL = "".join(REPLY)
REMEMBERING = "".join(REPLY_WITH_MEMORY)
REPLY_TOKENS = 60
OUTPUT = {"type": "output_text", "annotations": []}
ANSWER: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "Noted."}],
    "stop_reason": "end_turn",
}


@pytest.fixture(scope="module")
def server_url(llama: str) -> str:
    return llama


@pytest.fixture
def daemon(in_topic: DaemonProcess) -> DaemonProcess:
    """In front of the real llama.cpp."""
    return in_topic


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": text}


def send(url: str, messages: Sequence[Any], headers: Mapping[str, str] | None = None, **more: Any) -> Answer:
    body = {"model": "tiny", "max_tokens": REPLY_TOKENS, "messages": list(messages), **more}
    return ask(f"{url}/v1/messages", body, headers=headers)


def events_of(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    return [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]


def reply_of(answer: Answer) -> str:
    """The text of an answer, streamed or not."""
    assert answer.status == 200, answer.body
    if not answer.body.startswith(b"{"):
        return "".join(event["delta"].get("text", "") for event in events_of(answer) if "delta" in event)
    if "output" not in answer.json:
        return "".join(block.get("text", "") for block in answer.json["content"])
    messages = [item for item in answer.json["output"] if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


def through_chat(daemon: DaemonProcess, text: str) -> str:
    return daemon.chat([user(text)]).reply


def through_anthropic(daemon: DaemonProcess, text: str) -> str:
    return reply_of(send(daemon.base_url, [user(text)], system="You look after a lighthouse."))


def through_anthropic_blocks(daemon: DaemonProcess, text: str) -> str:
    content = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    return reply_of(send(daemon.base_url, [{"role": "user", "content": content}], stream=True))


def through_responses(daemon: DaemonProcess, text: str) -> str:
    return reply_of(respond(daemon, text, instructions="Be brief."))


def through_response_items(daemon: DaemonProcess, text: str) -> str:
    return reply_of(respond(daemon, [user(text)]))


@pytest.mark.parametrize(
    ("tell", "recall"),
    [
        (through_anthropic, through_anthropic_blocks),
        (through_anthropic_blocks, through_chat),
        (through_chat, through_anthropic),
        (through_chat, through_anthropic_blocks),
        (through_chat, through_responses),
        (through_responses, through_response_items),
    ],
)
def test_a_fact_told_through_one_api_is_recalled_through_another(daemon: DaemonProcess, tell: Any, recall: Any) -> None:
    assert tell(daemon, FACT) == FORGETFUL
    assert recall(daemon, QUESTION) == REMEMBERING


def test_a_conversation_goes_on_through_the_other_apis_and_is_stored_once(daemon: DaemonProcess) -> None:
    history = [user(FACT), {"role": "assistant", "content": daemon.chat([user(FACT)]).reply}, user("Thank you.")]
    content = send(daemon.base_url, history).json["content"]
    history += [{"role": "assistant", "content": content}, user("Is the ferry in?")]
    replies = [history[1]["content"], content[0]["text"], daemon.chat(history).reply]
    parts = [{"type": "message", "role": "assistant", "content": [OUTPUT | {"text": one}]} for one in replies]
    items = [history[0], parts[0], history[2], parts[1], history[4], parts[2], user("And the goat?")]
    reply_of(respond(daemon, items))
    said = (FACT, "Thank you.", "Is the ferry in?", "And the goat?")
    daemon.wait_stored(*said)
    contents = [entry["content"] for entry in daemon.export()]
    for text in said:
        assert sum(text in content for content in contents) == 1, contents


def test_an_answer_has_the_events_and_members_of_the_upstream_s(daemon: DaemonProcess, llama: str) -> None:
    for stream, text in ((False, "Hello there."), (True, "Multiply seven by eight.")):
        direct, passed = (send(url, [user(text)], stream=stream) for url in (llama, daemon.base_url))
        assert passed.headers["X-Memory-Status"] == "none"
        assert passed.headers["Content-Type"] == direct.headers["Content-Type"]
        assert shape(passed) == shape(direct)


def shape(answer: Answer) -> list[Any]:
    """An answer without what differs from one to the next: its id and what the cache had of the prompt."""
    values = [answer.json] if answer.body.startswith(b"{") else events_of(answer)
    for value in values:
        message = value.get("message", value)
        if "id" in message:
            del message["id"], message["usage"]
    return values


def test_calls_leave_the_prompt_with_their_results_and_the_text_beside_those_stays(make_daemon: MakeDaemon) -> None:
    with recording_upstream(window=2048) as upstream:
        upstream.answer = another_call
        daemon = make_daemon(upstream.url).start()
        history: list[Any] = [user("Read the logs.")]
        for turn in range(16):
            content = send(daemon.base_url, history).json["content"]
            history.append({"role": "assistant", "content": content})
            row = result(content[1]["id"], f"row {turn} is fine, says the keeper\n" * 20)
            history.append({"role": "user", "content": [row, {"type": "text", "text": f"What of {turn}?"}]})
        forwarded = [json.loads(one.body)["messages"] for one in upstream.requests if one.target == "/v1/messages"]
    for messages in forwarded:
        assert blocks_of(messages, "tool_use", "id") == blocks_of(messages, "tool_result", "tool_use_id")
    assert len(forwarded[-1]) < len(history) / 2, "the oldest turns must have left the prompt"
    own = forwarded[-1][0]["content"][-1]
    assert own["text"].startswith("What of "), "the prompt opens with the text that stood beside a result"


def another_call(request: Request) -> Response:
    """Text and a call of which no earlier one has the id."""
    own_id = hashlib.sha256(request.body).hexdigest()[:12]
    call = {"type": "tool_use", "id": own_id, "name": "read", "input": {"path": "log"}}
    return Response((json.dumps({**ANSWER, "content": [*ANSWER["content"], call]}).encode(),))


def blocks_of(messages: list[Any], kind: str, member: str) -> list[str]:
    blocks = [block for message in messages if isinstance(message["content"], list) for block in message["content"]]
    return [block[member] for block in blocks if block["type"] == kind]


def anthropic_answer(request: Request) -> Response:
    return Response((json.dumps(ANSWER).encode(),))


def test_a_thin_client_s_live_turns_are_written_in_this_api_s_way(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    upstream.answer = anthropic_answer
    daemon = make_daemon(upstream.url).start()
    calls = [{"type": "tool_use", "id": name, "name": "read", "input": {"path": name}} for name in "ab"]
    results = [result("a", "one"), result("b", "two")]
    new: list[list[Any]] = [
        [user("Read both."), {"role": "assistant", "content": calls}, {"role": "user", "content": results}],
        [user("And?")],
    ]
    for messages in new:
        assert send(daemon.base_url, messages, headers={"X-Memory-History": "daemon"}).status == 200
    assert json.loads(upstream.requests[-1].body)["messages"] == [
        user("Read both."),
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
        {"role": "assistant", "content": "Noted."},
        user("And?"),
    ]


def test_the_key_of_the_client_counts_tokens_too(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    upstream.answer = anthropic_answer
    daemon = make_daemon(upstream.url).start()
    assert send(daemon.base_url, [user("word " * 3000)], headers={"X-Api-Key": "secret"}).status == 200
    counted = [one for one in upstream.requests if one.target == "/v1/messages/count_tokens"]
    assert counted and {one.header("X-Api-Key") for one in counted} == {"secret"}


def test_errors_of_memd_s_own_have_the_api_s_shape(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("http://127.0.0.1:9", {"limits": {"body_bytes_max": 4096}}).start()
    answers = [
        send(daemon.base_url, [user("Hello?")]),
        send(f"{daemon.base_url}/t/..", [user("Hello?")]),
        send(daemon.base_url, [user("long " * 1000)]),
    ]
    assert [answer.status for answer in answers] == [502, 400, 413]
    kinds = ["api_error", "invalid_request_error", "request_too_large"]
    for answer, kind in zip(answers, kinds, strict=True):
        assert (answer.json["type"], answer.json["error"]["type"]) == ("error", kind)
        assert answer.json["error"]["message"].startswith("memd: ")


# Responses


def respond(daemon: DaemonProcess, given: object, headers: Headers | None = None, **more: Any) -> Answer:
    """A response, not streaming; `more` are further members of the body."""
    return ask(f"{daemon.base_url}/v1/responses", {"model": "tiny", "input": given, **more}, headers=headers)


def response_answer(request: Request) -> Response:
    """A short reply to a response request."""
    part = OUTPUT | {"text": "Noted."}
    output = [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}]
    return Response((json.dumps({"id": "resp_1", "object": "response", "output": output}).encode(),))


@pytest.mark.parametrize(
    "body",
    [
        {"model": "tiny"},
        {"model": "tiny", "input": 5},
        {"model": "tiny", "input": [{"type": "item_reference", "id": "msg_1"}]},
        {"model": "tiny", "input": [{"type": "message", "role": "user", "content": [{"type": "odd"}]}]},
        {"model": "tiny", "input": "x", "previous_response_id": "resp_1"},
        {"model": "tiny", "input": "x" * 2 * WINDOW, "stream": True},
    ],
)
def test_an_error_of_the_upstream_comes_through_as_it_is(
    daemon: DaemonProcess, llama: str, body: dict[str, Any]
) -> None:
    direct = ask(f"{llama}/v1/responses", body)
    through = ask(f"{daemon.base_url}/v1/responses", body)
    assert direct.status >= 400
    assert (through.status, through.body) == (direct.status, direct.body)
