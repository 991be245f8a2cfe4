"""Log-probabilities, entropies and likeliest classes token by token, also over sharded classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from ..autograd import dispatch
from ..contract.checks import check_flag
from ..contract.groups import local_of
from ..contract.problem import Outputs, Problem, Task
from ..contract.results import TokenStats, TokenStatsAndMean
from ..ranks.agreement import ARGMAX, STATISTICS
from ..ranks.door import no_labels, prepared

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
        tokens_sharded: bool
        vocab_size: int | None


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
def fused_logprobs(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) floats
    labels: Tensor,  # (...) or (..., K) int64 or int32
    *,
    bias: Tensor | None = None,  # (V,) floats
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,  # or (...) or (..., 1) floats
    mean_logit: bool = False,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
) -> TokenStats | TokenStatsAndMean:
    """Log-probability of each label, entropy, log-sum-exp and argmax in one pass, no logits.

    With ``z``, the logits of :func:`fused_ce` over the temperature, and ``p = softmax(z[i])``,
    in nats::

        logprob[i] = z[i, labels[i]] - logsumexp(z[i])
        entropy[i] = -sum over v of p[v] * log p[v]
        lse[i]     = logsumexp(z[i])
        argmax[i]  = argmax(z[i])        # token accuracy: (argmax == labels) at valid positions

    Ignored positions hold 0, 0, 0 and -1. Several classes of a token (top-k of a teacher,
    candidates of a ranking) are ``labels (..., K)``: then ``logprob`` is ``(..., K)``, 0 at ignored
    entries, and a position is ignored if all its labels are.

    Examples:
        >>> hidden, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> actions = torch.randint(100, (2, 5))
        >>> stats = fused_logprobs(hidden, weight, actions, temperature=0.7)
        >>> (-stats.logprob - 0.01 * stats.entropy).mean().backward()

    Args:
        labels: ``(...)`` or ``(..., K)``, as in :func:`fused_ce`.
        temperature: positive divisor of the finished (scaled and capped) logits: one number for
            all, or floats without gradient: ``(...)``, one per position, or with a last size of
            1, as in ``(B, 1)``, one per sequence.
        mean_logit: whether the mean of the logits over the classes is wanted, differentiable too.
        chunk_tokens: positions computed at a time in backward; ``None`` chooses.
        hidden, weight, bias, ...: the others are those of :func:`fused_ce`.

    Returns:
        :class:`TokenStats`, a tuple ``(logprob, entropy, lse, argmax)``; with ``mean_logit`` a
        :class:`TokenStatsAndMean` with that as its fifth. All but ``argmax`` are differentiable.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fused_ce`; ``ValueError`` for a temperature
            that is not positive and finite.

    Note:
        Each token has an upstream gradient of its own. Backward computes the logits once more, in
        tiles of the vocabulary, unless they are few and were kept (each call keeps its own until
        its backward; with a ``memory_budget`` none does), and leaves out tokens whose upstream
        gradients are all 0 (masked prompts, clipped ratios). The log-probability (of K
        classes: of the likeliest) and entropy stay exact where one class has nearly all the
        probability. Deterministic.
    """
    problem = Problem(
        hidden, weight, labels, bias=bias, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, chunk_tokens=chunk_tokens, memory_budget=memory_budget,
        backend=backend,
    )  # fmt: skip

    def check(given: Problem) -> dict[str, Any]:
        check_flag("mean_logit", mean_logit)
        return {"mean_logit": mean_logit}

    sharding = process_group, tokens_sharded, vocab_size
    problem, vocabulary = prepared(problem, sharding, STATISTICS, check, temperature)
    wanted = Outputs(lse=True, entropy=True, argmax=True, zmean=mean_logit)
    logprob, stats = dispatch.token_stats(Task(problem, wanted), vocabulary.stats_of)
    assert stats.argmax is not None
    more = [stats.entropy, stats.lse, stats.argmax, *[stats.zmean][: int(mean_logit)]]
    logprob, *more = vocabulary.tokens.own(logprob, *more)
    logprob = logprob.view(local_of(labels).shape)
    more = [x.view(local_of(hidden).shape[:-1]) for x in more]
    return TokenStatsAndMean(logprob, *more) if mean_logit else TokenStats(logprob, *more)


@torch.no_grad()
def fused_argmax(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) floats
    *,
    bias: Tensor | None = None,  # (V,) floats
    softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: str | None = None,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
) -> Tensor:
    """``F.linear(hidden, weight, bias).argmax(-1)`` of the finished logits, without the logits.

    Products are accumulated in float32 and compared as they are: classes that round to the same
    bfloat16 logit are told apart.

    Examples:
        >>> fused_argmax(torch.eye(3), torch.eye(3))
        tensor([0, 1, 2])

    Args: as in :func:`fused_ce`.

    Returns:
        ``(...)`` int64: the likeliest class of every position. Not defined: which one of several
        with equal logits, and any if a logit is NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fused_ce`.
    """
    problem = Problem(
        hidden, weight, no_labels(hidden), bias=bias, softcap=softcap, logit_scale=logit_scale,
        backend=backend,
    )  # fmt: skip
    sharding = process_group, tokens_sharded, vocab_size
    problem, vocabulary = prepared(problem, sharding, ARGMAX, None)
    task = Task(problem, Outputs(argmax=True))
    argmax = dispatch.token_stats(task, vocabulary.stats_of)[1].argmax
    assert argmax is not None
    return vocabulary.tokens.own(argmax)[0].view(local_of(hidden).shape[:-1])
