"""The drop-in for ``F.cross_entropy(F.linear(hidden, weight, bias), labels, ...)``.

Also with the names and the order of arguments of Liger-Kernel and cut-cross-entropy.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..autograd import dispatch
from ..contract.checks import check_choice
from ..contract.groups import local_of
from ..contract.labels import shift_labels
from ..contract.objective import weights_and_count
from ..contract.problem import ACC_DTYPE, Problem, Task
from ..ranks.agreement import LOSSES, SUM
from ..ranks.door import prepared

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)


def fused_cross_entropy(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) floats
    labels: Tensor,  # (...) int64 or int32
    *,
    bias: Tensor | None = None,  # (V,) floats
    class_weight: Tensor | None = None,  # (V,) numbers
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...) numbers or bool
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), labels, ...)`` without the logits.

    With the logits ``z`` of :func:`fused_ce`, ``y = labels[i]`` and ``nll[i, v] = logsumexp(z[i]) -
    z[i, v]``, in nats::

        loss[i] = token_weight[i] * (CE[i] + z_loss * logsumexp(z[i])**2)
        CE[i]   = (1 - label_smoothing) * class_weight[y] * nll[i, y]
                  + label_smoothing * mean over v of class_weight[v] * nll[i, v]

    ``"none"`` returns ``loss``, 0 at ignored positions; ``"sum"`` its sum; ``"mean"`` that sum over
    the sum of ``class_weight[labels[i]]``, without class weights over the number of valid
    positions. ``token_weight`` does not enter that denominator.

    Examples:
        >>> hidden, weight = torch.randn(2, 5, 16), torch.randn(100, 16)
        >>> labels = torch.randint(100, (2, 5))
        >>> fused_cross_entropy(hidden, weight, labels, reduction="none").shape
        torch.Size([2, 5])

    Args:
        class_weight: ``(V,)``, numbers of any dtype, without gradient. With a sharded vocabulary:
            those of all ranks' classes.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        hidden, weight, labels, ...: the others are those of :func:`fused_ce`.

    Returns:
        float32 (float64 for float64 inputs), ``()`` or, with ``"none"``, ``(...)``, the leading
        shape of ``hidden``; differentiable in ``hidden``, ``weight`` and ``bias``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fused_ce`; ``TypeError`` for class
            probabilities ``(..., V)`` as labels, which ``F.cross_entropy`` takes.

    Note:
        Where torch differs: it returns the logits' dtype for bfloat16 and float16; with every label
        ignored its mean is NaN, and this one 0 with gradients of 0; and a weight of 0 times an
        infinite loss is 0 here. With class weights Liger-Kernel divides the z-loss by the number
        of valid positions; here it is divided by the sum of weights, as the rest of the loss.

        "none" is exact under any upstream gradient: its backward computes the logits once more,
        unless they are few and were kept, and leaves out tokens whose upstream gradient is 0. For
        one denominator over several batches or ranks take :func:`fused_ce` with
        :class:`LossAccumulator` instead of "mean".
    """
    problem = Problem(
        hidden, weight, labels, bias=bias, token_weight=token_weight, class_weight=class_weight,
        ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
        label_smoothing=label_smoothing, z_loss=z_loss, chunk_tokens=chunk_tokens,
        memory_budget=memory_budget, backend=backend,
    )  # fmt: skip
    sharding = process_group, tokens_sharded, vocab_size

    def check(given: Problem) -> dict[str, Any]:
        check_choice("reduction", reduction, REDUCTIONS)
        return {"reduction": reduction}

    function = LOSSES if reduction == "none" else SUM
    problem, vocabulary = prepared(problem, sharding, function, check)
    if reduction == "none":
        losses = dispatch.token_losses(Task(problem), vocabulary.stats_of)
        return vocabulary.tokens.own(losses)[0].view(local_of(labels).shape)
    dtype = ACC_DTYPE[problem.hidden.dtype]
    if reduction == "sum":
        one = problem.hidden.new_ones((), dtype=dtype)
        task = Task(problem.replace(expected_upstream=one))
        return dispatch.loss_sum(task, vocabulary.stats_of)[0].loss_sum
    weights, count = weights_and_count(problem)
    # If all weights are 0, the mean is 0 / 0, as in torch; without a valid label it is 0.
    denominator = torch.where(count > 0, weights, 1.0).to(dtype)
    task = Task(problem.replace(expected_upstream=1 / denominator))
    return dispatch.loss_sum(task, vocabulary.stats_of)[0].loss_sum / denominator


# ---- under the names and with the order of arguments of other libraries --------------------------


class FusedLinearCrossEntropyLoss(nn.Module):
    """A module for ``loss(weight, hidden, labels, bias)``, Liger-Kernel's order of arguments.

    The options are those of :func:`fusedce.fused_cross_entropy`.

    Examples:
        >>> loss = FusedLinearCrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
        >>> hidden, head = torch.randn(6, 16), torch.nn.Linear(16, 100)
        >>> loss(head.weight, hidden, torch.randint(100, (6,)), head.bias).shape
        torch.Size([])

    Args:
        ignore_index, softcap, logit_scale, label_smoothing, z_loss, class_weight, reduction,
            chunk_tokens, memory_budget, backend: as in :func:`fusedce.fused_cross_entropy`.
            ``class_weight (V,)`` becomes a buffer, which moves with the module and is not saved.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        class_weight: Tensor | None = None,  # (V,) numbers
        reduction: Reduction = "mean",
        chunk_tokens: int | None = None,
        memory_budget: int | None = None,  # bytes
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.reduction: Reduction = reduction
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "chunk_tokens": chunk_tokens,
            "memory_budget": memory_budget,
            "backend": backend,
        }

    def forward(
        self,
        weight: Tensor,  # (V, H)
        hidden: Tensor,  # (..., H)
        labels: Tensor,  # (...) int64 or int32
        bias: Tensor | None = None,  # (V,)
        *,
        token_weight: Tensor | None = None,  # (...) numbers or bool
    ) -> Tensor:
        """The loss: ``()``, or the shape of ``labels`` with reduction "none"."""
        return fused_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            token_weight=token_weight,
            class_weight=self.class_weight,
            reduction=self.reduction,
            **self.options,
        )

    def extra_repr(self) -> str:
        """The options, for ``repr`` of the module."""
        shown = {"reduction": self.reduction, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def linear_cross_entropy(
    hidden: Tensor,  # (..., T, H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) floats
    labels: Tensor,  # (..., T) int64 or int32
    bias: Tensor | None = None,  # (V,) floats
    ignore_index: int | None = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: bool | int = 0,
    *,
    token_weight: Tensor | None = None,  # (..., T) numbers or bool
    class_weight: Tensor | None = None,  # (V,) numbers
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
) -> Tensor:
    """:func:`fusedce.fused_cross_entropy` in the order of arguments of cut-cross-entropy.

    Examples:
        >>> hidden, weight = torch.randn(2, 5, 16), torch.randn(100, 16)
        >>> tokens = torch.randint(100, (2, 5))
        >>> linear_cross_entropy(hidden, weight, tokens, shift=1, reduction="none")[:, 0]
        tensor([0., 0.])

    Args:
        shift: how many positions ahead of its hidden state a label stands: 0 for aligned labels;
            ``True`` or 1 for next-token prediction with labels that are the tokens themselves.
        token_weight: belongs to the labels, and moves with them.
        hidden, weight, labels, bias, ignore_index, softcap, reduction, class_weight,
            label_smoothing, z_loss, logit_scale, chunk_tokens, memory_budget, backend: as in
            :func:`fusedce.fused_cross_entropy`.

    Returns:
        ``()``, or with "none" the shape of ``labels``: each loss where its *label* stands, so 0 at
        the first ``shift`` positions.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fusedce.fused_cross_entropy`;
            ``ValueError`` also for a ``shift`` outside ``[0, T)``, or ``ignore_index=None`` with
            a shift (the last positions have no label).
    """
    if not isinstance(shift, int):
        raise TypeError(f"shift must be an int or a bool, got {type(shift).__name__}")
    offset = int(shift)
    if offset and isinstance(labels, Tensor):  # fused_cross_entropy refuses anything else
        T = labels.shape[-1] if labels.dim() else 1
        if ignore_index is None:
            raise ValueError("ignore_index must be an int with shift: the last labels are missing")
        if not 0 <= offset < T:
            raise ValueError(f"shift must be in [0, T) with T={T} (from labels), got {shift}")
        if isinstance(token_weight, Tensor) and token_weight.shape == labels.shape:
            token_weight = token_weight.roll(-offset, -1)
        labels = shift_labels(labels, offset=offset, ignore_index=ignore_index)
    loss = fused_cross_entropy(
        hidden, weight, labels, bias=bias, token_weight=token_weight, class_weight=class_weight,
        reduction=reduction, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
        label_smoothing=label_smoothing, z_loss=z_loss, chunk_tokens=chunk_tokens,
        memory_budget=memory_budget, backend=backend,
    )  # fmt: skip
    return loss.roll(offset, -1) if offset and reduction == "none" else loss
