"""Rounds of troubles in a cluster under load, judged from outside: `make cluster`.

    python tests/cluster/rounds.py [--rounds 24] [--daemons 3] [--only WORDS] [--seed 1] [--json FILE]
    python tests/cluster/rounds.py --rounds 10 --only "kill -9 of a daemon" --agents 16 --round-seconds 60 --one-house

Each round does one thing to a cluster of real processes while agents talk through all daemons, undoes it, waits until
each daemon serves all topics again, and has the database compared with what was promised. In every other pass there is
one daemon less, and the clocks of two are 10 s apart. Prints a line a round; exit code 1 if anything was lost, stored
twice, or refused by a daemon to which nothing was done, or a prefix changed.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

import plain_environment  # noqa: E402, F401  # needs the path, and comes before memd
import writers  # noqa: E402
from daemon_process import DaemonProcess  # noqa: E402
from house import House, running_house  # noqa: E402
from ledger import Answered  # noqa: E402
from troubles import TROUBLES, Trouble  # noqa: E402

TOPICS, WRITERS = 4, 6
SHIFTS = {0: 5.0, 1: -5.0}
"""Seconds by which clocks are ahead."""


class Round(NamedTuple):
    """What a round has shown."""

    trouble: str
    whole_seconds: float
    """From its end until each daemon serves each topic."""
    facts: int
    during: Answered
    """The longest answer of a daemon to which nothing was done itself, until the trouble was undone."""
    after: Answered
    """The same afterwards: what was ended starts again beside the others, on the same processors."""
    lost: int
    complaints: list[str]
    """What was lost, what is there twice, or not as it was promised."""


def play(house: House, trouble: Trouble, until: float = 0.0) -> Round:
    """One round; agents talk already, and until then."""
    house.wait_whole()
    one = house.one()
    facts, refused = house.ledger.acknowledged(), len(house.ledger.refused)
    began = time.monotonic()
    trouble.begin(house, one)
    time.sleep(max(0.0, began + trouble.lasts_seconds - time.monotonic()))
    undone = time.monotonic()
    trouble.undo(house, one)
    whole = house.wait_whole()
    time.sleep(max(0.0, until - time.monotonic()))
    house.end_writers()
    verdict = house.verdict()
    complaints = verdict.wrong + verdict.missing
    complaints += [f"refused by {one.daemon}: {one.request}: {one.what}" for one in house.ledger.refused[refused:]]
    said = house.ledger.acknowledged() - facts
    longest = house.ledger.longest(began, undone), house.ledger.longest(undone, time.monotonic())
    return Round(trouble.name, whole, said, *longest, len(verdict.missing), complaints)


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
            house.open_all()
            none = Answered(0.0, 0.0, "")
            yield Round(trouble.name, 0.0, 0, none, none, 0, [f"it went no further: {error}"])
            return


def at_the_end(house: House) -> list[str]:
    """What is wrong when all has ended."""
    house.open_all()
    house.verdict()  # what is acknowledged may be in a journal for a moment
    codes = {member.number: member.end() for member in house.members if member.is_well}
    verdict = house.judge()
    return [f"daemon {number} ended with {code}" for number, code in codes.items() if code] + (
        verdict.wrong + verdict.missing
    )


def told(one: Round) -> str:
    """A line for people."""
    state = "WRONG" if one.complaints else "ok"
    longest = (f"{answer.seconds:4.1f} s ({answer.request})" for answer in (one.during, one.after))
    return (
        f"{state:5} {one.trouble:42} {one.facts:4} facts, longest answer {', then '.join(longest)}, whole after "
        f"{one.whole_seconds:4.1f} s"
    )


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2 * len(TROUBLES))
    parser.add_argument("--daemons", type=int, default=3)
    parser.add_argument("--agents", type=int, default=WRITERS)
    parser.add_argument("--round-seconds", type=float, default=0.0, help="a round takes at least so long")
    parser.add_argument("--patience", type=float, default=12.0, help="seconds after which a client gives up")
    parser.add_argument("--one-house", action="store_true", help="no new cluster after each pass")
    parser.add_argument("--only", default="", help="troubles with these words in their name")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder in which everything stays")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    writers.PATIENCE_SECONDS = asked.patience
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
            with running_house(folder, daemons=asked.daemons - number % 2, seed=asked.seed + number) as house:
                house.start(SHIFTS if number % 2 else None)
                count = left if asked.one_house else min(left, len(chosen))
                for one in rounds(house, chosen, count, asked.agents, asked.round_seconds):
                    print(told(one), *one.complaints[:20], sep="\n      ", flush=True)
                    played.append(one)
                    left -= 1
                told_prefixes = house.prefixes()
                print(f"prefix unchanged in {told_prefixes.held} turns, shortened in {told_prefixes.shortened}")
                if wrong := at_the_end(house) + told_prefixes.changed:
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
    """The sum."""
    twice = sum(" times" in complaint for one in played for complaint in one.complaints)
    print(
        f"{len(played)} rounds, {sum(one.facts for one in played):,} facts acknowledged, "
        f"{sum(one.lost for one in played)} lost, {twice} twice, "
        f"{sum(bool(one.complaints) for one in played)} rounds with complaints, longest answer of a daemon to which "
        "nothing was done:"
    )
    for name in dict.fromkeys(one.trouble for one in played):
        own = [one for one in played if one.trouble == name]
        print(f"  {name:42} {max(one.during.seconds for one in own):4.1f} s, then", end=" ")
        print(f"{max(one.after.seconds for one in own):4.1f} s")


if __name__ == "__main__":
    main()
