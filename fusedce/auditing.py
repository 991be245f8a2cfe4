"""An audit of any training loop: how much each token weighs in each optimizer step.

Hooks on the model and its optimizers measure it; the loop is not changed. The gradient of a token's
loss with respect to its logits is ``w * (softmax - onehot)``. Its one negative entry names the
label, and its size is the weight ``w`` that the loop gave the token by all of its divisions. A
right loop gives all tokens of an optimizer step the weight 1 / (number of tokens of all
micro-batches and ranks).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .accumulate.engines import current_backward, is_held_by_fsdp2, when_backward_ends
from .accumulate.gradients import LISTENERS, norms_of
from .audited_logits import LogitFinder, when_gradient_arrives
from .contract.results import LossSum
from .head.model_loss import inner_model
from .packing import document_starts, leak_across_documents, leak_message

logger = logging.getLogger(__name__)

_ROWS = 128  # positions whose logits are read together
_SMOOTHED = 1e-3  # the least label smoothing that differs from rounding
_TOLERANCE = 0.01  # weights that differ by less are the same: bf16 gradients are rounded
_CERTAIN, _UNEVEN = 0.01, 0.1  # for one token: least 1 - p of its label, tolerance of its weight
_COLUMNS = ("step", "tokens", "true loss", "descended", "logged", "gradient's scale", "spread")


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
        afterwards: by how much ``.grad`` grew between the last backward and the step.
        even: whether the tokens of each micro-batch weigh the same; else ``scale`` and ``spread``
            are those of means.
        of_logits: whether all gradients were those of a cross-entropy of logits.
        micro_batches: of each, in the order of ranks, its tokens, and their weight over the right
            one.
    """

    n_tokens: int
    loss: float
    descended: float
    logged: float | None
    scale: float
    spread: float
    averaged: bool
    lost: int
    afterwards: float
    even: bool
    of_logits: bool
    micro_batches: list[tuple[int, float]]


@dataclass
class MicroBatch:
    """A micro-batch of this rank."""

    loss_sum: float  # nats
    n_tokens: int  # trained
    weight: float  # the mean weight of a token in the gradient of this rank; NaN: unknown
    even: bool = True  # whether all tokens have this weight, as far as it is known
    of_logits: bool = True  # whether the gradient is that of a cross-entropy of logits


@dataclass
class _Open:
    """The micro-batches since the last step of this rank."""

    micro: list[MicroBatch] = field(default_factory=list)
    logged: float | None = None
    lost: int = 0  # micro-batches whose gradients were set to zero before the step
    overflowed: bool = False  # whether those gradients were not finite
    afterwards: float = 1.0  # by how much .grad grew between the last backward and the step


class Audit:
    """The context manager that :func:`audit` returns, and its report.

    Attributes:
        steps: one :class:`Step` for each optimizer step, once the ``with`` block has ended.
        leak: by how many nats a loss in the first packed batch changed with other tokens in the
            document before its own; 0 up to rounding, ``None`` if no batch told.
    """

    def __init__(
        self, model: torch.nn.Module, adds: bool, loss_scale: float | Callable[[], float]
    ) -> None:
        self.steps: list[Step] = []
        self.leak: float | None = None
        self._is_packing_known = False
        self._model = model
        self._finder = LogitFinder(model, self._after_forward, lambda x: isinstance(x, LossSum))
        self._where = ""  # words for where the logits were found
        self._adds = adds
        self._loss_scale = loss_scale if callable(loss_scale) else lambda: loss_scale
        self._ended: list[_Open] = []  # the micro-batches of each step that was made
        self._now = _Open()
        self._unseen = 0  # optimizer steps without a micro-batch
        self._backward = -1  # id of the backward that runs, or ran last
        self._after_backward = 0.0  # the size of all gradients when that backward ended
        self._is_stepping = False  # a closure may be evaluated several times in a step
        self._handles: list[Any] = []

    def __enter__(self) -> Audit:
        self._parameters = {id(p) for p in self._model.parameters()}
        # Compiled code runs no hooks that came later.
        self._uncompiled = torch.compiler.set_stance("force_eager")
        self._handles = [
            self._model.register_forward_pre_hook(self._check_packing, with_kwargs=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._finder.attach()
        LISTENERS.append(self._after_correction)
        return self

    def include(self, module: torch.nn.Module) -> None:
        """Include the forward of ``module`` that has begun just before :meth:`__enter__`."""
        if module is self._model:
            self._finder.begin(module, ())

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._finder.detach()
        self._uncompiled.__exit__(None, None, None)
        LISTENERS.remove(self._after_correction)
        if error is None:
            self._add_up()

    def log(self, loss: float | Tensor) -> None:
        """Record the loss that the loop logs for the coming (or just made) optimizer step."""
        at = self._now if self._now.micro or not self._ended else self._ended[-1]
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
                logger.warning("%s", report)

        return AuditCallback()

    # ---- hooks ------------------------------------------------------------------------------

    def _check_packing(self, module: Any, args: Any, batch: dict[str, Any]) -> None:
        """Try, once, whether attention crosses the borders of packed documents.

        Alone, at the first batch of several documents; on several ranks at the first that tells of
        any, so that all ranks run the model.
        """
        ids = batch.get("input_ids")
        if self._is_packing_known or not torch.is_grad_enabled() or not isinstance(ids, Tensor):
            return
        starts = document_starts(batch, ids)
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        if starts is None or (alone and not starts.any()):
            return
        self._is_packing_known = True
        self.leak = leak_across_documents(module, batch)

    def _after_forward(self, found: Any, where: str) -> None:
        """Watch the gradient of a forward's logits, or of the sum of losses that it returned."""
        self._where = where
        if isinstance(found, LossSum):
            total, n = float(found.loss_sum.detach()), int(found.n_valid)
            if found.loss_sum.requires_grad:
                when_gradient_arrives(
                    found.loss_sum, lambda g: self._add(MicroBatch(total, n, float(g)))
                )
            return
        for logits, class_dim in found:
            self._watch(logits, class_dim)

    def _watch(self, logits: Tensor, class_dim: int) -> None:
        held = logits.detach().movedim(class_dim, -1)
        when_gradient_arrives(
            logits, lambda g: self._add(micro_batch_of(held, g.movedim(class_dim, -1)))
        )

    def _add(self, micro: MicroBatch) -> None:
        """Add a micro-batch whose backward runs now to the open step."""
        micro.weight /= self._loss_scale()
        backward = current_backward()
        if backward != self._backward:
            self._backward = backward
            self._count_lost()
            when_backward_ends(self._note_size)
        self._now.micro.append(micro)

    def _size(self) -> float:
        """The size of all gradients in ``.grad``; inf or NaN if one of them is not finite."""
        found = [p for p in self._model.parameters() if p.grad is not None]
        return sum(map(float, norms_of(found, torch.float64)))

    def _note_size(self) -> None:
        self._after_backward = self._size()

    def _count_lost(self) -> None:
        """Count the micro-batches whose gradients have been in ``.grad`` and are not any more."""
        if self._after_backward and not self._size() and not is_held_by_fsdp2(self._model):
            if self._is_stepping:  # LBFGS asks for the loss at other weights, and begins anew
                self._now = _Open(logged=self._now.logged)
                return
            self._now.lost = len(self._now.micro)
            self._now.overflowed |= not math.isfinite(self._after_backward)

    def _after_correction(self, parameters: list[Tensor], factor: float) -> None:
        """Follow a correction of the gradients by ``LossAccumulator.finish``."""
        if not any(id(p) in self._parameters for p in parameters):
            return  # of another model
        for micro in self._now.micro:
            micro.weight *= factor
        self._after_backward *= factor

    def _owns(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"])

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._is_stepping = self._owns(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """End the open step, after the optimizer's: its closure may run the last backward."""
        mine, self._is_stepping = self._owns(optimizer), False
        self._unseen += mine and not self._now.micro
        if mine and self._now.micro:
            self._count_lost()
            if self._after_backward:
                factor = self._size() / self._after_backward
                self._now.afterwards = factor * self._loss_scale()
            # A GradScaler lets a fused optimizer skip its own step, and sets `found_inf` meanwhile.
            if not getattr(optimizer, "found_inf", None):
                self._ended.append(self._now)
            self._now, self._after_backward = _Open(), 0.0

    # ---- the report -------------------------------------------------------------------------

    def _add_up(self) -> None:
        """Add up the steps over ranks.

        Collectives: one ``all_gather_object``, on all ranks.
        """
        ranks: list[list[_Open]] = [self._ended]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(ranks, self._ended)
        averaged_over = 1 if self._adds else len(ranks)
        for together in zip(*ranks, strict=False):
            # A loop skips a step on purpose if the gradients on any rank are not finite.
            skipped = any(one.overflowed for one in together)
            kept = [one.micro[one.lost if skipped else 0 :] for one in together]
            micro = [m for of_rank in kept for m in of_rank if m.n_tokens]
            if not micro:
                continue
            n = sum(m.n_tokens for m in micro)
            known = [m.weight for m in micro if not math.isnan(m.weight)]
            usual = sum(known) / len(known) if known else averaged_over / n
            for m in micro:
                m.weight = usual if math.isnan(m.weight) else m.weight
            weights = [m.weight / averaged_over * n for m in micro]  # 1 if the loop is right
            shares = [w * m.n_tokens for w, m in zip(weights, micro, strict=True)]
            least = min(weights)
            step = Step(
                n_tokens=n,
                loss=sum(m.loss_sum for m in micro) / n,
                descended=sum(m.weight * m.loss_sum for m in micro) / averaged_over,
                logged=next((x.logged for x in together if x.logged is not None), None),
                scale=sum(shares) / n,
                spread=max(weights) / least if least > 0 else math.inf,
                averaged=max(shares) - min(shares) <= _TOLERANCE * max(shares),
                lost=0 if skipped else sum(one.lost for one in together),
                afterwards=together[0].afterwards,
                even=all(m.even for m in micro),
                of_logits=all(m.of_logits for m in micro),
                micro_batches=[(m.n_tokens, w) for m, w in zip(micro, weights, strict=True)],
            )
            self.steps.append(step)

    def verdict(self) -> str:
        """Say in one sentence what the loop does to the weight of tokens."""
        return self._judged()[1]

    def right(self) -> bool | None:
        """Whether the loop is right; ``None`` if that cannot be said."""
        return self._judged()[0]

    def n_steps(self) -> int:
        """Optimizer steps that this rank has made so far."""
        return len(self._ended)

    def weighs_right(self) -> bool | None:
        """Whether tokens weigh the same, whatever attention does; ``None``: not known."""
        return self._weighed()[0]

    def _judged(self) -> tuple[bool | None, str]:
        """Whether the loop is right, and the verdict."""
        right, words = self._weighed()
        if not self.leak or right is None:
            return right, words
        crosses = leak_message(type(self._model).__name__, self.leak)
        return False, crosses if right else f"{words}; {crosses}"

    def _weighed(self) -> tuple[bool | None, str]:
        """Whether the loop weighs tokens rightly, and the verdict on that."""
        if not self.steps and self._unseen:
            return None, (
                f"{self._unseen} optimizer steps were made, but the model itself was never called "
                f"with gradients: a loop that calls fused_ce by hand needs a module whose forward "
                f"returns its LossSum, and the audit needs that module"
            )
        if not self.steps:
            return (
                None,
                "no optimizer step was made: does the optimizer hold the model's parameters?",
            )
        if not all(step.of_logits for step in self.steps):
            return None, (
                f"{self._where} are no logits of a cross-entropy, by their gradient: a hidden "
                f"state, logits that are scaled or capped later, or another loss? Audit the module "
                f"that makes the logits, as in fusedce.audit(model.head)"
            )
        if lost := sum(step.lost for step in self.steps):
            return False, (
                f"zero_grad was called before the optimizer step: the gradients of {lost} "
                f"micro-batches were lost"
            )
        if not all(step.even for step in self.steps):
            return None, (
                "tokens of one micro-batch weigh differently (weights of classes or of tokens?): "
                "the audit compares micro-batches whose tokens weigh the same"
            )
        spread = max(step.spread for step in self.steps)
        found = []
        if spread > 1 + _TOLERANCE:
            uneven = [step for step in self.steps if step.spread > 1 + _TOLERANCE]
            why = (
                "your micro-batches are averaged"
                if all(step.averaged for step in uneven)
                else "tokens of one step weigh differently"
            )
            found.append(f"{why}: tokens of short ones weigh up to {spread:.1f} x more")
        # A factor on .grad that does not lead to 1 may be that of clipping.
        scales = [
            step.scale for step in self.steps
            if min(abs(step.scale - 1), abs(step.scale * step.afterwards - 1)) > _TOLERANCE
        ]  # fmt: skip
        if scales:
            found.append(_of_scales(scales, len(self.steps)))
        logged = [(s.logged, s.loss) for s in self.steps if s.logged is not None]
        off = [(a, b) for a, b in logged if abs(a - b) > _TOLERANCE * max(abs(b), 1e-3)]
        if off:
            said, right = max(off, key=lambda x: abs(x[0] - x[1]))
            found.append(
                f"the loss that is logged is not that of the tokens ({said:.4f} where {right:.4f} "
                f"is right)"
            )
        return not found, "; ".join(found) or (
            "every token weighs the same, and the gradient is that of the mean over all tokens"
        )

    def __str__(self) -> str:
        """A Markdown table with a line for each step, and the verdict.

        What is no loss of logits has no table.
        """
        if not all(step.of_logits for step in self.steps):
            return self.verdict()
        lines = ["", f"| {' | '.join(_COLUMNS)} |", "|---:" * len(_COLUMNS) + "|"]
        for i, s in enumerate(self.steps):
            logged = "" if s.logged is None else f"{s.logged:.4f}"
            lines.append(
                f"| {i} | {s.n_tokens} | {s.loss:.4f} | {s.descended:.4f} | {logged} | "
                f"{s.scale:.3f} | {s.spread:.2f} |"
            )
        return "\n".join([*lines, "", self.verdict()])


def audit(
    model: torch.nn.Module,
    *,
    gradients_added: bool = False,
    loss_scale: float | Callable[[], float] = 1.0,
) -> Audit:
    """Watch anyone's training loop: ``with fusedce.audit(model) as report: train()``.

    For each optimizer step: the true mean loss of its tokens, the loss whose gradient was taken,
    what was logged, and by how much the gradient was off; as a table (``print(report)``; a callback
    writes it to the log when training ends), and a verdict in words (``report.verdict()``). It
    works around plain loops, accelerate, Lightning and Trainer (or with ``report.callback()``),
    with or without fusedce.

    At the first batch whose ``position_ids`` restart (or that has ``cu_seq_lens_q``), the model
    runs twice more, to find out whether its attention crosses the borders of packed documents.

    It reads numbers at each micro-batch and keeps logits until backward: use it for a few steps,
    not for a training run.

    Collectives: one ``all_gather_object`` at the end of the block, on all ranks.

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

    Args:
        model: what the loop calls, or the module inside its DDP or ``torch.compile``. It returns
            logits (alone, as ``.logits``, or in a tuple), a :class:`LossSum`, or its loss alone:
            then the audit watches what it gives to ``F.cross_entropy``, or what its head makes. A
            replaced head makes real logits during the audit, and compiled code runs uncompiled.
        gradients_added: whether the engine adds gradients over ranks, instead of averaging them.
        loss_scale: what losses are multiplied by before backward and gradients divided by after
            it: ``scaler.get_scale`` of a ``GradScaler``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: no logits were found in a forward; raised in that forward.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return Audit(inner_model(model), gradients_added, loss_scale)


def _of_scales(scales: list[float], n_steps: int) -> str:
    """Say by how much gradients are off, in the steps in which they are."""
    least, most = f"{min(scales):.3g}", f"{max(scales):.3g}"
    size = least if least == most else f"{least} to {most}"
    where = "" if len(scales) == n_steps else f" in {len(scales)} of {n_steps} steps"
    return f"gradients are {size} x those of the mean over the step's tokens{where}"


def micro_batch_of(logits: Tensor, grad: Tensor) -> MicroBatch:
    """The losses and weights of the trained tokens, from logits and gradient ``(..., V)``.

    A row's gradient is ``w * (softmax - target)``. Beside the label, the target is one number: 0,
    or what label smoothing puts there. So ``w`` is the slope of the gradient over the
    probabilities of the other classes; without smoothing, its entry at the label tells ``w`` best.
    Where the label is nearly certain that entry is rounding, and the other ones tell it. If the
    gradient is no such line over the probabilities, these were no logits of a cross-entropy.
    """
    found, misfit, whole = [], 0.0, 0.0
    rows = zip(logits.flatten(0, -2).split(_ROWS), grad.flatten(0, -2).split(_ROWS), strict=True)
    for z, g in rows:
        trained = (g != 0).any(-1)
        g, logprobs = g[trained].double(), torch.log_softmax(z[trained].double(), -1)
        is_certain = g.min(-1, keepdim=True).values >= 0
        labels = torch.where(is_certain, logprobs.argmax(-1, True), g.argmin(-1, True))
        others = torch.ones_like(g, dtype=torch.bool).scatter_(-1, labels, False)
        # The least-squares line through the gradient over the probabilities.
        n = others.sum(-1)
        mean_p, mean_g = ((v * others).sum(-1) / n for v in (logprobs.exp(), g))
        dp = (logprobs.exp() - mean_p[:, None]) * others
        slope = (dp * (g - mean_g[:, None])).sum(-1) / dp.square().sum(-1)
        offset = mean_g - slope * mean_p
        off_line = (g - slope[:, None] * logprobs.exp() - offset[:, None]) * others
        of_label = logprobs.gather(-1, labels)[:, 0]
        gap = -torch.expm1(of_label)
        smooth = -offset * g.shape[-1] > _SMOOTHED * slope.clamp(min=0)
        clear = (gap > _CERTAIN) & (n > 2) & slope.isfinite()
        misfit += float(off_line[clear].square().sum())
        whole += float((g * others)[clear].square().sum())
        rest, at_label = (g * others).sum(-1), -g.gather(-1, labels)[:, 0]
        at_label = torch.where(gap < _CERTAIN, rest, at_label)
        weight = torch.where(smooth, slope, at_label / gap)
        target = logprobs.exp() - g / weight[:, None]
        loss = torch.where(smooth, -(target * logprobs).sum(-1), -of_label)
        found.append(torch.stack([gap, torch.where(gap > 0, weight, 0), loss]))
    gap, weight, loss = torch.cat(found, -1).unbind()
    mean = float((weight * gap).sum() / gap.sum()) if len(gap) else 0.0  # NaN: p = 1 everywhere
    # The weight of a token whose label is nearly certain is a quotient of rounding errors.
    off = (weight - mean).abs()[gap > _CERTAIN] > _UNEVEN * abs(mean)
    # Logits of two bytes are not quite those of which the gradient was taken.
    rounding = torch.finfo(logits.dtype).eps * float(logits.abs().max()) if len(loss) else 0.0
    of_logits = not math.sqrt(misfit) > (_TOLERANCE + rounding) * math.sqrt(whole)
    return MicroBatch(float(loss.sum()), len(loss), mean, not bool(off.any()), of_logits)
