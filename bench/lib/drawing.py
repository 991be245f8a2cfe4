"""The style of all pictures.

Ours is blue and the others are grey or orange, which no common colour blindness confuses; names
stand at the bars and lines, not in the colours alone. The background is opaque white, so that a
dark page leaves them readable. Captions say what was measured and where.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

OURS, OTHER, NAIVE, INK = "#0072b2", "#9a9a9a", "#d55e00", "#222222"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#666666",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.facecolor": "white",
    "savefig.dpi": 130,
}


def styled(width: float, height: float) -> Figure:
    """An empty figure; sizes are in inches."""
    mpl.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def titled(figure: Figure, title: str, caption: str) -> Figure:
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    width = int(figure.get_figwidth() * 15)
    figure.supxlabel("\n".join(textwrap.wrap(caption, width)), x=0.01, ha="left", fontsize=8,
                     color="#555555")  # fmt: skip
    return figure


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def bars(panel: Axes, values: Sequence[tuple[str, float]], text: Callable[[float], str]) -> None:
    """Draw horizontal bars with their numbers, in the given order, ours in blue."""
    names = [name for name, _ in values]
    colours = [OURS if name.startswith("fused_ce") else OTHER for name in names]
    drawn = panel.barh(range(len(names)), [v for _, v in values], color=colours, height=0.7)
    panel.bar_label(drawn, [text(v) for _, v in values], padding=3, fontsize=9)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.22 * max(v for _, v in values))
    panel.grid(visible=False, axis="y")
    panel.tick_params(axis="y", length=0)


def log_ticks(axes: Axes, axis: str, values: Sequence[float]) -> None:
    """Set a log scale with few plain numbers: 1, 2, 5, 10, 20, 50 ..."""
    low, high = min(values) / 1.5, max(values) * 1.7
    steps = [m * 10.0**e for e in range(-3, 7) for m in (1, 2, 5)]
    scale = axes.xaxis if axis == "x" else axes.yaxis
    (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
    scale.set_major_locator(FixedLocator([s for s in steps if low <= s <= high]))
    scale.set_minor_locator(NullLocator())
    scale.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    (axes.set_xlim if axis == "x" else axes.set_ylim)(low, high)
