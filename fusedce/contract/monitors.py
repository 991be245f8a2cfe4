"""Statistics beside the loss: detached sums over its tokens, computed in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import LossSum

MONITORS = ("correct", "entropy", "z_loss")


class MonitoredLossSum(LossSum):
    """A :class:`LossSum` of two fields, with an attribute that holds more sums over its tokens.

    Attributes:
        monitors: by name, ``()`` float64 without gradient: ``correct``, tokens whose likeliest
            class is their label; ``entropy`` of the distributions, nats; ``z_loss``, the part of
            ``loss_sum`` that is z-loss, nats. Tokens of weight 0 add nothing. Over ``n_valid``
            they are token accuracy, mean entropy and z-loss per token.
    """

    monitors: Mapping[str, Tensor] = MappingProxyType({})

    @staticmethod
    def of(out: LossSum, monitors: Mapping[str, Tensor]) -> MonitoredLossSum:
        """``out`` with these sums beside it."""
        made = (MonitoredLossSum if out.is_whole else ScaledMonitoredLossSum)(*out)
        made.monitors = monitors
        return made

    def _replace(self, **fields: Any) -> MonitoredLossSum:
        """The same sums with other values in some fields."""
        return MonitoredLossSum.of(super()._replace(**fields), self.monitors)

    def __add__(self, other: object) -> LossSum:
        """Losses, counts and monitors of both; those that one of them lacks are left out."""
        total = super().__add__(other)
        if not isinstance(other, LossSum):
            return total
        theirs = getattr(other, "monitors", {})
        both = {name: x + theirs[name] for name, x in self.monitors.items() if name in theirs}
        return MonitoredLossSum.of(total, both)

    def __mul__(self, factor: Any) -> LossSum:
        """The loss times a number. The z-loss is scaled with it, the other sums are not."""
        return self._scaled(super().__mul__(factor), lambda x: x * factor)

    def __truediv__(self, divisor: Any) -> LossSum:
        return self._scaled(super().__truediv__(divisor), lambda x: x / divisor)

    def __neg__(self) -> LossSum:
        return self._scaled(super().__neg__(), lambda x: -x)

    def _scaled(self, out: LossSum, scale: Callable[[Tensor], Tensor]) -> LossSum:
        if not isinstance(out, LossSum):
            return out  # NotImplemented
        monitors = dict(self.monitors)
        if "z_loss" in monitors:
            monitors["z_loss"] = scale(monitors["z_loss"]).detach().double().reshape(())
        return MonitoredLossSum.of(out, monitors)


class ScaledMonitoredLossSum(MonitoredLossSum):
    """A :class:`MonitoredLossSum` that was multiplied or divided by a number.

    Its class says so, not an attribute: a pytree or a wrapper rebuilds a named tuple of its class
    and its two fields.
    """

    @property
    def is_whole(self) -> bool:
        """Always False."""
        return False


def check_monitor(monitor: Collection[str]) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless it holds names of :data:`MONITORS` alone."""
    if isinstance(monitor, (str, Tensor)) or not isinstance(monitor, Collection):
        raise TypeError(f"monitor must be a tuple of names out of {MONITORS}, got {monitor!r}")
    for name in monitor:
        if name not in MONITORS:
            raise ValueError(f"monitor must hold names out of {MONITORS}, got {name!r}")


def wanted_for(monitor: Collection[str], *, argmax: bool) -> Wanted:
    """The statistics of tokens that these sums, and ``argmax`` on request, are computed from."""
    return Wanted(
        argmax=argmax or "correct" in monitor,
        entropy="entropy" in monitor,
        lse="z_loss" in monitor,
    )


def sums(
    problem: Problem,
    monitor: Collection[str],
    argmax: Tensor | None,  # (N,); None where it is not wanted, like the two below
    lse: Tensor | None,
    entropy: Tensor | None,
) -> dict[str, Tensor]:
    """Sums over all tokens, by name: ``()`` float64.

    Tokens without loss have -1 in ``argmax``, and 0 in ``lse`` and ``entropy``.
    """
    found = {}
    if "correct" in monitor and argmax is not None:
        found["correct"] = ((argmax == problem.labels) & problem.valid()).sum().double()
    if "entropy" in monitor and entropy is not None:
        found["entropy"] = entropy.sum(dtype=torch.float64)
    if "z_loss" in monitor and lse is not None:
        z = problem.z_loss * lse.double().square()
        if problem.token_weight is not None:
            z = z * problem.token_weight
        found["z_loss"] = z.masked_fill(~problem.valid(), 0).sum()
    return found
