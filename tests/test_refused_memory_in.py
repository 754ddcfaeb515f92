"""A MemoryIn of which nothing was done: the request is answered, and the answer says so, with the reason."""

import re
import time
from typing import Any

import pytest
from daemon_process import DaemonProcess, ask, user, wait_until
from recording_upstream import RecordingUpstream

from memd.proxy.reading import NO_TOPIC_NOTE

FACT = "The spare key of the workshop hangs behind the blue bicycle."
MOVED = "The spare key of the workshop hangs in the shed."
QUESTION = "Where does the spare key of the workshop hang?"


def update(chunk_id: str, **more: Any) -> dict[str, Any]:
    """A MemoryIn with one correction."""
    wanted = {"chunk_ids": [chunk_id], "action": "Update", "reason": "It moved.", "content": MOVED}
    return {"corrections": [wanted | more]}


def shown_turn(daemon: DaemonProcess, turn: str) -> str:
    """A turn as `memd turn` shows it, once its receipt is written."""
    wait_until(lambda: daemon.run("turn", turn).returncode == 0, lambda: repr(daemon))
    return daemon.run("turn", turn).stdout


@pytest.fixture
def upstream(kept_upstream: RecordingUpstream) -> RecordingUpstream:
    return kept_upstream


@pytest.fixture
def daemon(in_topic: DaemonProcess) -> DaemonProcess:
    """With a fact in memory that was shown."""
    in_topic.chat([user(FACT)])
    in_topic.wait_stored(FACT)
    assert in_topic.chat([user(QUESTION)]).headers["X-Memory-Status"] == "injected"
    return in_topic


@pytest.mark.parametrize("action", ["update", "UPDATE", " Update"])
def test_an_action_is_taken_in_any_case(daemon: DaemonProcess, upstream: RecordingUpstream, action: str) -> None:
    shown = daemon.export()[0]["id"]
    answer = daemon.chat([user("It moved.")], memory_in=update(shown, action=action))
    assert "signals" not in answer.json["memory_out"] and answer.headers["X-Memory-Problem"] is None
    daemon.chat([user(QUESTION + " Really?")])
    assert MOVED in upstream.prompts[-1] and FACT not in upstream.prompts[-1]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (
            {"action": "Replace"},
            "no action that memd knows - at `memory_in.corrections[0].action`; it is Update or Helpful or Unhelpful",
        ),
        (
            {"contents": MOVED},
            "a member that memd does not know; did you mean content? - at `memory_in.corrections[0]`",
        ),
        ({"steps": 2}, "corrections[0].steps belongs to the actions Helpful and Unhelpful"),
        ({"chunk_ids": []}, "of length >= 1 - at `memory_in.corrections[0].chunk_ids`"),
    ],
    ids=["action", "key", "steps", "no chunk"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_refused_is_told_in_the_answer_and_in_a_header(
    daemon: DaemonProcess, wrong: dict[str, Any], reason: str, stream: bool
) -> None:
    memory_in = update("a3f9", **wrong)
    if stream:
        with daemon.stream([user("It moved.")], memory_in=memory_in) as opened:
            headers, [out] = opened.headers, [one["memory_out"] for one in opened if "memory_out" in one]
    else:
        answer = daemon.chat([user("It moved.")], memory_in=memory_in)
        headers, out = answer.headers, answer.json["memory_out"]
    assert headers["X-Memory-Status"] == "bad-memory-in" and reason in headers["X-Memory-Problem"]
    [signal] = out["signals"]
    assert signal["type"] == "memory_in_refused" and reason in signal["reason"] and out["injected_chunks"] == []


@pytest.mark.parametrize("unit", [" '", ' "', "` - at `$", "` - at `$.notes[1", "' - at `"])
def test_a_long_name_of_an_unknown_member_holds_up_nobody(in_topic: DaemonProcess, unit: str) -> None:
    began = time.monotonic()
    answer = in_topic.chat([user("Hello.")], memory_in={unit * (16_000 // len(unit)): 1})
    assert "a member that memd does not know" in (answer.headers["X-Memory-Problem"] or "")
    assert time.monotonic() - began < 5


def test_where_no_chunk_could_be_corrected_the_reason_is_told(daemon: DaemonProcess) -> None:
    shown = daemon.export()[0]["id"]
    mixed = daemon.chat(
        [user("It moved.")],
        memory_in=update(shown)
        | {"corrections": [{"chunk_ids": ["zzzz"], "action": "Helpful", "reason": ""}, *update(shown)["corrections"]]},
    )
    assert mixed.headers["X-Memory-Problem"] is None, "something was done"
    read = daemon.chat([user("Read.")], {"X-Memory-Mode": "readonly"}, memory_in=update(shown))
    assert "the request may only read in this topic" in read.headers["X-Memory-Problem"]
    for chunk_id, reason in (
        ("zzzz", "1 id not shown in the topic's last 64 turns"),
        (shown, "1 id taken out or erased since"),
    ):
        told = daemon.chat([user(f"It moved, {chunk_id}.")], memory_in=update(chunk_id))
        [signal] = told.json["memory_out"]["signals"]
        assert signal == {"type": "correction_failed", "chunk_id": chunk_id}
        problem, turn = f"memory_in: no chunk was corrected: {reason}", told.headers["X-Memory-Turn"]
        assert told.headers["X-Memory-Problem"] == problem
        assert any(turn in line and problem in line for line in daemon.log.read_text().splitlines())
        assert problem in shown_turn(daemon, turn)


def test_corrections_of_a_request_that_goes_on_without_memory_are_not_lost_silently(daemon: DaemonProcess) -> None:
    shown = daemon.export()[0]["id"]
    told = daemon.chat([user("It moved.")], {"X-Memory-Topic": "../.."}, memory_in=update(shown))
    assert told.headers["X-Memory-Status"] == "bad-topic"
    assert "'../..' is not a topic name" in told.headers["X-Memory-Problem"]
    assert "memory_out" not in told.json, "the client keeps its corrections for the next request"
    other = daemon.chat([user("It moved.")], memory_in={"topic_id": str(daemon.topic_id).title()} | update(shown))
    assert other.headers["X-Memory-Status"] == "bad-memory-in"
    assert (
        f"'{daemon.topic_id}'" in other.json["memory_out"]["signals"][0]["reason"] and other.headers["X-Memory-Problem"]
    )
    nothing = daemon.chat([user("It moved.")], {"X-Memory-Topic": "../.."}, memory_in={})
    assert "memory_out" not in nothing.json and "'../..'" in nothing.headers["X-Memory-Problem"]


def test_every_request_that_went_without_memory_is_seen_where_turns_are(daemon: DaemonProcess) -> None:
    url = f"{daemon.base_url}/v1/chat/completions"
    told = {
        "bad-memory-in": daemon.chat([user(QUESTION)], memory_in={"topics": ["lamps"]}),
        "bad-mode": daemon.chat([user(QUESTION)], {"X-Memory-Mode": "of"}),
        "bad-topic": daemon.chat([user(QUESTION)], {"X-Memory-Topic": "../.."}),
        "degraded:unreadable": ask(url, b'{"messages": 5}'),
    }
    turns = [answer.headers["X-Memory-Turn"] for answer in told.values()]
    wait_until(lambda: all(turn in daemon.run("turn").stdout for turn in turns), lambda: repr(daemon))
    for status, answer in told.items():
        problem, turn = answer.headers["X-Memory-Problem"], answer.headers["X-Memory-Turn"]
        assert answer.headers["X-Memory-Status"] == status and problem
        told_there = problem if status != "bad-topic" else NO_TOPIC_NOTE  # which repeats nothing: it is never erased
        assert " ".join(told_there.split()) in " ".join(daemon.run("turn", turn).stdout.split())
        assert not re.search("memory took|milliseconds", daemon.run("turn", turn).stdout), "nothing was counted"
        assert status.partition(":")[0] in daemon.run("turn").stdout
        assert f"turn={turn} " in daemon.log.read_text()


@pytest.mark.parametrize(
    ("mode", "note", "reason"),
    [("readonly", {}, "readonly 1"), ("full", {"said_at": "2099-01-01T00:00:00Z"}, "said_at 1")],
)
def test_notes_that_all_fail_are_told_like_corrections(
    daemon: DaemonProcess, mode: str, note: dict[str, str], reason: str
) -> None:
    notes = [{"content": "The kettle is red."} | note]
    told = daemon.chat([user("Note it.")], {"X-Memory-Mode": mode}, memory_in={"notes": notes})
    [out] = told.json["memory_out"]["notes"]
    problem, turn = f"memory_in: no note was taken: {reason}", told.headers["X-Memory-Turn"]
    assert out["error"] in reason and told.headers["X-Memory-Problem"] == problem
    assert any(turn in line and problem in line for line in daemon.log.read_text().splitlines())
    both = [notes[0], {"content": "The lamp is green."}]
    mixed = daemon.chat([user("Note both.")], memory_in={"notes": both})
    assert mixed.headers["X-Memory-Problem"] is None, "something was done"


@pytest.mark.parametrize("where", ["itself", "metadata"])
def test_a_memory_in_beside_a_conversation_that_the_upstream_keeps_is_told_in_the_log_too(
    daemon: DaemonProcess, upstream: RecordingUpstream, where: str
) -> None:
    given = {"memory_in": update("a3f9")}
    more = given if where == "itself" else {"metadata": given}
    body = {"model": "tiny", "input": QUESTION, "previous_response_id": "resp_1"} | more
    told = ask(f"{daemon.base_url}/v1/responses", body)
    problem, turn = told.headers["X-Memory-Problem"], told.headers["X-Memory-Turn"]
    assert "the upstream keeps" in problem
    assert any(turn in line and problem in line for line in daemon.log.read_text().splitlines())
    assert problem in " ".join(shown_turn(daemon, turn).split())


@pytest.mark.parametrize("content", [None, "", " "])
def test_an_update_without_a_text_says_what_it_took_out(daemon: DaemonProcess, content: str | None) -> None:
    shown = daemon.export()[0]["id"]
    told = daemon.chat([user("It moved.")], memory_in=update(shown, content=content))
    assert told.json["memory_out"]["signals"] == [{"type": "taken_out", "chunk_id": shown}]
    again = daemon.chat([user("It moved again.")], memory_in=update(shown, content=content))
    assert again.json["memory_out"]["signals"] == [{"type": "correction_failed", "chunk_id": shown}]
