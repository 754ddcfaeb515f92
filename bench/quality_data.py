"""Conversations with questions about them, read from the files of three public benchmarks; none of them is kept here.

- LoCoMo: a JSON list of `{conversation: {session_1: [{dia_id, speaker, text}], …}, qa: [{question, evidence: [dia_id],
  category}]}`; category 5 asks about what was never said.
- LongMemEval: a JSON list of `{question_id, question_type, question, haystack_session_ids, haystack_sessions: [[{role,
  content, has_answer?}]], answer_session_ids}`: every question has a history of its own. A `question_id` that ends with
  `_abs` asks about what was never said.
- BEAM: a folder with `chat.json` (`[{batch_number, turns: [[{role, id, content}]]}]`; a batch is a session here) and
  `probing_questions/probing_questions.json` (`{category: [{question, source_chat_ids}]}`, the ids in a list, or in
  lists by name), or a folder of such folders; `abstention` asks about what was never said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

NOTHING_TO_FIND = "5"
"""The category of questions about what was never said."""
_BEAM_MARK = re.compile(r"\s*->->\s*[\d,]+\s*\Z")
"""Behind the user's words BEAM keeps the number of the bullet that they were made from."""


class Question(NamedTuple):
    """One question, the texts of the turns that answer it, and the sessions that they are in."""

    text: str
    category: str
    evidence: tuple[str, ...]
    sessions: frozenset[int] = frozenset()
    """Positions in `Talk.sessions`."""


class Talk(NamedTuple):
    """One conversation of the data: its sessions as chat messages, and what is asked about them."""

    topic: str
    sessions: list[list[dict[str, str]]]
    questions: list[Question]


def read(path: Path, only: set[int] | None = None) -> list[Talk]:
    """The conversations of a file or folder; `only` those with these numbers."""
    told = list(_beam(path) if path.is_dir() else _from_file(path))
    return [talk for number, talk in enumerate(told) if only is None or number in only]


def _from_file(path: Path) -> Iterator[Talk]:
    items = json.loads(path.read_text())
    if not isinstance(items, list) or not items:
        raise SystemExit(f"{path}: not a list of conversations")
    if "haystack_sessions" in items[0]:
        return (_longmemeval(number, item) for number, item in enumerate(items))
    if "conversation" in items[0]:
        return (_locomo(number, item) for number, item in enumerate(items))
    raise SystemExit(f"{path}: neither LoCoMo (`conversation`) nor LongMemEval (`haystack_sessions`)")


# -- LoCoMo --------------------------------------------------------------------------------------------------------


def _locomo(number: int, told: dict[str, Any]) -> Talk:
    said = told["conversation"]
    names = sorted((name for name in said if re.fullmatch(r"session_\d+", name)), key=lambda name: int(name[8:]))
    turns = {turn["dia_id"]: (at, turn["text"]) for at, name in enumerate(names) for turn in said[name]}
    sessions = [
        [{"role": _role(turn, said[name]), "content": f"{turn['speaker']}: {turn['text']}"} for turn in said[name]]
        for name in names
    ]
    questions = []
    repaired = dropped = 0
    for asked in told["qa"]:
        named, good_will, useless = _evidence(asked.get("evidence", []), turns)
        repaired, dropped = repaired + good_will, dropped + useless
        texts, places = tuple(turns[one][1] for one in named), frozenset(turns[one][0] for one in named)
        questions.append(Question(asked["question"], str(asked["category"]), texts, places))
    if repaired or dropped:
        print(f"conversation {number}: {repaired} malformed entries of evidence repaired, {dropped} dropped")
    return Talk(f"talk-{number}", sessions, [one for one in questions if one.evidence])


def _role(turn: dict[str, str], session: list[dict[str, str]]) -> str:
    """Who opens a session plays the user."""
    return "user" if turn["speaker"] == session[0]["speaker"] else "assistant"


def _evidence(entries: list[str], turns: Collection[str]) -> tuple[list[str], int, int]:
    """The turns that evidence names, how many entries had to be read with good will, how many were of no use."""
    named: list[str] = []
    repaired = dropped = 0
    for entry in entries:
        found = [f"D{session}:{turn}" for session, turn in re.findall(r"D:?(\d+):0*(\d+)", entry)]
        known = [one for one in found if one in turns]
        named += known
        repaired += bool(known) and [entry] != known
        dropped += not known
    return list(dict.fromkeys(named)), repaired, dropped


# -- LongMemEval -----------------------------------------------------------------------------------------------------


def _longmemeval(number: int, told: dict[str, Any]) -> Talk:
    sessions = told["haystack_sessions"]
    answers = set(told["answer_session_ids"])
    places = frozenset(at for at, name in enumerate(told["haystack_session_ids"]) if name in answers)
    is_nothing = told["question_id"].endswith("_abs")
    texts = [turn["content"] for at in sorted(places) for turn in sessions[at] if turn.get("has_answer")]
    category = NOTHING_TO_FIND if is_nothing else told["question_type"]
    question = Question(told["question"], category, tuple(texts), places)
    said = [[{"role": turn["role"], "content": turn["content"]} for turn in session] for session in sessions]
    return Talk(f"talk-{number}", said, [question] if texts or is_nothing else [])


# -- BEAM ------------------------------------------------------------------------------------------------------------


def _beam(folder: Path) -> Iterator[Talk]:
    chats = sorted(folder.glob("**/chat.json"), key=lambda file: [int(n) for n in re.findall(r"\d+", str(file))])
    if not chats:
        raise SystemExit(f"{folder}: no chat.json in it or in its folders")
    return (_beam_chat(number, file) for number, file in enumerate(chats))


def _beam_chat(number: int, file: Path) -> Talk:
    batches = json.loads(file.read_text())
    turns = {
        message["id"]: (at, _BEAM_MARK.sub("", message["content"]), message["role"])
        for at, batch in enumerate(batches)
        for turn in batch["turns"]
        for message in turn
    }
    sessions: list[list[dict[str, str]]] = [[] for _ in batches]
    for at, content, role in turns.values():
        sessions[at].append({"role": role, "content": content})
    asked = json.loads((file.parent / "probing_questions" / "probing_questions.json").read_text())
    questions = []
    for category, group in asked.items():
        for one in group:
            named = [name for name in _ids(one.get("source_chat_ids", [])) if name in turns]
            texts, places = tuple(turns[name][1] for name in named), frozenset(turns[name][0] for name in named)
            is_nothing = category == "abstention"
            if texts or is_nothing:
                questions.append(Question(one["question"], NOTHING_TO_FIND if is_nothing else category, texts, places))
    return Talk(f"talk-{number}", sessions, questions)


def _ids(named: Any) -> list[int]:
    """The ids in lists of lists, or in lists by name."""
    if not isinstance(named, dict | list):
        return [named]
    groups = named.values() if isinstance(named, dict) else named
    return list(dict.fromkeys(one for group in groups for one in _ids(group)))
