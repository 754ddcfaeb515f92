"""`memd check --traffic FILE`: what the rules for programs would do to recorded requests, and who speaks in them.

Rule: nothing is stored and nothing forwarded. A line of the file is a request body as a client sent it, or an object
with `path` and `body`; a line `{"def": name, "v": value}` names a value that later lines have as `{"$ref": name}`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from memd.errors import BadRequestBody
from memd.messages import Message
from memd.proxy.reading import SideRequests
from memd.settings.model import IngestSettings
from memd.settings.programs import Kind, Rule, programs_of, rules
from memd.speech import Speech
from memd.wire.api import read_request
from memd.wire.registry import api_of
from memd.wire.request import ModelRequest
from memd.wording import counted, for_terminal

SHOWN_CHARACTERS, SHOWN_TEXTS = 80, 20


def report(file: Path, settings: IngestSettings) -> Iterator[str]:
    """The lines of the report.

    Raises:
        click.ClickException: a line is no recorded request.
    """
    programs = programs_of(settings)
    side, wrapping = SideRequests(programs), Speech(programs.strip)
    speech = Speech(programs.strip, programs.message, programs.reply, programs.result)
    met: dict[Rule, list[str]] = {}
    said: Counter[str] = Counter()
    requests = apart = 0
    seen: set[Message] = set()
    for request in _requests(file):
        users = [wrapping.heard(one).said for one in request.messages if one.role == "user"]
        texts: list[dict[Kind, str]] = [dict.fromkeys(("ignore_system", "sub_agent"), request.instructions)]
        texts.append({"ignore": users[-1] if users else ""})
        is_apart = side.includes(request)
        requests, apart = requests + 1, apart + is_apart
        new = [] if is_apart else [one for one in request.messages if one not in seen]
        seen.update(new)
        for message in new:
            words, whole = wrapping.heard(message).said.strip(), message.text.strip()
            texts.append({"strip": whole, "message": words, "result": whole} if message.role == "user" else {})
            texts.append({"reply": words} if message.role == "assistant" else {})
            if (heard := speech.heard(message)).opens_turn:
                said[_short(heard.said)] += 1
        for rule, text in ((rule, one[rule.kind]) for one in texts for rule in rules() if rule.kind in one):
            find = re.fullmatch if rule.kind in ("message", "reply", "result") else re.search
            if (found := find(rule.pattern, text)) is not None and found[0]:
                met.setdefault(rule, []).append(found[0])
    yield f"{counted(requests, 'request')}: {apart} that a program makes for itself and memory leaves alone"
    for rule, texts_met in sorted(met.items(), key=lambda one: -len(one[1])):
        yield f"{rule.kind:<14}{len(texts_met):>5}  {rule.of.partition(';')[0]}: {_short(texts_met[0])}"
    yield f"{counted(len(said), 'text')} taken for a user's speech{', the first' if len(said) > SHOWN_TEXTS else ''}:"
    yield from (f"{count:>19}  {text}" for text, count in list(said.items())[:SHOWN_TEXTS])


def _short(text: str) -> str:
    words = " ".join(for_terminal(text).split())
    return words if len(words) <= SHOWN_CHARACTERS else f"{words[:SHOWN_CHARACTERS]}…"


def _requests(file: Path) -> Iterator[ModelRequest]:
    named: dict[str, Any] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            told = msgspec.json.decode(line)
            if "def" in told:
                named[told["def"]] = told["v"]
                continue
            body = _whole(told.get("body", told), named)
            # By its shape where the recording does not have its path.
            guessed = "/responses" if "input" in body else "/messages" if "system" in body else "/chat/completions"
            if (api := api_of("POST", told.get("path", guessed).partition("?")[0])) is not None:
                yield read_request(api, msgspec.json.encode(body))
        except (msgspec.DecodeError, BadRequestBody, AttributeError, KeyError, TypeError, RecursionError) as error:
            said = f"{file}, line {number} is no recorded request ({error}); give each a line: the body as JSON"
            raise click.ClickException(said) from error


def _whole(value: Any, named: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_whole(one, named) for one in value]
    if isinstance(value, dict):
        is_name = value.keys() == {"$ref"}
        return named[value["$ref"]] if is_name else {key: _whole(one, named) for key, one in value.items()}
    return value
