"""Log-probabilities, entropies and likeliest classes token by token, also over sharded classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from fusedce.autograd import dispatch
from fusedce.backends.shards.agreement import (
    ARGMAX,
    MEAN_LOGIT,
    STATISTICS,
    groups_of,
    tell_peers_on_error,
)
from fusedce.contract.checks import (
    check_flag,
    check_number,
    check_softcap,
    check_temperature,
    checked,
    checked_temperature,
)
from fusedce.contract.explain import explains_names, not_a_tensor
from fusedce.contract.groups import local_of
from fusedce.contract.objective import Stats
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import TokenStats, TokenStatsAndMean
from fusedce.contract.task import Task
from fusedce.loss.sharded_problem import (
    agree_on_problem,
    device_of,
    has_several_classes,
    is_sharded,
    tokens_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Options(TypedDict, total=False):
        """Options of :func:`fused_logprobs` on which the type of its result does not depend."""

        bias: Tensor | None
        ignore_index: int | None
        softcap: float | None
        logit_scale: float
        temperature: float | Tensor
        chunk_tokens: int | None
        memory_budget: int | None
        backend: str | None
        process_group: Any


@overload
def fused_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *,
    mean_logit: Literal[False] = False, **options: Unpack[Options],
) -> TokenStats: ...  # fmt: skip


@overload
def fused_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *,
    mean_logit: Literal[True], **options: Unpack[Options],
) -> TokenStatsAndMean: ...  # fmt: skip


@overload
def fused_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *,
    mean_logit: bool, **options: Unpack[Options],
) -> TokenStats | TokenStatsAndMean: ...  # fmt: skip
@explains_names
def fused_logprobs(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) dtype of hidden
    labels: Tensor,  # (...) or (..., K) int64 or int32
    *,
    bias: Tensor | None = None,  # (V,) dtype of hidden
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,  # or (...) floats
    mean_logit: bool = False,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
    process_group: Any = None,
) -> TokenStats | TokenStatsAndMean:
    """Log-probability of each label, entropy, log-sum-exp and argmax in one pass, no logits.

    With the logits ``z`` of :func:`fused_ce` divided by the temperature they were sampled at,
    ``z = z / temperature``, and ``p = softmax(z[i])``::

        logprob[i] = z[i, labels[i]] - logsumexp(z[i])
        entropy[i] = -sum over v of p[v] * log p[v]
        lse[i]     = logsumexp(z[i])
        argmax[i]  = argmax(z[i])        # token accuracy: (argmax == labels) at valid positions

    The first three are differentiable, each token with an upstream gradient of its own. Backward
    computes the logits once more, in tiles, and leaves out tokens whose upstream gradients are all
    0 (masked prompts, clipped ratios). Neither ``1 - p`` nor the entropy cancels where one class
    has nearly all the probability. Deterministic. The gradient is not differentiable again.

    Ignored positions hold 0, 0, 0 and -1; their hidden state is never read. A label out of range
    is an error on a CPU, and gives NaN on other devices.

    Several classes of a token (top-k of a teacher, candidates of a ranking) are ``labels
    (..., K)``: then ``logprob`` is ``(..., K)``, 0 at ignored entries, and the rest as it was. The
    likeliest of the K is exact near a probability of 1; nothing of the size ``(N, K, H)`` is held.
    A position whose K labels are all ignored is an ignored one.

    Args:
        labels: ``(...)`` or ``(..., K)``, as in :func:`fused_ce`.
        hidden, weight, bias, ignore_index, softcap, logit_scale, backend: as in
            :func:`fused_ce`.
        temperature: positive divisor of the finished (scaled and capped) logits; one for all, or
            a tensor ``(...)`` of floats without gradient, of each position its own.
        mean_logit: whether the mean of the logits over the classes is wanted, differentiable too.
        chunk_tokens: positions computed at a time in backward; ``None`` chooses.
        memory_budget: as in :func:`fused_ce`; backward goes by tiles of the vocabulary.
        process_group: the ranks among which the rows of ``weight`` are split; for a ``DTensor``
            they are known. See :func:`fusedce.sharded.sharded_logprobs`.

    Returns:
        :class:`TokenStats`, a tuple ``(logprob, entropy, lse, argmax)``; with ``mean_logit`` a
        :class:`TokenStatsAndMean` with that as its fifth.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fused_ce`; ``ValueError`` for a temperature
            that is not positive and finite.

    Examples:
        >>> hidden, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> actions = torch.randint(100, (2, 5))
        >>> stats = fused_logprobs(hidden, weight, actions, temperature=0.7)
        >>> (-stats.logprob - 0.01 * stats.entropy).mean().backward()
    """
    problem = Problem(
        hidden, weight, labels, bias=bias, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, chunk_tokens=chunk_tokens, memory_budget=memory_budget,
        backend=backend,
    )  # fmt: skip
    if is_sharded(weight, process_group):
        return _sharded_stats(problem, temperature, mean_logit, process_group)
    check_flag("mean_logit", mean_logit)
    problem = _tempered(problem, temperature)
    several = has_several_classes(problem)
    problem = checked(problem.but(labels=labels[..., 0]) if several else problem)
    if problem.temperature is not None:
        used = problem.valid()
        if several:
            used = problem.but(labels=labels.reshape(-1, labels.shape[-1])).valid().any(1)
        t = checked_temperature(problem.temperature, hidden, used)
        problem = problem.but(temperature=t)
    wanted = Wanted(lse=True, entropy=True, argmax=True, zmean=mean_logit)
    if several:
        problem = problem.but(labels=labels.reshape(-1, labels.shape[-1]))
    logprob, stats = dispatch.token_stats(Task(problem, wanted))
    return _shaped(logprob.view(labels.shape), stats, hidden.shape[:-1], mean_logit)


@explains_names
@torch.no_grad()
def fused_argmax(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) dtype of hidden
    *,
    bias: Tensor | None = None,  # (V,) dtype of hidden
    softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: str | None = None,
    process_group: Any = None,
) -> Tensor:
    """``F.linear(hidden, weight, bias).argmax(-1)`` of the finished logits, without the logits.

    Products are accumulated in float32 and compared as they are: classes that round to the same
    bfloat16 logit are told apart.

    Args: as in :func:`fused_ce`, ``process_group`` too.

    Returns:
        ``(...)`` int64: the likeliest class of every position (which of several equal ones is not
        defined, and of logits with NaN neither).

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fused_ce`.

    Examples:
        >>> fused_argmax(torch.eye(3), torch.eye(3))
        tensor([0, 1, 2])
    """
    if is_sharded(weight, process_group):
        return sharded_argmax(
            hidden, weight, process_group=process_group, bias=bias, softcap=softcap,
            logit_scale=logit_scale, backend=backend,
        )  # fmt: skip
    if not isinstance(hidden, Tensor):
        raise not_a_tensor("hidden", hidden)
    labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    problem = Problem(
        hidden, weight, labels, bias=bias, softcap=softcap, logit_scale=logit_scale,
        backend=backend,
    )  # fmt: skip
    argmax = dispatch.token_stats(Task(checked(problem), Wanted(argmax=True)))[1].argmax
    assert argmax is not None
    return argmax.view(labels.shape)


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

    The statistics are the same, in nats, with the classes of all ranks. The entropy follows the
    chain rule, ``sum over shards of P * (H - log P)`` with a shard's probability ``P`` and entropy
    ``H``; none of its terms is negative. As with :func:`fusedce.sharded.sharded_cross_entropy`,
    every rank must run backward, and the forward pass by Triton waits for the device once.

    Collectives on the vocabulary's ranks:

    * forward: one all-gather of under 1 KiB, in which ranks compare what they ask for, and one of 5
      float64 a token that counts (6 with ``mean_logit``);
    * with ``labels (..., K)`` before them, one all-reduce of K float32 a token that counts (float64
      for float64 inputs), the logits of the K classes;
    * backward, and sharded tokens: as :func:`fusedce.sharded.sharded_cross_entropy`, with K more
      numbers a token in the all-reduce of upstream gradients.

    Args:
        labels: ``(...)``, or several classes of each token, ``(..., K)``, as in
            :func:`fusedce.fused_logprobs`.
        hidden, weight, process_group, tokens_sharded, vocab_size, bias: as in :func:`sharded_ce`.
        ignore_index, softcap, logit_scale, temperature, mean_logit, chunk_tokens, memory_budget,
            backend: as in :func:`fusedce.fused_logprobs`.

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
        hidden, weight, labels, bias=bias, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, chunk_tokens=chunk_tokens, memory_budget=memory_budget,
        backend=backend,
    )  # fmt: skip
    return _sharded_stats(
        problem, temperature, mean_logit, process_group, tokens_sharded, vocab_size
    )


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
        hidden, weight, labels, bias=bias, softcap=softcap, logit_scale=logit_scale,
        backend=backend,
    )  # fmt: skip
    problem, shard = agree_on_problem(problem, process_group, tokens_sharded, vocab_size, ARGMAX)
    argmax = dispatch.token_stats(Task(problem, Wanted(argmax=True), shard=shard))[1].argmax
    assert argmax is not None
    return argmax.view(tokens_of(labels))


def _sharded_stats(
    problem: Problem,
    temperature: float | Tensor,
    mean_logit: bool,
    process_group: Any,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
) -> TokenStats | TokenStatsAndMean:
    """:func:`sharded_logprobs` of a problem whose arguments are not checked yet."""
    with tell_peers_on_error(groups_of(problem.weight, process_group), device_of(problem.labels)):
        check_flag("mean_logit", mean_logit)
        problem = _tempered(problem, temperature)
    hidden, labels = problem.hidden, problem.labels
    function = MEAN_LOGIT if mean_logit else STATISTICS
    problem, shard = agree_on_problem(problem, process_group, tokens_sharded, vocab_size, function)
    wanted = Wanted(lse=True, entropy=True, argmax=True, zmean=mean_logit)
    logprob, stats = dispatch.token_stats(Task(problem, wanted, shard=shard))
    tokens = local_of(hidden).shape[:-1]
    return _shaped(logprob.view(tokens_of(labels)), stats, tokens, mean_logit)


def _tempered(problem: Problem, temperature: float | Tensor) -> Problem:
    """The problem with its logits divided by a number, or by each token's own.

    ``(c / t) * tanh((s / t) * x / (c / t))`` is ``c * tanh(s * x / c) / t``.
    """
    if isinstance(temperature, Tensor):
        return problem.but(temperature=temperature)
    t = check_temperature(temperature)
    check_softcap(problem.softcap)
    return problem.but(
        softcap=None if problem.softcap is None else problem.softcap / t,
        logit_scale=check_number("logit_scale", problem.logit_scale) / t,
    )


def _shaped(
    logprob: Tensor, stats: Stats, tokens: torch.Size, mean_logit: bool
) -> TokenStats | TokenStatsAndMean:
    """The result of the public functions: statistics in the shape of the tokens."""
    assert stats.argmax is not None
    found = TokenStats(logprob, *(x.view(tokens) for x in (stats.entropy, stats.lse, stats.argmax)))
    return TokenStatsAndMean(*found, stats.zmean.view(tokens)) if mean_logit else found
