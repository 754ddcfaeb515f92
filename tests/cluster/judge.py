"""The judge outside of a cluster: reads the database, no daemon, and compares with what was promised.

Rule: every acknowledged fact is live exactly once, none twice whatever became of its request; what is stored together
is there together; the log of a topic has no gap and no half group, and its ids ascend; a correction was applied as
often as somebody was told so, and one in doubt at most once more. The prompt of a turn begins with the prompt of the
turn before it, whichever daemons made them.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from ledger import Fact, Ledger

from memd.entries import UTILITY_RATIO
from memd.store.disk import LocalDisk
from memd.store.layout import TopicLayout
from memd.store.log.recovery import LogFile, broken_appends, read_log_file
from memd.store.shared.moving import into_folder
from memd.store.shared.postgres import SharedLog
from memd.store.tools.export import export

NAME = re.compile(r"\bF-[a-z0-9]+-\d+(?:/\d+)?\b")
SAID = re.compile(r"For the record (F-[a-z0-9]+-\d+):")
Line = dict[str, Any]
Prompt = list[dict[str, Any]]
CALM = ("injected", "none")


class Verdict(NamedTuple):
    """What is wrong, and what is not there yet, which may still be in a journal."""

    wrong: list[str]
    missing: list[str]
    entries: int


def read_topics(kept: SharedLog, folder: Path) -> Iterator[tuple[str, list[LogFile]]]:
    """Write all topics into a folder as `memd move` does; the files of their logs, oldest first."""
    for _, _, moved in into_folder(kept, folder, LocalDisk()):
        layout = TopicLayout(folder, moved.topic)
        numbered = sorted(layout.segments.glob("seg_*.bin")), [layout.active]
        paths = [path for several in numbered for path in several if path.exists()]
        yield moved.topic, [read_log_file(path.read_bytes(), name=path.name, dimension=None) for path in paths]


def judged(read: Callable[[Path], Iterator[tuple[str, list[LogFile]]]], ledger: Ledger, folder: Path) -> Verdict:
    """Compare what `read` writes into a folder with what was promised."""
    wrong, entries = list[str](), 0
    for topic, files in read(folder):
        own = [entry.canonical_id for file in files for entry in file.entries]
        wrong += [f"{topic}: id {after} behind {before}" for before, after in pairwise(own) if after <= before]
        wrong += [
            f"{topic}/{file.name}: gaps {file.gaps}, half groups {broken_appends(file)}"
            for file in files
            if damage(file)
        ]
        entries += len(own)
    live = [line for line in export(folder, LocalDisk(), topic_id=None, live_only=False) if line["live"]]
    found, missing = compared(live, ledger)
    return Verdict(wrong + found, missing, entries)


class Prefixes(NamedTuple):
    """Turns whose prompt had to begin with the prompt of the turn before it."""

    held: int
    shortened: int
    """Old turns had left the window, or all blocks at once."""
    changed: list[str]


def prefixes(prompts: Iterable[Prompt], ledger: Ledger) -> Prefixes:
    """Compare the prompts of conversations in which each turn so far was answered at once, by whichever daemon, and
    with its memory."""
    by_fact: dict[str, Prompt] = {said_in(prompt[-1]): prompt for prompt in prompts}
    held, shortened, changed, before = 0, 0, list[str](), dict[str, Prompt | None]()
    for fact in list(ledger.facts.values()):
        prompt = by_fact.get(fact.key)
        if not fact.conversation or prompt is None:
            continue
        former = before.get(fact.conversation, [])
        is_calm = former is not None and len(fact.answers) == 1 and fact.answers[0] in CALM
        if is_calm and former:
            if prompt[: len(former)] == former:
                held += 1
            elif said_in(prompt[0]) != said_in(former[0]) or not any(map(has_block, prompt[: len(former)])):
                shortened += 1
            else:
                changed.append(f"{fact.key}: {first_difference(former, prompt)}")
        before[fact.conversation] = prompt if is_calm else None
    return Prefixes(held, shortened, changed)


def said_in(message: dict[str, Any]) -> str:
    """The fact of a message, which stands behind the memory of others."""
    return next(reversed(SAID.findall(str(message["content"]))), "")


def has_block(message: dict[str, Any]) -> bool:
    """Whether memory stands in it."""
    return str(message["content"]).startswith("[memory]")


def first_difference(former: Prompt, prompt: Prompt) -> str:
    """Two messages that had to be the same."""
    return next((f"{one!r} became {other!r}" for one, other in zip_longest(former, prompt) if one != other), "")


def damage(file: LogFile) -> bool:
    """Whether a log has anything but whole groups."""
    return bool(file.gaps or broken_appends(file) or file.has_tail)


def compared(live: list[Line], ledger: Ledger) -> tuple[list[str], list[str]]:
    """What is wrong with the live chunks, and which acknowledged facts are not among them."""
    places: dict[str, list[Line]] = {}
    for line in live:
        for name in NAME.findall(line["content"]):
            places.setdefault(name, []).append(line)
    wrong: list[str] = []
    missing: list[str] = []
    known = list(ledger.facts.values())
    for fact in known:
        counts = [len(places.get(name, ())) for name in fact.names]
        wrong += [
            f"{name} is there {count} times: {[(line['canonical_id'], line['content']) for line in places[name]]}"
            for name, count in zip(fact.names, counts, strict=True)
            if count > 1
        ]
        if fact.acknowledged and 0 in counts:
            missing.append(f"{fact.key} ({fact.topic}) is not there: {counts}")
        elif 0 in counts and any(counts):
            wrong.append(f"{fact.key}: a part of it is there: {counts}")
        elif any(counts):
            wrong += state_of(fact, places)
    strange = places.keys() - {name for fact in known for name in fact.names}
    return wrong + [f"{name} was never said" for name in sorted(strange)], missing


def state_of(fact: Fact, places: dict[str, list[Line]]) -> list[str]:
    """What is wrong with a fact that is there: its topic, its word, its corrections."""
    wrong = []
    for name in fact.names:
        [*_, line] = places[name]
        steps = round(math.log(line["utility_multiplier"], UTILITY_RATIO))
        if line["topic_id"] != fact.topic:
            wrong.append(f"{name} is in {line['topic_id']}, not in {fact.topic}")
        if not any(word in line["content"] for word in fact.words):
            wrong.append(f"{name} has another word than {sorted(fact.words)}: {line['content'][:120]!r}")
        if not fact.steps <= steps <= fact.steps + fact.steps_in_doubt:
            wrong.append(f"{name} has {steps} steps; {fact.steps} were promised, {fact.steps_in_doubt} are in doubt")
    return wrong
