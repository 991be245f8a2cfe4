"""``F.cross_entropy`` of lazy logits: the fused loss of the head's inputs.

The loss of a training step computes the gradients of the head's operands at once, as ``fused_ce``
does, and keeps them until backward. Where other losses of the head wait for backward already, one
of few tokens computes its gradients in backward instead: so a loss in many pieces never holds more
than the logits would have taken.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..contract.checks import autocast_dtype, memory_budget_of, no_autocast
from ..contract.results import LossSum, MonitoredLossSum
from ..loss.cross_entropy import fused_cross_entropy
from ..loss.fused_ce import fused_ce
from ..loss.logprobs import fused_logprobs
from ..ranks.layout import is_vocabulary_shard
from ..recipes import token_scaled_loss
from .gradient import Gradients, LazyGradient, Part, check_not_batched
from .lazy import LazyLogits, node_number
from .linear_call import Expr, LinearCall
from .observe import LossObserver
from .rules import LogitForm, form_of


class Evaluated(NamedTuple):
    """A loss as a function of the head's operands."""

    loss: Tensor
    divisor: Tensor | None  # () by which a sum was divided; None: it was not
    given: dict[LinearCall, list[Tensor]]


_NOBODY = LossObserver()  # asks for nothing


class FusedLoss(torch.autograd.Function):
    """The loss, as a function of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, fused: CrossEntropy, dtype: torch.dtype) -> Tensor:
        """Return the loss that ``fused`` has computed, in ``dtype``."""
        ctx.set_materialize_grads(False)
        ctx.logits, ctx.fused, ctx.node = logits, fused, node_number(logits)
        return fused.loss.detach().to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """The gradient of the logits, which carries those of their operands."""
        if grad is None:
            return None, None, None
        check_not_batched(grad)
        ctx.saved_tensors  # noqa: B018  # the second time, torch raises its error
        fused, logits = ctx.fused, ctx.logits
        if torch.is_grad_enabled():
            return fused.native_gradient(logits + 0, grad), None, None
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keep:  # a kept loss keeps none of them
            ctx.logits = ctx.fused = None

        def make() -> Tensor:
            z = fused.expr.materialize("the gradient of logits").detach().requires_grad_()
            return fused.native_gradient(z, grad)

        ready = fused.ready is not None
        part = Part(lambda: fused.gradients(grad, keep=keep), ready=ready)
        load = {call: (steps, [part]) for call, steps in fused.expr.steps.items()}
        nodes = fused.expr.nodes | {ctx.node, ctx._sequence_nr()}
        root = Expr(None, make, (), {}, fused.expr.shape)
        meta = torch.empty(root.shape, dtype=logits.dtype, device="meta")
        return LazyGradient.carrying(load, nodes, root, meta, grad.device), None, None


class CrossEntropy:
    """One fused loss: its arguments, its value, and its gradients until backward takes them.

    Attributes:
        expr: the logits.
        loss: without a graph, once computed; ``divisor ()``: by which a sum was divided for it.
        ready: the loss as a function of leaves; ``None``: backward computes it again.
    """

    def __init__(
        self, func: Callable[..., Any], logits: LazyLogits, target: Tensor, weight: Tensor | None,
        ignore_index: int, reduction: str, label_smoothing: float,
    ) -> None:  # fmt: skip
        self.func, self.expr, self.target, self.weight = func, logits.expr, target, weight
        self.ignore_index, self.reduction = operator.index(ignore_index), reduction
        asked = LossObserver.current.get()
        if asked is None or weight is not None or reduction == "none":  # these are not observed
            asked = _NOBODY
        self.label_smoothing = float(label_smoothing or asked.label_smoothing)
        self.token_scaled = asked.token_scaled
        self.loss: Any = None
        self.divisor: Tensor | None = None
        self.ready: Evaluated | None = None

    def compute(self, *, train: bool) -> bool:
        """Compute the loss, and perhaps its gradients; ``False`` if the fused loss cannot."""
        now = train and not self._is_better_later()
        found = self._evaluate(train=now)
        if found is None:
            return False
        self.loss, self.divisor = found.loss.detach(), found.divisor
        if train:
            self.target = self.target.clone()
            self.weight = None if self.weight is None else self.weight.detach().clone()
        if now:
            self.ready = found
            for call in self.expr.steps:
                call.head.waiting[id(self)] = self
        return True

    def _is_better_later(self) -> bool:
        """Whether gradients of another loss wait, and these would be larger than the logits."""
        calls = self.expr.steps
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False  # both runs of a checkpoint must save the same
        if any(call.is_in_parts() for call in calls):
            return False  # ranks would not wait for each other
        # (a list, since other threads add theirs meanwhile)
        others = [ref() for call in calls for ref in call.head.waiting.valuerefs()]
        waits = any(other is not None and other.ready for other in others)
        return waits and self.target.numel() < max(call.given[0].shape[-1] for call in calls)

    def _evaluate(self, *, train: bool) -> Evaluated | None:
        """The loss and the operands, leaves in ``train``; ``None`` if no rule covers the logits."""
        given = {call: call.operands(by_all_ranks=True) for call in self.expr.steps}
        if train:
            given = {
                call: [x.detach().requires_grad_(need)
                       for x, need in zip(operands, call.needed, strict=False)]
                for call, operands in given.items()
            }  # fmt: skip
        with torch.set_grad_enabled(train), no_autocast(self.target.device):
            form = form_of(self.expr, given)
            if form is None or form.class_dim != min(1, len(self.expr.shape) - 1):
                return None
            if form.classes.start != 0 and is_vocabulary_shard(form.weight):
                return None
            if self.target.shape != form.hidden.shape[:-1]:
                return None
            return Evaluated(*self._loss_of(form), given)

    def _options(self, form: LogitForm) -> dict[str, Any]:
        """The arguments of a fused loss of these logits, but for hidden states and labels."""
        head = next(iter(self.expr.steps)).head
        w, bias, sharded = form.weight, form.bias, is_vocabulary_shard(form.weight)
        if form.classes != slice(0, w.shape[0]) and not sharded:
            w, bias = w[form.classes], None if bias is None else bias[form.classes]
        options: dict[str, Any] = {
            "weight": w, "bias": bias, "ignore_index": self.ignore_index, "softcap": form.cap,
            "logit_scale": form.scale, "memory_budget": memory_budget_of(head.memory_budget),
        }  # fmt: skip
        return options | ({"vocab_size": form.classes.stop} if sharded else {})

    def _loss_of(self, form: LogitForm) -> tuple[Tensor, Tensor | None]:
        """The loss, and by what a sum was divided for it."""
        options = self._options(form) | {"label_smoothing": self.label_smoothing}
        if self.weight is not None or self.reduction == "none":
            options |= {"class_weight": self.weight, "reduction": self.reduction}
            loss = fused_cross_entropy(form.hidden, labels=self.target, **options)
            valid = (self.target != self.ignore_index).any()  # (torch's mean of none is NaN)
            return (loss / valid if self.reduction == "mean" else loss), None
        observer = LossObserver.current.get() if self.loss is None else None  # else: in backward
        out = self._sum(form.hidden, options, observer.monitor if observer else ())
        if observer is not None:
            observer.observe(out, self.reduction, self.ignore_index)
        divisor = self.divisor
        if divisor is None and self.reduction == "mean":
            given = None if observer is None else observer.denominator
            divisor = out.n_valid if given is None else given
        return (out.loss_sum if divisor is None else out.loss_sum / divisor), divisor  # (none: NaN)

    def _sum(
        self, hidden: Tensor, options: dict[str, Any], monitor: Collection[str] = ()
    ) -> LossSum:
        if not self.token_scaled:
            return fused_ce(hidden, labels=self.target, **options, monitor=monitor)
        del options["label_smoothing"]
        stats = fused_logprobs(hidden, labels=self.target, **options)
        used = self.target != self.ignore_index
        sums = {"correct": stats.argmax == self.target, "entropy": stats.entropy.detach()}
        monitors = {name: (sums[name] * used).sum(dtype=torch.float64) for name in monitor}
        return MonitoredLossSum.of(token_scaled_loss(stats.logprob, used), monitors)

    def gradients(self, upstream: Tensor, *, keep: bool) -> dict[LinearCall, Gradients]:
        """``upstream`` times the gradients of the operands; they are the caller's to write into."""
        evaluated = self.ready or self._evaluate(train=True)
        assert evaluated is not None
        loss, given = evaluated.loss, evaluated.given
        leaves = [x for operands in given.values() for x in operands if x.requires_grad]
        found = torch.autograd.grad(
            loss, leaves, upstream.to(loss.dtype), retain_graph=keep, allow_unused=True
        )
        left = iter(found)
        return {
            call: [next(left) if x.requires_grad else None for x in operands]
            for call, operands in given.items()
        }

    def native_gradient(self, z: Tensor, upstream: Tensor) -> Tensor:
        """``upstream`` times the gradient of torch's own loss by ``z``, in float32 or better."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            loss = self._native(z)
            return torch.autograd.grad(loss, z, upstream.to(loss.dtype), create_graph=again)[0]

    def _native(self, z: Tensor) -> Tensor:
        """The loss of real logits, by torch."""
        fine = z if z.dtype == torch.float64 else z.float()
        weight = None if self.weight is None else self.weight.to(fine.dtype)
        reduction = self.reduction if self.divisor is None else "sum"
        reduction = "none" if self.token_scaled else reduction
        options = weight, None, self.ignore_index, None, reduction, self.label_smoothing
        loss = self.func(fine, self.target, *options)
        if self.token_scaled:
            loss = token_scaled_loss(-loss, self.target != self.ignore_index).loss_sum
        return loss if self.divisor is None else loss / self.divisor


def is_fusable(x: Any, target: Any, *, train: bool) -> TypeGuard[LazyLogits]:
    """Whether a loss of logits ``x (..., V)`` may be computed from their operands."""
    return (
        type(x) is LazyLogits and type(target) is Tensor and x.dim() > 0
        and not x.memory.written and (x.expr.once or not train)
        and target.dtype in (torch.int64, torch.int32) and target.device == x.device
        and torch._C._functorch.maybe_current_level() is None and forward_ad._current_level < 0
    )  # fmt: skip


def cross_entropy(
    func: Callable[..., Any], input: Any, target: Any, weight: Tensor | None = None,
    size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """``F.cross_entropy`` of lazy logits, or torch's own of real ones."""
    x, fused = input, None
    train = torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
    if (
        is_fusable(x, target, train=train)
        and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
        and 0 <= label_smoothing <= 1 and (weight is None or weight.dtype != torch.float64)
    ):  # fmt: skip
        fused = CrossEntropy(func, x, target, weight, ignore_index, reduction, label_smoothing)
    if fused is None or not fused.compute(train=train):
        options = weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return func(x, target, *options)
    next(iter(x.expr.steps)).head.report.losses += 1
    observer = LossObserver.current.get()
    # A loss of two bytes would round the factor that its denominator becomes.
    counted = observer is not None and observer.denominator is not None
    wide = counted or autocast_dtype(x.device) is not None
    dtype = fused.loss.dtype if wide else x.dtype
    loss = FusedLoss.apply(x, fused, dtype) if train else fused.loss.to(dtype)
    if observer is not None and len(observer.graphs) < len(observer.losses):
        observer.graphs.append(loss)
    return loss
