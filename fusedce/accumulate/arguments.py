"""Checks of the accumulator's arguments: counts, losses."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from fusedce.accumulate import exchange as _exchange
from fusedce.contract.results import MONITORS, LossSum, MonitoredLossSum, ScaledLossSum

OnEmpty = Literal["zero", "skip", "raise"]
_SUM = "out must be (loss_sum, n_valid) as fused_ce returns it"


def as_counts(counts: Any) -> list[Tensor]:
    """Declared counts copied to ``()`` int64 tensors; values on a device are not read."""
    one = isinstance(counts, (str, bytes)) or (isinstance(counts, Tensor) and counts.dim() == 0)
    if one or not isinstance(counts, Iterable):
        raise TypeError(
            f"counts must hold one number per micro-batch, e.g. [count_valid(b) for b in "
            f"micro_batches], got {describe(counts)}"
        )
    return [_as_count(i, count) for i, count in enumerate(counts)]


def _as_count(i: int, count: Any) -> Tensor:
    dtype = str(getattr(count, "dtype", type(count).__name__))
    try:
        if "bool" in dtype:
            raise TypeError
        if isinstance(count, Tensor) and not count.is_floating_point() and count.numel() == 1:
            count = count.detach().reshape(()).to(torch.int64, copy=True)
        else:  # numpy's integers and 0-d arrays have an index as well
            count = torch.tensor(operator.index(count), dtype=torch.int64, device="cpu")
    except TypeError:
        raise TypeError(f"counts[{i}] must be an integer, got {describe(count)}") from None
    except (RuntimeError, OverflowError, ValueError):
        raise ValueError(f"counts[{i}] must be an int64, got {count}") from None
    if _exchange.readable(count.device) and count < 0:
        raise ValueError(f"counts[{i}] must be >= 0, got {int(count)}")
    return count


def unpack(out: Any) -> MonitoredLossSum:
    """The losses of a micro-batch, as :func:`fused_ce` returned them: ``()`` each."""
    if hasattr(out, "loss") and hasattr(out, "keys"):
        raise TypeError(
            f"out must be (loss_sum, n_valid), got a {type(out).__name__}, whose .loss is a mean: "
            f"give (out.loss * n, n) with n = count_valid(labels), a tensor, or let a Trainer "
            f"with fusedce.FusedTrainerMixin do it"
        )
    if isinstance(out, Tensor) and out.numel() == 1:
        raise TypeError(
            f"{_SUM}, got {describe(out)}, which looks like a mean: pass fused_ce(...) itself, "
            f"without .mean(); the window divides"
        )
    pair = isinstance(out, tuple) and len(out) == 2
    if (
        not pair
        or not all(isinstance(x, Tensor) and x.numel() == 1 for x in out)
        or ([x.is_floating_point() for x in out] != [True, False])
    ):
        raise TypeError(f"{_SUM}: a floating and an integer scalar tensor, got {describe(out)}")
    if out[0].element_size() < 4:
        raise TypeError(
            f"out: loss_sum must be float32 or float64, got {out[0].dtype}, which cannot hold a "
            f"sum over tokens. Has a wrapper cast it (FSDP's MixedPrecisionPolicy(output_dtype=), "
            f"accelerate)? Let it return float32"
        )
    monitors = getattr(out, "monitors", {})
    kind = ScaledLossSum if isinstance(out, ScaledLossSum) else LossSum
    return MonitoredLossSum.of(
        kind(*(x if x.dim() == 0 else x.reshape(()) for x in (out[0], out[1].long()))),
        {name: monitors[name] for name in MONITORS if name in monitors},
    )


_SAME = ["ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Neg"]


def divisor_of(loss: Tensor) -> Tensor | None:
    """The number ``()`` that ``loss ()`` was divided by last; NaN for its own tokens.

    Read from the graph: a division, a mean of several elements, or torch's cross-entropy with
    ``reduction="mean"``. ``None`` for other operations, also those that hide one of these (a
    compiled graph, a sum of losses): a number does not show whether it is a mean.
    """
    node: Any = loss.grad_fn
    while node is not None and node.name().partition("Backward")[0] in _SAME:
        node = node.next_functions[0][0]
    kind = "" if node is None else node.name().partition("Backward")[0]
    if kind == "Div":
        other = getattr(node, "_saved_other", None)
        return other.detach() if isinstance(other, Tensor) and other.dim() == 0 else None
    reduces = kind in ("NllLoss", "NllLoss2D") and node._saved_reduction == 1
    if not reduces and kind != "Mean":
        return None
    one = kind == "Mean" and node._saved_self_sym_numel == 1
    return torch.tensor(1.0 if one else math.nan, device="cpu")


def check_module(module: Any) -> None:
    """Raise ``TypeError`` unless this is a module or ``None``."""
    if module is not None and not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {describe(module)}")


def describe(x: object) -> str:
    """An argument in a few words, for messages."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
    if isinstance(x, tuple):
        return "(" + ", ".join(describe(y) for y in x) + ")"
    return type(x).__name__
