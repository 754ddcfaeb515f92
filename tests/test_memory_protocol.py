"""MemoryIn and MemoryOut as a client sees them, on the real llama.cpp: corrections, signals, forms, headers."""

import json
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, user

KEY = "The deploy key lives in the drawer of desk nine."
WHERE = "Where does the deploy key live?"


@pytest.fixture(scope="module")
def server_url(llama: str) -> str:
    return llama


@pytest.fixture
def daemon(in_topic: DaemonProcess) -> DaemonProcess:
    return in_topic


def asked(daemon: DaemonProcess, text: str, **memory_in: Any) -> dict[str, Any]:
    """The MemoryOut of a new one-message chat."""
    answer = daemon.chat([user(text)], memory_in=memory_in)
    assert answer.status == 200, answer.body
    out = answer.json["memory_out"]
    assert isinstance(out, dict)
    return out


def ids(out: dict[str, Any]) -> list[str]:
    return [chunk["id"] for chunk in out["injected_chunks"]]


def correction(action: str, *chunk_ids: str, **more: Any) -> dict[str, Any]:
    return {"chunk_ids": list(chunk_ids), "action": action, "reason": "the test says so", **more}


@pytest.fixture
def key_id(daemon: DaemonProcess) -> str:
    """The id under which the fact was shown."""
    daemon.chat([user(KEY)])
    daemon.wait_stored(KEY)
    [chunk_id] = ids(asked(daemon, WHERE))
    return chunk_id


def test_helpful_and_unhelpful_move_the_multiplier_and_cancel_exactly_in_one_correction_of_several_steps_too(
    daemon: DaemonProcess, key_id: str
) -> None:
    def live() -> dict[str, Any]:
        [now] = [entry for entry in daemon.export() if entry["id"] == key_id and entry["live"]]
        return dict(now)

    asked(daemon, "One.", corrections=[correction("Helpful", key_id, key_id)])
    assert live()["utility_multiplier"] == 1.5  # named twice in one correction: once
    asked(daemon, "Two.", corrections=[correction("Helpful", key_id), correction("Helpful", key_id)])
    assert live()["utility_multiplier"] == 1.5**3  # separate corrections: each
    asked(daemon, "Three.", corrections=[correction("Unhelpful", key_id)] * 3)
    assert live()["utility_multiplier"] == 1.0

    asked(daemon, "Important.", corrections=[correction("Helpful", key_id, steps=10)])
    assert live()["utility_multiplier"] == 1.5**10 and live()["action_steps"] == 10
    asked(daemon, "More than that.", corrections=[correction("Helpful", key_id, steps=3)])
    assert live()["utility_multiplier"] == 1.5**10 and live()["action_steps"] == 0
    asked(daemon, "Not any more.", corrections=[correction("Unhelpful", key_id, steps=10)])
    assert live()["utility_multiplier"] == 1.0
    asked(daemon, "Well.", corrections=[correction("Unhelpful", key_id)] * 4)
    assert key_id not in ids(asked(daemon, WHERE + " Please.")), "it is not shown any more"


def test_pressure_is_signalled_from_the_fill_of_the_settings_and_ids_survive_a_restart(
    make_daemon: MakeDaemon, llama: str
) -> None:
    daemon = make_daemon(llama, {"injection": {"pressure_ratio": 0.01}}).start()
    daemon.chat([user(KEY)])
    daemon.wait_stored(KEY)
    out = asked(daemon, WHERE)
    [signal], [key_id] = out["signals"], ids(out)
    assert signal["type"] == "context_pressure" and 0.01 < signal["fill_ratio"] < 0.8
    [uuid] = [entry["uuid"] for entry in daemon.export() if entry["id"] == key_id]
    daemon.restart()
    out = asked(daemon, "After.", corrections=[correction("Helpful", uuid), correction("Helpful", key_id)])
    assert [one["type"] for one in out.get("signals", [])] == []
    assert [entry["utility_multiplier"] for entry in daemon.export() if entry["id"] == key_id] == [1.0, 1.5, 2.25]


def test_a_budget_that_overflows_is_signalled(daemon: DaemonProcess) -> None:
    for number in range(40):
        daemon.chat([user(f"Locker {number} of the boat house opens with the code {number * 7919}. " * 3)])
    signals = asked(daemon, "Which code opens the locker in the boat house?")["signals"]
    [signal] = [signal for signal in signals if signal["type"] == "context_overflow"]
    assert signal["fill_ratio"] > 1


@pytest.mark.parametrize(
    "more",
    [
        {"memory_in": {"topic_id": "TOPIC"}},
        {"memory_in": json.dumps({"topic_id": "TOPIC"})},
        {"metadata": {"memory_in": {"topic_id": "TOPIC"}}},
        {"metadata": {"memory_in": json.dumps({"topic_id": "TOPIC"}), "user": "u"}},
        {"metadata": {"memory_in": {"topic_id": "TOPIC"}}, "memory_in": {"topic_id": "ignored"}},
    ],
)
def test_memory_in_is_read_from_every_place_and_form(
    kept_daemon: DaemonProcess, daemon: DaemonProcess, more: dict[str, Any]
) -> None:
    there = kept_daemon.in_topic(f"of-{daemon.topic_id}")
    there.chat([user(KEY)])
    there.wait_stored(KEY)
    answer = daemon.chat([user(WHERE)], **json.loads(json.dumps(more).replace("TOPIC", str(there.topic_id))))
    assert answer.headers["X-Memory-Status"] == "injected"
    [chunk] = answer.json["memory_out"]["injected_chunks"]
    assert chunk["topic_id"] == there.topic_id
    assert answer.headers["X-Memory-Injected"] == chunk["id"]
    stored = {entry["id"]: entry for entry in there.export()}
    assert stored[chunk["id"]]["canonical_id"] == chunk["canonical_id"]
