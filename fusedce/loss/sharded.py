"""The losses with a vocabulary that is sharded over ranks (tensor parallelism).

They replace the column-parallel output layer and cross-entropy of Megatron-LM (arXiv:1909.08053,
section 3), and hold the logits of a chunk of tokens at a time.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fusedce.autograd import dispatch
from fusedce.backends.shards.agreement import LOSSES, SUM, groups_of, tell_peers_on_error
from fusedce.contract.checks import check_reduction
from fusedce.contract.explain import explains_names
from fusedce.contract.objective import weights_and_count
from fusedce.contract.problem import Problem
from fusedce.contract.results import LossSum
from fusedce.contract.task import Task
from fusedce.loss.sharded_problem import agree_on_problem, device_of, tokens_of


@explains_names
def sharded_ce(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V_local, H) with process_group, or a DTensor (V, H) with Shard(0)
    labels: Tensor,  # (...) int64 or int32
    *,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    bias: Tensor | None = None,  # (V_local,), or a DTensor (V,) with Shard(0)
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...) numbers or bool, no gradient
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
) -> LossSum:
    """:func:`fusedce.fused_ce` with the rows of ``weight`` spread over ranks; the same results.

    The classes are the rows of all ranks. Every rank returns the whole ``loss_sum`` and
    ``n_valid``, and receives its rows of the weight and bias gradients and the whole gradient of
    its ``hidden``: the loss counts once, not once per rank. A :class:`fusedce.LossAccumulator` must
    therefore not count these ranks (``from_mesh(mesh, ["dp"])``).

    A rank holds the logits of one chunk of tokens for its own rows, never ``(N, V_local)``; without
    gradients the Triton kernels hold O(N) numbers. Deterministic; all ranks compute the same bits
    of the loss. Waits for the device once (on a mesh of more dimensions, once in each), to compare
    what the ranks hold and to cut the chunks.

    Collectives on the vocabulary's ranks, all in the forward pass, none in backward:

    * one all-gather of under 1 KiB: do all ranks hold the same tokens and options, how many rows
      has each, and has one found an error; for a weight that is replicated over other dimensions of
      its mesh, before it one on each of those, over which labels must be equal and hidden states
      within 1% of their norm;
    * Triton, in training: one all-reduce of a float32 per token that counts, the labels' logits;
      with label smoothing one all-gather of ``H + 1`` float64; per chunk one all-gather of 2
      float32 per token (4 with ``argmax_out``), reference and sum of its exponentials;
    * Triton, without gradients: one all-gather of 3 float32 per token that counts, the same and the
      label's logit; with label smoothing that of ``H + 1`` float64;
    * torch: per chunk, one all-gather of 3 float64 per token (4 with label smoothing): maximum, sum
      of exponentials, the label's logit, the sum of logits;
    * per chunk, where ``hidden`` requires grad, one all-reduce of its valid rows ``(C, H)`` in
      float32. With Triton it runs while the chunk's product for the weight and the next chunk are
      computed, with torch while the next chunk is;
    * with sharded tokens, one all-gather each of hidden, labels and token weights before, and a
      reduce-scatter of ``(N, H)`` in place of the all-reduces.

    Label smoothing of capped logits by Triton, and what :func:`fused_ce` monitors of entropy and
    z-loss, come from the losses of the tokens, with the collectives of
    :func:`sharded_cross_entropy`; so does ``argmax_out`` but in training by Triton.

    Args:
        hidden: ``(..., H)``, the same on all ranks, or each rank's own tokens; a ``DTensor`` on the
            weight's mesh says by its placement which (``Replicate``, or ``Shard`` of a dimension
            other than the last).
        weight: ``(V_local, H)``, this rank's rows: class ``c`` is row ``c - (rows of lower
            ranks)``; shards may be unequal or empty. Or a ``DTensor (V, H)`` with placement
            ``Shard(0)``.
        labels: ``(...)``, as ``hidden``: all tokens' labels in ``[0, V)``, or this rank's.
        process_group: the ranks that hold the shards, a group or one-dimensional ``DeviceMesh``;
            for a ``DTensor`` it is known.
        tokens_sharded: for plain tensors, whether each rank passes its own tokens (sequence
            parallelism); their numbers may differ. ``loss_sum`` still covers all of them.
        vocab_size: classes, where the last rows are padding that must have no probability;
            ``None`` counts every row.
        bias: like ``weight``.
        ignore_index, softcap, logit_scale, label_smoothing, z_loss, token_weight, chunk_tokens,
            memory_budget, backend: as in :func:`fusedce.fused_ce`, the same on all ranks. The
            budget is each rank's; where it leads to tiles, the collectives are those of
            :func:`sharded_cross_entropy`.

    Returns:
        :class:`fusedce.LossSum`, equal on all ranks, in nats and tokens.

    Raises:
        TypeError, ValueError: as :func:`fusedce.fused_ce`; ranks disagree on tokens, labels,
            rows, backend or (Triton) whether their rows require grad, or hold other tokens where
            the weight is replicated (on all ranks); a placement other than those above.

    Examples:
        >>> # every rank; alone, it holds the whole vocabulary
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        >>> weight = distribute_tensor(torch.randn(11, 4), mesh, [Shard(0)]).requires_grad_()
        >>> hidden, labels = torch.randn(3, 4), torch.tensor([1, -100, 10])
        >>> sharded_ce(hidden, weight, labels).mean().backward()
        >>> weight.grad.placements
        (Shard(dim=0),)
    """
    problem = Problem(
        hidden, weight, labels, bias=bias, token_weight=token_weight, ignore_index=ignore_index,
        softcap=softcap, logit_scale=logit_scale, label_smoothing=label_smoothing, z_loss=z_loss,
        chunk_tokens=chunk_tokens, memory_budget=memory_budget, backend=backend,
    )  # fmt: skip
    problem, shard = agree_on_problem(problem, process_group, tokens_sharded, vocab_size)
    return dispatch.loss_sum(Task(problem, shard=shard))[0]


@explains_names
def sharded_cross_entropy(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V_local, H) with process_group, or a DTensor (V, H) with Shard(0)
    labels: Tensor,  # (...) int64 or int32
    *,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    bias: Tensor | None = None,  # (V_local,), or a DTensor (V,) with Shard(0)
    class_weight: Tensor | None = None,  # (V,) numbers
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...) numbers or bool
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
) -> Tensor:
    """:func:`fusedce.fused_cross_entropy` with the rows of ``weight`` spread over ranks.

    The losses and reductions are the same, in nats, with the classes of all ranks. Every rank
    returns the same (of its own tokens, where tokens are sharded too), and must run backward: it
    receives its rows of the weight and bias gradients and the whole gradient of its ``hidden``.
    Upstream gradients must be equal on ranks that hold the same tokens, as those of equal programs
    are; the loss counts once, not once per rank. Label smoothing is torch's; Megatron-LM's
    ``label_smoothing=e`` is ``e * V / (V - 1)`` here.

    Each rank runs the backend over its own rows, as if they were a vocabulary, in tiles; backward
    computes them once more. So do "mean" and "sum" with ``class_weight``; without, they are
    :func:`sharded_ce`, with three products of the shard's size instead of four.
    Deterministic; all ranks compute the same bits of the loss. By Triton the forward pass waits for
    the device once, as :func:`sharded_ce` does; backward waits, too.

    Collectives on the vocabulary's ranks (other than those of :func:`sharded_ce`):

    * forward: one all-gather of under 1 KiB, in which ranks compare what they ask for, and one of 2
      float64 a token that counts (3 with label smoothing);
    * backward, where ``hidden`` requires grad: one all-reduce of ``(N_valid, H)`` in float32;
    * with sharded tokens, one all-gather each of hidden, labels and token weights before; in
      backward one all-reduce of 4 numbers a token, and a reduce-scatter of ``(N, H)`` in place of
      the all-reduce; "mean" and "sum" one all-reduce of two numbers.

    Args:
        hidden, weight, labels, process_group, tokens_sharded, vocab_size, bias: as in
            :func:`sharded_ce`.
        class_weight: ``(V,)`` numbers, the weights of all ranks' classes, the same on all ranks;
            without gradient, without padding.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index, softcap, logit_scale, label_smoothing, z_loss, token_weight, chunk_tokens,
            memory_budget, backend: as in :func:`fusedce.fused_cross_entropy`.

    Returns:
        float32 (float64 for float64 inputs), ``()`` or, with ``"none"``, the shape of ``labels``;
        differentiable in ``hidden``, ``weight`` and ``bias``, once.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sharded_ce`, on all ranks the same; also for
            class weights that differ between ranks or are not ``(V,)``.

    Examples:
        >>> # every rank; alone, it holds the whole vocabulary
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        >>> weight = distribute_tensor(torch.randn(11, 4), mesh, [Shard(0)]).requires_grad_()
        >>> hidden, labels = torch.randn(3, 4), torch.tensor([1, -100, 10])
        >>> sharded_cross_entropy(hidden, weight, labels, reduction="none").shape
        torch.Size([3])
    """
    problem = Problem(
        hidden, weight, labels, bias=bias, token_weight=token_weight, class_weight=class_weight,
        ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
        label_smoothing=label_smoothing, z_loss=z_loss, chunk_tokens=chunk_tokens,
        memory_budget=memory_budget, backend=backend,
    )  # fmt: skip
    return reduced(problem, reduction, process_group, tokens_sharded, vocab_size)


def reduced(
    problem: Problem,
    reduction: str,
    process_group: Any,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
) -> Tensor:
    """The losses, their sum or their mean, of arguments as they were given."""
    labels = problem.labels
    with tell_peers_on_error(groups_of(problem.weight, process_group), device_of(labels)):
        check_reduction(reduction)
    if problem.class_weight is None and reduction != "none":
        problem, shard = agree_on_problem(
            problem, process_group, tokens_sharded, vocab_size, SUM, reduction
        )
        out, _ = dispatch.loss_sum(Task(problem, shard=shard))
        return out.loss_sum if reduction == "sum" else out.mean()
    problem, shard = agree_on_problem(
        problem, process_group, tokens_sharded, vocab_size, LOSSES, reduction
    )
    losses = dispatch.token_losses(Task(problem, shard=shard))
    if reduction == "none":
        return losses.view(tokens_of(labels))
    mine = torch.stack([losses.sum(dtype=torch.float64), *weights_and_count(problem)])
    loss_sum, weights, count = dispatch.over_ranks(mine, shard).unbind()
    if reduction == "mean":
        loss_sum = loss_sum / torch.where(count > 0, weights, 1.0).detach()
    return loss_sum.to(losses.dtype)
