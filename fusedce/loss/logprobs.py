"""Log-probabilities, entropies and likeliest classes token by token, for policy gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from fusedce.autograd import dispatch
from fusedce.contract.checks import check_flag, checked, checked_temperature
from fusedce.contract.explain import explains_names, not_a_tensor
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import TokenStats, TokenStatsAndMean
from fusedce.loss.sharded_logprobs import sharded_argmax, statistics
from fusedce.loss.sharded_problem import has_several_classes, is_sharded
from fusedce.loss.tokens import of_tokens, tempered

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
    if is_sharded(weight, process_group):
        return statistics(problem, temperature, mean_logit, process_group)
    check_flag("mean_logit", mean_logit)
    problem = tempered(problem, temperature)
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
        logprob, stats = dispatch.class_stats(problem, labels.reshape(-1, labels.shape[-1]), wanted)
    else:
        stats = dispatch.token_stats(problem, wanted)
        logprob = -stats.nll
    return of_tokens(logprob.view(labels.shape), stats, hidden.shape[:-1], mean_logit)


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
            hidden,
            weight,
            process_group=process_group,
            bias=bias,
            softcap=softcap,
            logit_scale=logit_scale,
            backend=backend,
        )
    if not isinstance(hidden, Tensor):
        raise not_a_tensor("hidden", hidden)
    labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    problem = checked(
        Problem(
            hidden,
            weight,
            labels,
            bias=bias,
            softcap=softcap,
            logit_scale=logit_scale,
            backend=backend,
        )
    )
    argmax = dispatch.token_stats(problem, Wanted(argmax=True)).argmax
    assert argmax is not None
    return argmax.view(labels.shape)
