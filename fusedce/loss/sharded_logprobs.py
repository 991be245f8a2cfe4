"""Log-probabilities and likeliest classes token by token on a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.autograd import sharded_stats
from fusedce.backends.sharded.agreement import ARGMAX, MEAN_LOGIT, STATISTICS, tell_peers_on_error
from fusedce.backends.sharded.layout import groups_of
from fusedce.contract.checks import check_flag
from fusedce.contract.explain import explains_names, not_a_tensor
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import TokenStats, TokenStatsAndMean
from fusedce.loss.sharded_problem import agree_on_problem, device_of, local_of, tokens_of
from fusedce.loss.tokens import of_tokens, tempered


@explains_names
def sharded_logprobs(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V_local, H) with process_group, or a DTensor (V, H) with Shard(0)
    labels: Tensor,  # (...) or (..., K) int64 or int32
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
    memory_budget: int | None = None,  # bytes
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
    ranks, backward passes and waiting for :func:`fusedce.sharded.sharded_cross_entropy` holds here
    too.

    Collectives on the vocabulary's ranks:

    * forward: one all-gather of under 1 KiB, in which ranks compare what they ask for, and one of 5
      float64 a token that counts (6 with ``mean_logit``);
    * with ``labels (..., K)`` before them, one all-reduce of K float32 a token that counts (float64
      for float64 inputs), the logits of the K classes;
    * backward: those of that function; with sharded tokens the same before, too, and K more numbers
      a token in the all-reduce of upstream gradients.

    Args:
        labels: ``(...)``, or several classes of each token, ``(..., K)``, as in
            :func:`fusedce.fused_logprobs`.
        hidden, weight, process_group, tokens_sharded, vocab_size, bias: as in :func:`sharded_ce`.
        ignore_index, softcap, logit_scale, temperature, mean_logit, chunk_tokens, memory_budget,
            backend: as in
            :func:`fusedce.fused_logprobs`.

    Returns:
        :class:`fusedce.TokenStats`, a tuple ``(logprob, entropy, lse, argmax)``, argmax among all
        classes; with ``mean_logit`` one with that as its fifth.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sharded_ce`, on all ranks the same;
            ``ValueError`` for a temperature that is not positive and finite.

    Examples:
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
        memory_budget=memory_budget,
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
    """:func:`sharded_logprobs` of a problem whose arguments nobody has checked yet."""
    with tell_peers_on_error(groups_of(problem.weight, process_group), device_of(problem.labels)):
        check_flag("mean_logit", mean_logit)
        problem = tempered(problem, temperature)
    hidden, labels = problem.hidden, problem.labels
    function = MEAN_LOGIT if mean_logit else STATISTICS
    problem, shard = agree_on_problem(problem, process_group, tokens_sharded, vocab_size, function)
    wanted = Wanted(lse=True, entropy=True, argmax=True, zmean=mean_logit)
    if problem.labels.dim() == 2:
        logprob, stats = sharded_stats.class_stats(problem, shard, wanted)
    else:
        stats = sharded_stats.token_stats(problem, shard, wanted)
        logprob = -stats.nll
    tokens = local_of(hidden).shape[:-1]
    return of_tokens(logprob.view(tokens_of(labels)), stats, tokens, mean_logit)


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
    of all ranks. Collectives: one all-gather of under 1 KiB, and one of 4 float64 a token; with
    sharded tokens one each of hidden states and of the labels that stand in for none.

    Args: as in :func:`sharded_ce`.

    Returns:
        ``(...)`` int64, equal on all ranks (of each rank's own tokens, where they are sharded);
        which of several equal ones is not defined, and of logits with NaN neither.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sharded_ce`.

    Examples:
        >>> # every rank; alone, it holds the whole vocabulary
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> sharded_argmax(torch.eye(3), torch.eye(3), process_group=dist.group.WORLD)
        tensor([0, 1, 2])
    """
    with tell_peers_on_error(groups_of(weight, process_group), device_of(hidden)):
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
    problem, shard = agree_on_problem(problem, process_group, tokens_sharded, vocab_size, ARGMAX)
    argmax = sharded_stats.token_stats(problem, shard, Wanted(argmax=True)).argmax
    assert argmax is not None
    return argmax.view(tokens_of(labels))
