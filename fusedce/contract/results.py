"""Results of the public functions: sums of losses, statistics of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .checks import can_be_read, check_number

MONITORS = ("correct", "entropy", "z_loss")  # see `MonitoredLossSum`


class LossSum(NamedTuple):
    """An unnormalised loss and the number of tokens it sums over.

    Attributes:
        loss_sum: ``()``, float32 (float64 for float64 inputs): sum over valid tokens, in nats.
        n_valid: ``()``, int64, same device: number of valid tokens. On a GPU, a label out of range
            makes ``loss_sum`` NaN and ``n_valid`` negative (the code holds its position and value;
            :class:`fusedce.LossAccumulator` turns it into the error at its next synchronisation).
    """

    loss_sum: Tensor
    n_valid: Tensor

    def mean(self, denominator: Tensor | float | None = None) -> Tensor:
        """``loss_sum / max(denominator or n_valid, 1)``: nats per token, ``()``, differentiable.

        With gradient accumulation or several ranks, ``denominator`` is the number of valid tokens
        of the whole optimizer step: see :class:`fusedce.LossAccumulator`.

        Raises:
            TypeError, ValueError: ``denominator`` is not one number of at least 0. A tensor on a
                device is not read: a negative one counts as 1.
        """
        if denominator is None and can_be_read(self.n_valid):
            return self.loss_sum / max(int(self.n_valid), 1)
        own = self.n_valid.clamp(min=1)
        if isinstance(denominator, torch.SymInt):
            device = self.n_valid.device
            denominator = torch.scalar_tensor(denominator, dtype=torch.int64, device=device)
        if isinstance(denominator, Tensor):
            if denominator.numel() != 1:
                raise ValueError(
                    f"denominator must be one number, got a tensor of shape "
                    f"{tuple(denominator.shape)}"
                )
            if can_be_read(denominator) and denominator.item() < 0:
                check_number("denominator", denominator.item())
            given = denominator.reshape(()).to(self.loss_sum)
            return self.loss_sum / torch.where(given == 0, own.to(given), given.clamp(min=1))
        if denominator is None:
            return self.loss_sum / own
        number = check_number("denominator", denominator)
        return self.loss_sum / (max(number, 1) if number else own)

    # ---- a sum behaves as a sum -------------------------------------------------------------

    def __add__(self, other: object) -> LossSum:
        """Losses, counts and monitors of both; monitors that one of them lacks are left out."""
        if isinstance(other, LossSum):
            scaled = isinstance(self, ScaledLossSum) or isinstance(other, ScaledLossSum)
            kind = ScaledLossSum if scaled else LossSum
            total = kind(self.loss_sum + other.loss_sum, self.n_valid + other.n_valid)
            mine, theirs = (getattr(x, "monitors", {}) for x in (self, other))
            both = {name: x + theirs[name] for name, x in mine.items() if name in theirs}
            return MonitoredLossSum.of(total, both) if both else total
        if isinstance(other, int) and not isinstance(other, bool) and other == 0:
            return self  # sum([...]) starts from 0
        if isinstance(other, (int, float, Tensor)):
            raise TypeError(
                f"a number (a regulariser, a router's loss) cannot be added to a LossSum. "
                f"{_REMEDY}, and its add_auxiliary(term) takes a mean such as a regulariser"
            )
        return NotImplemented

    def __radd__(self, other: object) -> LossSum:
        return self + other

    def __mul__(self, factor: Any) -> LossSum:
        """The loss times a number, over the same tokens; its z-loss is scaled, too."""
        number = _as_number(factor)
        return NotImplemented if number is None else self._scaled(lambda x: x * number)

    def __rmul__(self, factor: Any) -> LossSum:
        return self * factor

    def __truediv__(self, divisor: Any) -> LossSum:
        number = _as_number(divisor)
        return NotImplemented if number is None else self._scaled(lambda x: x / number)

    def __neg__(self) -> LossSum:
        return self._scaled(lambda x: -x)

    def _scaled(self, scale: Callable[[Tensor], Tensor]) -> LossSum:
        monitors = dict(getattr(self, "monitors", {}))
        if "z_loss" in monitors:
            monitors["z_loss"] = scale(monitors["z_loss"]).detach().double().reshape(())
        loss = scale(self.loss_sum).reshape(()).to(self.loss_sum.dtype)
        return MonitoredLossSum.of(ScaledLossSum(loss, self.n_valid), monitors)

    def __repr__(self) -> str:
        """The fields, and how to get a loss."""
        fields = f"loss_sum={self.loss_sum!r}, n_valid={self.n_valid!r}"
        return f"{type(self).__name__}({fields}; .mean() is the loss per token)"

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(f"a LossSum cannot be formatted by {spec!r}. {_REMEDY}")
        return repr(self)

    @property
    def monitors(self) -> Mapping[str, Tensor]:
        """Sums that were asked for with ``monitor=``: see :class:`MonitoredLossSum`."""
        return _NO_MONITORS

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"backward(), item(), float() and comparisons are not defined for a LossSum. {_REMEDY}"
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, Tensor)):
            self._refuse()
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)


_NO_MONITORS: Mapping[str, Tensor] = MappingProxyType({})
_OF_A_LOSS = frozenset(("loss", "detach", "cpu", "requires_grad", "grad_fn", "isnan", "to"))
_REMEDY = (
    "It is a sum over n_valid tokens, which nothing has divided yet. Use .mean(), nats per token; "
    "with gradient accumulation or several ranks, a fusedce.LossAccumulator divides by the tokens "
    "of all of them"
)


def _explained(out: LossSum, name: str) -> Any:
    if name in _OF_A_LOSS:
        raise AttributeError(f"a LossSum has no {name}. {_REMEDY}")
    raise AttributeError(f"{type(out).__name__!r} object has no attribute {name!r}")


# A sum must be divided before it is differentiated or compared. Methods that only explain this are
# set here, out of a type checker's sight: to it, `out.backward()` is an error.
LossSum.__getattr__ = _explained  # type: ignore[attr-defined]
for _name in ("backward", "item", "__float__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(LossSum, _name, LossSum._refuse)
_new = LossSum.__new__


def _with_both_fields(kind: Any, loss_sum: Any, *n_valid: Any, **named: Any) -> Any:
    if not n_valid and not named:
        raise TypeError(
            f"a LossSum has two fields, got one argument, {type(loss_sum).__name__}. A GradScaler "
            f"takes a loss: scaler.scale(acc.scale(out)), or scaler.scale(out.mean())"
        )
    return _new(kind, loss_sum, *n_valid, **named)


LossSum.__new__ = _with_both_fields  # type: ignore[method-assign, assignment]
LossSum.__array_ufunc__ = None  # type: ignore[attr-defined]  # numpy's numbers leave 2 * out to us


class MonitoredLossSum(LossSum):
    """A :class:`LossSum` of two fields, with an attribute that holds more sums over its tokens.

    Attributes:
        monitors: by name, ``()`` float64 without gradient: ``correct``, tokens whose likeliest
            class is their label; ``entropy`` of the distributions, nats; ``z_loss``, the part of
            ``loss_sum`` that is z-loss, nats. Tokens of weight 0 add nothing. Over ``n_valid``
            they are token accuracy, mean entropy and z-loss per token.
    """

    monitors: Mapping[str, Tensor] = _NO_MONITORS  # pyright: ignore[reportIncompatibleMethodOverride]

    @staticmethod
    def of(out: LossSum, monitors: Mapping[str, Tensor]) -> MonitoredLossSum:
        """``out`` with these monitored sums."""
        kind = ScaledLossSum if isinstance(out, ScaledLossSum) else MonitoredLossSum
        made = kind(*out)
        made.monitors = monitors
        return made

    def _replace(self, **fields: Any) -> MonitoredLossSum:
        """The same sums with other values in some fields."""
        return MonitoredLossSum.of(super()._replace(**fields), self.monitors)


class ScaledLossSum(MonitoredLossSum):
    """A sum that was multiplied or divided by a number: a share of a loss.

    A class marks it, not an attribute: pytrees and wrappers rebuild a named tuple from its class
    and its two fields.
    """


def _as_number(x: Any) -> Any:
    """A number, or a tensor of one, as ``()``, which does not lower the dtype of a sum."""
    if isinstance(x, Tensor) and x.numel() == 1:
        return x.reshape(())
    return x if isinstance(x, (int, float)) and not isinstance(x, bool) else None


class TokenStats(NamedTuple):
    """The result of :func:`fused_logprobs`: ``(...)`` each, but ``logprob`` as ``labels``.

    Attributes:
        logprob: log-probability of the label, nats, at most 0; fp32 (fp64 for fp64 inputs).
        entropy: of the distribution over the V classes, nats, at least 0; dtype of logprob.
        lse: log-sum-exp of the logits, nats; dtype of logprob.
        argmax: int64, the likeliest class; -1 at ignored positions.
    """

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    argmax: Tensor


class TopK(NamedTuple):
    """The result of :func:`fused_topk`, the likeliest class first.

    Attributes:
        logprob: ``(..., k)`` log-probabilities, nats; fp32 (fp64 for fp64 inputs).
        index: ``(..., k)`` int64 classes.
    """

    logprob: Tensor
    index: Tensor  # type: ignore[assignment]  # hides the method of tuples


class TokenStatsAndMean(NamedTuple):
    """:class:`TokenStats` with one more field.

    Attributes:
        mean_logit: mean of the finished logits over the V classes; dtype of logprob.
    """

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    argmax: Tensor
    mean_logit: Tensor


class TokenStatsAndTop(NamedTuple):
    """:class:`TokenStats` with one more field.

    Attributes:
        top: the likeliest classes of each position; at ignored ones 0, and classes -1.
    """

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    argmax: Tensor
    top: TopK
