"""`memd digest`, `related` and `entities`: what is stored, seen as a whole.

Rule: the daemon computes; these commands only show its answers.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import click
import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memd.admin.queries import PAGE, PAGE_MAX
from memd.admin.views import Digest, Entities, RelatedChunks
from memd.cli.flags import FOUND_SOMETHING, config_of_existing, print_lines, settings_flags
from memd.cli.running import daemon_for
from memd.store.lexical.entities import Kind
from memd.wording import counted, for_terminal

Answer = TypeVar("Answer")

INDENT = 2
_TOPICS = click.option(
    "--topic", "topics", multiple=True, help="Only this topic; may be given again. Default: all topics."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")


@click.command()
@settings_flags
@_TOPICS
@click.option("--from", "since", metavar="TIME", help="Only what was said from a time (2026-11-20) on.")
@click.option("--to", metavar="TIME", help="Only what was said before a time; of a date, before its end.")
@click.option("--role", "roles", multiple=True, help="Only where this role speaks; may be given again.")
@click.option(
    "--by", type=click.Choice(["auto", "day", "week"]), help="Days or weeks. Default: weeks from two weeks on."
)
@click.option("--sentences", type=click.IntRange(0, 50), help="Key sentences of a period. Default: 3.")
@_JSON
def digest(config_path: Path | None, data_dir: str | None, as_json: bool, **choice: Any) -> int:
    """Show what was said, by day or week.

    Exit code 1 if there is nothing.

    Example: memd digest --from 2026-11-20
    """
    told = _told(config_path, data_dir, "/memd/digest", choice)
    return _shown(told, Digest, _digest_lines, as_json=as_json, nothing="Nothing was said then.")


@click.command()
@settings_flags
@_TOPICS
@click.option("--limit", type=click.IntRange(1, PAGE_MAX), help="How many at most. Default: 10.")
@_JSON
@click.argument("chunk_id", metavar="ID")
def related(config_path: Path | None, data_dir: str | None, as_json: bool, chunk_id: str, **choice: Any) -> int:
    """Show what belongs to the chunk ID without being said beside it.

    Chunks near in meaning, with the same rare names, or of the same half hour; exit code 1 if there are none.

    Example: memd related 9ada
    """
    told = _told(config_path, data_dir, f"/memd/chunks/{quote(chunk_id, safe='')}/related", choice)
    return _shown(told, RelatedChunks, _related_lines, as_json=as_json, nothing="Nothing else has to do with it.")


@click.command()
@settings_flags
@_TOPICS
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([kind.value for kind in Kind]),
    help="Only names written like this.",
)
@click.option("--limit", type=click.IntRange(1, PAGE_MAX), help=f"How many at most. Default: {PAGE}.")
@_JSON
@click.argument("name", metavar="[NAME]", required=False)
def entities(config_path: Path | None, data_dir: str | None, as_json: bool, **choice: Any) -> int:
    """Show the names in what is stored, or the chunks that have NAME.

    Exit code 1 if there are none.

    Example: memd entities --kind path
    """
    told = _told(config_path, data_dir, "/memd/entities", choice)
    return _shown(told, Entities, _entity_lines, as_json=as_json, nothing="No such name is stored.")


def _told(config_path: Path | None, data_dir: str | None, path: str, choice: dict[str, Any]) -> bytes:
    """Ask the daemon; options are named as the route's parameters, those for several in the plural."""
    names = {"topics": "topic", "since": "from", "roles": "role", "kinds": "kind"}
    given = {names.get(name, name): value for name, value in choice.items() if value not in (None, ())}
    with daemon_for(config_of_existing(config_path, data_dir)) as daemon:
        return daemon.get(path, **given)


def _shown(
    told: bytes, shape: type[Answer], lines: Callable[[Answer], list[RenderableType]], *, as_json: bool, nothing: str
) -> int:
    """Print an answer as it came or as lines, and `nothing` where there are none; returns the exit code."""
    if as_json:
        click.echo(told)
        return 0
    printed = lines(msgspec.json.decode(told, type=shape))
    print_lines(printed or [nothing])
    return 0 if printed else FOUND_SOMETHING


def _digest_lines(answer: Digest) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for period in answer.periods:
        days = period.first if answer.by == "day" else f"{period.first} to {period.last}"
        lines.append(Text.assemble((days, "bold"), f"  {counted(period.chunks, 'chunk')}"))
        if period.words:
            lines.append(_indented(", ".join(period.words), "cyan"))
        lines += [_indented(f"{one.id}  {one.text}") for one in period.sentences]
        lines.append("")
    return lines


def _related_lines(answer: RelatedChunks) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for one in answer.chunks:
        said = datetime.fromtimestamp(one.said_at / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
        why = [] if one.cosine is None else [f"cosine {one.cosine:.2f}"]
        why += [f"shares {for_terminal(', '.join(one.shared))}"] if one.shared else []
        why += [] if one.seconds_apart is None else [f"{counted(one.seconds_apart // 60, 'minute')} apart"]
        head = Text.assemble((f"{one.score:.3f}", "bold"), f"  {one.id}  ", (one.topic_id, "cyan"), f"  {said}  ")
        lines.append(Group(head.append("; ".join(why), "green"), _indented(one.content), ""))
    return lines


def _entity_lines(answer: Entities) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for one in answer.entities:
        ids = " ".join(chunk.id for chunk in one.chunks) + ("" if len(one.chunks) == one.count else " …")
        name = (for_terminal(one.name), "bold")
        lines.append(Text.assemble(f"{one.count:>6}  ", name, f"  {one.kind}  ", (ids, "dim")))
    if answer.total > len(answer.entities):
        lines.append(f"{len(answer.entities):,} of {counted(answer.total, 'name')}; --limit shows more.")
    return lines


def _indented(text: str, style: str = "") -> RenderableType:
    return Padding(Text(for_terminal(text), style), (0, 0, 0, INDENT), expand=False)
