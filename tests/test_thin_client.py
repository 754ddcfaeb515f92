"""A client that sends only what is new (`X-Memory-History: daemon`): memd puts the live turns in front of it."""

from __future__ import annotations

import json

from conftest import MakeDaemon
from daemon_process import DaemonProcess
from recording_upstream import RecordingUpstream

THIN = {"X-Memory-History": "daemon"}


def shown(upstream: RecordingUpstream) -> list[tuple[str, str]]:
    """Role and text of the messages that the model was shown last."""
    body = json.loads(upstream.chats[-1].body)
    return [(message["role"], message["content"]) for message in body["messages"]]


def say(daemon: DaemonProcess, text: str, **headers: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    assert daemon.chat(messages, headers={**THIN, **headers}).status == 200


def test_the_live_turns_stand_before_what_is_new_also_after_a_restart(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url).start()
    say(daemon, "hello")
    say(daemon, "hello")  # the same words again are a new turn, not the conversation's first
    daemon.restart()
    say(daemon, "goodbye")
    roles = [role for role, _ in shown(upstream)]
    texts = [text for role, text in shown(upstream) if role == "user"]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert texts == ["hello", "hello", "goodbye"]


def test_sessions_keep_thin_clients_apart(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url).start()
    say(daemon, "left one", **{"X-Memory-Session": "left"})
    say(daemon, "right one", **{"X-Memory-Session": "right"})
    say(daemon, "left two", **{"X-Memory-Session": "left"})
    texts = [text.rpartition("\n")[2] for role, text in shown(upstream) if role == "user"]
    assert texts == ["left one", "left two"]
