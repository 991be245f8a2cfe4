"""Checks of the accumulator's arguments: counts, losses, weights."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.exchange import KINDS, UNNAMED, VALUES
from fusedce.contract.results import MONITORS, LossSum, MonitoredLossSum, ScaledLossSum

OnEmpty = Literal["zero", "skip", "raise"]
Losses = dict[str, MonitoredLossSum]
"""The losses of a micro-batch by name: ``loss_sum ()`` and ``n_valid ()`` int64, and monitors."""
_MOST_LOSSES = VALUES // len(KINDS)
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
    if _faults.readable(count.device) and count < 0:
        raise ValueError(f"counts[{i}] must be >= 0, got {int(count)}")
    return count


def as_window(
    counts: Any, weights: Mapping[str, float] | None
) -> tuple[dict[str, float], list[tuple[Tensor, ...]]]:
    """The weights of a window's losses by name, and the count of each for each micro-batch."""
    if not isinstance(counts, Mapping):
        if weights is not None:
            raise ValueError("weights are for several losses: give counts as a dict, by name")
        return {UNNAMED: 1.0}, [(count,) for count in as_counts(counts)]
    names = list(counts)
    if not names or len(names) > _MOST_LOSSES or not all(isinstance(x, str) and x for x in names):
        raise ValueError(f"counts must name 1 to {_MOST_LOSSES} losses, got {names}")
    if weights is not None and not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a dict of numbers by loss, got {describe(weights)}")
    found = dict.fromkeys(names, 1.0) | dict(weights or {})
    if len(found) > len(names):
        raise ValueError(f"weights must be those of the losses {names}, got {list(weights or ())}")
    for name, weight in found.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise TypeError(f"weights[{name!r}] must be a number, got {describe(weight)}")
        if not math.isfinite(weight):
            raise ValueError(f"weights[{name!r}] must be finite, got {weight}")
    columns = [as_counts(counts[name]) for name in names]
    lengths = {name: len(column) for name, column in zip(names, columns, strict=True)}
    if len({*lengths.values()}) > 1:
        raise ValueError(
            f"counts must hold one number per micro-batch for each loss, got {lengths}"
        )
    return found, list(zip(*columns, strict=True))


def unpack(out: Any, names: Iterable[str]) -> Losses:
    """The losses of a micro-batch by name, as :func:`fused_ce` returned them."""
    names = list(names)
    if not isinstance(out, Mapping) or hasattr(out, "loss"):
        if names != [UNNAMED]:
            raise TypeError(f"out must be a dict of the window's losses {names}, got one loss")
        return {UNNAMED: _unpack(out)}
    if set(out) != set(names):
        wanted = "one loss, no dict" if names == [UNNAMED] else f"a dict of the losses {names}"
        raise ValueError(f"out must be {wanted}, as the window declares, got {list(out)}")
    return {name: _unpack(out[name]) for name in names}


def _unpack(out: Any) -> MonitoredLossSum:
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
    kind = LossSum if getattr(out, "is_whole", True) else ScaledLossSum
    return MonitoredLossSum.of(
        kind(*(x if x.dim() == 0 else x.reshape(()) for x in (out[0], out[1].long()))),
        {name: monitors[name] for name in MONITORS if name in monitors},
    )


_SAME_VALUE = ("ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone")


def divisor_of(loss: Tensor) -> Tensor | None:
    """The number ``()`` that ``loss ()`` was divided by last; NaN for its own tokens.

    Read from the graph: a division, a mean of several elements, or torch's cross-entropy with
    ``reduction="mean"``. ``None`` for other operations, also those that hide one of these (a
    compiled graph, a sum of losses): a number does not show whether it is a mean.
    """
    node: Any = loss.grad_fn
    while node is not None and node.name().partition("Backward")[0] in _SAME_VALUE:
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
