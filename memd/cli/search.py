"""`memd search`: the chunks that a question would get, and why.

Rule: the daemon searches; the command only shows its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memd.admin.history import LogPage
from memd.admin.queries import PAGE_MAX
from memd.cli.flags import FOUND_SOMETHING, config_of_existing, origin_words, print_lines, settings_flags, warning_words
from memd.cli.running import daemon_for
from memd.errors import BadQuestion
from memd.recall.explained import INJECTED, FoundChunk, SearchAnswer
from memd.settings.model import Config
from memd.wording import counted, for_terminal

INDENT = 2
NOTHING_STORED = (
    "Nothing is stored yet. What is said through memd is (`memd serve`), and `memd add PATH` and `memd remember` put "
    "something in."
)
_PARAMETERS = {"since": "from"} | {f"{name}s": name for name in ("role", "kind", "source", "tag", "author")}


@click.command()
@settings_flags
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be given again. Default: all topics.")
@click.option("--as-of", metavar="TIME", help="Search what was stored up to a time (2026-11-20T14:30) or canonical_id.")
@click.option("--from", "since", metavar="TIME", help="Only what was said from a time (2026-11-20) on.")
@click.option("--to", metavar="TIME", help="Only what was said before a time; of a date, before its end.")
@click.option("--role", "roles", multiple=True, help="Only where this role speaks; may be given again.")
@click.option("--kind", "kinds", multiple=True, help="Only this kind (turn, note, document); may be given again.")
@click.option("--source", "sources", multiple=True, help="Only from this source; may be given again.")
@click.option("--tag", "tags", multiple=True, help="Only notes with this tag; may be given again.")
@click.option("--author", "authors", multiple=True, help="Only what this token's holder said; may be given again.")
@click.option("--contains", metavar="TEXT", help="Only chunks whose text has this, in any case.")
@click.option("--limit", type=click.IntRange(min=1, max=PAGE_MAX), help=f"How many at most. Default: {PAGE_MAX}.")
@click.option("--explain", is_flag=True, help="Also what would not be injected, with the parts of each score and why.")
@click.option("--json", "as_json", is_flag=True, help="All candidates as one JSON object.")
@click.argument("question", metavar="QUESTION")
def search(
    config_path: Path | None,
    data_dir: str | None,
    topics: tuple[str, ...],
    as_of: str | None,
    explain: bool,
    as_json: bool,
    question: str,
    **choice: Any,
) -> int:
    """Show the chunks that a new chat with QUESTION would get.

    Exit code 1 if there are none.

    Example: memd search "Which port does the shop listen on?"
    """
    if not question.strip():
        raise BadQuestion("the question is empty; say what to search for")
    config = config_of_existing(config_path, data_dir)
    answer, is_empty = _search(config, question, topics, as_of, choice)
    if as_json:
        click.echo(msgspec.json.encode(answer))
    else:
        print_lines(
            [NOTHING_STORED] if is_empty else _lines(answer, topics, explain=explain, is_filtered=any(choice.values()))
        )
    return 0 if answer.tokens else FOUND_SOMETHING


def _search(
    config: Config, question: str, topic_ids: Sequence[str], as_of: str | None, choice: Mapping[str, Any]
) -> tuple[SearchAnswer, bool]:
    """Search these topics, or all if there are none; also return whether nothing at all is stored.

    Args:
        as_of: search the log up to this time; see `memd.wanted.moment`.
        choice: the values of the options that choose among chunks, by their names.

    Raises:
        MemdError: the question cannot be answered.
    """
    with daemon_for(config) as daemon:
        given = {_PARAMETERS.get(name, name): value for name, value in choice.items() if value not in (None, ())}
        told = daemon.get("/memd/search", q=question, topic=list(topic_ids), as_of=as_of, **given)
        answer = msgspec.json.decode(told, type=SearchAnswer)
        is_empty = not answer.chunks and not msgspec.json.decode(daemon.get("/memd/log", limit=1), type=LogPage).events
        return answer, is_empty


def _lines(answer: SearchAnswer, topics: Sequence[str], *, explain: bool, is_filtered: bool) -> list[RenderableType]:
    """Return the answer as text: the chunks that would be injected, best first; with `explain` all candidates."""
    injected = [chunk for chunk in answer.chunks if chunk.verdict == INJECTED]
    shown: list[RenderableType] = [_chunk(chunk, explain=explain) for chunk in (answer.chunks if explain else injected)]
    if shown:
        shown.insert(0, Text("score  id    topic  said", "dim"))
    if not answer.chunks:
        where = "found" if answer.note is not None else "stored, of what was chosen," if is_filtered else "stored"
        shown.append(f"Nothing is {where} that has to do with it.")
    elif not injected:
        shown.append("Nothing would be injected; --explain shows the candidates and why.")
    else:
        tokens = f"{answer.tokens:,} of {answer.budget_tokens:,} tokens"
        shown.append(f"{counted(len(injected), 'chunk')}, {tokens}, would be injected.")
    if answer.note is not None:
        shown.append(answer.note)
    if not topics:
        shown.append("Every topic that you may read was searched; --topic names one.")
    return shown


def _chunk(chunk: FoundChunk, *, explain: bool) -> RenderableType:
    said = datetime.fromtimestamp(chunk.said_at / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    head = Text.assemble((f"{chunk.score:.3f}", "bold"), f"  {chunk.id}  ", (chunk.topic_id, "cyan"), f"  {said}")
    head.append(origin_words(chunk), "magenta")
    head.append(warning_words(chunk), "yellow")
    if explain:
        head.append(f"  {chunk.verdict}", "green" if chunk.verdict == INJECTED else "yellow")
    parts: list[RenderableType] = [head]
    if explain:
        echo = "" if chunk.echo == 1 else f", times {chunk.echo:.2f} as an echo"
        echo += "" if chunk.time == 1 else f", times {chunk.time:g} for its time"
        parts.append(
            Padding(
                f"meaning {chunk.meaning:.3f} (cosine {chunk.cosine:.3f}) + words {chunk.words:.3f} + feedback "
                f"{chunk.feedback:.3f} + neighbours {chunk.neighbours:.3f}, times {chunk.multiplier:g}{echo}; "
                f"{counted(chunk.tokens, 'token')}",
                (0, 0, 0, INDENT),
                expand=False,
            )
        )
    parts.append(Padding(Text(for_terminal(chunk.content)), (0, 0, 1, INDENT), expand=False))
    return Group(*parts)
