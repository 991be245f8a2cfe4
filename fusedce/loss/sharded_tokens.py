"""Losses, log-probabilities and likeliest classes token by token on a sharded vocabulary."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fusedce.autograd import sharded, sharded_tokens
from fusedce.backends.sharded.agreement import ARGMAX, LOSSES, MEAN_LOGIT, STATISTICS, on_the_way
from fusedce.backends.sharded.layout import groups_of, is_dtensor
from fusedce.contract.explain import explains_names, not_a_tensor
from fusedce.contract.objective import weights_and_count
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import TokenStats, TokenStatsAndMean
from fusedce.loss.sharded import device_of, met
from fusedce.loss.tokens import check_reduction, of_tokens, tempered


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
    backend: str | None = None,
) -> Tensor:
    """:func:`fusedce.fused_cross_entropy` with the rows of ``weight`` spread over ranks.

    The same losses, in nats: with the logits ``z`` over all ranks' classes, ``nll[i, v] =
    logsumexp(z[i]) - z[i, v]`` and ``y = labels[i]``::

        loss[i] = token_weight[i] * (CE[i] + z_loss * logsumexp(z[i])**2)
        CE[i]   = (1 - label_smoothing) * class_weight[y] * nll[i, y]
                  + label_smoothing * mean over v of class_weight[v] * nll[i, v]

    ``"none"`` returns ``loss``, 0 at ignored positions; ``"sum"`` its sum; ``"mean"`` that over the
    sum of ``class_weight[labels]`` (without: over the number of valid positions). Every rank
    returns the same (of its own tokens, where tokens are sharded too), and must run backward: it
    receives its rows of the weight and bias gradients and the whole gradient of its ``hidden``.
    Upstream gradients must be equal on ranks that hold the same tokens, as those of equal programs
    are; the loss counts once, not once per rank. Label smoothing is torch's; Megatron-LM's
    ``label_smoothing=e`` is ``e * V / (V - 1)`` here.

    Each rank runs the backend over its own rows, as if they were a vocabulary, in tiles; backward
    computes them once more. So do "mean" and "sum" with ``class_weight`` or ``backend="triton"``;
    else they are :func:`sharded_ce`, with three products of the shard's size instead of four.
    Deterministic; all ranks compute the same bits of the loss. Waits for the device.

    Collectives on the vocabulary's ranks (other than those of :func:`sharded_ce`):

    * forward: one all-gather of 69 int64, in which ranks compare what they ask for, and one of 2
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
            backend: as in :func:`fusedce.fused_cross_entropy`.

    Returns:
        float32 (float64 for float64 inputs), ``()`` or, with ``"none"``, the shape of ``labels``;
        differentiable in ``hidden``, ``weight`` and ``bias``, once.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sharded_ce`, on all ranks the same; also for
            class weights that differ between ranks or are not ``(V,)``.

    Example:
        >>> # every rank; alone, it holds the whole vocabulary
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        >>> weight = distribute_tensor(torch.randn(11, 4), mesh, [Shard(0)]).requires_grad_()
        >>> hidden, labels = torch.randn(3, 4), torch.tensor([1, -100, 10])
        >>> sharded_cross_entropy(hidden, weight, labels, reduction="none").shape
        torch.Size([3])
    """
    problem = Problem(
        hidden,
        weight,
        labels,
        bias=bias,
        token_weight=token_weight,
        class_weight=class_weight,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        chunk_tokens=chunk_tokens,
        backend=backend,
    )
    return reduced(problem, reduction, process_group, tokens_sharded, vocab_size)


def reduced(
    problem: Problem,
    reduction: str,
    process_group: Any,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
) -> Tensor:
    """Of a problem as it was asked: the losses, their sum or their mean."""
    labels = problem.labels
    with on_the_way(groups_of(problem.weight, process_group), device_of(labels)):
        check_reduction(reduction)
    plain = problem.class_weight is None and problem.backend != "triton"
    if plain and reduction != "none":
        out = sharded.loss_sum(*met(problem, process_group, tokens_sharded, vocab_size))
        return out.loss_sum if reduction == "sum" else out.mean()
    problem, shard = met(problem, process_group, tokens_sharded, vocab_size, LOSSES)
    losses = sharded_tokens.losses(problem, shard)
    if reduction == "none":
        return losses.view(tokens_of(labels))
    mine = torch.stack([losses.sum(dtype=torch.float64), *weights_and_count(problem)])
    loss_sum, weights, count = sharded_tokens.total(mine, shard).unbind()
    if reduction == "mean":
        loss_sum = loss_sum / torch.where(count > 0, weights, 1.0).detach()
    return loss_sum.to(losses.dtype)


@explains_names
def sharded_logprobs(
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
    temperature: float | Tensor = 1.0,  # or (...) floats
    mean_logit: bool = False,
    chunk_tokens: int | None = None,
    backend: str | None = None,
) -> TokenStats | TokenStatsAndMean:
    """:func:`fusedce.fused_logprobs` with the rows of ``weight`` spread over ranks.

    With the logits ``z`` over all ranks' classes, divided by the temperature, and ``p =
    softmax(z[i])``, in nats::

        logprob[i] = z[i, labels[i]] - logsumexp(z[i])
        entropy[i] = -sum over v of p[v] * log p[v]
        lse[i]     = logsumexp(z[i])
        argmax[i]  = argmax(z[i])

    The entropy is put together by the chain rule, ``sum over shards of P * (H - log P)`` with ``P``
    and ``H`` a shard's probability and entropy: of terms that are never negative. What holds of
    ranks, backward passes and waiting for :func:`sharded_cross_entropy` holds here too.

    Collectives on the vocabulary's ranks:

    * forward: one all-gather of 69 int64, in which ranks compare what they ask for, and one of 5
      float64 a token that counts (6 with ``mean_logit``);
    * backward: those of :func:`sharded_cross_entropy`; with sharded tokens the same before, too.

    Args:
        labels: ``(...)``; several classes of a token, ``(..., K)``, need the whole vocabulary.
        hidden, weight, process_group, tokens_sharded, vocab_size, bias: as in :func:`sharded_ce`.
        ignore_index, softcap, logit_scale, temperature, mean_logit, chunk_tokens, backend: as in
            :func:`fusedce.fused_logprobs`.

    Returns:
        :class:`fusedce.TokenStats`, a tuple ``(logprob, entropy, lse, argmax)``, argmax among all
        classes; with ``mean_logit`` one with that as its fifth.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sharded_ce`, on all ranks the same;
            ``ValueError`` for a temperature that is not positive and finite.

    Example:
        >>> # every rank; alone, it holds the whole vocabulary
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.randn(11, 4, requires_grad=True)  # this rank's rows
        >>> hidden, labels = torch.randn(3, 4), torch.tensor([1, -100, 10])
        >>> stats = sharded_logprobs(hidden, weight, labels, process_group=dist.group.WORLD)
        >>> (-stats.logprob - 0.01 * stats.entropy).mean().backward()
    """
    problem = Problem(
        hidden,
        weight,
        labels,
        bias=bias,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        chunk_tokens=chunk_tokens,
        backend=backend,
    )
    return statistics(problem, temperature, mean_logit, process_group, tokens_sharded, vocab_size)


def statistics(
    problem: Problem,
    temperature: float | Tensor,
    mean_logit: bool,
    process_group: Any,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
) -> TokenStats | TokenStatsAndMean:
    """Of a problem as it was asked, at a temperature."""
    labels = problem.labels
    with on_the_way(groups_of(problem.weight, process_group), device_of(labels)):
        problem = tempered(problem, temperature)
        if isinstance(labels, Tensor) and labels.dim() == getattr(problem.hidden, "ndim", 0) > 0:
            raise ValueError(
                f"labels must be (...), one class a token, where the vocabulary is sharded, got "
                f"{tuple(labels.shape)}: several classes of a token need the whole head"
            )
    function = MEAN_LOGIT if mean_logit else STATISTICS
    problem, shard = met(problem, process_group, tokens_sharded, vocab_size, function)
    wanted = Wanted(lse=True, entropy=True, argmax=True, zmean=mean_logit)
    stats = sharded_tokens.token_stats(problem, shard, wanted)
    here = tokens_of(labels)
    return of_tokens((-stats.nll).view(here), stats, here, mean_logit)


@explains_names
@torch.no_grad()
def sharded_argmax(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V_local, H) with process_group, or a DTensor (V, H) with Shard(0)
    *,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    bias: Tensor | None = None,  # (V_local,), or a DTensor (V,) with Shard(0)
    softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """:func:`fusedce.fused_argmax` with the rows of ``weight`` spread over ranks.

    ``argmax(softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap))`` over the classes
    of all ranks. Collectives: one all-gather of 69 int64, and one of 4 float64 a token; with
    sharded tokens one each of hidden states and of the labels that stand in for none.

    Args: as in :func:`sharded_ce`.

    Returns:
        ``(...)`` int64, equal on all ranks (of each rank's own tokens, where they are sharded);
        which of several equal ones is not defined, and of logits with NaN neither.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sharded_ce`.

    Example:
        >>> # every rank; alone, it holds the whole vocabulary
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> sharded_argmax(torch.eye(3), torch.eye(3), process_group=dist.group.WORLD)
        tensor([0, 1, 2])
    """
    with on_the_way(groups_of(weight, process_group), device_of(hidden)):
        if not isinstance(hidden, Tensor):
            raise not_a_tensor("hidden", hidden)
    labels = torch.zeros_like(hidden.sum(-1), dtype=torch.int64)  # a DTensor like hidden
    problem = Problem(
        hidden,
        weight,
        labels,
        bias=bias,
        softcap=softcap,
        logit_scale=logit_scale,
        backend=backend,
    )
    problem, shard = met(problem, process_group, tokens_sharded, vocab_size, ARGMAX)
    argmax = sharded_tokens.token_stats(problem, shard, Wanted(argmax=True)).argmax
    assert argmax is not None
    return argmax.view(tokens_of(labels))


def tokens_of(labels: Any) -> torch.Size:
    """The shape of what each token gets here."""
    local: Tensor = labels.to_local() if is_dtensor(labels) else labels
    return local.shape
