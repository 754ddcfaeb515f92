"""Draws what `bench/quality.py` measured: how much of what a question needs is found within a budget of tokens.

Rule: only the figures are drawn, nothing is measured. The colours are from Okabe and Ito's palette, which colour-blind
readers can tell apart; the ground is white, so that the picture can be read on dark pages too.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("agg")  # no display
import matplotlib.pyplot as plt  # needs the line above

BUDGETS = (500, 1000, 2000, 4000)
STYLES = {
    "cosine only": ("#999999", "meaning alone (cosine)"),
    "lexical only": ("#E69F00", "words alone (BM25)"),
    "fused": ("#56B4E9", "both, fused"),
    "fused + neighbours": ("#000000", "both and neighbours: memd's default"),
}


def draw(rows: dict[str, list[float]], path: Path) -> None:
    """Write `path`.png and `path`.svg.

    Args:
        rows: variant → recall (0 to 1) within each of `BUDGETS`.
    """
    with mpl.rc_context({"font.size": 10, "svg.hashsalt": "memd"}):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        for name, (color, label) in STYLES.items():
            if name in rows:
                axes.plot(BUDGETS, [100 * value for value in rows[name]], "o-", color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(BUDGETS, [f"{budget:,}" for budget in BUDGETS])
        axes.set_xlabel("tokens that memory may take in a prompt")
        axes.set_ylabel("evidence found, per cent")
        axes.set_ylim(50, 100)
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.legend(loc="lower right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title("What a question needs, found within a budget", fontweight="bold", fontsize=12)
        figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        plt.close(figure)
