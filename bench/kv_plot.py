"""Draws what `bench/kv.py` measured: one bar a turn, made of what was new, what memory put in, and what was read again.

Rule: only the figures are drawn, nothing is measured. The colours are from Okabe and Ito's palette, which colour-blind
readers can tell apart; the ground is white, so that the picture can be read on dark pages too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("agg")  # no display
import matplotlib.pyplot as plt  # needs the line above
from matplotlib.axes import Axes
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from kv import Measured, Reading

NEW, INJECTED, AGAIN = "#000000", "#56B4E9", "#D55E00"
MEANING = {NEW: "new in the conversation", INJECTED: "put in by memory", AGAIN: "read before, and now again"}
COLUMNS = ("full attention", "sliding window", "sliding window, --swa-full")
ROWS = {
    "direct, full history": "without memd",
    "memd, nothing remembered": "memd,\nnothing remembered",
    "memd, memory": "memd with memory",
    "memd, memory, sticky off": "memd with memory,\nsticky_tokens: 0",
}
LOW = 0.3  # of the height of a row with memory: without, few tokens are read
DOTS_PER_INCH = 110
HALF_A_BAR = 0.4  # of the room of a turn


def draw(measured: Measured, path: Path) -> None:
    """Write `path`.png and `path`.svg."""
    servers = [server for server in COLUMNS if server in measured]
    rows = [row for row in ROWS if all(row in measured[server] for server in servers)]
    highest = 1.3 * max(r.evaluated for server in servers for row in rows for r in measured[server][row].talk)
    shares = [1.0 if "memory" in row else LOW for row in rows]
    with mpl.rc_context({"font.size": 10, "svg.hashsalt": "memd"}):
        figure, axes = plt.subplots(
            len(rows),
            len(servers),
            figsize=(10.5, 1.9 * sum(shares) + 1.9),
            sharex=True,
            squeeze=False,
            layout="constrained",
            height_ratios=shares,
        )
        for row, share, line in zip(rows, shares, axes, strict=True):
            for server, panel in zip(servers, line, strict=True):
                _bars(panel, measured[server][row].talk)
                panel.set_ylim(0, share * highest)
                panel.set_yticks(
                    [n for n in range(0, 100_000, 2000 if share == 1 else 1000) if n < 0.8 * share * highest]
                )
                panel.tick_params(labelleft=server == servers[0])
            line[0].set_ylabel(ROWS[row], rotation=0, ha="right", va="center", labelpad=12)
        for server, top, bottom in zip(servers, axes[0], axes[-1], strict=True):
            top.set_title(server.replace(", ", ",\n") if len(servers) > 2 else server, fontweight="bold", fontsize=11)
            bottom.set_xlabel("turn")
        figure.suptitle("Prompt tokens that llama.cpp read in each turn", fontsize=13, fontweight="bold")
        patches = [Patch(color=color, label=meaning) for color, meaning in MEANING.items()]
        figure.legend(
            handles=patches,
            loc="outside lower center",
            ncols=len(patches),
            frameon=False,
            title="×: tokens read ÷ (new in the conversation + put in by memory)",
        )
        figure.savefig(path.with_suffix(".png"), dpi=DOTS_PER_INCH, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        plt.close(figure)


def _bars(panel: Axes, readings: list[Reading]) -> None:
    """One stacked bar a turn, as high as what was read; what was read again is what is over."""
    new = [min(r.new, r.evaluated) for r in readings]
    known = [min(r.new + r.injected, r.evaluated) for r in readings]
    evaluated = [r.evaluated for r in readings]
    edges = [turn + side for turn in range(1, len(readings) + 1) for side in (-HALF_A_BAR, HALF_A_BAR)]
    bottoms = [[0] * len(readings), new, known]
    for bottom, top, color in zip(bottoms, (new, known, evaluated), MEANING, strict=True):
        # One path a colour, with gaps where nothing is a number: a patch for each bar would make a large SVG.
        heights = [math.nan if low == high else high for low, high in zip(bottom, top, strict=True)]
        panel.stairs(_with_gaps(heights), edges, baseline=_with_gaps(bottom), fill=True, color=color, linewidth=0)
    read, wanted = sum(r.evaluated for r in readings[1:]), sum(r.new + r.injected for r in readings[1:])
    panel.text(
        0.02,
        0.95,
        f"turns 2–{len(readings)}: {read:,} tokens, {read / wanted:.2f} ×",
        transform=panel.transAxes,
        ha="left",
        va="top",
        fontsize=9,
    )
    panel.grid(axis="y", color="#CCCCCC", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xticks([1, *range(10, len(readings) + 1, 10)])


def _with_gaps(heights: Sequence[float]) -> list[float]:
    return [value for height in heights for value in (height, math.nan)][:-1]
