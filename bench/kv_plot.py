"""Draws what `bench/kv.py` measured: one bar a turn, made of what was new, what memory put in, and what was read again.

Rule: only the figures are drawn, nothing is measured. Colours are Okabe and Ito's, which colour-blind readers can tell
apart; the ground is white, so that the picture can be read on dark pages too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import matplotlib as mpl

mpl.use("agg")  # no display
import matplotlib.pyplot as plt  # needs the line above
from matplotlib.axes import Axes
from matplotlib.patches import Patch

NEW, INJECTED, AGAIN = "#000000", "#56B4E9", "#D55E00"
LABELS = ((NEW, "new messages"), (INJECTED, "memory put in"), (AGAIN, "read again, although known"))
SERVERS_MAX = 3  # columns; more would be too small to read
PIXELS_PER_INCH = 130
