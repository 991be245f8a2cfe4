"""The likeliest classes of every token and their log-probabilities, without the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.choose import resolve_backend
from ..backends.gradients import sizes_of
from ..backends.plan import ROW_MULTIPLE, BudgetTooSmall, by_tiles, plan_tiles
from ..backends.shards import all_gather
from ..backends.torch.logit_tiles import Logits, chunks_of, exp_, filled, tiles
from ..contract.checks import check_are_tensors, check_int
from ..contract.groups import local_of
from ..contract.labels import used_tokens
from ..contract.problem import Outputs, Problem, Projection, Shard
from ..contract.results import TopK
from ..ranks.agreement import TOPK
from ..ranks.door import no_labels, prepared
from .logprobs import fused_logprobs

_GROUP = 32  # classes whose maximum is found first
_MANY, _WIDER = 512, 4  # tokens of a tile of the plan, from which it has so many times the classes


def fused_topk(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H)
    k: int,
    *,
    bias: Tensor | None = None,  # (V,)
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,  # or (...) or (..., 1) floats
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
) -> TopK:
    """The ``k`` likeliest classes of every token and their log-probabilities, without the logits.

    ``F.linear(hidden, weight, bias)``, finished and divided by the temperature as in
    :func:`fusedce.fused_logprobs`, then ``log_softmax(-1).topk(k)``. Of equal logits the classes of
    the lowest index are taken, in their order.

    Examples:
        >>> fused_topk(torch.eye(3), 9 * torch.eye(3), 2).index
        tensor([[0, 1],
                [1, 0],
                [2, 0]])

    Args:
        k: number of classes, at least 1 and at most V.
        hidden, weight, bias, ...: the others are those of :func:`fusedce.fused_logprobs`.

    Returns:
        :class:`TopK`: ``logprob (..., k)`` float32 (float64 for float64 inputs) in descending
        order, in nats, and ``index (..., k)`` int64. If a logit is NaN, the classes are not
        defined, and a log-probability is NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fusedce.fused_logprobs`; ``TypeError`` for a
            ``k`` that is no int, ``ValueError`` for one outside of ``[1, V]``.

    Note:
        One pass: each tile of the vocabulary gives its ``k`` largest logits and its part of the
        log-sum-exp. With a gradient wanted, ``logprob`` is :func:`fusedce.fused_logprobs` of the
        classes that were found: one more pass, and its backward, by ``backend``. The first pass is
        torch's on every device; on a GPU the host waits once a tile. Deterministic. Not for
        ``torch.compile(fullgraph=True)``.
    """
    options: dict[str, Any] = {
        "bias": bias, "softcap": softcap, "logit_scale": logit_scale,
        "memory_budget": memory_budget, "backend": backend,
    }  # fmt: skip
    inputs = (x for x in (hidden, weight, bias) if isinstance(x, Tensor))
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)

    problem = Problem(hidden, weight, no_labels(hidden), **options)

    def check(given: Problem) -> dict[str, Any]:
        check_int("k", k)
        return {"k": k, "differentiable": differentiable}

    sharding = process_group, tokens_sharded, vocab_size
    problem, (shard, tokens, _) = prepared(problem, sharding, TOPK, check, temperature)
    V = problem.weight.shape[0] if shard is None else shard.V
    if not 1 <= k <= V:
        raise ValueError(f"k must be in [1, V] with V={V} (from weight), got {k}")
    resolve_backend(problem.backend, problem.hidden)
    shape = (*local_of(hidden).shape[:-1], k)

    def with_gradient(index: Tensor) -> Tensor:
        return fused_logprobs(
            hidden, weight, index, temperature=temperature, process_group=process_group,
            tokens_sharded=tokens_sharded, vocab_size=vocab_size, **options,
        ).logprob  # fmt: skip

    try:
        with torch.no_grad(), torch.autocast(problem.hidden.device.type, enabled=False):
            found = tokens.own(*_walk(problem, k, shard))
    except BudgetTooSmall as of_walk:
        if differentiable and shard is None:  # the larger of both least budgets is the call's
            try:
                with_gradient(problem.labels.new_zeros(shape))
            except BudgetTooSmall as of_gradient:
                if of_gradient.least > of_walk.least:
                    raise of_gradient from None
        raise
    logprob, index = (x.view(shape) for x in found)
    if differentiable:
        logprob = with_gradient(index)
    return TopK(logprob, index)


@torch.compiler.disable
def _walk(problem: Problem, k: int, shard: Shard | None) -> tuple[Tensor, Tensor]:
    """``(N, k)`` log-probabilities and classes."""
    V, head = len(problem.weight), Projection.of(problem)
    top = problem.hidden.new_full((len(problem.labels), k), -torch.inf, dtype=head.acc)
    at = torch.full_like(top, V if shard is None else shard.V, dtype=torch.int64)
    lses = torch.full_like(top[:, :1], -torch.inf, dtype=torch.float64)
    rows = used_tokens(problem, max(V, 1))[0].nonzero()[:, 0]
    call = sizes_of(problem, Outputs(), len(rows))
    # A tile, the largest of its logits, and what is compared with them; the largest shard's rows,
    # so that all ranks need the same budget.
    most_rows = V if shard is None else shard.largest
    call = call._replace(V=max(most_rows, 1), copies=call.copies + 3)
    way = plan_tiles(call, memory_budget=problem.memory_budget)
    if problem.memory_budget is None and way.tokens >= _MANY:
        # As many logits, of fewer tokens: a large tile has no more candidates than a small one.
        fewer = way.tokens // _WIDER // ROW_MULTIPLE * ROW_MULTIPLE
        way = by_tiles(call, fewer, way.classes * _WIDER)
    tokens, step, logits = way.tokens, way.classes, Logits(head, way)
    for some in chunks_of(rows, tokens):
        block = filled(some)
        h = logits.operand(problem.hidden[block])
        best, classes, lse = top[block][:, :0], at[block][:, :0], lses[block]
        for begin, end in tiles(V, step):
            z = logits.tile(h, begin, end)  # (v, R)
            if problem.temperature is not None:
                z.div_(problem.temperature[block])
            values, found = _largest(z, min(k, end - begin))
            lse = torch.logaddexp(lse, _lse_(z, values[:, 0], found[:, 0])[:, None])
            best, classes = torch.cat([best, values], 1), torch.cat([classes, found + begin], 1)
            best, order = best.sort(dim=1, descending=True, stable=True)
            best, classes = best[:, :k], classes.gather(1, order)[:, :k]
        width = best.shape[1]  # less than k in a small shard
        best = (best - lse).to(top) if shard is None else best
        top[block, :width], at[block, :width], lses[block] = best, classes, lse
    if shard is None or not len(top):
        return top, at
    top, at, lses = _over_ranks(top, at + shard.first, lses, shard)
    return (top - lses).to(head.acc), at


def _largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``(R, k)`` each: the ``k`` largest of every column of ``z (v, R)``, and their rows.

    Of equal ones the first. They lie in the ``k`` groups of neighbouring rows with the largest
    maxima, which are found much sooner.
    """
    v, R = z.shape
    n, whole = min(k + 1, v), v // _GROUP * _GROUP
    if 4 * n * _GROUP <= v:
        groups = z[:whole].unflatten(0, (-1, _GROUP))
        best = groups.amax(1).t().topk(n).indices.t()  # (n, R)
        rows = best[:, None] * _GROUP + torch.arange(_GROUP, device=z.device)[:, None]
        rows = rows.reshape(-1, R)
        values, at = torch.cat([z.gather(0, rows), z[whole:]]).t().topk(n)
        last = torch.arange(whole, v, device=z.device)[:, None].expand(-1, R)
        at = torch.cat([rows, last]).t().gather(1, at)
    else:
        values, at = z.t().topk(n)
    tied = (values[:, 1:] == values[:, :-1]).any(1)
    if tied.any():  # `topk` may take or order them in any way
        at[tied] = z[:, tied].t().sort(dim=1, descending=True, stable=True).indices[:, :n]
    return values[:, :k], at[:, :k]


def _lse_(z: Tensor, top: Tensor, at: Tensor) -> Tensor:
    """``(R,)`` float64: log-sum-exps of ``z (v, R)``, which is scratch then.

    ``top (R,)`` are the largest, in rows ``at``. They are left out of the sum of exponentials, in
    which nothing else would be left where they are far above the others.
    """
    most = top.clamp(min=torch.finfo(z.dtype).min)  # -inf - -inf is NaN
    others = exp_(z.scatter_(0, at[None], -torch.inf).sub_(most)).sum(0)
    others += most - most  # NaN beside a logit of inf
    return top + others.double().log1p()


def _over_ranks(
    top: Tensor, at: Tensor, lses: Tensor, shard: Shard
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge every rank's candidates. Collectives: one all-gather of ``2 k + 1`` float64 a token."""
    k = top.shape[1]
    table = all_gather(torch.cat([top.double(), at.double(), lses], 1), shard.group)
    table = table.view(-1, len(top), 2 * k + 1).transpose(0, 1)  # (N, ranks, 2 k + 1)
    values, classes, of_ranks = (x.flatten(1) for x in table.split([k, k, 1], 2))
    # Stable sorts: of equal values the lowest class comes first, fillers of small shards last.
    classes, order = classes.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    classes = classes.gather(1, order)[:, :k].long()
    return values[:, :k], classes, of_ranks.logsumexp(1, keepdim=True)


def filtered_logprob(
    logprob: Tensor,  # (...) of the sampled classes
    labels: Tensor,  # (...) the sampled classes
    top: TopK,  # (..., K) of the same logits and temperature
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    ignore_index: int = -100,
) -> Tensor:
    """Log-probabilities of classes that a sampler drew from its likeliest ones alone.

    Samplers keep the ``top_k`` likeliest classes, then of these the fewest whose probabilities,
    renormalised, reach ``top_p`` (the order of vLLM and transformers). The result is ``logprob``
    minus the logarithm of the probability that is kept. A sampled class that is not among them
    (the sampler rounded otherwise) counts as kept, too. Differentiable in ``logprob`` and
    ``top.logprob``; the choice of classes has no gradient.

    Examples:
        >>> top = TopK(torch.tensor([[0.4, 0.2, 0.1]]).log(), torch.tensor([[7, 2, 5]]))
        >>> filtered_logprob(top.logprob[:, 1], torch.tensor([2]), top, top_k=2).exp()
        tensor([0.3333])

    Args:
        top: of :func:`fusedce.fused_topk`, at the temperature of sampling, ``K >= top_k``.
        top_k: ``None``: the sampler has no such limit. Then the ``K`` classes must have at least
            ``top_p`` of the probability; a token where they have less gives NaN.
        top_p: in (0, 1].
        ignore_index: positions with this label are 0.

    Returns:
        ``(...)`` nats.

    Raises:
        TypeError: ``logprob`` or ``labels`` is no tensor, or ``top`` no :class:`TopK`.
        ValueError: a shape does not fit the others, or ``top_k`` or ``top_p`` is out of range.
    """
    check_are_tensors(logprob=logprob, labels=labels)
    if not isinstance(top, TopK):
        raise TypeError(f"top must be what fused_topk returns, got {type(top).__name__}")
    K = top.logprob.shape[-1]
    if not logprob.shape == labels.shape == top.logprob.shape[:-1] == top.index.shape[:-1]:
        raise ValueError(
            f"logprob and labels must be (...) of top, which is (..., K), got "
            f"{tuple(logprob.shape)}, {tuple(labels.shape)} and {tuple(top.logprob.shape)}"
        )
    if top_k is not None and not 1 <= top_k <= K:
        raise ValueError(f"top_k must be in [1, K] with K={K} (from top), got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if top_k is None and top_p == 1:
        return logprob.masked_fill(labels == ignore_index, 0)
    log_p = top.logprob[..., :top_k]
    p = (log_p if top_k is None else log_p.log_softmax(-1)).detach().double().exp()
    reached = p.cumsum(-1)
    kept = reached - p < top_p
    normaliser = log_p.masked_fill(~kept, -torch.inf).logsumexp(-1)
    known = ((top.index[..., :top_k] == labels[..., None]) & kept).any(-1)
    normaliser = torch.where(known, normaliser, torch.logaddexp(normaliser, logprob))
    if top_k is None:
        normaliser = normaliser.masked_fill(reached[..., -1] < top_p, torch.nan)
    return (logprob - normaliser).masked_fill(labels == ignore_index, 0)
