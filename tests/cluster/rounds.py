"""Rounds of troubles in a cluster under load, judged from outside: `make cluster`.

    python tests/cluster/rounds.py [--rounds 36] [--daemons 3] [--only WORDS] [--lease 2] [--seed 1] [--json FILE]
    python tests/cluster/rounds.py --rounds 10 --only "kill -9 of the owner" --agents 16 --round-seconds 60 --one-house

Each round does one thing to a cluster of real processes while agents talk through all daemons, waits until the others
serve the topics, undoes it, waits until each daemon serves all topics again, and has the database and the bucket
compared with what was promised. In every other pass the clocks of two daemons are 10 s apart. In the end the daemons
are ended, and a folder that knows nothing claims every topic: it has to hold the same. Prints a line a round and the
times of takeover; exit code 1 if anything was lost, stored twice, or refused by a daemon to which nothing was done.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

import plain_environment  # noqa: E402, F401  # needs the path, and comes before memd
from daemon_process import DaemonProcess  # noqa: E402
from house import House, running_house  # noqa: E402
from troubles import TROUBLES, Trouble  # noqa: E402

TOPICS, WRITERS = 4, 6
SHIFTS = {0: 5.0, 1: -5.0}
"""Seconds by which clocks are ahead."""


class Round(NamedTuple):
    """What a round has shown."""

    trouble: str
    takeovers: list[float]
    """Seconds from the trouble to the first promise of another daemon, of each topic."""
    whole_seconds: float
    """From its end until each daemon serves each topic."""
    facts: int
    longest: float
    """Seconds of the longest answer of a daemon to which nothing was done itself."""
    complaints: list[str]


def play(house: House, trouble: Trouble, until: float = 0.0) -> Round:
    """One round; agents talk already, and until then."""
    house.wait_whole()
    owner = house.owner()
    had = {topic for topic, number in house.owners().items() if number == owner.number} & house.topics
    others = {member.number for member in house.members} - {owner.number}
    facts, refused = house.ledger.acknowledged(), len(house.ledger.refused)
    house.ledger.longest, began, taken = 0.0, time.monotonic(), {}
    trouble.begin(house, owner)
    if trouble.is_taken_over:
        taken = house.taken_over(began, had, others)
    time.sleep(max(0.0, began + trouble.lasts_leases * house.lease_seconds - time.monotonic()))
    trouble.undo(house, owner)
    whole = house.wait_whole()
    time.sleep(max(0.0, until - time.monotonic()))
    house.end_writers()
    verdict = house.verdict()
    complaints = verdict.wrong + verdict.missing
    complaints += [f"refused by {one.daemon}: {one.request}: {one.what}" for one in house.ledger.refused[refused:]]
    said = house.ledger.acknowledged() - facts
    return Round(trouble.name, sorted(taken.values()), whole, said, house.ledger.longest, complaints)


def rounds(
    house: House, chosen: Sequence[Trouble], count: int, agents: int = WRITERS, seconds: float = 0.0
) -> Iterator[Round]:
    """Round after round, each of so many seconds at least, until one fails so that it cannot go on."""
    for number in range(count):
        trouble = chosen[number % len(chosen)]
        house.write(TOPICS, agents)
        try:
            yield play(house, trouble, time.monotonic() + seconds)
        except AssertionError as error:
            house.end_writers()
            house.lines.open_all()
            yield Round(trouble.name, [], 0.0, 0, 0.0, [f"it went no further: {error}"])
            return


def at_the_end(house: House) -> list[str]:
    """What is wrong when all has ended, and somebody who knows nothing has every topic."""
    house.lines.open_all()
    house.verdict()  # what is acknowledged may be in a journal for a moment
    codes = {member.number: member.end() for member in house.members if member.is_running}
    complaints = [f"daemon {number} ended with {code}" for number, code in codes.items() if code]
    if left := house.owners():
        complaints.append(f"topics that were not released: {left}")
    verdict = house.judge_claimed()
    return complaints + verdict.wrong + verdict.missing


def told(one: Round) -> str:
    """A line for people."""
    taken = f"taken over in {' '.join(f'{seconds:.1f}' for seconds in one.takeovers)} s" if one.takeovers else ""
    state = "WRONG" if one.complaints else "ok"
    return (
        f"{state:5} {one.trouble:45} {one.facts:4} facts, longest answer {one.longest:4.1f} s, whole after "
        f"{one.whole_seconds:4.1f} s {taken}"
    )


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2 * len(TROUBLES))
    parser.add_argument("--daemons", type=int, default=3)
    parser.add_argument("--agents", type=int, default=WRITERS)
    parser.add_argument("--round-seconds", type=float, default=0.0, help="a round takes at least so long")
    parser.add_argument("--one-house", action="store_true", help="no new cluster after each pass")
    parser.add_argument("--lease", type=float, default=2.0)
    parser.add_argument("--only", default="", help="troubles with these words in their name")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder in which everything stays")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    DaemonProcess.forks = sys.platform == "linux"
    chosen = [trouble for trouble in TROUBLES if asked.only in trouble.name]
    random.Random(asked.seed).shuffle(chosen)
    played: list[Round] = []
    ending: list[str] = []
    left, number = asked.rounds, 0
    while left > 0:
        with tempfile.TemporaryDirectory(prefix="memd-cluster-", ignore_cleanup_errors=True) as name:
            folder = asked.keep / f"pass{number}" if asked.keep else Path(name)
            folder.mkdir(parents=True, exist_ok=True)
            with running_house(folder, daemons=asked.daemons, lease_seconds=asked.lease) as house:
                house.start(SHIFTS if number % 2 else None)
                count = left if asked.one_house else min(left, len(chosen))
                for one in rounds(house, chosen, count, asked.agents, asked.round_seconds):
                    print(told(one), *one.complaints[:20], sep="\n      ", flush=True)
                    played.append(one)
                    left -= 1
                if wrong := at_the_end(house):
                    print("WRONG at the end", *wrong[:20], sep="\n      ", flush=True)
                    ending += wrong
                print(dict(house.ledger.counts), flush=True)
                left = 0 if played[-1].complaints and "no further" in played[-1].complaints[0] else left
        number += 1
    summary(played)
    if asked.json:
        asked.json.write_text(json.dumps({"rounds": [one._asdict() for one in played], "ending": ending}, indent=1))
    sys.exit(bool(ending) or any(one.complaints for one in played))


def summary(played: Sequence[Round]) -> None:
    """The times of takeover by trouble, and the sum."""
    seconds: dict[str, list[float]] = {}
    for one in played:
        seconds.setdefault(one.trouble, []).extend(one.takeovers)
    for name, taken in sorted(seconds.items()):
        if taken:
            print(f"{name:45} {len(taken):3} topics: median {statistics.median(taken):.2f} s, most {max(taken):.2f} s")
    wrong = sum(bool(one.complaints) for one in played)
    print(
        f"{len(played)} rounds, {sum(one.facts for one in played):,} facts acknowledged, {wrong} rounds with complaints"
    )


if __name__ == "__main__":
    main()
