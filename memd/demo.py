"""The demo: an ordinary chat client sends a conversation through a daemon and shows what is remembered.

Rule: every figure and text on the screen was measured or received in this run. A claim that does not come true raises
`NotShown`, whose text ends the demo. The client uses only `metadata.memory_in` and the headers.
The answer to each question occurs in the conversation exactly once, so that only remembering that place can produce it;
`load_turns` checks this.

The fake llama-server has no language model and knows only its prompt. It answers messages of the conversation with
scripted replies, and anything else with the sentence of its prompt that shares most of the question's significant
words, or says that it does not know. It keeps every prompt for the demo and for tests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import shutil
import sys
import tempfile
import textwrap
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import uvloop
from aiohttp import web
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text

from memd.assets import bike_workshop, ranks_bytes
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.daemon.app import running
from memd.messages import without_memory_blocks
from memd.settings.model import Config, ListenSettings, LogSettings, RetrievalSettings, UpstreamSettings
from memd.store.disk import LocalDisk
from memd.store.lexical.analyzer import analyze_query
from memd.store.tools.export import export, shown_text

UNKNOWN = "I don't know. Nothing in what I was shown answers that."
SHARE_MIN = 0.4
"""Minimum share of a question's significant words, by weight, in an answer."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n")
_DAY_LINE = re.compile(r"-- \w+ \d{4}-\d\d-\d\d --")
_MEMORY_LINE = re.compile(r"(\[mem:[0-9a-f]+\]) ")
_SPEAKER = re.compile(r"(user|assistant|system|developer|tool): ")
_BLOCK = re.compile(r"\[memory\].*?\[/memory\]", re.DOTALL)

Messages = Sequence[Mapping[str, str]]


class ShownPrompt(NamedTuple):
    """A prompt that the model received."""

    messages: Messages
    tokens: int

    def block_with(self, text: str) -> str:
        """Return its last memory block with this text; empty if none has it."""
        said = (one["content"] for one in reversed(self.messages) if one["role"] != "assistant")
        blocks = (found[0] for content in said if (found := _BLOCK.search(content)))
        return next((block for block in blocks if text in block), "")


class FakeModel:
    """The server's state; started by `running`. `count`: tokens of a text. `lines`: the scripted replies, by last user
    message."""

    def __init__(self, *, count: Callable[[str], int], lines: Mapping[str, str]) -> None:
        self.shown: list[ShownPrompt] = []
        self.base_url = ""
        self.count = count
        self._lines = lines

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeModel]:
        """Serve on a free loopback port until the block is left."""
        application = web.Application(client_max_size=100 * 1024 * 1024)
        application.router.add_get("/props", self._props)
        application.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    def reply_to(self, messages: Messages) -> str:
        """Return the reply to a prompt."""
        position = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        if position < 0:
            return UNKNOWN
        question = without_memory_blocks(messages[position]["content"]).strip()
        if question in self._lines:
            return self._lines[question]
        # In a merged prompt the memory block precedes the question in the same message.
        block = messages[position]["content"].removesuffix(question)
        return _best_answer(question, [*messages[:position], {"role": "developer", "content": block}])

    async def _props(self, _: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {"n_ctx": WINDOW_TOKENS}, "model_alias": "stand-in"})

    async def _chat(self, request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        turns = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
        tokens = self.count(f"{turns}<|im_start|>assistant\n")
        self.shown.append(ShownPrompt(messages, tokens))
        text = self.reply_to(messages)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": tokens, "completion_tokens": self.count(text)}
        return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})


def _best_answer(question: str, messages: Messages) -> str:
    """Return the user's sentence that shares the most significant words with the question; on a tie the latest."""
    sentences = [sentence for message in messages for sentence in _said_by_user(message)]
    words = [analyze_query(text).keys() for text, _ in sentences]
    # A word is significant if few sentences have it.
    having = {word: sum(word in other for other in words) for word in analyze_query(question)}
    weights = {word: math.log(1 + len(words) / (1 + number)) for word, number in having.items()}
    best, best_share = "", 0.0
    for (text, source), own in zip(sentences, words, strict=True):
        share = sum(weights[word] for word in weights.keys() & own) / (sum(weights.values()) or 1.0)
        if share >= max(best_share, SHARE_MIN) and not text.endswith("?"):
            best, best_share = f'You said{source}: "{text}"', share
    return best or UNKNOWN


def _said_by_user(message: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the user's sentences in a message or in the chunks of a memory block, each with its position."""
    role, source = message["role"], ""
    for line in message["content"].split("\n"):
        if found := _MEMORY_LINE.match(line):
            source, line = f" {found[1]}", line[found.end() :]
        elif line == "[/memory]":
            source = ""
        if source and (found := _SPEAKER.match(line)):
            role, line = found[1], line[found.end() :]
        if role == "user" and not (source and _DAY_LINE.fullmatch(line)):
            yield from ((sentence.strip(), source) for sentence in _SENTENCE_END.split(line) if sentence.strip())


EXCERPT_CHARACTERS = 260
REFUSAL_CHARACTERS = 300
"""Limit for the shown text of a model server's refusal."""
ANSWER_TOKENS_MAX = 512
"""Limit for an answer, because a base model never ends. memd reserves as many in a window of 4,096."""


class NotShown(Exception):
    """A claim of the demo that did not come true."""


class ChatAnswer(NamedTuple):
    """The answer to one request."""

    text: str
    status: str
    recall_ms: float | None = None
    """Milliseconds to find and insert the memories, from `Server-Timing`; None if there was no recall."""


class ChatClient:
    """One conversation; `messages` is its history as the client keeps it."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, topic_id: str, system_prompt: str) -> None:
        self.messages = [{"role": "system", "content": system_prompt}]
        self._session = session
        self._url = f"{base_url}/v1/chat/completions"
        self._topic_id = topic_id

    async def say(
        self, text: str, *, corrections: Sequence[object] = (), headers: Mapping[str, str] | None = None
    ) -> ChatAnswer:
        """Send the history with one more message, and append the reply. Raises NotShown: the model refused."""
        self.messages.append({"role": "user", "content": text})
        memory_in = {"topic_id": self._topic_id, "corrections": list(corrections)}
        body: dict[str, object] = {"model": "any", "messages": self.messages, "metadata": {"memory_in": memory_in}}
        body |= {"max_tokens": ANSWER_TOKENS_MAX, "temperature": 0}
        forever = aiohttp.ClientTimeout()  # a large model on a small machine is slow; Ctrl-C ends it
        async with self._session.post(self._url, json=body, headers=headers, timeout=forever) as response:
            if not response.ok:
                said = " ".join((await response.text()).split())[:REFUSAL_CHARACTERS]
                raise NotShown(f"the model refuses {text!r} ({response.status}): {said}")
            reply = await response.json(content_type=None)
            text, told = reply["choices"][0]["message"]["content"] or "", response.headers
        self.messages.append({"role": "assistant", "content": text})
        spans_ms = re.findall(r"(?:embed|search|inject);dur=([0-9.]+)", told.get("Server-Timing", ""))
        recall_ms = sum(map(float, spans_ms)) if spans_ms else None
        return ChatAnswer(text, told.get("X-Memory-Status", ""), recall_ms)


SYSTEM_PROMPT = "You are a careful coding assistant. Answer briefly."


class Exchange(NamedTuple):
    """One exchange between the developer and the assistant."""

    user: str
    assistant: str


class Question(NamedTuple):
    """A question that the developer asks long after the answer was said."""

    text: str
    expects: str


QUESTIONS = (
    Question("Which error code does the API answer when a stand is already taken?", "ERR_7421"),
    Question("After how many hours do the login tokens expire?", "36 hours"),
    Question("Which database are we using instead of SQLite?", "PostgreSQL 16"),
    Question("How does Marta want to get her messages?", "text messages and never e-mail"),
)
"""Asked at the end of the long conversation."""
QUESTION_IN_NEW_CHAT = Question("On which port should the API listen?", "7340")
CHANGED = Question("When does the reminder for customers go out?", "18:00 on the evening before")
"""Asked before the decision changes."""
CHANGED_AGAIN = Question(
    "And when exactly does the reminder for customers go out now?", "three hours before the appointment"
)
CORRECTION = "Decision changed: the reminder for customers goes out three hours before the appointment."
CORRECTION_REASON = "customers forgot the appointment overnight"


def load_turns() -> list[Exchange]:
    """Return the conversation, oldest turn first."""
    text = bike_workshop()
    _, *exchanges = text.split("\n> ")
    turns = [Exchange(*(said.strip() for said in exchange.split("\n< "))) for exchange in exchanges]
    for question in (*QUESTIONS, QUESTION_IN_NEW_CHAT, CHANGED):
        assert text.count(question.expects) == 1, f"{question.expects!r} must be said exactly once"
    return turns


WINDOW_TOKENS = 4096
TOPIC = "spokebook"
READING_SECONDS = 2.5
RECALL_MILLISECONDS_MAX = 60_000
"""Generous, so that the demo works however busy the machine is."""
STORED_SECONDS_MAX = 60.0
SHOWN_IN_FULL = 3
"""Number of first turns shown in full; the others are shown as figures."""
PROGRESS_EVERY = 12
LINES_SHOWN = 4
"""Number of stored chunks shown."""
USER, MODEL, MEMORY = "bold cyan", "bold green", "magenta"


def main(fast: bool, model: Path | None, stay: bool) -> int:
    """Play the demo and return the exit code. `fast`: without pauses. `model`: a GGUF file asked at the end, with and
    without memory. `stay`: open the page and run until Ctrl-C, even without a terminal. Raises MemdError: the model
    cannot be used."""
    logging.basicConfig(level=logging.ERROR)
    console = Console(highlight=False, width=min(Console().width, 100))
    try:
        uvloop.run(_play(console, 0.0 if fast else READING_SECONDS, model, stay))
    except NotShown as problem:
        console.print(f"\n[bold red]The demo did not show what it should:[/] {problem}")
        return 1
    except KeyboardInterrupt:
        console.print()
    return 0


async def _play(console: Console, pause_seconds: float, model: Path | None, stay: bool) -> None:
    turns = load_turns()
    counter = TokenCounter(cl100k_base(ranks_bytes()))
    standin = FakeModel(count=counter.count, lines=dict(turns))
    with tempfile.TemporaryDirectory(prefix="memd-demo-") as folder:
        async with standin.running(), aiohttp.ClientSession() as session:
            config = Config(
                listen=ListenSettings(port=0),
                upstream=UpstreamSettings(url=standin.base_url),
                data_dir=Path(folder) / "memory",
                log=LogSettings(level="error"),
                retrieval=RetrievalSettings(timeout_ms=RECALL_MILLISECONDS_MAX),
            )
            async with running(config) as daemon:
                new_chat = partial(ChatClient, session, daemon.base_url, TOPIC, SYSTEM_PROMPT)
                stage = _Stage(console, new_chat, standin, config.data_dir, pause_seconds)
                text = (
                    f"The real daemon runs at {daemon.base_url} on a temporary directory. In the place of a model "
                    f"stands a program with a window of {WINDOW_TOKENS:,} tokens. In the conversation it reads its "
                    f"part of a script ({len(turns)} turns); questions afterwards it answers by quoting its prompt, so "
                    "it knows only what memd put there."
                )
                panel = Panel(text, title="[bold]memd demo[/]", border_style="blue", padding=(1, 2))
                console.print("", panel, sep="\n")
                chat = await stage.long_conversation(turns)
                await stage.questions(chat)
                await stage.another_chat()
                await stage.correction()
                stage.figures()
                if model is None:
                    stage.next_steps(model)
                    await stage.your_turn(f"{daemon.own_url}/memd/", stay)
            if model is not None:
                stage.act("A real model", f"{model.name}, the same questions in new chats: memory off, then on.")
                async with running(msgspec.structs.replace(config, upstream=UpstreamSettings()), model) as daemon:
                    stage.new_chat = partial(ChatClient, session, daemon.base_url, TOPIC, SYSTEM_PROMPT)
                    await stage.real_model()
                    stage.next_steps(model)
                    await stage.your_turn(f"{daemon.own_url}/memd/", stay)


class _Stage(msgspec.Struct):
    """The acts of the play, in order, and their counters."""

    console: Console
    new_chat: Callable[[], ChatClient]
    standin: FakeModel
    data_dir: Path
    pause_seconds: float
    turns: int = 0
    said_tokens: int = 0
    recall_ms: list[float] = []

    def act(self, title: str, subtitle: str) -> None:
        """Print the heading of an act."""
        rule = Rule(f"[bold]{title}[/]", style="blue", align="left")
        self.console.print("", rule, f"[dim]{escape(subtitle)}[/]\n", sep="\n")

    async def long_conversation(self, turns: list[Exchange]) -> ChatClient:
        """Send all turns, each with the whole history; return the chat, still open."""
        self.act("A long conversation", "The client sends its whole history every time, as clients do.")
        chat = self.new_chat()
        left_before = False
        for number, turn in enumerate(turns, start=1):
            answer = await self._say(chat, turn.user)
            if answer.text != turn.assistant:
                raise NotShown(f"turn {number} was answered {answer.text!r}")
            shown = self.standin.shown[-1]
            if number <= SHOWN_IN_FULL:
                self._show_answer(Question(_excerpt(turn.user), ""), ChatAnswer(_excerpt(turn.assistant), ""))
                await self._pause()
            sent = (one for one in shown.messages if "[memory]" not in one["content"] or one["role"] == "user")
            left = len(chat.messages) - 1 - len([*sent])  # the reply came after
            if left and not left_before:
                self._show_event(
                    f" turn {number}:[/] {self.said_tokens:,} tokens were said; the window has {WINDOW_TOKENS:,}, "
                    f"with room kept for the reply and for memory. The oldest {left} messages are on disk now and the "
                    f"model is no longer shown them: its prompt is down to {shown.tokens:,} tokens."
                )
                await self._pause()
            left_before = left_before or left > 0
            if number % PROGRESS_EVERY == 0 or number == len(turns):
                bar = "█" * round(10 * number / len(turns))
                self.console.print(
                    f"  [cyan]{bar:░<10}[/] turn {number:>2}/{len(turns)}  said [bold]{self.said_tokens:>5,}[/] tokens"
                    f"  prompt [bold]{shown.tokens:>5,}[/]  [{MEMORY}]{left:>3}[/] messages left out"
                )
            await self._pause(0.02)
        if not left_before:
            raise NotShown("no turn left the prompt although the conversation is longer than the window")
        time, contents, end = asyncio.get_running_loop().time, self._live_contents(), turns[-1].user.partition(".")[0]
        until = time() + STORED_SECONDS_MAX
        with self.console.status("what was said is being stored …"):  # in the background
            while time() < until and not any(end in text for text in contents):
                await asyncio.sleep(0.1)
                contents = self._live_contents()
        if not contents:
            raise NotShown(f"nothing was stored within {STORED_SECONDS_MAX:.0f} s")
        lines = [f"[{MEMORY}]▪[/] {escape(_excerpt(text, 160))}" for text in contents[-LINES_SHOWN:]]
        lines.append(f"[dim]… and {len(contents) - len(lines)} more[/]")
        title = f"remembered on disk: {len(contents)} chunks, word for word"
        self.console.print("", Panel("\n".join(lines), title=title, border_style=MEMORY), sep="\n")
        await self._pause()
        return chat

    async def questions(self, chat: ChatClient) -> None:
        """Ask for facts of the first turns in the same chat, long after those turns have left the prompt."""
        self.act("Asking about the beginning", "The turns that hold the answers are no longer in the prompt.")
        for question in QUESTIONS:
            answer, shown = await self._asked(chat, question)
            if question is QUESTIONS[0]:
                self._show_prompt(shown, len(chat.messages) - 1, question.expects)
                await self._pause()
            self._show_answer(question, answer)

    async def another_chat(self) -> None:
        """Ask in the same topic with an empty history: with memory and, for comparison, without."""
        question = QUESTION_IN_NEW_CHAT
        self.act("A new chat, empty history", "First with X-Memory-Mode: off, then as usual.")
        without = await self.new_chat().say(question.text, headers={"X-Memory-Mode": "off"})
        if without.text != UNKNOWN:
            raise NotShown(f"without memory the model should know nothing, but it said {without.text!r}")
        self._show_answer(Question(f"{question.text} (memory off)", ""), without)
        await self._pause()
        answer, _ = await self._asked(self.new_chat(), question)
        self._show_answer(question, answer)
        await self._pause()

    async def correction(self) -> None:
        """Change a decision: the caller replaces the chunk it came from, and asks again in a new chat."""
        self.act("A correction", "memd never decides what is out of date. Whoever asks can.")
        chat = self.new_chat()
        before, _ = await self._asked(chat, CHANGED)
        self._show_answer(CHANGED, before)
        await self._pause()
        named = before.text.partition("[mem:")[2].partition("]")[0]
        correction = {"chunk_ids": [named], "action": "Update", "reason": CORRECTION_REASON}
        correction["content"] = f"user: {CORRECTION}"
        fields = [f"{key + ':':<11} {msgspec.json.encode(value).decode()}" for key, value in correction.items()]
        syntax = Syntax("\n".join(fields), "yaml", background_color="default", word_wrap=True)
        self.console.print(Panel(syntax, title="metadata.memory_in.corrections", border_style="yellow"))
        await self._pause()
        await self._say(chat, CORRECTION, [correction])
        after, shown = await self._asked(self.new_chat(), CHANGED_AGAIN)
        if shown.block_with(f"[mem:{named}]"):
            raise NotShown(f"chunk {named} is still shown although it was replaced")
        self._show_answer(CHANGED_AGAIN, after)
        self._show_event(
            f"[/] Chunk {named} is not shown any more. On disk it stays, marked Deprecated, until somebody erases it. "
            "The question and its first answer are remembered too, as a chunk of their own.",
            below=1,
        )

    def figures(self) -> None:
        """Print all counters."""
        largest = max(shown.tokens for shown in self.standin.shown)
        if largest >= WINDOW_TOKENS:
            raise NotShown(f"a prompt had {largest} tokens, more than the window")
        log_bytes = sum(file.stat().st_size for file in self.data_dir.rglob("*.bin"))
        recall_ms = sorted(self.recall_ms)
        said = f"{self.said_tokens:,} tokens in {self.turns} turns; the largest prompt had {largest:,}"
        kept = f"{len(self._live_contents())} chunks, {log_bytes / 1024:.0f} KB on disk"
        took = f"{recall_ms[len(recall_ms) // 2]:.1f} ms (median), {recall_ms[-1]:.1f} ms at most"
        self.console.print(Rule("[bold]In figures[/]", style="blue", align="left"))
        self.console.print(f"Said: {said}.\nRemembered: {kept}.\nRemembering took {took}.\n")

    def next_steps(self, model: Path | None) -> None:
        """Print the commands that run memd with the reader's model. `model`: the one of the play."""
        tell, memd = self.console.print, _command()
        tell("Now with a model of yours, a llama-server that runs or one that memd starts:\n")
        for server in ("--upstream http://127.0.0.1:8080", f"--model {escape(str(model or 'FILE.gguf'))}"):
            tell(f"  [bold]{memd} serve {server}[/]", soft_wrap=True)
        tell("\nand point your client's base URL at [bold]http://127.0.0.1:8765/v1[/].\n")

    async def real_model(self) -> None:
        """Ask a real model without memory and with it, and count correct answers of both."""
        questions = (*QUESTIONS, QUESTION_IN_NEW_CHAT)
        known = {"off": 0, "full": 0}
        for question in questions:
            for mode in known:
                with self.console.status("the model answers …"):  # which may take a minute
                    answer = await self.new_chat().say(question.text, headers={"X-Memory-Mode": mode})
                known[mode] += question.expects.casefold() in answer.text.casefold()
                asked = question.text if mode == "full" else f"{question.text} (memory off)"
                self._show_answer(question._replace(text=asked), answer._replace(text=_excerpt(answer.text)))
        result = f"Of {len(questions)} questions it answered {known['off']} without memory and {known['full']} with it."
        self._show_event(f"[/] {result}", below=1)

    async def your_turn(self, page: str, stay: bool) -> None:
        """Let the reader ask until an empty line, at a terminal; without one and with `stay`, run until Ctrl-C."""
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if not is_terminal and not stay:
            return
        self.console.print(Rule("[bold]Your turn[/]", style="blue", align="left"))
        self.console.print(f"The daemon with this memory still runs. Look into it: [bold]{page}[/]")
        ends = "Ask it something; an empty line ends the demo." if is_terminal else "Ctrl-C ends the demo."
        self.console.print(f"[dim]{ends}[/]\n")
        if stay:
            webbrowser.open(page)
        if not is_terminal:
            await asyncio.Event().wait()
        chat = self.new_chat()
        while question := await self._typed():
            with self.console.status("the model answers …"):
                answer = await chat.say(question)
            self._show_answer(Question("", ""), answer)

    async def _typed(self) -> str:
        """Read a line from the reader without a thread, which Ctrl-C could not interrupt."""
        self.console.print(f"    [{USER}]you[/] ", end="")
        loop, is_typed = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(sys.stdin, is_typed.set)
        try:
            await is_typed.wait()
            return sys.stdin.readline().strip()
        finally:
            loop.remove_reader(sys.stdin)

    async def _pause(self, share: float = 1.0) -> None:
        await asyncio.sleep(share * self.pause_seconds)

    async def _say(self, chat: ChatClient, text: str, corrections: Sequence[object] = ()) -> ChatAnswer:
        answer = await chat.say(text, corrections=corrections)
        if answer.status.startswith("degraded"):
            raise NotShown(f"memd reports {answer.status}")
        self.turns += 1
        self.said_tokens += self.standin.count(text) + self.standin.count(answer.text)
        return answer

    async def _asked(self, chat: ChatClient, question: Question) -> tuple[ChatAnswer, ShownPrompt]:
        """Ask, and verify that the answer came from a memory block."""
        answer = await self._say(chat, question.text)
        shown = self.standin.shown[-1]
        if answer.recall_ms is not None:
            self.recall_ms.append(answer.recall_ms)
        if question.expects not in answer.text:
            said = f"should be answered with {question.expects!r}; the model said {answer.text!r}"
            raise NotShown(f"{question.text!r} {said}")
        if not shown.block_with(question.expects):
            raise NotShown(f"{question.expects!r} was known without memory")
        return answer, shown

    def _live_contents(self) -> list[str]:
        return [shown_text(line) for line in export(self.data_dir, LocalDisk(), topic_id=TOPIC, live_only=True)]

    def _show(self, who: str, style: str, text: str | Text) -> None:
        """Print what somebody said."""
        row = Table.grid(Column(width=6, justify="right", style=style), padding=(0, 1))
        row.add_row(who, text if isinstance(text, Text) else Text(text))
        self.console.print(Padding(row, (0, 0, 0, 1)))

    def _show_event(self, text: str, below: int = 0) -> None:
        """Print an event, marked."""
        self.console.print(Padding(f"[{MEMORY}]▸{text}", (0, 2, below, 2)))

    def _show_answer(self, question: Question, answer: ChatAnswer) -> None:
        """Print a question, unless the reader typed it, its answer, and the duration of the recall."""
        if question.text:
            self._show("you", USER, question.text)
        text = Text(answer.text)
        text.highlight_words([question.expects] if question.expects else [], "bold reverse")
        self._show("model", MODEL, text)
        if answer.recall_ms is not None:
            self.console.print(f"        [dim]remembered in {answer.recall_ms:.1f} ms[/]")
        self.console.print()

    def _show_prompt(self, shown: ShownPrompt, sent: int, expects: str) -> None:
        """Print the memory block that contained the answer."""
        head, *parts, tail = re.split(r"\n(?=\[mem:|-- |\[/memory\])", shown.block_with(expects))
        at = next(number for number, part in enumerate(parts) if expects in part)
        day = [part for part in parts[:at] if _DAY_LINE.fullmatch(part)][-1:]
        text = Text("\n".join(map(_excerpt, "\n".join([head, *day, parts[at]]).split("\n"))))
        others = sum(part.startswith("[mem:") for part in parts) - 1
        left = f"… and {others} more\n" if others else ""
        text.append(f"\n{left}{tail}", style="dim")
        text.highlight_regex(r"\[mem:[0-9a-f]+\]", f"bold {MEMORY}")
        text.highlight_words([expects], "bold reverse")
        below = f"the client sent {sent} messages, the model was shown {len(shown.messages)} ({shown.tokens:,} tokens)"
        title = "what memd put before the question"
        self.console.print(Panel(text, title=title, subtitle=f"[dim]{below}[/]", border_style=MEMORY))


def _excerpt(text: str, characters: int = EXCERPT_CHARACTERS) -> str:
    return textwrap.shorten(text, characters, placeholder=" …")


def _command() -> str:
    """Return the command of this installation, as one can type it."""
    beside = Path(sys.executable).with_name("memd")
    if shutil.which("memd") or not beside.exists():
        return "memd"
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)
