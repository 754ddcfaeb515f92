"""`memd check`: is everything ready, and if not, what to do.

Rule: this module has only the order of the checks and their output; the first line says whether all is well.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import msgspec

from memd.cli.check import data, settings, upstream
from memd.cli.check import traffic as recorded
from memd.cli.check.result import CheckResult, Mark, failed, failed_with, ok, warning
from memd.cli.flags import FOUND_SOMETHING, servers_of, settings_flags, upstream_flag
from memd.cli.running import awaited
from memd.cli.tables import WIDE, progress
from memd.errors import ConfigError, StoreError
from memd.settings.loading import load_config, places_of_settings
from memd.store.disk import LocalDisk
from memd.store.encryption.opening import disk_of
from memd.store.layout import RECEIPTS_NAME
from memd.store.tools.disk_usage import disk_usage
from memd.wording import counted, for_terminal

_COLOUR: dict[Mark, str] = {"ok": "green", "warning": "yellow", "failed": "red"}
_MARK_WIDTH, _NAME_WIDTH = 9, 17
ROOM_MIN = 40


@click.command()
@settings_flags
@upstream_flag("The model server, or several. Default: the running daemon's, else upstream.url.")
@click.option(
    "--traffic",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Instead say what the rules for programs do to recorded requests: a body of JSON a line.",
)
@click.option("--live", is_flag=True, help="Also hold a short conversation with the model, in a temporary folder.")
@click.option("--json", "as_json", is_flag=True, help="All outcomes as one JSON object.")
def check(
    config_path: Path | None,
    data_dir: str | None,
    upstream: tuple[str, ...],
    traffic: Path | None,
    live: bool,
    as_json: bool,
) -> int:
    """Say whether everything is ready, and if not, what to do.

    Exit code 1 if anything failed.

    Example: memd check --live
    """
    logging.getLogger("memd").addHandler(logging.NullHandler())  # the results say it
    flags = {"data_dir": data_dir, **servers_of(upstream)}
    given = {name: value for name, value in flags.items() if value is not None}
    if traffic is not None:
        told = list(recorded.report(traffic, load_config(config_path, os.environ, given).ingest))
        click.echo(msgspec.json.encode({"traffic": told}) if as_json else "\n".join(told))
        return 0
    with progress("checking") as advanced:  # to the end: its first line is whether all is well
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
    """Run the checks, in order.

    Args:
        path, env, given: as for `load_config`.
        live: whether to hold a conversation with the model too.
        files: the disk; another one than the real only where a fault is to be injected.
    """
    yield settings.packages()
    yield settings.tokenizer()
    useless: list[str] = []
    try:
        config = load_config(path, env, given, tell=useless.append)
        file, places = places_of_settings(path, env, given)
    except ConfigError as error:
        yield failed_with(settings.SETTINGS, error)
        yield failed("the rest", "was not looked at", "correct the settings first, then ask again")
        return
    yield settings.origin(file, places)
    for line in useless:
        yield warning(settings.SETTINGS, *line.split("; ", 1))
    yield settings.access(config, file, places)
    yield settings.open_files(config)
    yield from settings.sources(config)
    daemon, _ = awaited(config)
    try:
        disk = disk_of(config, files)
    except StoreError as error:
        yield failed_with(data.ENCRYPTION, error)
    else:
        if disk.encrypts(config.data_dir / RECEIPTS_NAME):
            yield ok(data.ENCRYPTION, f"{config.data_dir} is encrypted, and the key that is given is its own")
        yield data.directory(config.data_dir, disk)
        yield from data.permissions(config.data_dir)
        yield data.lock(config.data_dir, daemon, disk)
        topics = []
        try:
            topics = disk_usage(config.data_dir, disk)
            yield from data.log(config.data_dir, topics, disk, is_cache=config.cluster.is_on)
        except StoreError as error:
            yield failed_with(data.LOG, error)
        yield from data.audit(config.data_dir, disk)
        yield from data.backup(config, env, daemon)
        yield from data.cluster(config)
        yield from settings.embedding_model(config, topics, disk)
        yield from settings.reranker(config)
    yield settings.address(config, daemon)
    is_served = daemon is not None and not given.keys() & {"upstream.url", "upstream.urls"}
    if daemon is not None and is_served:
        config = upstream.as_served(config, daemon)
    probe, told = upstream.upstream(config, daemon if is_served else None)
    yield from told
    if live and not any(outcome.mark == "failed" for outcome in told):
        yield from upstream.live(config, probe.model or "any", probe.window, daemon)
    elif live:
        yield failed(upstream.LIVE, "not tried", "mend the upstream first")


def line(outcome: CheckResult, width: int = WIDE) -> str:
    """Return a result as text, in colours; its remedy is on a line of its own."""
    mark = click.style(outcome.mark.ljust(_MARK_WIDTH), fg=_COLOUR[outcome.mark], bold=outcome.mark != "ok")
    indent = " " * (_MARK_WIDTH + _NAME_WIDTH)
    said = _broken(outcome.said, indent, width)
    shown = f"{mark}{outcome.check.ljust(_NAME_WIDTH)}{said}"
    if not outcome.remedy:
        return shown
    return f"{shown}\n{indent}{click.style('→', bold=True)} {_broken(outcome.remedy, f'{indent}  ', width)}"


def summary(found: list[CheckResult]) -> str:
    """Return the first line: whether all is well, and what is not."""
    count = {mark: sum(outcome.mark == mark for outcome in found) for mark in _COLOUR}
    if count["failed"]:
        names = ", ".join(dict.fromkeys(outcome.check for outcome in found if outcome.mark == "failed"))
        return f"memd is not ready: {count['failed']} failed ({names}), {counted(count['warning'], 'warning')}"
    return "memd is ready" + (f"; {counted(count['warning'], 'warning')}" if count["warning"] else "")


def _broken(text: str, indent: str, width: int) -> str:
    """Text in lines of at most `width`, the later ones indented; no word is broken, as it may be a path."""
    room = max(width - len(indent), ROOM_MIN)
    words = " ".join(for_terminal(text).split())
    return f"\n{indent}".join(textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False))
