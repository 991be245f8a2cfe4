"""Hooks on a model and its optimizers that measure the weight of each token in a step.

The training loop is not changed. The gradient of a token's loss with respect to its logits is
``w * (softmax - onehot)``. Its one negative entry names the label, and its size is the weight ``w``
that the loop gave the token by all of its divisions. A right loop gives all tokens of an
optimizer step the weight 1 / (number of tokens of all micro-batches and ranks).
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
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.variable import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fusedce.accumulate.gradients import LISTENERS, held_by_fsdp2
from fusedce.auditing.steps import MicroBatch, Step, micro_batch_of, step_of, table, verdict
from fusedce.contract.groups import local_of
from fusedce.contract.results import LossSum

logger = logging.getLogger(__name__)

_CASTS = ("ToCopyBackward0", "CloneBackward0")  # autograd nodes of copies of the same shape


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
    """

    def __init__(
        self, model: torch.nn.Module, adds: bool, loss_scale: float | Callable[[], float]
    ) -> None:
        self.steps: list[Step] = []
        self._model = model
        self._adds = adds
        self._loss_scale = loss_scale if callable(loss_scale) else lambda: loss_scale
        self._ended: list[_Open] = []  # the micro-batches of each step that was made
        self._now = _Open()
        self._unseen = 0  # optimizer steps without a micro-batch
        self._backward = -1  # id of the backward that runs, or ran last
        self._after_backward = 0.0  # the size of all gradients when that backward ended
        self._handles: list[Any] = []

    def __enter__(self) -> Audit:
        self._parameters = {id(p) for p in self._model.parameters()}
        self._handles = [
            self._model.register_forward_hook(self._after_forward),
            register_optimizer_step_post_hook(self._after_step),
        ]
        LISTENERS.append(self._after_correction)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for handle in self._handles:
            handle.remove()
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

    def _after_forward(self, module: Any, args: Any, out: Any) -> None:
        """Watch the gradient of a forward's logits, or of the sum of losses that it returned."""
        if not torch.is_grad_enabled():
            return
        if isinstance(out, LossSum):
            total, n = float(out.loss_sum.detach()), int(out.n_valid)
            if out.loss_sum.requires_grad:
                edge = get_gradient_edge(out.loss_sum)
                _watch(edge, lambda g: self._add(MicroBatch(total, n, float(g))))
            return
        get = out.get if isinstance(out, dict) else lambda name: getattr(out, name, None)
        logits = out if isinstance(out, Tensor) else get("logits")
        if not isinstance(logits, Tensor) or not logits.requires_grad:
            raise ValueError(
                f"audit needs a model that returns logits with a gradient, or a LossSum; "
                f"{type(module).__name__} returned {type(out).__name__}"
            )
        held = logits.detach()
        _watch(_edge_of(logits), lambda g: self._add(micro_batch_of(held, g)))

    def _add(self, micro: MicroBatch) -> None:
        """Add a micro-batch whose backward runs now to the open step."""
        micro.weight /= self._loss_scale()
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._count_lost()
            queue = Variable._execution_engine.queue_callback
            # Callbacks run in the order in which they were queued. DDP and FSDP queue theirs, which
            # complete the gradients, later in this backward; a callback that is queued at the end
            # of backward runs after them.
            queue(lambda: queue(self._note_size))
        self._now.micro.append(micro)

    def _size(self) -> float:
        """The size of all gradients in ``.grad``; inf or NaN if one of them is not finite."""
        found = (local_of(p.grad) for p in self._model.parameters() if p.grad is not None)
        grads = (grad._values() if grad.is_sparse else grad for grad in found)
        return sum(float(torch.linalg.vector_norm(g, math.inf)) for g in grads if g.numel())

    def _note_size(self) -> None:
        self._after_backward = self._size()

    def _count_lost(self) -> None:
        """Count the micro-batches whose gradients have been in ``.grad`` and are not any more."""
        if self._after_backward and not self._size() and not held_by_fsdp2(self._model):
            self._now.lost = len(self._now.micro)
            self._now.overflowed |= not math.isfinite(self._after_backward)

    def _after_correction(self, factor: float) -> None:
        """Follow a correction of the gradients by ``LossAccumulator.finish``."""
        for micro in self._now.micro:
            micro.weight *= factor
        self._after_backward *= factor

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """End the open step, after the optimizer's: its closure may run the last backward."""
        mine = any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"])
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
            logged = [one.logged for one in together if one.logged is not None]
            if micro:
                step = step_of(micro, averaged_over, logged[0] if logged else None)
                step.lost = 0 if skipped else sum(one.lost for one in together)
                step.afterwards = together[0].afterwards
                self.steps.append(step)

    def verdict(self) -> str:
        """Say in one sentence what the loop does to the weight of tokens."""
        return verdict(self.steps, self._unseen)

    def __str__(self) -> str:
        return "\n".join(["", *table(self.steps), "", self.verdict()])


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
        model: what is called in the loop, or what lies inside its DDP. It returns logits (alone or
            as ``.logits``) or a :class:`LossSum`. A replaced head makes its logits meanwhile.
        gradients_added: whether the engine adds gradients over ranks, instead of averaging them.
        loss_scale: what losses are multiplied by before backward and gradients divided by after
            it: ``scaler.get_scale`` of a ``GradScaler``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model's forward has returned something else; raised in that forward.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return Audit(getattr(model, "module", model), gradients_added, loss_scale)


def _edge_of(logits: Tensor) -> GradientEdge:
    """The edge at which the gradient of ``logits`` arrives, or of the source of their cast.

    With mixed precision, accelerate returns fp32 copies of a model's outputs, also of the bf16
    logits that the model's loss is made of.
    """
    edge = get_gradient_edge(logits)
    node, nr = edge.node, edge.output_nr
    while node.name() in _CASTS:
        source, nr = node.next_functions[0]
        assert source is not None  # a copy that needs a gradient has a source that needs one
        node = source
    return GradientEdge(node, nr)


def _watch(edge: GradientEdge, callback: Callable[[Tensor], None]) -> None:
    """Call ``callback`` with the gradient that arrives at ``edge``."""
    nr = edge.output_nr  # the hook holds no reference to its own node

    def hook(grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[nr]
        if grad is not None:
            callback(grad.detach())

    edge.node.register_prehook(hook)
