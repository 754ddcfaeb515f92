"""The figure that memory layers publish: whether the sessions with the answer are among the first that are found.

    python bench/longmemeval.py FILE --store DIR [--only 0-49] [--json FILE]
    python bench/longmemeval.py --from-locomo locomo.json --every 20 FILE

Backs the claim that memd finds what was said without a second model. FILE has LongMemEval's format (quality_data.py);
the second line makes one of LoCoMo's conversations, for where the real one cannot be had. Histories are stored by
`memd import`, one of several questions once, and stay in `--store`; questions go to `/memd/search`, which ranks as a
prompt does, and to a fresh chat. Questions about what was never said are left out, as the peers do.

    R@5, R@10        a session with the answer is among the first 5, 10 that a chunk was found of
    all@5, all@10    all of them are
    evidence         share of the answer's turns of which a sentence is shown within 2,000 tokens
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

import daemons
from quality_data import NOTHING_TO_FIND, Question, Talk, read
from recall import answered, some_of, store

BUDGET_TOKENS = 2000
SESSIONS = (5, 10)


def histories(talks: list[Talk]) -> list[Talk]:
    """The talks with their questions, each history once, under a name that its text decides."""
    asked: dict[str, list[Question]] = defaultdict(list)
    sessions = {}
    for talk in talks:
        name = "long-" + hashlib.blake2b(json.dumps(talk.sessions).encode(), digest_size=8).hexdigest()
        sessions[name] = talk.sessions
        asked[name] += answered(talk)
    return [Talk(name, sessions[name], questions) for name, questions in asked.items() if questions]


def first_sessions(daemon: daemons.Daemon, topic: str, question: str) -> list[int]:
    """The positions of the sessions in the order in which their best chunks are found."""
    told = daemon.own("/memd/search?" + urlencode({"q": question, "topic": topic}))
    places = (int(chunk["source"].rpartition("-")[2]) for chunk in told["chunks"])
    return list(dict.fromkeys(places))


def measured(daemon: daemons.Daemon, talks: list[Talk]) -> dict[str, dict[str, Any]]:
    """The figures, by the kind of question and of all."""
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for talk in talks:
        for one in talk.questions:
            found = first_sessions(daemon, talk.topic, one.text)
            shown = daemon.ask(talk.topic, one.text)
            figures = {f"R@{count}": float(not one.sessions.isdisjoint(found[:count])) for count in SESSIONS}
            figures |= {f"all@{count}": float(one.sessions <= set(found[:count])) for count in SESSIONS}
            figures |= {"evidence": fmean(some_of(turn, shown.block) for turn in one.evidence)} if one.evidence else {}
            for kind in (one.category, "all questions"):
                rows[kind].append(figures)
    return {
        kind: {"questions": len(some)}
        | {name: round(100 * fmean(row[name] for row in some if name in row), 1) for name in some[0]}
        for kind, some in sorted(rows.items())
    }


def made_of_locomo(path: Path, every: int) -> list[dict[str, Any]]:
    """LoCoMo's conversations in LongMemEval's format: each so-many-th question with its whole conversation."""
    items = []
    for talk in read(path):
        for number, one in enumerate(talk.questions[::every]):
            names = [f"{talk.topic}-{at}" for at in range(len(talk.sessions))]
            said = [
                [{**turn, "has_answer": any(text in turn["content"] for text in one.evidence)} for turn in session]
                for session in talk.sessions
            ]
            is_nothing = one.category == NOTHING_TO_FIND
            items.append(
                {
                    "question_id": f"{talk.topic}-{number}{'_abs' if is_nothing else ''}",
                    "question_type": f"category {one.category}",
                    "question": one.text,
                    "haystack_session_ids": names,
                    "haystack_sessions": said,
                    "answer_session_ids": [names[at] for at in sorted(one.sessions)],
                }
            )
    return items


def numbers(given: str) -> set[int]:
    """`3` or `0-49`."""
    first, _, last = given.partition("-")
    return set(range(int(first), int(last or first) + 1))


def main() -> None:
    """Measure and print, or make a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="of LongMemEval's format")
    parser.add_argument("--store", type=Path, help="a folder, in which what is stored stays")
    parser.add_argument("--only", type=numbers, help="these questions, by their places: 3, or 0-49")
    parser.add_argument("--memd", type=Path, default=daemons.HERE, help="the source tree of the version that is asked")
    parser.add_argument("--from-locomo", type=Path, help="make FILE of these conversations, and measure nothing")
    parser.add_argument("--every", type=int, default=1, help="with --from-locomo: each so-many-th question")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.from_locomo is not None:
        asked.file.write_text(json.dumps(made_of_locomo(asked.from_locomo, asked.every)))
        return
    if asked.store is None:
        parser.error("--store DIR says where the histories are stored")
    asked.store.mkdir(parents=True, exist_ok=True)
    tree, talks = asked.memd.resolve(), histories(read(asked.file, asked.only))
    store(tree, asked.store / "memory", talks)
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name:
        shutil.copytree(asked.store / "memory", Path(name) / "memory")
        settings = daemons.settings_of(Path(name) / "memory", injection={"budget_tokens": BUDGET_TOKENS})
        with daemons.serving(tree, settings) as daemon:
            daemon.settled()
            figures = measured(daemon, talks)
    for kind, row in figures.items():
        print(f"{kind:28} " + "  ".join(f"{one} {value}" for one, value in row.items()))
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
