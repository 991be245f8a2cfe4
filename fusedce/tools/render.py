"""The findings of the commands as plain text, for a terminal or a bug report, and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedce.tools.model_sizes import UserError

if TYPE_CHECKING:  # a plan needs no torch, so neither do its text and its picture
    from fusedce.tools.bench import Result
    from fusedce.tools.check import Check
    from fusedce.tools.plan import ModelPlan


def check_text(found: Check, saved: dict[str, int], device: str) -> str:
    """The findings of `check`, and the predicted memory of the model's loss.

    Args:
        found: the comparison.
        saved: predicted bytes of the loss by method, at 4096 tokens of the model's real size.
        device: the device of this prediction.
    """
    rows = [
        ("loss, native", f"{found.loss:.6f} nats per token"),
        ("relative error of the loss", f"{found.loss_error:.1e}"),
        ("... in evaluation", f"{found.eval_error:.1e}"),
        ("... of all gradients", f"{found.grad_error:.1e}"),
    ]
    if found.native_errors is not None:
        native = ", ".join(f"{e:.1e}" for e in found.native_errors)
        rows.append((f"the native model's own in {found.dtype}", native))
    sizes = {name: _size(count) for name, count in saved.items()}
    each = f"eager {sizes['eager']}, compiled {sizes['compiled eager']}, fused {sizes['fused_ce']}"
    rows.append((f"predicted memory of the loss ({device}, 4096 tokens, real size)", each))
    return "\n".join(
        (
            f"{found.model_class}, {found.parameters / 1e6:.2f} M parameters as run, {found.dtype}",
            *_pairs(rows),
            "equal: " + ("yes" if found.equal else "NO, do not use it with this model"),
            "fused: " + ("yes, no logits were made" if found.fused else "no, real logits"),
            *(f"  {reason}" for reason in found.why_not),
        )
    )


def plan_text(found: ModelPlan) -> str:
    """The findings of `plan`."""
    of = found.model
    pairs = [
        ("one copy of the logits", _size(found.logits_bytes)),
        ("tokens of a chunk of fused_ce", f"{found.chunk_tokens} of {found.tokens}"),
        ("least memory_budget", _size(found.least_budget)),
        ("recommended memory_budget", _size(found.recommended_budget)),
    ]
    if found.states_bytes is not None:
        pairs.append(("weights, gradients, Adam on each device", _size(found.states_bytes)))
    if found.free_bytes is not None:
        pairs.append(("left for loss and activations", _size(found.free_bytes)))
    rows = []
    for m in found.methods:
        row = {"": m.name, "predicted memory of the loss": _size(m.bytes)}
        if m.most_tokens is not None:
            row["most tokens that fit"] = str(m.most_tokens)
        rows.append(row)
    lines = [
        f"Predicted for {of.name}: H={of.H}, V={of.V}; {found.tokens} tokens, {found.dtype}, "
        f"{found.gpus} x {found.device}",
        *_pairs(pairs),
        _table(rows),
    ]
    for m in found.methods:
        held = ", ".join(f"{name} {_size(count)}" for name, count in m.memory.items())
        lines.append(f"{m.name} holds: {held}")
    lines += [
        "Each memory_budget (beside inputs and gradients) and what it gives:",
        _frontier(found),
    ]
    return "\n".join([*lines, "Counted from sizes, not measured."])


def _frontier(found: ModelPlan) -> str:
    """A table of memory budgets: the least one, then each twice the one before."""
    rows = []
    for point in found.frontier:
        row = {
            "memory_budget": _size(point.budget),
            "way": point.way,
            "tokens x classes": f"{point.tokens} x {point.classes}",
            "holds": _size(point.bytes),
            "products": str(point.products),
        }
        rows.append(row)
    return _table(rows)


def bench_text(found: Result) -> str:
    """The measurements of `bench`."""
    N, H, V = found.shape
    return (
        f"Forward + backward, N={N}, H={H}, V={V}, {found.dtype}. {found.where}\n"
        f"{_table(found.table())}\nMemory: {found.memory_method}, beyond the inputs."
    )


def _pairs(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in pairs)
    return (f"  {name:{width}}  {value}" for name, value in pairs)


def _table(rows: Sequence[dict[str, str]]) -> str:
    from tabulate import tabulate

    return tabulate(rows, headers="keys", disable_numparse=True)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


# ---- pictures, if matplotlib is installed ----------------------------------------------------


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
