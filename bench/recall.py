"""How much of what a question needs is in the prompt, and what comes up where nothing should.

    python bench/recall.py --store DIR [--data NAME=PATH …] [--amid KIND] [--memd FOLDER] [--parts …] [--json FILE]

Backs the claims about what is found. Reads files and folders of public benchmarks (quality_data.py). `--store` keeps
what was stored: a second run, of another version (`--memd`, its source tree), only asks a copy of it, so that both read
the same data directory. All goes through a daemon over HTTP, with the settings as they come but for the budget; each
question is asked in a fresh read-only chat, and the block is read out of the prompt that is forwarded. With `--amid`
each message is stored with lines of code: in it, fenced, or as a tool's result behind it. The parts:

    evidence  share of the turns of an answer that are shown within a budget of tokens: at least half of a turn, by
              whole sentences; of a folder's long messages a sentence. How often the embedding model read the question
              (`embed` in Server-Timing, where it takes time), how many questions brought nothing
    beside    the same within 2,000 tokens, with 1.8 KB of code (Python; JavaScript) or prose before or after the
              question; of files
    three     the same where three questions are asked in one message; of files
    silence   small talk and questions about nothing stored, of data/silence.json and data/small_talk.json: no block
    copies    texts that differ in one value, by two authors: found by their own question, and by their whole text
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from urllib.parse import urlencode

import daemons
from quality_data import NOTHING_TO_FIND, Question, Talk, read

PARTS = ("evidence", "beside", "three", "silence", "copies")
BUDGETS = {"turns": (500, 1000, 2000, 4000), "messages": (1000, 2000, 4000)}
"""Of a file's short turns, and of a folder's long messages."""
BESIDE_CHARACTERS = 1800
AMID_LINES = 12
SILENCE_TALKS = 3
"""Of each set; small talk is the same in the others."""
SENTENCE_CHARACTERS_MIN = 30
COPIES, COPIES_BUDGET = 40, 500
COPY = (
    "The spare key hangs in the grey box behind the porter's desk on the ground floor. Whoever takes it signs in the"
    " blue book beside the box, with name and time, and brings it back before the evening shift begins; the porter"
    " counts the keys at eight and calls whoever has not signed out. A second key is with the caretaker next door."
    " Nobody takes a key home, nobody lends one on, and whoever loses one pays for the lock. Written down for room {}."
)
NOTES = 50
MEASURES = ("belt speed", "oil pressure", "shift length", "scrap rate", "crew size")
PLAN = (
    "The {0} of the northern line was chosen after two weeks"
    " of trials, in which the foreman and the people of the early shift wrote down each stop with its reason, and it"
    " stays as it is until the audit in autumn, when the figures of all four lines are laid side by side. Set: {1}."
)
DATA = Path(__file__).parent / "data"
PAGE = Path(__file__).parent.parent / "memd" / "admin" / "page"
_SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]*")
Figures = dict[str, Any]


# -- what is found ---------------------------------------------------------------------------------------------------


def half_of(turn: str, shown: str) -> bool:
    """Whether at least half of a turn, by whole sentences, is shown."""
    sentences = [sentence.strip() for sentence in _SENTENCE.findall(turn) if sentence.strip()]
    total = sum(map(len, sentences))
    return sum(len(sentence) for sentence in sentences if sentence in shown) * 2 >= total > 0


def some_of(message: str, shown: str) -> bool:
    """Whether a sentence of a message, of a length that is its own, is shown; all of a message that has none."""
    sentences = [sentence.strip() for sentence in _SENTENCE.findall(message)]
    own = [sentence for sentence in sentences if len(sentence) >= SENTENCE_CHARACTERS_MIN]
    return any(sentence in shown for sentence in own) if own else message.strip() in shown


FOUND: dict[str, Callable[[str, str], bool]] = {"turns": half_of, "messages": some_of}


class Asked(NamedTuple):
    """A message, and the evidence of each question in it."""

    topic: str
    text: str
    evidence: tuple[tuple[str, ...], ...]


def alone(talks: Sequence[Talk]) -> list[Asked]:
    """All questions that have an answer."""
    return [Asked(talk.topic, one.text, (one.evidence,)) for talk in talks for one in answered(talk)]


def answered(talk: Talk) -> list[Question]:
    """Its questions that have an answer."""
    return [one for one in talk.questions if one.category != NOTHING_TO_FIND]


def in_threes(talks: Sequence[Talk]) -> Iterator[Asked]:
    """The same questions, three of a conversation in one message, in an order by chance."""
    for talk in talks:
        questions = answered(talk)
        random.Random(7).shuffle(questions)
        for at in range(0, len(questions) - 2, 3):
            three = questions[at : at + 3]
            yield Asked(talk.topic, " ".join(one.text for one in three), tuple(one.evidence for one in three))


def pasted() -> dict[str, str]:
    """Long texts: code of Python's own, code with a semicolon behind each statement, Python's manual."""
    from pydoc_data.topics import topics

    code = "\n".join(inspect.getsource(module) for module in (argparse, tempfile, shutil, inspect))
    statements = "\n".join(path.read_text() for path in sorted(PAGE.glob("*.js")))
    return {"code": code, "statements": statements, "prose": "\n".join(topics[name] for name in sorted(topics))}


def with_pasted(asked: Sequence[Asked], text: str, *, is_before: bool) -> Iterator[Asked]:
    """The same questions, each with another piece of a text before or after it."""
    chosen = random.Random(11)
    for one in asked:
        at = chosen.randrange(len(text) - BESIDE_CHARACTERS)
        piece = text[at : at + BESIDE_CHARACTERS]
        yield one._replace(text=f"{piece}\n\n{one.text}" if is_before else f"{one.text}\n\n{piece}")


def shares(daemon: daemons.Daemon, asked: Sequence[Asked], is_found: Callable[[str, str], bool]) -> Figures:
    """Ask, and what share of the evidence was shown, over questions; how often the model was asked."""
    told: dict[str, list[float]] = {"found": [], "model": [], "silent": [], "characters": [], "embed": [], "search": []}
    for one in asked:
        shown = daemon.ask(one.topic, one.text)
        for evidence in one.evidence:
            told["found"].append(fmean(is_found(turn, shown.block) for turn in evidence))
        told["model"].append(shown.asked_model)
        told["silent"].append(not shown.block)
        told["characters"].append(len(shown.block))
        for name in ("embed", "search"):
            told[name].append(shown.ms.get(name, 0.0))
    means = {name: fmean(values) for name, values in told.items()}
    percent = {name: round(100 * means[name], 1) for name in ("found", "model", "silent")}
    rest = {
        "characters": round(means["characters"]),
        **{f"{one}_ms": round(means[one], 2) for one in ("embed", "search")},
    }
    return {"questions": len(told["found"]), **percent, **rest}


# -- the parts --------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Conversations, under the name that they were given."""

    name: str
    kind: str
    """A key of BUDGETS."""
    talks: list[Talk]


class Run(NamedTuple):
    """One version, over a copy of what was stored."""

    tree: Path
    data_dir: Path
    data: list[Data]

    def within(self, budget: int) -> Any:
        """The daemon with a budget of tokens."""
        return daemons.serving(self.tree, daemons.settings_of(self.data_dir, injection={"budget_tokens": budget}))


def evidence(run: Run) -> Iterator[tuple[str, Figures]]:
    """Each question alone."""
    for name, kind, talks in run.data:
        for budget in BUDGETS[kind]:
            with run.within(budget) as daemon:
                daemon.settled()
                yield f"{name} within {budget}", shares(daemon, alone(talks), FOUND[kind])


def beside(run: Run) -> Iterator[tuple[str, Figures]]:
    """Each question with something pasted."""
    for name, kind, talks in run.data:
        with run.within(2000) as daemon:
            for (what, text), is_before in product(pasted().items(), (True, False)) if kind == "turns" else ():
                asked = list(with_pasted(alone(talks), text, is_before=is_before))
                where = "before" if is_before else "after"
                yield f"{name}, {what} {where} it", shares(daemon, asked, FOUND[kind])


def three(run: Run) -> Iterator[tuple[str, Figures]]:
    """Three questions in one message."""
    for name, kind, talks in run.data:
        for budget in (1000, 2000, 4000) if kind == "turns" else ():
            with run.within(budget) as daemon:
                yield f"{name}, three within {budget}", shares(daemon, list(in_threes(talks)), FOUND[kind])


def silence(run: Run) -> Iterator[tuple[str, Figures]]:
    """What has nothing to find, by its kind."""
    asked = [(one["kind"], one["ask"]) for one in json.loads((DATA / "silence.json").read_text())]
    for language, lines in json.loads((DATA / "small_talk.json").read_text()).items():
        asked += [(f"small talk, {language}", line) for line in lines]
    for name, _, talks in run.data:
        quiet: dict[str, list[bool]] = {}
        models = []
        with run.within(2000) as daemon:
            for talk in talks[:SILENCE_TALKS]:
                for kind, text in asked:
                    shown = daemon.ask(talk.topic, text)
                    models.append(shown.asked_model)
                    quiet.setdefault(kind, []).append(not shown.block)
                    is_eight = kind.startswith("small talk,")
                    quiet.setdefault("eight languages" if is_eight else "the 200", []).append(not shown.block)
        rows = {kind: round(100 * fmean(values), 1) for kind, values in quiet.items()}
        yield f"{name}, silent", rows | {"model": round(100 * fmean(models), 1)}


def copies(run: Run) -> Iterator[tuple[str, Figures]]:
    """Texts that are alike but for a value, told by two people; notes that are alike, asked by their text."""
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name:
        data_dir = Path(name) / "memory"
        config = Path(name) / "config.yaml"
        config.write_text(f"data_dir: {data_dir}\n")
        tokens = [_token(run.tree, data_dir, who) for who in ("ann", "ben")]
        settings = daemons.settings_of(
            data_dir, injection={"budget_tokens": COPIES_BUDGET}, buffer={"store_after_seconds": 0}
        )
        with daemons.serving(run.tree, settings) as daemon:
            rooms = random.Random(3).sample(range(100, 999), COPIES)
            texts = [COPY.format(room) for room in rooms]
            for number, text in enumerate(texts):
                token = tokens[number % 2]
                daemon.chat("chats", [{"role": "user", "content": text}], "full", token)
                daemon.own("/memd/notes", {"topic_id": "notes", "notes": [{"content": text}]}, token)
            notes = [PLAN.format(what, value) for what in MEASURES for value in range(30, 30 + NOTES // len(MEASURES))]
            daemon.own("/memd/notes", {"topic_id": "alike", "notes": [{"content": note} for note in notes]})
            for number, note in enumerate(notes):
                daemon.chat("alike-said", [{"role": "user", "content": note}], "full", tokens[number % 2])
            time.sleep(3)
            daemon.settled()
            for topic in ("chats", "notes"):
                asked = [(daemon.ask(topic, f"Where is the spare key of room {room}?").block, room) for room in rooms]
                yield (
                    f"alike, {topic}",
                    {f"found, of {COPIES}": sum(COPY.format(room) in block for block, room in asked)},
                )
            for topic, asking in (
                ("alike", ""),
                ("alike-said", "Is this still so? "),
            ):  # what is in the prompt is not shown
                first = shown = 0
                for note in notes:
                    ranked = daemon.own("/memd/search?" + urlencode({"q": asking + note, "topic": topic}))["chunks"]
                    first += bool(ranked) and note in ranked[0]["content"]
                    shown += note in daemon.ask(topic, asking + note).block
                yield f"asked by its text, {topic}", {f"first, of {NOTES}": first, f"shown, of {NOTES}": shown}


def _token(tree: Path, data_dir: Path, who: str) -> str:
    return daemons.command(tree, data_dir, "token", "add", who, "--topics", "*", "--rights", "read,write").split()[-1]


# -- the run ----------------------------------------------------------------------------------------------------------


WORK: dict[str, Callable[[Run], Iterator[tuple[str, Figures]]]] = {
    "evidence": evidence,
    "beside": beside,
    "three": three,
    "silence": silence,
    "copies": copies,
}


def amid_code(session: Sequence[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    """The messages of a session, each with another dozen lines of code: `fence` or `result`; "": without."""
    lines, chosen = pasted()["code"].splitlines(), random.Random(13)
    for number, message in enumerate(session):
        at = chosen.randrange(len(lines) - AMID_LINES)
        code = "\n".join(lines[at : at + AMID_LINES])
        if kind == "fence":
            yield message | {"content": f"{message['content']}\n\n```python\n{code}\n```"}
            continue
        yield message
        if kind == "result":
            asked = {"name": "read", "arguments": json.dumps({"path": f"src/{number}.py"})}
            call = {"id": f"c{number}", "type": "function", "function": asked}
            yield {"role": "assistant", "content": "Let me look at that file.", "tool_calls": [call]}
            yield {"role": "tool", "tool_call_id": call["id"], "content": code}


def store(tree: Path, data_dir: Path, talks: Sequence[Talk], amid: str = "") -> None:
    """Store what is not there yet, each conversation in a topic; see `amid_code`."""
    for talk in talks:
        done = data_dir.parent / f"{talk.topic}.stored"
        if done.exists():
            continue
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for number, session in enumerate(talk.sessions):
                messages = [*amid_code(session, amid)]
                file.write(json.dumps({"id": f"{talk.topic}-{number}", "messages": messages}) + "\n")
            file.flush()
            asked = ("import", "--format", "openai", "--topic", talk.topic, file.name)
            print(daemons.command(tree, data_dir, *asked).strip(), flush=True)
        done.touch()


def read_data(given: str) -> Data:
    """What NAME=PATH names."""
    name, _, path = given.partition("=")
    talks = [one._replace(topic=f"{name}-{one.topic}") for one in read(Path(path))]
    return Data(name, "messages" if Path(path).is_dir() else "turns", talks)


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", type=Path, required=True, help="a folder, in which what is stored stays")
    parser.add_argument("--data", type=read_data, action="append", default=[], help="NAME=PATH; may be given again")
    parser.add_argument("--amid", choices=("fence", "result"), default="", help="with code beside each stored message")
    parser.add_argument("--memd", type=Path, default=daemons.HERE, help="the source tree of the version that is asked")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of these")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.store.mkdir(parents=True, exist_ok=True)
    tree = asked.memd.resolve()
    store(tree, asked.store / "memory", [talk for one in asked.data for talk in one.talks], asked.amid)
    told: Figures = {}
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name:
        data_dir = Path(name) / "memory"
        if asked.data:
            shutil.copytree(asked.store / "memory", data_dir)
        for part in asked.parts.split(","):
            started = time.perf_counter()
            for what, figures in WORK[part](Run(tree, data_dir, asked.data)):
                told[what] = figures
                row = "  ".join(f"{name} {value}" for name, value in figures.items())
                print(f"{what:28} {row}", flush=True)
                if asked.json is not None:
                    asked.json.write_text(json.dumps(told, indent=1))
            print(f"  ({part}: {time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
