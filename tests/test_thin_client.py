"""A client that sends only what is new (`X-Memory-History: daemon`): memd puts the live turns in front of it."""

from __future__ import annotations

import json
import urllib.request

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess
from recording_upstream import RecordingUpstream

from memd.conversation.events import decode_event
from memd.conversation.hot_buffer import HotBuffer
from memd.store.disk import DiskFiles
from memd.store.log.journal import read_journal

THIN = {"X-Memory-History": "daemon"}
KILLS = 5


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


def answers_in_journal(daemon: DaemonProcess) -> int:
    """The answers that the journal has, read as a start would."""
    buffer = HotBuffer(lambda: "new", 64)
    buffer.replay([decode_event(one) for one in read_journal(daemon.data_dir / "default" / "hot.log", DiskFiles())])
    roles = [one.message.role for talk in buffer.conversations() for one in talk.messages if one.message is not None]
    return roles.count("assistant")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fsync", "headers"), [("always", THIN), ("interval", THIN), ("always", {})], ids=["always", "thin", "full"]
)
def test_a_daemon_killed_right_after_the_complete_answer_has_it_in_the_journal(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, fsync: str, headers: dict[str, str], stream: bool
) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"journal_fsync": fsync, "store_after_seconds": 3600}})
    for number in range(KILLS):
        daemon.start()
        body = {"model": "tiny", "stream": stream, "messages": [{"role": "user", "content": f"Question {number}"}]}
        asked = urllib.request.Request(
            f"{daemon.base_url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Memory-Session": str(number), **headers},
        )
        with urllib.request.urlopen(asked, timeout=20) as answer:
            answer.read()
        daemon.kill()
        assert answers_in_journal(daemon) == number + 1
