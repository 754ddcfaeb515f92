"""Chats go on, answers are made anew, texts wait, the daemon is killed, and meanwhile chunks are erased: what was
erased is in no file any more, whatever its clients still send in the same chats.

Rule: the witness is the bytes of the files; a fact is a word that stands nowhere else.
"""

from __future__ import annotations

import os
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, user
from effort import scaled
from recording_upstream import RecordingUpstream, Request, Response, chat_answer

FACT = re.compile(rb"QX\d{5}Z")
NAMES = ["stove", "boat", "barometer", "staircase", "flag", "goat", "radio", "well", "window", "path", "ladder"]
STEPS, CHATS_MAX = 120, 6
WINDOW = 1_500
"""So that turns leave the prompt."""


class Talker:
    """Chats of one topic, and what was erased in it."""

    def __init__(self, daemon: DaemonProcess, chance: random.Random) -> None:
        self.daemon = daemon
        self.chance = chance
        self.chats: list[list[dict[str, str]]] = []
        self.alive: list[str] = []
        self.erased: set[str] = set()
        self._facts = 0

    def step(self) -> None:
        """One thing that people and programs do."""
        ways = [self._begin, self._go_on, self._go_on, self._edit, self._fork, self._shorten, self._rewrite]
        ways += [self._answer_anew, self._answer_anew, self._note, *[self._erase] * 4]
        self.chance.choice(ways if self.chats else [self._begin])()

    def back(self, folder: Path) -> set[str]:
        """What was erased and is in a file."""
        found = set[str]()
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError):  # an index that was merged meanwhile
                    found |= {one.decode() for one in FACT.findall((Path(parent) / name).read_bytes())}
        return found & self.erased

    def _text(self) -> str:
        self._facts += 1
        self.alive.append(f"QX{self._facts:05}Z")
        said = "The {} {} because of the {}, so the {} waits until the {} is done."
        before, behind = (said.format(*self.chance.sample(NAMES, 5)) for _ in range(2))
        key = f"The key {self.alive[-1]} belongs to the {self.chance.choice(NAMES)}."
        return key if self.chance.random() < 0.3 else f"{before} {key} {behind}"

    def _say(self, history: list[dict[str, str]]) -> list[dict[str, str]]:
        return [*history, {"role": "assistant", "content": self.daemon.chat(history).reply}]

    def _begin(self) -> None:
        self.chats = [*self.chats, self._say([user(self._text())])][-CHATS_MAX:]

    def _in_a_chat(self, begin: int, end: int) -> None:
        at = self.chance.randrange(len(self.chats))
        self.chats[at] = self._say([*self.chats[at][begin:end], user(self._text())])

    def _go_on(self) -> None:
        self._in_a_chat(0, 1 << 30)

    def _edit(self) -> None:
        self._in_a_chat(0, -2)

    def _fork(self) -> None:
        history = self.chance.choice(self.chats)
        history = history[: 2 * self.chance.randrange(len(history) // 2)]
        self.chats = [*self.chats, self._say([*history, user(self._text())])][-CHATS_MAX:]

    def _shorten(self) -> None:
        self._in_a_chat(2, 1 << 30)

    def _rewrite(self) -> None:
        at = self.chance.randrange(len(self.chats))
        history = [*self.chats[at]]
        history[1] = {"role": "assistant", "content": f"In short: {self.chance.choice(NAMES)}."}
        self.chats[at] = self._say([*history, user(self._text())])

    def _answer_anew(self) -> None:
        at = self.chance.randrange(len(self.chats))
        self.chats[at] = self._say(self.chats[at][:-1])

    def _note(self) -> None:
        note = {"topic_id": "default", "notes": [{"content": self._text()}]}
        assert ask(f"{self.daemon.own_url}/memd/notes", note).status == 200

    def _erase(self) -> None:
        fact = self.chance.choice(self.alive)
        self.alive.remove(fact)
        asked = urlencode({"topic": "default", "q": f"What about the key {fact}?"})
        listed = urlencode({"topic": "default", "contains": fact})
        found = ask(f"{self.daemon.own_url}/memd/search?{asked}").json["chunks"]
        while ids := [one["id"] for one in found if fact in one["content"]]:
            body = {"topic_id": "default", "chunk_ids": ids, "forbid": self.chance.random() < 0.2}
            erased = ask(f"{self.daemon.own_url}/memd/erase", body)
            assert erased.status == 200, erased.body
            self.erased.add(fact)
            found = ask(f"{self.daemon.own_url}/memd/chunks?{listed}").json["chunks"]  # with another answer
        if fact in self.erased:
            assert self.back(self.daemon.data_dir) == set(), repr(self.daemon)


@pytest.mark.thorough
@pytest.mark.parametrize("store_after_seconds", [0.3, 3600])
def test_what_is_erased_while_other_things_wait_stays_away(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, store_after_seconds: float
) -> None:
    chance, answers = random.Random(7), iter(range(100_000))

    def answer(request: Request) -> Response:
        return chat_answer(request, f"Noted under number {next(answers)} in the ledger of this house, and no more.")

    upstream.answer = answer
    settings: dict[str, Any] = {
        "buffer": {"store_after_seconds": store_after_seconds},
        "segment": {"max_entries": 8},
        "upstream": {"window": WINDOW},
    }
    daemon = make_daemon(upstream.url, settings).start()
    talker = Talker(daemon, chance)
    for number in range(max(40, scaled(STEPS))):
        talker.step()
        if number % 20 == 19:
            daemon.kill()
            assert talker.back(daemon.data_dir) == set()
            daemon.start()
    assert daemon.terminate() == 0
    assert len(talker.erased) > 3
    assert talker.back(daemon.data_dir) == set()
