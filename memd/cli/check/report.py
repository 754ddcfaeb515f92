"""`memd check`: is everything ready, and if not, what to do.

Rule: this module has the order of the checks, their output, and the report on recorded requests that replaces them with
`--traffic`. The first line says whether all is well.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from memd.cli.check import CheckResult, Mark, failed, failed_with, machine, ok, upstream, warning
from memd.cli.flags import FILE, FOUND_SOMETHING, servers_of, settings_flags, upstream_flag
from memd.cli.operations import WIDE, progress
from memd.cli.running import awaited
from memd.errors import BadRequestBody, ConfigError, StoreError
from memd.messages import Message, Speech
from memd.proxy.reading import SideRequests
from memd.settings.loading import Kind, Rule, load_config, places_of_settings, programs_of, rules
from memd.settings.model import IngestSettings
from memd.store.disk import LocalDisk
from memd.store.encryption.disk import disk_of
from memd.store.layout import RECEIPTS_NAME
from memd.store.tools.verify import disk_usage
from memd.wire.api import ModelRequest, read_request
from memd.wire.registry import api_of
from memd.wording import counted, for_terminal, with_remedy

_COLOUR: dict[Mark, str] = {"ok": "green", "warning": "yellow", "failed": "red"}
_MARK_WIDTH, _NAME_WIDTH = 9, 17
ROOM_MIN = 40


@click.command()
@settings_flags
@upstream_flag("The model server, or several. Default: the running daemon's, else upstream.url.")
@click.option(
    "--traffic",
    type=FILE,
    metavar="FILE",
    help="Instead say what the rules for programs do to recorded requests: a body of JSON a line.",
)
@click.option("--live", is_flag=True, help="Also hold a short conversation with the model, in a temporary folder.")
@click.option("--json", "as_json", is_flag=True, help="All outcomes as one JSON object.")
def check(
    config_path: Path | None, data_dir: str | None, *, traffic: Path | None, live: bool, as_json: bool, **servers: Any
) -> int:
    """Say whether everything is ready, and if not, what to do.

    Exit code 1 if anything failed.

    Example: memd check --live
    """
    logging.getLogger("memd").addHandler(logging.NullHandler())  # the results report it
    flags = {"data_dir": data_dir, **servers_of(servers["upstream"])}
    given = {name: value for name, value in flags.items() if value is not None}
    if traffic is not None:
        told = list(traffic_report(traffic, load_config(config_path, os.environ, given).ingest))
        click.echo(msgspec.json.encode({"traffic": told}) if as_json else "\n".join(told))
        return 0
    with progress("checking") as advanced:  # until the end, because the first output line says whether all is well
        found: list[CheckResult] = []
        for outcome in outcomes(config_path, os.environ, given, live=live):
            found.append(outcome)
            advanced(len(found), len(found) + 1)
    is_ready = all(outcome.mark != "failed" for outcome in found)
    if as_json:
        click.echo(msgspec.json.encode({"ok": is_ready, "checks": found}))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
        click.echo("\n".join([summary(found), "", *(line(one, width) for one in found)]))
    return 0 if is_ready else FOUND_SOMETHING


def outcomes(
    path: Path | None,
    env: Mapping[str, str],
    given: Mapping[str, object],
    *,
    live: bool,
    files: LocalDisk | None = None,
) -> Iterator[CheckResult]:
    """Run the checks in order. `path, env, given`: as for `load_config`. `live`: also hold a conversation with the
    model. `files`: the disk; a different one only to inject faults."""
    yield from machine.installation()
    yield from machine.tokenizer()
    useless: list[str] = []
    try:
        config = load_config(path, env, given, tell=useless.append)
        file, places = places_of_settings(path, env, given)
    except ConfigError as error:
        yield failed_with(error, machine.SETTINGS)
        yield failed("was not looked at", "correct the settings first, then ask again", "the rest")
        return
    yield from machine.origin(file, places)
    for line in useless:
        yield warning(*with_remedy(line), machine.SETTINGS)
    yield from machine.access(config, file, places)
    yield from machine.open_files(config)
    for source in config.sources:
        yield from machine.source(source, config.data_dir)
    daemon, _ = awaited(config)
    yield from machine.troubles(daemon)
    try:
        disk = disk_of(config, files)
    except StoreError as error:
        yield failed_with(error, "encryption")
    else:
        if disk.encrypts(config.data_dir / RECEIPTS_NAME):
            yield ok(f"{config.data_dir} is encrypted, and the key that is given is its own", check="encryption")
        yield from machine.directory(config.data_dir, disk)
        yield from machine.permissions(config.data_dir)
        yield from machine.lock(config.data_dir, daemon, disk)
        topics = []
        try:
            topics = disk_usage(config.data_dir, disk)
            yield from machine.log(config.data_dir, topics, disk, is_cache=config.cluster.is_on)
        except StoreError as error:
            yield failed_with(error, "log")
        yield from machine.audit(config.data_dir, disk)
        yield from machine.bucket(config, env)
        yield from machine.cluster(config)
        yield from machine.embedding_model(config, topics, disk)
        yield from machine.reranker(config)
    yield from machine.address(config, daemon)
    is_served = daemon is not None and not given.keys() & {"upstream.url", "upstream.urls"}
    yield from upstream.upstream(config, daemon, is_served=is_served, is_live=live)


def line(outcome: CheckResult, width: int = WIDE) -> str:
    """Format a result in colours, with its remedy on a separate line."""
    mark = click.style(outcome.mark.ljust(_MARK_WIDTH), fg=_COLOUR[outcome.mark], bold=outcome.mark != "ok")
    indent = " " * (_MARK_WIDTH + _NAME_WIDTH)
    said = _broken(outcome.said, indent, width)
    shown = f"{mark}{outcome.check.ljust(_NAME_WIDTH)}{said}"
    if not outcome.remedy:
        return shown
    return f"{shown}\n{indent}{click.style('→', bold=True)} {_broken(outcome.remedy, f'{indent}  ', width)}"


def summary(found: list[CheckResult]) -> str:
    """Return the first line: whether all is well, and otherwise the problems."""
    count = {mark: sum(outcome.mark == mark for outcome in found) for mark in _COLOUR}
    if count["failed"]:
        names = ", ".join(dict.fromkeys(outcome.check for outcome in found if outcome.mark == "failed"))
        return f"memd is not ready: {count['failed']} failed ({names}), {counted(count['warning'], 'warning')}"
    return "memd is ready" + (f"; {counted(count['warning'], 'warning')}" if count["warning"] else "")


def _broken(text: str, indent: str, width: int) -> str:
    """Wrap a text at `width`, indenting later lines; words are never broken, because one may be a path."""
    room = max(width - len(indent), ROOM_MIN)
    words = " ".join(for_terminal(text).split())
    return f"\n{indent}".join(textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False))


SHOWN_CHARACTERS, SHOWN_TEXTS = 80, 20


def traffic_report(file: Path, settings: IngestSettings) -> Iterator[str]:
    """Report how the rules for programs apply to recorded requests, and who speaks in those; nothing is stored.

    Each line of the file is a client's request body, or an object with `path` and `body`. A line
    `{"def": name, "v": value}` defines a value that later lines use as `{"$ref": name}`. Raises click.ClickException
    if a line is neither."""
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

    def whole(value: dict[str, Any]) -> Any:
        return named[value["$ref"]] if value.keys() == {"$ref"} else value

    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            told = json.loads(line, object_hook=whole)
            if "def" in told:
                named[told["def"]] = told["v"]
                continue
            body = told.get("body", told)
            # By its shape if the recording has no path.
            guessed = "/responses" if "input" in body else "/messages" if "system" in body else "/chat/completions"
            if (api := api_of(told.get("path", guessed).partition("?")[0])) is not None:
                yield read_request(api, msgspec.json.encode(body))
        except (ValueError, BadRequestBody, AttributeError, KeyError, TypeError, RecursionError) as error:
            said = f"{file}, line {number} is no recorded request ({error}); give each a line: the body as JSON"
            raise click.ClickException(said) from error
