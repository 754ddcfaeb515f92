"""The cost of rights: what a request pays for them, and whether the time of a refusal tells that a topic exists.

Backs two claims: principals cost at most 0.05 ms a request, and refusing a topic that exists takes as long as refusing
one that does not, on every route (taken from the router, as tests/test_rights.py does) and in a chat.

    python bench/rights.py [--rounds 400] [--json FILE]

The two kinds of refusal are asked for in turns, over one kept connection; the order within a turn changes. A ratio is
that of the medians; its spread is that of eight parts of the rounds, each by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "tests"))  # which know how each route is asked
sys.path.insert(2, str(Path(__file__).parent.parent / "tests" / "support"))

import aiohttp
import msgspec
from aiohttp.test_utils import make_mocked_request
from daemon_in_process import House, house_in, secret_of
from rich.console import Console
from rich.table import Table
from test_rights import GUARDED, HOW, told

from memd.access import let_in, principal_of
from memd.principals import Principal, Principals

REQUESTS = 1_000
TOPICS = [f"team-{name}" for name in "abcdefghijklmnop"]
PARTS = 8
THERE, MISSING = "vault-one", "vault-two"
"""As long as one another: a longer name takes longer to send."""


class Check(msgspec.Struct, frozen=True):
    """What letting a request in and asking for a right costs, the median and one in a hundred, in microseconds."""

    tokens: int
    same_us: float
    """Of the same token and topic again."""
    other_us: float
    """Of another token and topic each time."""
    other_high_us: float


class Refusal(msgspec.Struct, frozen=True):
    """How long refusals take, and the ratio of a topic that exists to one that does not."""

    route: str
    there_us: float
    ratio: float
    low: float
    high: float


def checks(tokens: int) -> Check:
    """Let requests in, with so many tokens known, each with four patterns; with none everybody is the owner."""
    patterns = ("team-*", "home-*-notes", "*-archive", "work")
    known = {
        hashlib.sha256(secret_of(str(number)).encode()).digest(): Principal(
            str(number), tuple(f"{one}{number % 7 or ''}" for one in patterns[1:]) + patterns[:1], frozenset(["read"])
        )
        for number in range(tokens)
    }
    principals, chance = Principals(known), random.Random(7)

    def times(pairs: Iterator[tuple[int, str]]) -> list[float]:
        taken = []
        for number, topic in itertools.islice(pairs, REQUESTS):
            request = make_mocked_request("GET", "/memd/log", {"X-Memory-Token": secret_of(str(number))})
            began = time.perf_counter()
            let_in(request, principals)
            principal_of(request).check("read", topic)
            taken.append((time.perf_counter() - began) * 1e6)
        return taken

    same = times(itertools.repeat((0, TOPICS[0])))
    others = times(iter(lambda: (chance.randrange(max(1, tokens)), chance.choice(TOPICS)), None))
    return Check(
        tokens=tokens,
        same_us=statistics.median(same),
        other_us=statistics.median(others),
        other_high_us=statistics.quantiles(others, n=100)[98],
    )


def asked_both(there_id: str) -> Iterator[tuple[str, tuple[str, object], tuple[str, object]]]:
    """Yield each route with how it is asked for the topic that exists and for the one that does not."""
    for route in GUARDED:
        how = HOW[route.method, route.path]
        if how(THERE) != how(MISSING):
            yield f"{route.method} {route.path}", how(THERE), how(MISSING)
    for path in ("/memd/turns/{}", "/memd/turns/{}/replay", "/memd/chunks/{}", "/memd/conversations/{}"):
        missing = "0" * (len(there_id) - 1) + "1"
        yield f"GET {path.format('(id)')}", (path.format(there_id), None), (path.format(missing), None)


async def refusal_us(session: aiohttp.ClientSession, url: str, body: object, status: set[int]) -> float:
    """Microseconds until a refusal is read."""
    began = time.perf_counter()
    async with session.request("GET" if body is None else "POST", url, json=body) as answer:
        await answer.read()
        taken = (time.perf_counter() - began) * 1e6
    assert answer.status in status, (url, answer.status)
    return taken


async def refusals(house: House, rounds: int) -> list[Refusal]:
    """Ask every route for both topics, in turns."""
    await told(house, THERE, "The word for the vault door is hibiscus-77.")
    await house.chat("owner", "What is the word for the vault door?", path=f"/t/{THERE}/v1")
    await house.settled()
    _, turns = await house.ask("owner", f"/memd/turns?topic={THERE}")
    turn_id = turns["turns"][0]["turn_id"]
    chat = {"messages": [{"role": "user", "content": "Hello there!"}]}
    base, own = house.daemon.base_url, house.daemon.own_url
    cases = [(name, (own + one[0], one[1]), (own + two[0], two[1])) for name, one, two in asked_both(turn_id)]
    chats = [(f"{base}/t/{topic}/v1/chat/completions", chat) for topic in (THERE, MISSING)]
    cases.append(("POST a chat", chats[0], chats[1]))
    found = []
    async with aiohttp.ClientSession(headers={"X-Memory-Token": secret_of("ann")}) as session:
        for name, there, missing in cases:
            status = {403} if "(id)" not in name else {404}
            pairs = []
            for number in range(rounds + 20):
                order = (there, missing) if number % 2 else (missing, there)
                one, two = [await refusal_us(session, url, body, status) for url, body in order]
                pairs.append((one, two) if number % 2 else (two, one))
            found.append(compared(name, pairs[20:]))
    return found


def compared(name: str, pairs: list[tuple[float, float]]) -> Refusal:
    """The ratio of the medians, and of those of parts of the pairs."""

    def ratio(some: list[tuple[float, float]]) -> float:
        return statistics.median(one for one, _ in some) / statistics.median(two for _, two in some)

    parts = [ratio(pairs[part::PARTS]) for part in range(PARTS)]
    return Refusal(name, statistics.median(one for one, _ in pairs), ratio(pairs), min(parts), max(parts))


def show(checked: list[Check], refused: list[Refusal]) -> None:
    """Print both tables."""
    console = Console()
    cost = Table(title="letting a request in and asking for a right, µs", title_justify="left")
    for column in ("tokens", "the same again", "another each time", "one in a hundred"):
        cost.add_column(column, justify="right")
    for one in checked:
        cost.add_row(f"{one.tokens:,}", f"{one.same_us:.1f}", f"{one.other_us:.1f}", f"{one.other_high_us:.1f}")
    console.print(cost)
    equal = Table(title="refusals: a topic that exists, beside one that does not", title_justify="left")
    for column in ("route", "µs", "ratio", "from", "to"):
        equal.add_column(column, justify="left" if column == "route" else "right")
    for row in refused:
        equal.add_row(row.route, f"{row.there_us:.0f}", f"{row.ratio:.3f}", f"{row.low:.3f}", f"{row.high:.3f}")
    console.print(equal)
    ratios = [row.ratio for row in refused]
    told_apart = [row.route for row in refused if not row.low <= 1 <= row.high]
    console.print(f"median ratio {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    console.print(f"all parts on one side of 1: {', '.join(told_apart) or 'none'}")


async def measured(folder: Path, rounds: int) -> list[Refusal]:
    """The refusals of a daemon in this process."""
    async with house_in(folder) as house:
        return await refusals(house, rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    checked = [checks(tokens) for tokens in (0, 1, 100, 1_000)]
    with tempfile.TemporaryDirectory() as folder:
        refused = asyncio.run(measured(Path(folder), given.rounds))
    show(checked, refused)
    if given.json is not None:
        figures = {"checks": checked, "refusals": refused}
        given.json.write_text(json.dumps(msgspec.to_builtins(figures), indent=1))


if __name__ == "__main__":
    main()
