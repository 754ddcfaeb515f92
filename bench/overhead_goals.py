"""The goals of bench/overhead.py, and whether its figures meet them.

Rule: pure; a goal is judged by figures of one run only. `e` is the embedding of a question alone, measured in turns
with what is divided by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Figures = Mapping[str, float]
Rows = Mapping[str, Figures]

DIRECT, BARE, MNEMONIC = "direct", "bare pass-through", "mnemonic-proxy"
OFF, NOTHING_STORED = "memd, off", "memd, nothing stored"
NEW_CHATS, STEADY_CHATS = "a new conversation each time", "chats of 25 turns"
MANY_STEADY_CHATS = "chats of 25 turns, 8 clients"
SMALL_BYTES, LARGE_BYTES = 2_000, 200_000
MANY_CHUNKS = 100_000


class Goal(NamedTuple):
    """A bound, and what was measured; None: it was not."""

    what: str
    bound: float
    unit: str
    measured: float | None
    is_at_least: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """Met, missed, or not measured."""
        if self.measured is None:
            return "not measured"
        is_met = self.measured >= self.bound if self.is_at_least else self.measured <= self.bound
        return "met" if is_met else "missed"


def over(chunks: int) -> str:
    """The name of memd with memory over so many chunks."""
    return f"memd, {chunks:,} chunks"


def cell_name(size: int, clients: int) -> str:
    """A history of so many bytes and so many clients, as people read it."""
    return f"{size:,} B, {clients} client{'s' if clients > 1 else ''}"


def added_ms(rows: Rows, target: str, *, what: str = "first_byte") -> float | None:
    """What a target adds to the median of the direct request's first byte (`chunk`: first streamed chunk)."""
    direct, own = (rows.get(name, {}).get(f"{what}_p50_ms") for name in (DIRECT, target))
    return None if direct is None or own is None else own - direct


def added_e(rows: Rows, target: str) -> float | None:
    """The same in embeddings."""
    added = added_ms(rows, target)
    return None if added is None else added / rows[target]["e_ms"]


def ratio(one: float | None, other: float | None) -> float | None:
    """One by the other, where both were measured."""
    return None if one is None or not other else one / other


def goals(told: Mapping[str, Any], chunks: list[int]) -> list[Goal]:
    """All goals, given what bench/overhead.py measured by part, and over which stores."""
    return [
        *_first_bytes(told["cells"], chunks),
        *_chats(told["chats"], chunks),
        *_pieces(told["pieces"]),
        *_rates(told, chunks),
        _pass_through(told["cells"]),
        Goal("tokens stored a second ÷ embedded a second", 0.8, "", told["storing"].get("stored_per_embedded"), True),
        *_resident(told["resident"]),
    ]


def _first_bytes(cells: Mapping[str, Rows], chunks: list[int]) -> Iterator[Goal]:
    small, large = (cells.get(cell_name(size, 1), {}) for size in (SMALL_BYTES, LARGE_BYTES))
    for count in chunks:
        bound = 1.6 if count <= 5000 else 2.2
        yield Goal(f"added to the first byte, 2 KB, {count:,} chunks", bound, "e", added_e(small, over(count)))
    stored = small.get(NOTHING_STORED, {}).get("chunks", 0)
    note = f"{stored:.0f} chunks were stored all the same" if stored else ""
    yield Goal("the same, nothing stored", 0.5, "e", added_e(small, NOTHING_STORED), note=note)
    yield Goal("the same, 200 KB, 100,000 chunks", 3, "e", added_e(large, over(MANY_CHUNKS)))


def _chats(chats: Mapping[str, Rows], chunks: list[int]) -> Iterator[Goal]:
    for kind in (NEW_CHATS, STEADY_CHATS):
        for count in chunks:
            yield Goal(f"the same, {kind}, {count:,} chunks", 2.2, "e", added_e(chats.get(kind, {}), over(count)))
    for count in chunks:
        figures = chats.get(STEADY_CHATS, {}).get(over(count), {})
        measured = ratio(figures.get("first_byte_p99_ms"), figures.get("first_byte_p50_ms"))
        note = f"{figures.get('requests', 0):.0f} requests"
        yield Goal(f"p99 ÷ p50, storing included, {count:,} chunks", 1.5, "", measured, note=note)


def _pieces(pieces: Rows) -> Iterator[Goal]:
    memory = [name for name in pieces if name.endswith("chunks")]
    measured = max((pieces[name]["cpu_us"] for name in memory), default=None)
    others = ", ".join(f"{name} {pieces[name]['cpu_us']:.0f}" for name in pieces if name not in memory)
    yield Goal("processor for a streamed piece, storing apart", 20, "µs", measured, note=others)


def _rates(told: Mapping[str, Any], chunks: list[int]) -> Iterator[Goal]:
    cells, many = told["cells"], over(MANY_CHUNKS)
    eight = cells.get(cell_name(SMALL_BYTES, 8), {})
    rate, other = (eight.get(name, {}).get("per_second") for name in (many, MNEMONIC))
    steady = told["chats"].get(MANY_STEADY_CHATS, {}).get(many, {}).get("per_second")
    yield Goal("requests a second, 8 clients, 100,000 chunks", 400, "", rate, is_at_least=True)
    yield Goal("the same, storing included (chats of 25 turns)", 400, "", steady, is_at_least=True)
    yield Goal("requests a second ÷ mnemonic-proxy's, 8 clients", 1, "", ratio(rate, other), is_at_least=True)
    waited = cells.get(cell_name(SMALL_BYTES, 64), {}).get(many, {}).get("first_byte_p50_ms")
    yield Goal("first byte p50, 64 clients, 2 KB, 100,000 chunks", 150, "ms", waited)
    small = cells.get(cell_name(SMALL_BYTES, 1), {})
    for count in chunks:
        own, theirs = (small.get(name, {}).get("first_byte_p50_ms") for name in (over(count), MNEMONIC))
        yield Goal(f"first byte ÷ mnemonic-proxy's, 2 KB, {count:,} chunks", 0.5, "", ratio(own, theirs))


def _pass_through(cells: Mapping[str, Rows]) -> Goal:
    ratios = {
        f"{what.replace('_', ' ')}, {name}": rows[OFF][f"{what}_p50_ms"] / rows[BARE][f"{what}_p50_ms"]
        for name, rows in cells.items()
        for what in ("first_byte", "chunk")
        if OFF in rows and BARE in rows
    }
    if not ratios:
        return Goal("`off` ÷ bare pass-through, the worst cell", 1.3, "", None)
    worst = max(ratios, key=lambda name: ratios[name])
    beyond = sum(one > 1.3 for one in ratios.values())
    note = f"{worst}; {beyond} of {len(ratios)} beyond"
    return Goal("`off` ÷ bare pass-through, the worst cell", 1.3, "", ratios[worst], note=note)


def _resident(resident: Rows) -> Iterator[Goal]:
    for target, bound in ((NOTHING_STORED, 350), (over(MANY_CHUNKS), 550)):
        after = resident.get(target, {}).get("after the load")
        what = f"resident after the load, {target.removeprefix('memd, ')}"
        yield Goal(what, bound, "MB", None if after is None else after / 1e6)
