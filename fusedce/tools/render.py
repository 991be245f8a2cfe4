"""The findings of the commands as plain text, for a terminal or a bug report."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a plan needs no torch, so neither does its text
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
    memory = f"Predicted memory of the loss ({device}, 4096 tokens, real size): {each}"
    return "\n".join(
        (
            f"{found.model_class}, {found.parameters / 1e6:.2f} M parameters as run, {found.dtype}",
            *_pairs(rows),
            *textwrap.wrap(memory, 80),
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
    lines = [
        f"{of.name}: H={of.H}, V={of.V}; {found.tokens} tokens, {found.dtype}, {found.device}",
        *_pairs(pairs),
        "Memory of the loss:",
    ]
    for m in found.methods:
        held = ", ".join(f"{name} {_size(count)}" for name, count in m.memory.items())
        text = f"  {m.name}: {_size(m.bytes)} ({held})"
        lines += textwrap.wrap(text, 80, subsequent_indent="    ")
    rows = [
        {
            "memory_budget": _size(point.budget),
            "way": point.way,
            "tokens x classes": f"{point.tokens} x {point.classes}",
            "holds": _size(point.bytes),
            "products": str(point.products),
        }
        for point in found.frontier
    ]
    lines += ["Each memory_budget (beside inputs and gradients) and what it gives:", _table(rows)]
    return "\n".join([*lines, "Counted from sizes, not measured."])


def bench_text(found: Result) -> str:
    """The measurements of `bench`."""
    N, H, V = found.shape
    caption = f"Forward + backward, N={N}, H={H}, V={V}, {found.dtype}. {found.where}"
    memory = f"Medians of the rounds. Memory: {found.memory_method}, beyond the inputs."
    return "\n".join(
        (
            *textwrap.wrap(caption, 80),
            _table(found.table()),
            *(f"{row.name}: {row.skipped}" for row in found.rows if row.skipped),
            *textwrap.wrap(memory, 80),
        )
    )


def _pairs(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in pairs)
    return (f"  {name:{width}}  {value}" for name, value in pairs)


def _table(rows: Sequence[dict[str, str]]) -> str:
    from tabulate import tabulate

    return tabulate(rows, headers="keys", disable_numparse=True)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
