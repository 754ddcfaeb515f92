"""`memd search`: the chunks that a question would get, and why.

Rule: the daemon searches; the command only shows its answer.
"""

from __future__ import annotations

from collections.abc import Set
from datetime import UTC, datetime

import click
import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memd.admin.history import LogPage
from memd.admin.reads import SearchRoutes
from memd.cli.flags import FOUND_SOMETHING, origin_words, warning_words
from memd.cli.operations import Asked, Lines, shows
from memd.recall.explained import INJECTED, FoundChunk, SearchAnswer
from memd.wording import counted, for_terminal

INDENT = 2
NOTHING_STORED = (
    "Nothing is stored yet. What is said through memd is (`memd serve`), and `memd add PATH` and `memd remember` put "
    "something in."
)


@click.command()
@shows(SearchRoutes.search, q="QUESTION")
@click.option("--explain", is_flag=True, help="Also what would not be injected, with the parts of each score and why.")
def search(asked: Asked[SearchAnswer], *, explain: bool) -> tuple[Lines, int]:
    """Show the chunks that a new chat with QUESTION would get.

    Exit code 1 if there are none.

    Example: memd search "Which port does the shop listen on?"
    """
    answer, exit_code = asked.answer, 0 if asked.answer.tokens else FOUND_SOMETHING
    if not answer.chunks and not msgspec.json.decode(asked.daemon.get("/memd/log", limit=1), type=LogPage).events:
        return [NOTHING_STORED], exit_code
    return _lines(answer, asked.given.keys(), explain=explain), exit_code


def _lines(answer: SearchAnswer, given: Set[str], *, explain: bool) -> list[RenderableType]:
    """Return the answer as text: the chunks that would be injected, best first; with `explain` all candidates."""
    injected = [chunk for chunk in answer.chunks if chunk.verdict == INJECTED]
    shown: list[RenderableType] = [_chunk(chunk, explain=explain) for chunk in (answer.chunks if explain else injected)]
    if shown:
        shown.insert(0, Text("score  id    topic  said", "dim"))
    if not answer.chunks:
        where = (
            "found"
            if answer.note is not None
            else "stored, of what was chosen,"
            if given - {"q", "topic", "as_of", "limit"}
            else "stored"
        )
        shown.append(f"Nothing is {where} that has to do with it.")
    elif not injected:
        shown.append("Nothing would be injected; --explain shows the candidates and why.")
    else:
        tokens = f"{answer.tokens:,} of {answer.budget_tokens:,} tokens"
        shown.append(f"{counted(len(injected), 'chunk')}, {tokens}, would be injected.")
    if answer.note is not None:
        shown.append(answer.note)
    if "topic" not in given:
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
