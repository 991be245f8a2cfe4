"""Checks of the accumulator's arguments: parameters, losses by name, counts, sums."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..contract.results import MONITORS, LossSum, MonitoredLossSum, ScaledLossSum
from .exchange import MOST_LOSSES

OnEmpty = Literal["zero", "skip", "raise"]
_SUM = "out must be (loss_sum, n_valid) as fused_ce returns it"


def as_tensors(name: str, parameters: Any) -> list[Tensor]:
    """The tensors of an iterable, each once; ``TypeError`` for anything else."""
    advice = (
        f"{name} must be an iterable of tensors, such as model.parameters() (not "
        f"named_parameters(), a state_dict or an optimizer's param_groups)"
    )
    if isinstance(parameters, (torch.nn.Module, Tensor)) or not isinstance(parameters, Iterable):
        raise TypeError(f"{advice}, got {describe(parameters)}")
    found: dict[int, Tensor] = {}
    for p in parameters:
        if not isinstance(p, Tensor):
            raise TypeError(f"{advice}, it holds {describe(p)}")
        found[id(p)] = p
    return list(found.values())


def check_losses(losses: Any) -> dict[str, float]:
    """The weights of the losses of a step, by name; one loss is called ``""``."""
    if losses is None:
        return {"": 1.0}
    example = "losses={'main': 1, 'next2': 0.3}"
    if not isinstance(losses, Mapping):
        raise TypeError(f"losses must be a dict of weights, {example}, got {describe(losses)}")
    if not 0 < len(losses) <= MOST_LOSSES:
        raise ValueError(f"losses must have 1 to {MOST_LOSSES} names, {example}, got {len(losses)}")
    for name, weight in losses.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("counts", "out"):
            raise ValueError(f"losses must be named by other identifiers, {example}, got {name!r}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise TypeError(f"losses[{name!r}] must be a number, got {describe(weight)}")
        if not math.isfinite(weight):
            raise ValueError(f"losses[{name!r}] must be finite, got {weight}")
    return {name: float(weight) for name, weight in losses.items()}


def by_loss(what: str, names: Iterable[str], one: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return a value for each loss: the ``one`` argument, or those given by name."""
    names = list(names)
    if names == [""]:
        if len(one) != 1 or named:
            given = [*map(describe, one), *named]
            raise TypeError(
                f"{what} takes one argument, got {given}; several losses are named in the "
                f"constructor: LossAccumulator(model, losses={{'main': 1, 'next2': 0.3}})"
            )
        return list(one)
    if one or set(named) != set(names):
        raise TypeError(f"{what} must name the losses {names}, got {[*named] or 'none by name'}")
    return [named[name] for name in names]


def as_counts(name: str, counts: Any) -> list[int]:
    """Declared counts as numbers; those on a device are read."""
    one = isinstance(counts, (str, bytes)) or (isinstance(counts, Tensor) and counts.dim() == 0)
    if one or not isinstance(counts, Iterable):
        raise TypeError(
            f"{name} must hold one number per micro-batch, e.g. [count_valid(b) for b in "
            f"micro_batches], got {describe(counts)}"
        )
    return [_as_count(f"{name}[{i}]", count) for i, count in enumerate(counts)]


def _as_count(name: str, count: Any) -> int:
    dtype = str(getattr(count, "dtype", type(count).__name__))
    try:
        if "bool" in dtype:
            raise TypeError
        # numpy's integers, 0-d arrays and integer tensors of one element have an index as well
        number = operator.index(count.detach().cpu() if isinstance(count, Tensor) else count)
    except (TypeError, NotImplementedError):
        raise TypeError(f"{name} must be an integer, got {describe(count)}") from None
    if number >= 2**63:
        raise ValueError(f"{name} must be an int64, got {count}")
    if number < 0:
        raise ValueError(f"{name} must be >= 0, got {number}")
    return number


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


def describe(x: object) -> str:
    """An argument in a few words, for messages."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
    if isinstance(x, tuple):
        return "(" + ", ".join(describe(y) for y in x) + ")"
    return type(x).__name__
