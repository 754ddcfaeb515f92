"""The demo's output in the terminal.

Rule: it only shows what it is given; nothing here measures, asks or decides.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from memd.demo.fake_model import ShownPrompt

USER, MODEL, MEMORY = "bold cyan", "bold green", "magenta"
EXCERPT_CHARACTERS = 260
CHUNK_CHARACTERS = 330
CHUNKS_SHOWN = 4
PROGRESS_EVERY = 12


class Screen:
    """Writes to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def opening(self, window: int, turns: int, base_url: str) -> None:
        """Announce the play."""
        text = (
            f"The real daemon runs at {base_url} on a temporary directory. Behind it stands in for a model: a program "
            f"with a window of {window:,} tokens that answers by quoting its prompt. In the conversation it reads its "
            f"part of a script ({turns} turns); to the questions afterwards it can only know what memd put in front of "
            "it."
        )
        self._console.print()
        self._console.print(Panel(text, title="[bold]memd demo[/]", border_style="blue", padding=(1, 2)))

    def act(self, title: str, subtitle: str) -> None:
        """A new part of the play."""
        self._console.print()
        self._console.print(Rule(f"[bold]{title}[/]", style="blue", align="left"))
        self._console.print(f"[dim]{escape(subtitle)}[/]\n")

    def exchange(self, user: str, assistant: str) -> None:
        """One turn of the conversation."""
        self._say("you", USER, _excerpt(user))
        self._say("model", MODEL, _excerpt(assistant))
        self._console.print()

    @contextmanager
    def progress(self, turns: int) -> Iterator[Callable[[int, int, int, int], None]]:
        """A line every few turns: `show(turn, said_tokens, prompt_tokens, left_out_messages)`."""

        def show(turn: int, said: int, prompt: int, left: int) -> None:
            if turn % PROGRESS_EVERY == 0 or turn == turns:
                bar = "█" * round(10 * turn / turns)
                self._console.print(
                    f"  [cyan]{bar:░<10}[/] turn {turn:>2}/{turns}  said [bold]{said:>5,}[/] tokens  "
                    f"prompt [bold]{prompt:>5,}[/]  [{MEMORY}]{left:>3}[/] messages left out"
                )

        yield show

    def first_left(self, turn: int, said: int, left: int, prompt: int, window: int) -> None:
        """The moment when old turns leave the prompt."""
        text = (
            f"[{MEMORY}]▸ turn {turn}:[/] {said:,} tokens were said; the window has {window:,}, with room kept for the "
            f"reply and for memory. The oldest {left} messages are on disk now and the model is no longer shown them: "
            f"its prompt is down to {prompt:,} tokens."
        )
        self._console.print(Padding(text, (0, 2)))

    def remembered(self, contents: Sequence[str]) -> None:
        """Show the contents of the log."""
        lines = [Text.from_markup(f"[{MEMORY}]▪[/] {escape(_excerpt(text, 160))}") for text in contents[:CHUNKS_SHOWN]]
        more = len(contents) - len(lines)
        title = f"remembered on disk: {len(contents)} chunks, word for word"
        self._console.print()
        self._console.print(
            Panel(Group(*lines, Text(f"… and {more} more", style="dim")), title=title, border_style=MEMORY)
        )

    def prompt(self, shown: ShownPrompt, sent: int, expects: str) -> None:
        """The memory block that the model was shown."""
        block = shown.blocks[-1] if shown.blocks else "(no memory block)"
        head, *parts, tail = _chunks_of(block)
        days = [part for part in parts if part.startswith("-- ")]
        chunks = [part for part in parts if part not in days]
        telling = [chunk for chunk in chunks if expects in chunk]
        chosen = [chunk for chunk in chunks if chunk in telling or chunk in chunks[: CHUNKS_SHOWN - len(telling)]]
        body: list[RenderableType] = [Text("\n".join([head, *days[:1]]), style="dim")]
        for chunk in chosen:
            text = Text(_around(chunk, expects))
            text.highlight_regex(r"\[mem:[0-9a-f]+\]", f"bold {MEMORY}")
            text.highlight_words([expects], "bold reverse")
            body.append(text)
        if len(chosen) < len(chunks):
            body.append(Text(f"… and {len(chunks) - len(chosen)} more", style="dim"))
        body.append(Text(tail, style="dim"))
        below = f"the client sent {sent} messages, the model was shown {len(shown.messages)} ({shown.tokens:,} tokens)"
        title = "what memd put before the question"
        self._console.print(Panel(Group(*body), title=title, subtitle=f"[dim]{below}[/]", border_style=MEMORY))

    def answer(self, question: str, answer: str, expects: str, recall_ms: float | None) -> None:
        """A question, unless the reader typed it, the answer, and how long remembering took."""
        if question:
            self._say("you", USER, question)
        text = Text(answer)
        text.highlight_words([expects] if expects else [], "bold reverse")
        self._say("model", MODEL, text)
        if recall_ms is not None:
            self._console.print(f"        [dim]remembered in {recall_ms:.1f} ms[/]")
        self._console.print()

    def correction(self, correction: Mapping[str, Any]) -> None:
        """The correction as the client sends it."""
        lines = [f"{key + ':':<11} {msgspec.json.encode(value).decode()}" for key, value in correction.items()]
        syntax = Syntax("\n".join(lines), "yaml", background_color="default", word_wrap=True)
        self._console.print(Panel(syntax, title="metadata.memory_in.corrections", border_style="yellow"))

    def replaced(self, chunk_id: str) -> None:
        """Show the state of the chunk that a correction named."""
        text = (
            f"[{MEMORY}]▸[/] Chunk {chunk_id} is not shown any more. On disk it stays, marked Deprecated, until "
            "somebody erases it. The question and its first answer are remembered too, as a chunk of their own."
        )
        self._console.print(Padding(text, (0, 2, 1, 2)))

    def figures(
        self,
        *,
        turns: int,
        said_tokens: int,
        largest_prompt: int,
        window: int,
        chunks: int,
        log_bytes: int,
        recall_ms: Sequence[float],
    ) -> None:
        """Show the figures of the run and the next steps."""
        self._console.print(Rule("[bold]In figures[/]", style="blue", align="left"))
        table = Table(box=box.SIMPLE, show_header=False)
        table.add_column(style="dim")
        table.add_column(justify="right")
        table.add_row("turns played", f"{turns}")
        table.add_row("tokens said", f"{said_tokens:,}")
        table.add_row("largest prompt", f"{largest_prompt:,} of {window:,}")
        table.add_row("chunks remembered", f"{chunks} ({log_bytes / 1024:.0f} KB on disk)")
        middle = recall_ms[len(recall_ms) // 2]
        table.add_row("remembering took", f"{middle:.1f} ms (median), {recall_ms[-1]:.1f} ms at most")
        self._console.print(table)
        memd = _command()
        self._console.print("Now with a model of yours:\n")
        self._console.print(f"  [bold]{memd} serve --upstream http://127.0.0.1:8080[/]   [dim]a llama-server[/]")
        self._console.print(f"  [bold]{memd} serve --model FILE.gguf[/]   [dim]or let memd start one[/]\n")
        self._console.print("and point your client's base URL at [bold]http://127.0.0.1:8765/v1[/].\n")

    def known(self, questions: int, *, without: int, remembered: int) -> None:
        """How many questions a real model answered."""
        text = f"[{MEMORY}]▸[/] Of {questions} questions it answered {without} without memory and {remembered} with it."
        self._console.print(Padding(text, (0, 2, 1, 2)))

    def staying(self, page: str, *, asks: bool) -> None:
        """Say that the daemon goes on, and how to look into its memory."""
        self._console.print(Rule("[bold]Your turn[/]", style="blue", align="left"))
        self._console.print(f"The daemon with this memory still runs. Look into it: [bold]{page}[/]")
        ends = "Ask it something; an empty line ends the demo." if asks else "Ctrl-C ends the demo."
        self._console.print(f"[dim]{ends}[/]\n")

    def asking(self) -> None:
        """The prompt at which the reader types."""
        self._console.print(f"    [{USER}]you[/] ", end="")

    # -- private ------------------------------------------------------------------------------------------------

    def _say(self, who: str, style: str, text: str | Text) -> None:
        row = Table.grid(padding=(0, 1))
        row.add_column(width=6, justify="right", style=style)
        row.add_column()
        row.add_row(who, text if isinstance(text, Text) else Text(text))
        self._console.print(Padding(row, (0, 0, 0, 1)))


def _command() -> str:
    """The command of this installation, as it can be typed."""
    beside = Path(sys.executable).with_name("memd")
    if shutil.which("memd") or not beside.exists():
        return "memd"
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def _excerpt(text: str, characters: int = EXCERPT_CHARACTERS) -> str:
    return textwrap.shorten(text, characters, placeholder=" …")


def _around(chunk: str, expects: str) -> str:
    """The chunk's id and as much of its text as fits, from near the words that matter."""
    mark, _, text = chunk.partition("] ")
    flat = " ".join(text.split())
    at = flat.find(expects)
    start = max(0, at - CHUNK_CHARACTERS // 2) if at + len(expects) > CHUNK_CHARACTERS else 0
    start = flat.rfind(" ", 0, start) + 1 if start else 0
    return f"{mark}] {'… ' if start else ''}{_excerpt(flat[start:], CHUNK_CHARACTERS)}"


def _chunks_of(block: str) -> list[str]:
    """The block's first line, its chunks (some of several lines), and its last line."""
    head, *rest = block.split("\n")
    if not rest:
        return [block, ""]
    chunks: list[str] = []
    for line in rest[:-1]:
        if line.startswith(("[mem:", "-- ")) or not chunks:
            chunks.append(line)
        else:
            chunks[-1] += "\n" + line
    return [head, *chunks, rest[-1]]
