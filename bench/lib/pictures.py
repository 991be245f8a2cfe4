"""Every picture of `bench/`, in one style, drawn from committed data.

Ours is blue and the others are grey or orange, which no common colour blindness confuses; names
stand at the bars and lines, not in the colours alone. The background is opaque white, so that a
dark page leaves them readable. Captions say what was measured and where.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .losses import FLOOR
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
        text, above = (f"budget {mib} MiB", 6) if mib else ("no budget", -14)
        axes.annotate(text, (x, y), xytext=(4, above), textcoords="offset points", fontsize=8.5)
    log_ticks(axes, "x", [x for x, *_ in points])
    log_ticks(axes, "y", [1.0, *(y for _, y, _ in points)])
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_xlabel("peak memory beyond inputs and gradients, MiB (log)")
    axes.set_ylabel("time / bare GEMMs (log)")
    title = "Time against memory of one forward + backward"
    caption = f"{_of(rows[0])}, {_conditions(rows)}. {where}"
    return [save(titled(figure, title, caption), folder / f"budget-{tag}.png")]


def gpu(rows: Sequence[Row], where: str, path: Path) -> Path:
    """Memory and time of each implementation, a panel a problem; ours by default and by budget.

    ``rows`` carry ``over_products``.
    """
    rows = [r for r in rows if r["suite"] == "peers" and "ms" in r and r["name"] != FLOOR]
    shapes = list(dict.fromkeys(tuple(r["shape"]) for r in rows))[:2]
    figure = styled(9, 3.8)
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    rows = [r | {"peak_mib": max(r["peak_mib"], 1)} for r in rows if tuple(r["shape"]) in shapes]
    for panel, shape in zip(panels, shapes, strict=True):
        here = [r for r in rows if tuple(r["shape"]) == shape]
        ours = sorted((r for r in here if r["name"].startswith("fused_ce")),
                      key=lambda r: r["peak_mib"])  # fmt: skip
        panel.plot([r["peak_mib"] for r in ours], [r["over_products"] for r in ours], "-o",
                   color=OURS, linewidth=2)  # fmt: skip
        for r in here:
            at, name = (r["peak_mib"], r["over_products"]), r["name"]
            mine = name.startswith("fused_ce")
            if not mine:
                panel.plot(*at, "o", color=OTHER)
            elif name != "fused_ce":
                continue
            # Names of points that lie on each other stand above each other.
            over = sum(near(r, other) for other in here[: here.index(r)])
            panel.annotate(
                "fused_ce, default" if mine else name, at,
                xytext=(0, -13 if mine else 6 + 11 * over), fontsize=8,
                textcoords="offset points", ha="center", color=OURS if mine else INK,
            )  # fmt: skip
        log_ticks(panel, "x", [0.15, *(r["peak_mib"] for r in rows), 4e4])
        panel.xaxis.set_major_locator(FixedLocator([1, 10, 100, 1000, 10000]))
        panel.axhline(1, color=INK, linewidth=1)
        panel.set_xlabel("MiB beyond inputs and gradients (log)")
        panel.set_title("{} tokens, H={}, V={}".format(*shape))
    log_ticks(panels[0], "y", [1.0, *(r["over_products"] for r in rows)])
    panels[0].set_ylabel("time / three bare products (log)")
    caption = f"One forward + backward, bfloat16; lower left is better. {where}"
    return save(titled(figure, "", caption), path)


def near(a: Row, b: Row) -> bool:
    """Whether another implementation's point lies on this one."""
    return not b["name"].startswith("fused_ce") and all(
        abs(math.log(a[key] / b[key])) < 0.1 for key in ("peak_mib", "over_products")
    )


def memory(data: dict[str, Any], measured: Sequence[Row], path: Path) -> Path:
    """Counted bytes of the loss by tokens, and the measured peaks at the same shape."""
    H, V = map(int, data["model"].split(","))
    rows, figure = data["rows"], styled(6.4, 4.2)
    axes = figure.subplots()
    lines = {"eager": (OTHER, "-"), "compiled eager": (OTHER, "--"), "fused_ce": (OURS, "-"),
             "fused_ce, least memory_budget": (OURS, "--")}  # fmt: skip
    tokens = [row["tokens"] for row in rows]
    for name, (colour, line) in lines.items():
        held = [row["bytes"][name] / 2**30 for row in rows]
        axes.plot(tokens, held, line, color=colour, linewidth=2)
        axes.annotate(name, (tokens[-1], held[-1]), xytext=(4, 0), va="center",
                      textcoords="offset points",
                      color=OURS if colour == OURS else INK)  # fmt: skip
        points = [
            (row["shape"][0], row["peak_mib"] / 1024) for row in measured
            if row["suite"] == "peers" and row["name"] == name and row["shape"][1:] == [H, V]
        ]  # fmt: skip
        axes.plot([x for x, _ in points], [y for _, y in points], "o", color=colour)
    log_ticks(axes, "x", tokens)
    axes.xaxis.set_major_locator(FixedLocator(tokens))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1024:g}k"))
    axes.set_xlim(tokens[0], tokens[-1] * 9)
    axes.spines["bottom"].set_bounds(tokens[0], tokens[-1])
    log_ticks(axes, "y", [b / 2**30 for row in rows for b in row["bytes"].values()])
    axes.set_xlabel("tokens of a micro-batch")
    axes.set_ylabel("GiB beyond inputs and gradients (log)")
    caption = f"H={H}, V={V}, bfloat16, {data['device']}: lines counted, points measured."
    return save(titled(figure, "Memory of the loss", caption), path)


def stacks(rows: Sequence[Row], path: Path) -> Path:
    """How far the gradient of a step is from the right one: a cell for each stack and model."""
    rows = [row for row in rows if row["micro-batches"] > 1]
    models = list(dict.fromkeys(row["model"] for row in rows))
    names = list(dict.fromkeys(row["stack"] for row in rows))
    figure = styled(6.8, 0.36 * len(names) + 0.9)
    axes = figure.subplots()
    errors = [[math.nan] * len(models) for _ in names]
    for row in rows:
        i, j = names.index(row["stack"]), models.index(row["model"])
        errors[i][j] = error = gradient_error(row["gradient"], row["direction"])
        text = "right" if error < 1e-4 else f"{error:.2f}"
        axes.text(j, i, text, ha="center", va="center", color="white" if error > 0.5 else INK)
    axes.imshow(errors, cmap="Oranges", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(models)), models)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    caption = "Distance of the gradient from the right one, over its size; 4 micro-batches a step."
    return save(titled(figure, "", caption), path)


def gradient_error(projection: float, sine: float) -> float:
    """Distance from the right gradient, over its size, of one with this projection on it."""
    aside = projection * sine / math.sqrt(1 - sine**2)
    return math.hypot(projection - 1, aside)


def weights(found: dict[str, list[tuple[int, float]]], path: Path) -> Path:
    """The weight of a token of each micro-batch in one step, before and after; 1 is right."""
    figure = styled(6.4, 3.6)
    axes = figure.subplots()
    width = 0.8 / len(found)
    for i, (name, micro_batches) in enumerate(found.items()):
        at = [x + i * width for x in range(len(micro_batches))]
        colour = OURS if name == "LossAccumulator" else NAIVE
        drawn = axes.bar(at, [w for _, w in micro_batches], width, color=colour, label=name)
        if colour == NAIVE:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            labels = [f"{w:.1f}" for _, w in micro_batches]
            axes.bar_label(drawn, labels, padding=2, fontsize=9, bbox=box)
    axes.set_xticks([x + width / 2 for x in range(len(at))], [f"{n}" for n, _ in micro_batches])
    axes.axhline(1, color=INK, linewidth=1, zorder=0.5)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("tokens of the micro-batch")
    axes.set_ylabel("weight of one of its tokens\n(1 is right)")
    axes.legend()
    return save(titled(figure, "One optimizer step of 8 micro-batches", ""), path)


def accumulation(data: dict[str, Any], path: Path) -> Path:
    """A panel for each regime of lengths: the distance of the logged losses from those of 32x1."""
    regimes = data["regimes"]
    rows = -(-len(regimes) // 2)
    figure = styled(7, 2.6 * rows + 1.2)
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    for axes, (regime, found) in zip(panels.flat, regimes.items(), strict=False):
        full = found["runs"]["32x1"]["logged"]
        for name, (colour, line) in _SPLITS.items():
            gaps = _gaps(found["runs"][name]["logged"], full)
            axes.semilogy(range(1, len(full) + 1), gaps, color=colour, linestyle=line,
                          linewidth=1.4, label=name)  # fmt: skip
        axes.set_title(f"{regime} tokens")
    for axes in panels[-1]:
        axes.set_xlabel("optimizer step")
    for axes in panels[:, 0]:
        axes.set_ylabel("distance to 32x1, nats")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), ncols=4, loc="outside upper center")
    where = f"{data['device_name']}, torch {data['torch']}, float32; {data['steps']} steps of 32"
    caption = f"{where} sequences, AdamW. Distances below {GAP_FLOOR:g} are drawn there."
    return save(titled(figure, "", caption), path)


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
    """The site's first picture: memory and time against the others, and the gap of the denominator.

    Drawn twice: two panels above the third, and one below the other for narrow screens.

    Raises:
        ValueError: no problem has both a time and a peak.
    """
    memory = [r for r in rows if r["suite"] == "memory" and r.get("extra_peak_bytes") is not None]
    time = [r for r in rows if r["suite"] == "time" and r["median"] and r["name"] != FLOOR]
    of = {problem(r)[1:] for r in memory} & {problem(r)[1:] for r in time}
    if not of:
        raise ValueError("no problem has a time and a peak: measure the suites time and memory")
    chosen = max(of, key=lambda p: (p[0], p[3]))  # of the most tokens; float32 of two dtypes
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
    for suffix, size, panels in (("", (7.4, 5.8), "ab;cc"), ("-narrow", (4.8, 9.6), "a;b;c")):
        figure = styled(*size)
        wide = not suffix
        upper, middle, lower = figure.subplot_mosaic(panels).values()
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
        conditions = f"Above: {loss}Below: {steps}" if wide else ""  # the page's caption has them
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
    axes.set_title("Logged loss beside one batch")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("distance, nats per token (log)")


def _gaps(run: Sequence[float], full: Sequence[float]) -> list[float]:
    return [max(abs(a - b), GAP_FLOOR) for a, b in zip(run, full, strict=True)]


def _of(row: Row) -> str:
    return f"N={row['N']}, H={row['H']}, V={row['V']}, {row['dtype']}"


def _conditions(rows: Sequence[Row]) -> str:
    shares = sorted({r["ignored"] for r in rows})
    return "labels ignored: " + ", ".join(f"{s:.0%}" for s in shares)
