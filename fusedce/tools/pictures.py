"""The pictures that `fusedce plan` and `fusedce bench` draw, if matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedce.backends.plan import WAYS
from fusedce.prediction import GiB
from fusedce.tools.model_sizes import UserError

if TYPE_CHECKING:  # a plan's picture needs no torch
    from fusedce.tools.bench import Result
    from fusedce.tools.plan import ModelPlan


def can_draw(path: Path) -> None:
    """Check that a picture can be written to ``path``, before anything is measured.

    Raises:
        UserError: matplotlib is missing, or ``path`` cannot be written.
    """
    _figure(1, 1)
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as problem:
        raise UserError(f"cannot write --picture {path}: {problem}") from None
    if not existed:
        path.unlink()


def draw_bench(result: Result, path: Path) -> None:
    """Draw bars of memory and of time, ours in blue.

    Raises:
        UserError: matplotlib is missing, or ``path`` cannot be written.
    """
    ran = [r for r in result.rows if r.median is not None]
    figure = _figure(10, 1.6 + 0.4 * len(ran))
    left, right = figure.subplots(1, 2)
    with_memory = [r for r in ran if r.extra_bytes is not None]
    panels = (
        (left, with_memory, [(r.extra_bytes or 0) / 2**20 for r in with_memory],
         "Peak memory beyond the inputs, MiB", "{:.0f}"),
        (right, ran, [1e3 * r.median for r in ran if r.median], "Time, ms", "{:.1f}"),
    )  # fmt: skip
    for axes, rows, values, title, form in panels:
        colours = ["#0072b2" if r.name == "fused_ce" else "#9a9a9a" for r in rows]
        bars = axes.barh(range(len(rows)), values, color=colours)
        axes.bar_label(bars, [form.format(v) for v in values], padding=3)
        axes.set_yticks(range(len(rows)), [r.name for r in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(values))
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    N, H, V = result.shape
    caption = f"Forward + backward, N={N}, H={H}, V={V}, {result.dtype}. {result.where}"
    _save(figure, path, caption)


def draw_plan(found: ModelPlan, path: Path) -> None:
    """Memory against predicted time of our ways, beside eager and compiled eager.

    Raises:
        UserError: no times are predicted for this device and dtype; matplotlib is missing; ``path``
            cannot be written.
    """
    if found.floor_milliseconds is None:
        raise UserError("--picture needs predicted times: a GPU and bf16 or fp16")
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    for name, colour in zip(WAYS, ("#0072b2", "#56b4e9", "#009e73"), strict=True):
        points = [p for p in found.frontier if p.way == name]
        axes.plot(
            [p.bytes / GiB for p in points], [p.milliseconds for p in points], "o-", color=colour,
            label=f"fused_ce, {name}",
        )  # fmt: skip
    for method, marker in zip(found.methods, "sD", strict=False):
        axes.plot(method.bytes / GiB, method.milliseconds, marker, color="#9a9a9a")
        axes.annotate(method.name, (method.bytes / GiB, method.milliseconds), (6, 4),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.axhline(found.floor_milliseconds, color="#cccccc", zorder=0)
    axes.set_xscale("log")
    axes.set_ylim(0)
    axes.set_xlabel("memory beside inputs and gradients, GiB")
    axes.set_title("ms, predicted; the line: three bare products", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    of = found.model
    _save(
        figure, path,
        f"{of.name}: {found.tokens} tokens, H={of.H}, V={of.V}, {found.dtype}, {found.device}",
    )  # fmt: skip


def _figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib, sizes in inches.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError("--picture needs matplotlib: pip install 'fusedce[bench]'") from None
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def _save(drawn: Any, path: Path, caption: str) -> None:
    """Write the figure with a caption below it.

    Raises:
        UserError: ``path`` cannot be written.
    """
    drawn.supxlabel(caption, x=0.01, ha="left", fontsize=8)
    try:
        drawn.savefig(path, facecolor="white")
    except (OSError, ValueError) as problem:
        raise UserError(f"cannot write --picture {path}: {problem}") from None
