"""What is ingested by bench/ingest.py: conversations of four kinds, made here, the same for the same seed.

Chat prose, source code, tool results (JSON and log lines), and languages other than English. Every text differs from
every other, so that nothing is left out as a repetition; words are drawn, so the cosines are those of real sentences of
little variety.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from vectors import sentences

from memd.messages import Message, ToolCall

CONVERSATION_MESSAGES = 30

_NAMES = ("parse", "load", "merge", "route", "count", "cache", "fetch", "clean", "order", "split", "write", "check")
_THINGS = ("invoice", "token", "harbour", "boat", "ledger", "segment", "header", "cursor", "window", "packet", "sensor")
_LEVELS = ["DEBUG", "INFO", "INFO", "INFO", "WARN", "ERROR"]
_LANGUAGES = (
    (
        "{a} wartet seit {n} Tagen auf {b}, weil niemand die Nachricht {n} gelesen hat.",
        ["der Hafenmeister", "die Werkstatt", "unsere Lehrerin", "das Labor", "der Zug nach Basel", "die Bibliothek"],
    ),
    (
        "Il y a {n} jours, {a} a demandé à {b} de changer la pièce numéro {n}.",
        ["la mairie", "le boulanger", "notre voisin", "l'école", "le garage", "la pharmacie du port"],
    ),
    (
        "{a}昨天向{b}订了{n}个新的零件，但是第{n}号还没有送到。",
        ["图书馆", "修理厂", "邻居", "学校", "港口办公室", "面包店"],
    ),
    (
        "{a}は{b}に{n}番の書類を送りましたが、まだ返事が来ていません。",
        ["図書館", "研究室", "先生", "港の事務所", "工場", "駅員"],
    ),
    (
        "{a} уже {n} дней ждёт, когда {b} пришлёт деталь номер {n}.",
        ["мастерская", "школа", "сосед", "библиотека", "начальник порта", "лаборатория"],
    ),
)


def conversation(kind: str, seed: int) -> list[Message]:
    """CONVERSATION_MESSAGES messages of about 130 tokens each."""
    chance = random.Random(f"{kind} {seed}")
    return KINDS[kind](chance)


def questions(count: int, seed: int) -> list[str]:
    """What somebody asks who remembers vaguely."""
    return [f"What was it that {sentence}?" for sentence in sentences(count, seed)]


def _chat(chance: random.Random) -> list[Message]:
    return _talk(lambda: " ".join(sentences(5, chance.randrange(1 << 30))) + ".")


def _code(chance: random.Random) -> list[Message]:
    return _talk(
        lambda: f"Here it is now, revision {chance.randrange(10**6)}:\n\n```python\n{_function(chance)}\n```\n"
    )


def _function(chance: random.Random) -> str:
    name, thing, number = chance.choice(_NAMES), chance.choice(_THINGS), chance.randrange(10_000)
    other, limit = chance.choice(_THINGS), chance.randrange(2, 5000)
    return (
        f"def {name}_{thing}_{number}(self, {thing}s: Sequence[{thing.title()}], limit: int = {limit}) -> int:\n"
        f'    """{name.title()} every {thing} up to `limit`; those of {other} {number} come first."""\n'
        f"    seen: dict[str, {other.title()}] = {{}}\n"
        f"    for position, {thing} in enumerate({thing}s[:limit]):\n"
        f"        if {thing}.{other}_id in seen or position % {chance.randrange(2, 99)} == 0:\n"
        f"            continue\n"
        f"        seen[{thing}.{other}_id] = self._{other}s.{chance.choice(_NAMES)}({thing}, at=0x{number:04x})\n"
        f"    return len(seen)"
    )


def _tools(chance: random.Random) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < CONVERSATION_MESSAGES:
        thing, call = chance.choice(_THINGS), f"call_{chance.randrange(10**9)}"
        asked = f"Why did the {thing} service restart at {chance.randrange(24):02}:{chance.randrange(60):02}?"
        arguments = json.dumps({"service": thing, "lines": chance.randrange(5, 50)})
        told = _json(chance) if chance.random() < 0.5 else _log_lines(chance, thing)
        messages.append(Message(role="user", text=asked))
        messages.append(Message(role="assistant", text="", tool_calls=(ToolCall(call, "read_log", arguments),)))
        messages.append(Message(role="tool", text=told, tool_call_id=call))
        messages.append(Message(role="assistant", text=f"It ran out of file handles; see {thing} {call[-4:]}."))
    return messages


def _json(chance: random.Random) -> str:
    rows = [
        {"id": chance.randrange(10**7), "name": chance.choice(_THINGS), "load": round(chance.random(), 3), "ok": True}
        for _ in range(8)
    ]
    return json.dumps({"rows": rows, "next": f"{chance.randrange(1 << 40):x}"}, indent=1)


def _log_lines(chance: random.Random, thing: str) -> str:
    lines = []
    for _ in range(7):
        day, hour, millisecond = chance.randrange(1, 30), chance.randrange(24), chance.randrange(999)
        peer = f"10.0.{chance.randrange(255)}.{chance.randrange(255)}"
        did = f"{chance.choice(_NAMES)} took {chance.randrange(5000)} ms peer={peer}"
        stamp = f"2026-11-{day:02}T{hour:02}:{chance.randrange(60):02}:07.{millisecond:03}Z"
        lines.append(f"{stamp} {chance.choice(_LEVELS)} {thing}[{chance.randrange(9999)}] {did}")
    return "\n".join(lines)


def _foreign(chance: random.Random) -> list[Message]:
    pattern, words = chance.choice(_LANGUAGES)

    def text() -> str:
        told = []
        for _ in range(4):
            one, other = chance.sample(words, 2)
            told.append(pattern.format(a=one, b=other, n=chance.randrange(1000)))
        return " ".join(told)

    return _talk(text)


def _talk(text: Callable[[], str]) -> list[Message]:
    return [Message(role=("user", "assistant")[i % 2], text=text()) for i in range(CONVERSATION_MESSAGES)]


KINDS: dict[str, Callable[[random.Random], list[Message]]] = {
    "chat": _chat,
    "source code": _code,
    "tool results": _tools,
    "not English": _foreign,
}
