"""Every picture of `bench/`, in one style, drawn from committed data.

Ours is blue and the others are grey or orange, which no common colour blindness confuses; names
stand at the bars and lines, not in the colours alone. The background is opaque white, so that a
dark page leaves them readable. Captions say what was measured and where.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fusedce.tools.bench import FLOOR

from .results import Row, problem

MiB = 2**20
GAP_FLOOR = 1e-8  # a gap of exactly 0 has no place on a log scale
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


def with_peaks(rows: Sequence[Row]) -> list[Row]:
    """Rows of training steps whose peak was measured: a suite of its own on a CPU."""
    measured = [r for r in rows if r.get("extra_peak_bytes") is not None]
    suites = {r["suite"] for r in measured}
    return [r for r in measured if r["suite"] == ("memory" if "memory" in suites else "time")]


def _mib(x: float) -> str:
    return f"{x / 1024:.1f} GiB" if x >= 10 * 1024 else f"{x:.0f} MiB"


def _times(x: float) -> str:
    return f"{x:.2f} x"


def budget(rows: Sequence[Row], where: str, folder: Path, tag: str) -> list[Path]:
    """Time against memory of fused_ce under memory budgets; no picture if they were not measured.

    ``rows`` carry ``median`` seconds and ``ratio`` to the bare products.
    """
    rows = [r for r in rows if r["suite"] == "budget"]
    points = sorted(
        ((r["extra_peak_bytes"] / MiB, r["ratio"], r["budget"]) for r in rows
         if r["name"] == "fused_ce" and r.get("extra_peak_bytes") and r["ratio"]),
        key=lambda point: point[:2],
    )  # fmt: skip
    if len(points) < 2:
        return []
    figure = styled(6, 3.6)
    axes = figure.subplots()
    axes.plot([x for x, *_ in points], [y for _, y, _ in points], "-o", color=OURS)
    for x, y, mib in points:
        text = f"budget {mib} MiB" if mib else "no budget"
        axes.annotate(text, (x, y), xytext=(4, 6), textcoords="offset points", fontsize=8.5)
    log_ticks(axes, "x", [x for x, *_ in points])
    log_ticks(axes, "y", [1.0, *(y for _, y, _ in points)])
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_xlabel("peak memory beyond inputs and gradients, MiB (log)")
    axes.set_ylabel("time / bare GEMMs (log)")
    title = "Time against memory of one forward + backward"
    caption = f"{_of(rows[0])}, {_conditions(rows)}. {where}"
    return [save(titled(figure, title, caption), folder / f"budget-{tag}.png")]


def gpu(rows: Sequence[Row], where: str, path: Path) -> Path:
    """Time, memory and error of the peers at the first problem that `bench/gpu.py` measured."""
    rows = [r for r in rows if r["suite"] == "peers" and "ms" in r]
    N, H, V = rows[0]["shape"]
    rows = [r for r in rows if r["shape"] == [N, H, V] and r["name"] != FLOOR]
    figure = styled(10, 2.9)
    panels = figure.subplots(1, 3)
    for panel, title, values, text in (
        (panels[0], "time over three bare products", [r["over_products"] for r in rows], _times),
        (panels[1], "peak beyond inputs and gradients", [r["peak_mib"] for r in rows], _mib),
        (panels[2], "largest error against float64", [max(r["errors"].values()) for r in rows],
         lambda x: f"{x:.1e}"),
    ):  # fmt: skip
        bars(panel, [(r["name"], x) for r, x in zip(rows, values, strict=True)], text)
        panel.set_title(title)
        if panel is not panels[0]:
            panel.set_yticks(range(len(rows)), [""] * len(rows))
    caption = f"One forward + backward, bfloat16, {N} tokens, H={H}, V={V}. {where}"
    return save(titled(figure, "", caption), path)


def accumulation(data: dict[str, Any], path: Path) -> Path:
    """One panel per regime: the logged losses above, their distance to 32x1 below."""
    regimes = data["regimes"]
    figure = styled(4.2 * len(regimes), 6.8)
    axes = figure.subplots(
        2, len(regimes), sharex=True, sharey="row", height_ratios=(3, 2), squeeze=False
    )
    for (top, bottom), (regime, found) in zip(axes.T, regimes.items(), strict=True):
        runs = found["runs"]
        full = runs["32x1"]["logged"]
        x = range(1, len(full) + 1)
        top.plot(x, full, color=INK, linewidth=5, alpha=0.3, label="32x1")
        for name, (colour, line) in _SPLITS.items():
            run = runs[name]["logged"]
            bottom.semilogy(x, _gaps(run, full), color=colour, linestyle=line, linewidth=1.4,
                            label=name)  # fmt: skip
            if name.endswith("1x32"):
                top.plot(x, run, color=colour, linestyle=line, linewidth=1.8, label=name)
        top.set_title(regime)
        bottom.set_xlabel("optimizer step")
    axes[0, 0].set_ylabel("logged loss, nats per token")
    axes[0, 0].legend()
    axes[1, 0].set_ylabel(f"distance to 32x1, nats\n(below {GAP_FLOOR:g}: drawn there)")
    # Where every line lies low, which is the regime of equal lengths, there is room.
    axes[1, -1].legend(fontsize=8, ncols=2, loc="upper right")
    where = f"{data['device_name']}, torch {data['torch']}, float32; {data['steps']} steps of 32"
    title = "Effective batch of 32 sequences, split into micro-batches"
    return save(titled(figure, title, f"{where} sequences, AdamW."), path)


_SPLITS = {
    "naive 16x2": ("#f0b37e", "-"),
    "naive 2x16": ("#e07b39", "-"),
    "naive 1x32": (NAIVE, "-"),
    "fused 16x2": ("#8fc1e3", "--"),
    "fused 2x16": ("#3d8fc6", "--"),
    "fused 1x32": (OURS, "--"),
    "floor": ("#888888", ":"),
}


def overview(
    rows: Sequence[Row], gaps: dict[str, Any], where: str, folder: Path, tag: str
) -> list[Path]:
    """The README's picture: memory and time against the others, and the gap of the denominator.

    Drawn twice: the panels side by side, and one below the other for narrow screens.

    Raises:
        ValueError: no problem has both a time and a peak.
    """
    memory = with_peaks(rows)
    time = [r for r in rows if r["suite"] == "time" and r["median"] and r["name"] != FLOOR]
    of = {problem(r)[1:] for r in memory} & {problem(r)[1:] for r in time}
    if not of:
        raise ValueError("no problem has a time and a peak: measure the suites time and memory")
    chosen = max(of, key=lambda p: (p[0] * p[1] * p[2], p[3]))  # the largest; float32 of two
    memory, time = ([r for r in part if problem(r)[1:] == chosen] for part in (memory, time))
    names = [r["name"] for r in memory if r["name"] in {t["name"] for t in time}]

    peaks = {r["name"]: r["extra_peak_bytes"] / MiB for r in memory}
    times = {r["name"]: r["ratio"] for r in time}
    regime, found = next(iter(gaps["regimes"].items()))  # natural lengths
    runs = found["runs"]
    N, H, V, dtype = chosen[:4]
    loss = f"N={N}, H={H}, V={V}, {dtype}, {_conditions(memory)}; {where}. "
    steps = f"32 sequences ({regime} tokens) as one batch and as 32 micro-batches; "
    steps += f"{gaps['device_name']}, torch {gaps['torch']}, float32."

    written = []
    for suffix, size, shape in (("", (12.5, 4.6), (1, 3)), ("-narrow", (4.8, 9.6), (3, 1))):
        figure = styled(*size)
        wide = {"width_ratios": (1, 0.8, 1.15)} if shape == (1, 3) else {}
        upper, middle, lower = figure.subplots(*shape, **wide)
        bars(upper, [(n, peaks[n]) for n in names], _mib)
        upper.set_title("Peak memory of the loss")
        upper.set_xlabel("MiB beyond inputs and gradients")
        bars(middle, [(n, times[n]) for n in names], _times)
        if wide:
            middle.set_yticks([])
        middle.axvline(1, color=INK, linewidth=1)
        middle.set_title("Time of the loss")
        middle.set_xlabel("over the three bare products")
        _gap_panel(lower, runs)
        conditions = f"Left: {loss}Right: {steps}" if wide else ""  # the page's caption has them
        written.append(save(titled(figure, "", conditions), folder / f"overview-{tag}{suffix}.png"))
    return written


def _gap_panel(axes: Axes, runs: dict[str, Any]) -> None:
    """Distance of the logged loss of 32 micro-batches from that of one batch, step by step."""
    full = runs["32x1"]["logged"]
    x = range(1, len(full) + 1)
    for name, colour, text in (
        ("naive 1x32", NAIVE, "mean of means"),
        ("fused 1x32", OURS, "one denominator"),
    ):
        axes.semilogy(x, _gaps(runs[name]["logged"], full), color=colour, linewidth=1.8)
        above = (len(full) / 2, max(_gaps(runs[name]["logged"], full)))
        axes.annotate(text, above, xytext=(0, 8), textcoords="offset points", ha="center",
                      color=colour, fontsize=10)  # fmt: skip
    axes.set_ylim(GAP_FLOOR / 2, 10)
    axes.set_title("Logged loss: 1x32, 32x1")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("distance, nats per token (log)")


def _gaps(run: Sequence[float], full: Sequence[float]) -> list[float]:
    return [max(abs(a - b), GAP_FLOOR) for a, b in zip(run, full, strict=True)]


def _of(row: Row) -> str:
    return f"N={row['N']}, H={row['H']}, V={row['V']}, {row['dtype']}"


def _conditions(rows: Sequence[Row]) -> str:
    shares = sorted({r["ignored"] for r in rows})
    return "labels ignored: " + ", ".join(f"{s:.0%}" for s in shares)
