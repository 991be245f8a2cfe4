"""The fused losses of a model, observed by code that counts tokens itself.

A trainer's mixin enters a :class:`LossObserver`, :func:`model_loss` does so for one loss in a loop
that users write, and :func:`note_items` tells the losses of a model by which number it will divide
them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedce.contract.monitors import MonitoredLossSum
from fusedce.contract.results import LossSum


class Result(NamedTuple):
    """A loss at the moment it was returned; the model may change the tensor in place later."""

    value: Tensor  # () copy, without a graph
    edge: GradientEdge | None  # where its gradient arrives; None if it needs none

    @classmethod
    def of(cls, loss: Tensor) -> Result:
        """The value and the gradient's place of ``loss ()``."""
        edge = get_gradient_edge(loss) if loss.requires_grad else None
        return cls(loss.detach().clone(), edge)


class LossObserver:
    """Collects, inside its ``with`` block, the sums of every fused ``F.cross_entropy``.

    Losses per token and losses with class weights are not collected, nor are those of other
    threads.

    Args:
        denominator: ``()``, in tokens: losses with ``reduction="mean"`` divide by it instead of by
            their own count.
        monitor: names of the sums to compute beside each loss.

    Attributes:
        losses: ``(loss_sum, n_valid, reduction)`` of each loss, in order.
        results: what each ``F.cross_entropy`` has returned (:class:`Result`); not in compiled code.
        monitors: the sums that ``monitor`` names, in the same order
            (:class:`fusedce.contract.monitors.MonitoredLossSum`).

    Raises:
        RuntimeError: another observer is entered already.
    """

    current: LossObserver | None = None

    def __init__(self, denominator: Tensor | None = None, *, monitor: Collection[str] = ()) -> None:
        self.denominator, self.monitor = denominator, monitor
        self.monitors: list[Mapping[str, Tensor]] = []
        self.losses: list[tuple[Tensor, Tensor, str]] = []
        self.results: list[Result] = []
        self._thread = threading.get_ident()

    @classmethod
    def of_this_thread(cls) -> LossObserver | None:
        """The observer that is entered, if this thread has made it."""
        observer = cls.current
        if observer is None or torch.compiler.is_compiling():  # a trace cannot ask for its thread
            return observer
        return observer if observer._thread == threading.get_ident() else None

    def observe(self, out: LossSum, reduction: str) -> None:
        """Collect one loss."""
        # The sum may be the loss itself, which the model may change in place.
        self.losses.append((out.loss_sum.detach().clone(), out.n_valid, reduction))
        if isinstance(out, MonitoredLossSum):
            self.monitors.append(out.monitors)

    def __enter__(self) -> LossObserver:
        if LossObserver.current is not None:
            raise RuntimeError(
                "a LossObserver is entered already: observers do not nest, leave its block first"
            )
        LossObserver.current = self
        return self

    def __exit__(self, *_: object) -> None:
        LossObserver.current = None


def model_loss(model: Any, batch: Mapping[str, Any]) -> LossSum:
    """``model(**batch).loss`` as the sum and count that :class:`fusedce.LossAccumulator` takes.

    A model's own ``loss`` is the mean over one batch, and a mean of such means weighs a token of a
    short batch more. Here the model's loss code runs unchanged, shift and ``ignore_index``
    included, and its cross-entropy divides by 1.

    Args:
        model: called as it is, with DDP, FSDP or accelerate around it; before they wrap it, its
            head was replaced by :func:`fusedce.replace_loss_head`.
        batch: keyword arguments of the model, with ``labels``.

    Returns:
        ``loss_sum ()`` in nats, differentiable, and ``n_valid ()`` int64.

    Raises:
        ValueError: the model's loss is not one fused cross-entropy with the mean over its tokens,
            or holds an auxiliary loss (MoE router).
        TypeError: ``batch`` is not a mapping.

    Examples:
        >>> acc.backward(fusedce.model_loss(model, batch))  # doctest: +SKIP
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping of tensors, got {type(batch).__name__}")
    labels = batch.get("labels", batch.get("shift_labels"))
    if not isinstance(labels, Tensor):
        raise ValueError(f'batch must hold "labels", got the keys {sorted(batch)}')
    one = torch.ones((), dtype=torch.int64, device=labels.device)
    with LossObserver(one) as observer:
        out = model(**{k: x for k, x in batch.items() if k != "num_items_in_batch"})
    get = out.get if isinstance(out, Mapping) else lambda name: getattr(out, name, None)
    loss = get("loss")
    if [reduction for *_, reduction in observer.losses] != ["mean"] or loss is None:
        raise ValueError(
            f"the loss of {type(model).__name__} must be one fused cross-entropy, but "
            f"{len(observer.losses)} were seen: call fusedce.replace_loss_head(model) first, "
            f"before DDP or accelerate wraps the model, and give it labels. (Liger's patches "
            f"bypass the head: leave them out)"
        )
    if get("aux_loss") is not None:
        raise ValueError(
            "the model's loss holds an auxiliary loss, which is no sum over tokens: call the model "
            "with output_router_logits=False, or give acc.add_auxiliary(aux) its own term"
        )
    return LossSum(loss.float().reshape(()), observer.losses[0][1])


# ---- the number by which a model will divide its losses --------------------------------------
# Models of transformers add their cross-entropies up and divide the sum by `num_items_in_batch`.
# Knowing it beforehand saves a rounding (fusedce.contract.objective). The number of one forward
# stays until the next, so that a loss of other code may meet a stale one. That is harmless:
# backward multiplies by the real factor over the expected one, and only one rounding is added.

_items: contextvars.ContextVar[Tensor | float | None] = contextvars.ContextVar(
    "fusedce_num_items_in_batch", default=None
)


def note_items(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Hook before a model's forward: keep its ``num_items_in_batch``."""
    if torch.compiler.is_compiling():
        return
    items = kwargs.get("num_items_in_batch")
    number = isinstance(items, (int, float)) and items > 0
    tensor = isinstance(items, Tensor) and items.numel() == 1
    _items.set(items if number or tensor else None)


def expected_factor() -> Tensor | float | None:
    """Expected factor of a sum of losses: 1 / items as a number or ``()``, or ``None``."""
    items = _items.get()
    if isinstance(items, Tensor):
        return items.detach().reshape(()).double().clamp(min=1).reciprocal()
    return None if items is None else 1 / items
