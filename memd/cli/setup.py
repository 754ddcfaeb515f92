"""`memd setup`: writes memd's base URL into the settings of installed agents.

Rule: nothing is written before the difference was shown and confirmed. A file keeps its other content: comments and
order if its format has comments (TOML, YAML), everything except the layout in JSON. The edited text is parsed again.
Unless the result is exactly as intended, the file is left alone and the lines are printed for editing by hand.
"""

from __future__ import annotations

import difflib
import http.client
import json
import os
import re
import shutil
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import yaml

from memd.admin.status import health
from memd.assets import words_of
from memd.cli.check.upstream import as_served
from memd.cli.flags import FOUND_SOMETHING, OneOf, config_of, say, with_settings
from memd.cli.running import RunningDaemon
from memd.entries import checked_topic_id
from memd.errors import BadQuestion, MemdError
from memd.proxy.connections import reached
from memd.settings.model import Config, base_of
from memd.wording import for_terminal, name_for_terminal

Json = dict[str, Any]

YAML = (".yml", ".yaml")
COPY = ".before-memd"
"""Suffix of the copy beside a file, which `--undo` restores; an empty copy means that there was no file."""
GLANCE_SECONDS_MAX = 2.0
IF_NONE, KEY = "?", "?{key}"
"""Prefix of a value that is written only if there is none yet, and the placeholder of memd's key."""


OWN = "memd"
"""Name of the settings tables that are entirely memd's."""


class AgentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A settings file of an agent and the values that memd writes into it; explained in `assets/agents.toml`."""

    agent: str
    binary: str
    sign: str
    names: tuple[str, ...]
    wanted: Json
    variable: str = ""
    folder: str = ""
    never_beside: str = ""
    then: str = ""

    @property
    def path(self) -> Path:
        """The first existing one of its names, otherwise the last."""
        folder = Path(os.environ.get(self.variable) or Path.home() / self.folder)
        paths = [folder / name for name in self.names]
        return next((one for one in paths if one.exists()), paths[-1])

    @property
    def copy(self) -> Path:
        """The copy beside it, from before the first run."""
        return self.path.with_name(self.path.name + COPY)

    @property
    def kind(self) -> str:
        """File suffix: `.json`, `.toml` and so on."""
        return self.path.suffix

    @property
    def is_installed(self) -> bool:
        """True if the agent is on this machine."""
        is_set_up = (Path.home() / self.sign).exists() or bool(os.environ.get(self.variable))
        return is_set_up or bool(shutil.which(self.binary))


AGENTS = tuple(
    msgspec.convert(row | {"wanted": json.loads(row["wanted"])}, AgentFile) for row in words_of("agents")["agents"]
)
NAMES = tuple(dict.fromkeys(one.agent for one in AGENTS))
OTHERS = "; docs/clients.md says how others are connected"
SERVERS = {"llama-server": 8080, "Ollama": 11434, "LM Studio": 1234, "vLLM": 8000}
_TOPIC = re.compile(r"://[^/\s]+/t/([\w.-]+)")
NOT_NOW = (401, 403, 503)
"""HTTP statuses of a model server that needs a key or is not ready."""


class Change(NamedTuple):
    """A file's present and intended text."""

    path: Path
    copy: Path
    before: str
    after: str


class CannotEdit(MemdError):
    """A file that memd does not edit; the message gives the reason."""


@click.command()
@click.argument("agents", metavar="[AGENT...]", nargs=-1, type=OneOf(NAMES, OTHERS))
@click.option("--topic", metavar="TOPIC", help="A memory of its own, in all your projects: the URL gets /t/TOPIC.")
@click.option("--model", metavar="NAME", help="The model's name. Default: the first that the model server lists.")
@click.option("--undo", is_flag=True, help="Take back what an earlier run wrote.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_settings(config_of)
def setup(agents: tuple[str, ...], topic: str | None, model: str | None, undo: bool, yes: bool, config: Config) -> int:
    """Write memd's base URL into the agents that are installed.

    AGENT...: pi, opencode, codex, claude-code, qwen-code, continue, cline or aider; default: all. Each change is shown
    first, and a copy of the file is kept beside it. Names the model servers that run at their usual ports, too.

    Example: memd setup codex --topic my-project
    """
    if undo and (topic or model):
        raise BadQuestion("--undo takes everything back: give it without --topic and --model")
    daemon = RunningDaemon.find(config.data_dir, config.auth.token)
    base = f"{'https' if config.listen.tls_cert else 'http'}://{reached(config.listen.host)}:{config.listen.port}"
    if daemon and not undo:  # asked with the agents' key: without the right one memd refuses them
        base = RunningDaemon(daemon.url, config.auth.token).ask(health).model_url
    values = {"url": base + (f"/t/{checked_topic_id(topic)}" if topic else ""), "key": config.auth.token or "-"}
    values |= {"now": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}", "model": model or ""}
    is_named = bool(model or undo)
    if not undo:
        listed = _tell_servers(config, daemon, base)
        values["model"], is_named = model or listed or "local", bool(model or listed)
    rows = [one for one in AGENTS if one.agent in (agents or NAMES)]
    rows = [one for one in rows if (one.copy.exists() if undo else one.is_installed)]
    if not rows:
        which = ", ".join(agents or NAMES)
        click.echo(f"There is nothing to take back for {which}." if undo else f"Not installed: {which}.")
        return 0
    if not is_named:
        click.echo("No server names its model: `local` is written, which llama-server takes; others need --model NAME.")
    left_alone = False
    for agent in dict.fromkeys(one.agent for one in rows):
        files = [one for one in rows if one.agent == agent]
        left_alone |= _agent(files, values, undo=undo, yes=yes)
    return FOUND_SOMETHING if left_alone else 0


def _agent(files: list[AgentFile], values: Mapping[str, str], *, undo: bool, yes: bool) -> bool:
    """Show the changes of an agent's files, ask, and make them. Return whether a file was left alone."""
    agent, changes, left_alone = files[0].agent, list[Change](), False
    for row in files:
        try:
            changes.append(_change(row, values, undo=undo))
        except (CannotEdit, OSError, UnicodeError) as error:
            say(f"{row.path} of {agent} is left alone: {error}")
            if not undo:
                click.echo(f"Write into it by hand:\n{_by_hand(_merged(None, row.wanted, values), row.kind)}", err=True)
            left_alone = True
    different = [one for one in changes if one.before != one.after]
    for one in different:
        lines = difflib.unified_diff(one.before.splitlines(), one.after.splitlines(), lineterm="")
        shown = [f"{agent}: {one.path}", *list(lines)[2:]]
        click.echo("\n".join(map(for_terminal, shown)))
        former = sorted({*_TOPIC.findall(one.before)} - {*_TOPIC.findall(one.after)})
        if former and not undo:
            click.echo(f"{agent}: this replaces topic {', '.join(former)}, in all projects of this user.")
    if changes and not different and not undo:
        click.echo(f"{agent}: nothing to change.")
    if different and not (yes or click.confirm(f"Change {agent}?")):
        click.echo(f"{agent} stays as it is.")
        return left_alone
    for one in changes if undo else different:
        if not undo and not one.copy.exists():  # from before the first run; empty if there was no file
            one.copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(one.path, one.copy) if one.path.exists() else one.copy.touch()
        _write(one)
        if undo:
            one.copy.unlink()
    if different:
        then = "".join(f"; {row.then}" for row in files if row.then)
        done = f"{agent} asks memd now{then}. `memd setup --undo` goes back."
        click.echo(f"memd is out of {agent}." if undo else done)
    return left_alone


# The model servers


def _tell_servers(config: Config, daemon: RunningDaemon | None, own: str) -> str:
    """Print the running model servers; return the first model that memd, or else one of them, lists; empty if none."""
    served = as_served(config, daemon) if daemon else config
    upstream = base_of(served.upstream.each()[0].url)
    by = "upstream.url" if served is config else "of the running memd"
    places = {f"http://127.0.0.1:{port}": f", the usual place of {name}" for name, port in SERVERS.items()}
    places = {upstream: "", **places}
    found = {url: models for url in places if url != own and (models := _models(url)) is not None}
    for url, models in found.items():
        has = f" with {name_for_terminal(models[0])}" if models else ""
        used = "upstream.url is set to it" if served is config else "the running memd asks it"
        to_do = used if url == upstream else f"for memd: upstream.url: {url}"
        click.echo(f"A model server answers at {url}{has}{places[url]}; {to_do}.")
    if not found:
        ports = ", ".join(f"{name} {port}" for name, port in SERVERS.items())
        click.echo(f"No model server answers at {upstream} ({by}) or at a usual port ({ports}).")
    return next((models[0] for models in (_models(own), *found.values()) if models), "")


def _models(url: str) -> list[str] | None:
    """Return the models that a server lists, none if it needs a key or is loading; None if no server answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/v1/models", timeout=GLANCE_SECONDS_MAX) as answer:
            told = json.loads(answer.read(1_000_000))
        return [str(one["id"]) for one in told["data"]]
    except urllib.error.HTTPError as refusal:
        return [] if refusal.code in NOT_NOW else None
    except (OSError, ValueError, http.client.HTTPException, LookupError, TypeError):
        return None


# An agent's files


def _text(path: Path) -> str:
    return path.read_bytes().decode() if path.exists() else ""


def _write(change: Change) -> None:
    """Replace the file atomically, following links; remove it if the text is empty."""
    path = change.path.resolve()
    if not change.after:
        path.unlink(missing_ok=True)
        return
    made = path.with_name(f"{path.name}.memd-new")
    made.write_bytes(change.after.encode())
    if path.exists():
        shutil.copymode(path, made)
    made.replace(path)


def _change(row: AgentFile, values: Mapping[str, str], *, undo: bool) -> Change:
    """`undo`: revert only memd's own values; later changes by others stay. Raises CannotEdit: the file cannot be
    parsed, or not be changed safely."""
    path, copy, kind = row.path, row.copy, row.kind
    if not undo and row.never_beside and not path.exists() and (path.parent / row.never_beside).exists():
        raise CannotEdit(f"{row.never_beside} would not be read any more beside it")
    text, kept, wanted = _text(path), _text(copy), _merged(None, row.wanted, values)
    try:
        now = _parsed(text, kind)
        if not undo:
            target = _merged(now, row.wanted, values)
            return Change(path, copy, text, text if target == now else _edited(text, kind, now, target, wanted))
        target = _without(now, before := _parsed(kept, kind), wanted)
        return Change(path, copy, text, kept if target == before else _edited(text, kind, now, target, wanted))
    except CannotEdit as error:
        raise CannotEdit(f"{error}; as it was before, it is {copy}" if undo else str(error)) from None


# What a file says


def _merged(now: Any, wanted: Any, values: Mapping[str, str]) -> Any:
    """Merge `wanted` into `now` and fill its placeholders; a token of memd's own replaces any other key."""
    if isinstance(wanted, dict):
        here = now if isinstance(now, dict) else {}
        named = {_replaced(name, values): value for name, value in wanted.items()}
        return here | {name: _merged(here.get(name), value, values) for name, value in named.items()}
    if isinstance(wanted, list):
        made = [_merged(None, one, values) for one in wanted]
        names = [one["name"] for one in made if isinstance(one, dict)]
        return [*made, *(one for one in now or () if names and not _is_named(one, names))]
    if not isinstance(wanted, str):
        return wanted
    is_only_if_none = wanted.startswith(IF_NONE) and not (wanted == KEY and values["key"] != "-")
    return now if is_only_if_none and now is not None else _replaced(wanted.removeprefix(IF_NONE), values)


def _replaced(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(url|key|now|model)\}", lambda found: values[found[1]], text)


def _without(now: Json, before: Json, wanted: Json) -> Json:
    """Return `now` with the values in `wanted` reset to those in `before`."""
    back = dict(now)
    for name, value in wanted.items():
        if name != OWN and isinstance(value, dict) and isinstance(now.get(name), dict):
            was = before.get(name)
            back[name] = _without(now[name], was if isinstance(was, dict) else {}, value)
        elif isinstance(value, list) and isinstance(now.get(name), list):
            names = [one["name"] for one in value]
            was = before.get(name) or []
            back[name] = [one for one in was if _is_named(one, names)]
            back[name] += [one for one in now[name] if not _is_named(one, names)]
        elif name in before:
            back[name] = before[name]
        if name not in before and (name == OWN or not (back.get(name) and isinstance(value, dict | list))):
            back.pop(name, None)
    return back


def _is_named(entry: Any, names: list[str]) -> bool:
    return isinstance(entry, dict) and entry.get("name") in names


# The text of a file


def _parsed(text: str, kind: str) -> Json:
    try:
        if kind == ".toml":
            return tomllib.loads(text)
        told = _yaml(text) if kind in YAML else json.loads(text) if text.strip() else {}
    except (ValueError, yaml.YAMLError) as error:
        place = str(error).splitlines()[0]
        raise CannotEdit(f"memd cannot read it ({place}); comments in JSON are not read either") from None
    if not isinstance(told, dict):
        raise CannotEdit("it holds no settings with names")
    return told


def _yaml(text: str) -> Any:
    """Parse as PyYAML does, but reject duplicate keys, which other parsers treat as an error."""
    root = yaml.compose(text, yaml.SafeLoader)
    names = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise yaml.YAMLError(f"{repeated!r} is there twice")
    return yaml.safe_load(text) or {}


def _by_hand(wanted: Json, kind: str) -> str:
    if kind == ".toml":
        return "\n".join([*_pairs({n: v for n, v in wanted.items() if not isinstance(v, dict)}, "="), *_tables(wanted)])
    if kind in YAML:
        return yaml.safe_dump(wanted, sort_keys=False)
    return json.dumps(wanted, indent=2, ensure_ascii=False)


def _edited(text: str, kind: str, now: Json, target: Json, wanted: Json) -> str:
    """Return the text with the settings of `target`, which differs from `now` only in `wanted`. Raises CannotEdit:
    separate lines cannot express the change."""
    ends = "\r\n" if "\r\n" in text else "\n"
    unix = text.replace("\r\n", "\n")
    if kind in (".toml", *YAML):
        unix = unix if unix.endswith("\n") or not unix else unix + "\n"
        edited = _edited_lines(unix, "=" if kind == ".toml" else ":", now, target, wanted)
    else:
        found = re.search(r"^([ \t]+)\S", unix, re.MULTILINE)
        edited = json.dumps(target, indent=found[1] if found else 2, ensure_ascii=False) + "\n" if target else ""
    try:
        said = _parsed(edited, kind)
    except CannotEdit:
        said = None
    if said != target:
        raise CannotEdit("it is laid out so that its lines cannot be changed safely")
    return edited.replace("\n", ends)


def _edited_lines(text: str, sign: str, now: Json, target: Json, wanted: Json) -> str:
    """Edit TOML (`=`) or YAML (`:`): top-level values in their lines, tables and list entries as blocks."""
    first_table = re.search(r"^\[", text, re.MULTILINE) if sign == "=" else None
    cut = first_table.start() if first_table else len(text)
    head, rest = text[:cut], text[cut:]
    for name, value in wanted.items():
        if isinstance(value, dict):  # one table per member
            for inner in value:
                table = rf"\n?^\[{name}\.{inner}\]\n(?:[\w-]+ *=.*\n)*"
                rest = re.sub(table, "", rest, flags=re.MULTILINE)
            blocks = _tables({name: {inner: target.get(name, {}).get(inner) for inner in value}})
            rest += "".join(f"\n{block}\n" for block in blocks)
        elif isinstance(value, list):
            names = [one["name"] for one in value]
            entries = [one for one in target.get(name, []) if _is_named(one, names)]
            head = _with_entries(head, name, names, entries, is_gone=name not in target)
        elif now.get(name) != target.get(name):
            line = rf"^{re.escape(name)}([ \t]*{sign}[ \t]*)(?:\"[^\"\n]*\"|'[^'\n]*'|[^#\n]*?)([ \t]+#.*)?\n"
            [pair] = _pairs({name: target[name]}, sign) if name in target else [""]
            if not pair:
                head = re.sub(line, "", head, flags=re.MULTILINE)
            elif found := re.search(line, head, re.MULTILINE):
                head = f"{head[: found.start()]}{pair}{found[2] or ''}\n{head[found.end() :]}"
            else:
                pairs = [one.end() for one in re.finditer(r"^[\w\"\]}].*\n", head, re.MULTILINE)]
                at = len(head) if sign == ":" else max(pairs, default=0)
                head = f"{head[:at]}{pair}\n{head[at:]}"
    return head + rest


def _with_entries(text: str, name: str, names: list[str], entries: list[Json], *, is_gone: bool) -> str:
    """Replace the entries of these names in a YAML list; the new ones come first."""
    for one in names:
        text = re.sub(rf"^( *)- name: {one}\n(?:\1 +\S.*\n)*", "", text, flags=re.MULTILINE)
    empty = r"\[[ \t]*\]|\{[ \t]*\}|null|~"
    key = re.search(rf"^([\"']?){name}\1:[ \t]*(?:{empty})?[ \t]*(#.*)?\n", text, re.MULTILINE)
    before, after = (text[: key.start()], text[key.end() :]) if key else (text, "")
    if is_gone:
        return before + after
    sibling = re.match(r"(?:[ \t]*(?:#.*)?\n)*( *)- ", after)
    indent = sibling[1] if sibling else "  "
    value = "" if entries or sibling else " []"
    comment = f"  {key[2]}" if key and key[2] else ""
    dumped = yaml.safe_dump(entries, sort_keys=False, width=1_000_000) if entries else ""
    return f"{before}{name}:{value}{comment}\n" + re.sub(r"^(?=.)", indent, dumped, flags=re.MULTILINE) + after


def _pairs(values: Json, sign: str) -> Iterator[str]:
    between = " = " if sign == "=" else ": "
    return (f"{name}{between}{json.dumps(value, ensure_ascii=False)}" for name, value in values.items())


def _tables(wanted: Json) -> list[str]:
    """Format TOML tables two levels deep."""
    inner = {f"{outer}.{name}": one for outer, members in wanted.items() if isinstance(members, dict)
             for name, one in members.items() if one is not None}  # fmt: skip
    return ["\n".join([f"[{name}]", *_pairs(values, "=")]) for name, values in inner.items()]
