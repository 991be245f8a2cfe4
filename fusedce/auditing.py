"""Measure what a training loop optimises: the weight of each token in each optimizer step.

The loop is not changed. The gradient of a token's loss with respect to its logits is
``w * (softmax - onehot)``. Its one negative entry names the label, and its size is the weight ``w``
that the loop gave the token by all of its divisions. A right loop gives all tokens of an
optimizer step the weight 1 / (number of tokens of all micro-batches and ranks).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.variable import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fusedce.accumulate.gradients import OnCorrection, held_by_fsdp2, local_of
from fusedce.contract.results import LossSum
from fusedce.head.loss_observer import LossObserver

logger = logging.getLogger(__name__)

_ROWS = 128  # positions whose logits are read together
_COPIES = 4  # parameters whose gradients are compared before and after clipping
_SMOOTHED = 1e-3  # the least label smoothing that differs from rounding
_ROUNDS = 50  # iterations of least squares
_TOLERANCE = 0.01  # weights that differ by less are the same: bf16 gradients are rounded


@dataclass
class Step:
    """One optimizer step, over the micro-batches of all ranks.

    Attributes:
        n_tokens: trained tokens; ``loss``: their mean, nats per token.
        descended: the loss whose gradient this was: ``sum of weight * loss`` over tokens.
        logged: the loss that the loop logged, if :meth:`Audit.log` was called.
        scale: the mean weight of a token over the right one; 1 is right.
        spread: the largest weight of a micro-batch's tokens over the smallest; 1 is right.
        averaged: whether each micro-batch weighs the same, however many tokens it has.
        lost: micro-batches whose gradients were set to zero before the step.
        afterwards: the factor on ``.grad`` between the last backward and the step.

    With class weights, the sums and means weigh each token by the weight of its class.
    """

    n_tokens: int
    loss: float
    descended: float
    logged: float | None
    scale: float
    spread: float
    averaged: bool
    lost: int = 0
    afterwards: float = 1.0


class Token(NamedTuple):
    """One trained token."""

    label: int
    weight: float  # in the gradient of this rank
    loss: float


@dataclass
class MicroBatch:
    """The sums of a micro-batch, and its tokens if the model returned logits."""

    loss_sum: float
    n_tokens: float
    weight: float  # of a token, in the gradient of this rank
    tokens: list[Token] = field(default_factory=list)  # known only if the model returns logits

    @classmethod
    def of(cls, tokens: list[Token]) -> MicroBatch:
        """The micro-batch of these tokens."""
        n = len(tokens)
        weight = sum(t.weight for t in tokens) / n if n else 0.0
        return cls(sum(t.loss for t in tokens), n, weight, tokens)

    def multiply(self, factor: float) -> None:
        """Multiply all weights."""
        self.weight *= factor
        self.tokens = [t._replace(weight=t.weight * factor) for t in self.tokens]


@dataclass
class _Open:
    """The micro-batches since the last step of this rank."""

    micro: list[MicroBatch] = field(default_factory=list)
    logged: float | None = None
    lost: int = 0  # micro-batches whose gradients were set to zero before the step
    afterwards: float = 1.0  # factor on .grad between the last backward and the step


class Audit:
    """The context manager that :func:`audit` returns, and its report.

    Attributes:
        steps: one :class:`Step` for each optimizer step, once the ``with`` block has ended.
    """

    def __init__(
        self, model: torch.nn.Module, adds: bool, loss_scale: float | Callable[[], float]
    ) -> None:
        self.steps: list[Step] = []
        self._model = model
        self._adds = adds
        self._loss_scale = loss_scale
        self._ours: list[_Open] = []
        self._now = _Open()
        self._backward = -1  # id of the backward that runs, or ran last
        # Parameters, and copies of their gradients after that backward.
        self._grads: list[tuple[Tensor, Tensor]] = []
        self._observer: LossObserver | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Audit:
        self._parameters = {id(p) for p in self._model.parameters()}
        self._handles = [
            self._model.register_forward_pre_hook(self._runs),
            self._model.register_forward_hook(self._ran, with_kwargs=True, always_call=True),
            register_optimizer_step_post_hook(self._steps),
            OnCorrection(self._corrected),
        ]
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for handle in self._handles:
            handle.remove()
        if error is None:
            self._summarise()
            logger.warning("%s", self)

    def log(self, loss: float | Tensor) -> None:
        """Record the loss that the loop logs for the coming (or just made) optimizer step."""
        at = self._now if self._now.micro or not self._ours else self._ours[-1]
        at.logged = float(loss)

    def callback(self) -> Any:
        """A callback that audits ``train()``: ``Trainer(callbacks=[audit(model).callback()])``."""
        from transformers import TrainerCallback

        report = self

        class AuditCallback(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                report.__enter__()

            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
            ) -> None:
                if logs and "loss" in logs and args.logging_steps == 1:
                    report.log(float(logs["loss"]))

            def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                report.__exit__(None, None, None)

        return AuditCallback()

    # ---- hooks ------------------------------------------------------------------------------

    def _runs(self, module: Any, args: Any) -> None:
        """Observe the fused losses of the forward that begins."""
        if torch.is_grad_enabled() and LossObserver.current is None:
            self._observer = LossObserver()
            self._observer.__enter__()
        observer = LossObserver.current
        self._n_before = 0 if observer is None else len(observer.losses)

    def _ran(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Watch the gradient of a forward's logits, or of its loss if it has no real logits."""
        fused = (
            [] if LossObserver.current is None else LossObserver.current.losses[self._n_before :]
        )
        if self._observer is not None:
            self._observer.__exit__()
            self._observer = None
        if not torch.is_grad_enabled() or out is None:  # it has raised
            return
        if isinstance(out, LossSum):
            loss_sum, n = float(out.loss_sum.detach()), int(out.n_valid)
            _watch(out.loss_sum, lambda g: self._take(MicroBatch(loss_sum, n, float(g))))
            return
        logits = out if isinstance(out, Tensor) else _get(out, "logits")
        if type(logits) is Tensor and logits.requires_grad:
            held = logits.detach()
            _watch(logits, lambda g: self._take(_of_logits(held, g)))
            return
        loss = _get(out, "loss")
        if loss is not None and len(fused) == 1:
            ((loss_sum_of_all, n_valid, _),) = fused
            self._watch_loss(loss, float(loss_sum_of_all), int(n_valid))
            return
        shifted = kwargs.get("shift_labels")
        labels = kwargs.get("labels") if shifted is None else shifted
        if loss is None or labels is None or logits is None:
            raise ValueError(
                f"audit needs a model that returns logits, a LossSum, or a loss and logits of the "
                f"labels it is given; {type(module).__name__} returned {type(out).__name__}"
            )
        encodes = getattr(self._model.config, "is_encoder_decoder", False)
        aligned = labels[..., 0 if encodes or shifted is not None else 1 :]
        observer, LossObserver.current = LossObserver.current, None  # this loss is not the model's
        try:
            with torch.no_grad():
                rows = logits[..., : aligned.shape[-1], :].detach().flatten(0, -2)
                total = float(F.cross_entropy(rows, aligned.flatten(), reduction="sum"))
        finally:
            LossObserver.current = observer
        self._watch_loss(loss, total, int((aligned != -100).sum()))

    def _watch_loss(self, loss: Tensor, total: float, n: int) -> None:
        """Watch the gradient of a loss whose logits are never computed."""
        value = float(loss.detach())
        divided_by = total / value if value else math.inf
        _watch(loss, lambda g: self._take(MicroBatch(total, n, float(g) / divided_by)))

    def _take(self, micro: MicroBatch) -> None:
        scale = self._loss_scale() if callable(self._loss_scale) else self._loss_scale
        micro.multiply(1 / scale)
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            if any(m.n_tokens and m.weight for m in self._now.micro) and self._are_gone():
                self._now.lost = len(self._now.micro)
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._remember))  # after DDP's and FSDP's own
        self._now.micro.append(micro)

    def _are_gone(self) -> bool:
        """Whether the gradients of earlier micro-batches are gone from ``.grad`` and FSDP2."""
        grads = (p.grad for p in self._model.parameters() if p.grad is not None)
        return not held_by_fsdp2(self._model) and not any(bool(local_of(g).any()) for g in grads)

    def _remember(self) -> None:
        """Copy some gradients after a backward."""
        found = [p for p in self._model.parameters() if p.grad is not None]
        found = sorted(found, key=lambda p: p.numel())[:_COPIES]
        self._grads = [(p, local_of(p.grad).detach().to(torch.float64, copy=True)) for p in found]

    def _corrected(self, factor: float) -> None:
        """Follow a correction of the gradients by ``LossAccumulator.finish``."""
        for micro in self._now.micro:
            micro.multiply(factor)
        self._grads = [(p, grad * factor) for p, grad in self._grads]

    def _multiplied_by(self) -> float:
        """The factor between ``.grad`` now and after backward; 1 if it is not one factor."""
        pairs = [(local_of(p.grad).double(), g) for p, g in self._grads if p.grad is not None]
        pairs = [(now, then) for now, then in pairs if now.shape == then.shape]
        squares = sum(float((then * then).sum()) for _, then in pairs)
        if not squares:
            return 1.0
        factor = sum(float((now * then).sum()) for now, then in pairs) / squares
        residual = sum(float((now - factor * then).square().sum()) for now, then in pairs)
        if residual > 1e-4 * factor**2 * squares:
            return 1.0
        return factor * (self._loss_scale() if callable(self._loss_scale) else self._loss_scale)

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        # This hook runs after the step, since a closure (Lightning) runs the last backward in it.
        mine = any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"])
        if mine and self._now.micro:
            self._now.afterwards = self._multiplied_by()
            self._ours.append(self._now)
            self._now = _Open()

    # ---- the report -------------------------------------------------------------------------

    def _summarise(self) -> None:
        """Add up the steps over ranks: one ``all_gather_object``."""
        ranks: list[list[_Open]] = [self._ours]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(ranks, self._ours)
        averaged_over = 1 if self._adds else len(ranks)
        for together in zip(*ranks, strict=False):
            micro = [m for one in together for m in one.micro if m.n_tokens]
            logged = [one.logged for one in together if one.logged is not None]
            if micro:
                step = _step_of(micro, averaged_over, logged[0] if logged else None)
                step.lost = sum(one.lost for one in together)
                step.afterwards = together[0].afterwards
                self.steps.append(step)

    def verdict(self) -> str:
        """One sentence: what the loop does to the weight of tokens."""
        return _verdict(self.steps)

    def __str__(self) -> str:
        return "\n".join(["", *_table(self.steps), "", self.verdict()])


def audit(
    model: torch.nn.Module,
    *,
    gradients_added: bool = False,
    loss_scale: float | Callable[[], float] = 1.0,
) -> Audit:
    """Watch anyone's training loop: ``with fusedce.audit(model) as report: train()``.

    For each optimizer step: the true mean loss of its tokens, the loss whose gradient was taken,
    what was logged, and by how much the gradient was off; as a table in the log when the block ends
    (``print(report)``), and a verdict in words (``report.verdict()``). Works around plain loops,
    accelerate, Lightning, Trainer (or with ``report.callback()``), ours and others'.

    It reads numbers at each micro-batch, and keeps logits until backward: for a few steps, not for
    a training run. On several ranks, one ``all_gather_object`` at the end, on all of them.

    Args:
        model: what is called in the loop, or what lies inside its DDP. It returns logits (alone or
            as ``.logits``), a :class:`LossSum`, or, with a replaced head, a loss for its labels.
        gradients_added: whether the engine adds gradients over ranks, instead of averaging them.
        loss_scale: what losses are multiplied by before backward and gradients divided by after
            it: ``scaler.get_scale`` of a ``GradScaler``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: in its forward, where it returns something else.

    Examples:
        >>> model = torch.nn.Linear(4, 11)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with fusedce.audit(model) as report:
        ...     for n in (2, 6):  # micro-batches of different lengths, averaged
        ...         loss = F.cross_entropy(model(torch.randn(n, 4)), torch.randint(11, (n,)))
        ...         (loss / 2).backward()
        ...     optimizer.step()
        >>> report.verdict()
        'your micro-batches are averaged: tokens of short ones weigh up to 3.0 x more'
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return Audit(getattr(model, "module", model), gradients_added, loss_scale)


def _watch(x: Tensor, callback: Callable[[Tensor], None]) -> None:
    """Call ``callback`` with the gradient of ``x``."""
    if x.requires_grad:
        x.register_hook(lambda grad: callback(grad.detach()))


def _get(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, dict) else getattr(out, name, None)


def _of_logits(logits: Tensor, grad: Tensor) -> MicroBatch:
    """Loss, label and weight of each trained token, from logits and gradient ``(..., V)``.

    A row's gradient is ``w * (softmax - target)``. Beside the label, the target is one number: 0,
    or what label smoothing puts there. So ``w`` is the slope of the gradient over the
    probabilities of the other classes; without smoothing, its entry at the label tells ``w`` best.
    """
    tokens: list[Token] = []
    rows = zip(logits.flatten(0, -2).split(_ROWS), grad.flatten(0, -2).split(_ROWS), strict=True)
    for z, g in rows:
        trained = g.min(-1).values < 0
        g, logprobs = g[trained].double(), torch.log_softmax(z[trained].double(), -1)
        labels = g.argmin(-1, keepdim=True)
        others = torch.ones_like(g, dtype=torch.bool).scatter_(-1, labels, False)
        slope, offset = _line(logprobs.exp(), g, others)
        of_label = logprobs.gather(-1, labels)[:, 0]
        gap = -torch.expm1(of_label)
        smooth = -offset * g.shape[-1] > _SMOOTHED * slope.clamp(min=0)
        weight = torch.where(smooth, slope, -g.gather(-1, labels)[:, 0] / gap)
        target = logprobs.exp() - g / weight[:, None]
        loss = torch.where(smooth, -(target * logprobs).sum(-1), -of_label)
        known = gap > 0
        columns = (x[known].tolist() for x in (labels[:, 0], weight, loss))
        tokens += [Token(*one) for one in zip(*columns, strict=True)]
    return MicroBatch.of(tokens)


def _line(x: Tensor, y: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and offset ``(rows,)`` of the least-squares line through ``y`` over ``x (rows, V)``."""
    n = where.sum(-1)
    mean_x, mean_y = ((v * where).sum(-1) / n for v in (x, y))
    dx, dy = ((v - m[:, None]) * where for v, m in ((x, mean_x), (y, mean_y)))
    slope = (dx * dy).sum(-1) / dx.square().sum(-1)
    return slope, mean_y - slope * mean_x


# ---- steps in numbers and words ------------------------------------------------------------------


def _without_class_weights(micro: list[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches with class weights taken out, if such weights explain those of the tokens.

    A token's weight is then the product of its micro-batch's and its class's. Both factors are
    found by alternating least squares of logarithms. Micro-batches without a common class cannot
    be compared, and count as equal.
    """
    tokens = [t for m in micro for t in m.tokens]
    even = all(abs(t.weight - m.weight) <= _TOLERANCE * m.weight for m in micro for t in m.tokens)
    if even or len(tokens) != sum(m.n_tokens for m in micro) or min(tokens, key=_w).weight <= 0:
        return micro
    of_micro, of_class = [0.0] * len(micro), dict.fromkeys((t.label for t in tokens), 0.0)
    for _ in range(_ROUNDS):
        found: dict[int, list[float]] = {label: [] for label in of_class}
        for a, m in zip(of_micro, micro, strict=True):
            for t in m.tokens:
                found[t.label].append(math.log(t.weight) - a)
        of_class = {label: sum(x) / len(x) for label, x in found.items()}
        of_micro = [
            sum(math.log(t.weight) - of_class[t.label] for t in m.tokens) / len(m.tokens)
            for m in micro
        ]
    for a, m in zip(of_micro, micro, strict=True):
        if any(abs(math.log(t.weight) - a - of_class[t.label]) > _TOLERANCE for t in m.tokens):
            return micro
    weights = {label: math.exp(x) for label, x in of_class.items()}
    return [
        MicroBatch(
            sum(weights[t.label] * t.loss for t in m.tokens),
            sum(weights[t.label] for t in m.tokens),
            math.exp(a),
        )
        for a, m in zip(of_micro, micro, strict=True)
    ]


def _w(token: Token) -> float:
    return token.weight


def _step_of(micro: list[MicroBatch], averaged_over: int, logged: float | None) -> Step:
    """The step of these micro-batches, whose gradients ``averaged_over`` ranks have averaged."""
    n_tokens = int(sum(m.n_tokens for m in micro))
    micro = _without_class_weights(micro)
    n = sum(m.n_tokens for m in micro)
    weights = [m.weight / averaged_over * n for m in micro]  # 1 if the loop is right
    shares = [w * m.n_tokens for w, m in zip(weights, micro, strict=True)]
    least = min(weights)
    return Step(
        n_tokens=n_tokens,
        loss=sum(m.loss_sum for m in micro) / n,
        descended=sum(m.weight * m.loss_sum for m in micro) / averaged_over,
        logged=logged,
        scale=sum(shares) / n,
        spread=max(weights) / least if least > 0 else math.inf,
        averaged=max(shares) - min(shares) <= _TOLERANCE * max(shares),
    )


def _off(a: float, b: float) -> bool:
    """Whether ``a`` differs from ``b`` by more than rounding."""
    return abs(a - b) > _TOLERANCE * max(abs(b), 1e-3)


def _verdict(steps: Sequence[Step]) -> str:
    """One sentence: what the loop does to the weight of tokens."""
    if not steps:
        return "no optimizer step was made: does the optimizer hold the model's parameters?"
    if lost := sum(step.lost for step in steps):
        return (
            f"zero_grad was called between the micro-batches of a step: the gradients of {lost} of "
            f"them were lost"
        )
    spread = max(step.spread for step in steps)
    scale = sum(step.scale for step in steps) / len(steps)
    stepped = sum(step.scale * step.afterwards for step in steps) / len(steps)
    found = []
    if spread > 1 + _TOLERANCE:
        uneven = [step for step in steps if step.spread > 1 + _TOLERANCE]
        why = (
            "your micro-batches are averaged"
            if all(step.averaged for step in uneven)
            else "tokens of one step weigh differently"
        )
        found.append(f"{why}: tokens of short ones weigh up to {spread:.1f} x more")
    # A factor on .grad that does not lead to 1 may be that of clipping.
    if abs(scale - 1) > _TOLERANCE and abs(stepped - 1) > _TOLERANCE:
        found.append(f"gradients are {scale:.3g} x those of the mean over the step's tokens")
    off = [s for s in steps if s.logged is not None and _off(s.logged, s.loss)]
    if off:
        step = max(off, key=lambda s: abs((s.logged or 0) - s.loss))
        found.append(
            f"the loss that is logged is not that of the tokens ({step.logged:.4f} for "
            f"{step.loss:.4f})"
        )
    return "; ".join(found) or (
        "every token weighs the same, and the gradient is that of the mean over all tokens"
    )


def _table(steps: Sequence[Step]) -> list[str]:
    """A Markdown table with a line for each step."""
    lines = [
        "| step | tokens | true loss | descended | logged | gradient's scale | spread |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for i, s in enumerate(steps):
        logged = "" if s.logged is None else f"{s.logged:.4f}"
        lines.append(
            f"| {i} | {s.n_tokens} | {s.loss:.4f} | {s.descended:.4f} | {logged} | "
            f"{s.scale:.3f} | {s.spread:.2f} |"
        )
    return lines
