"""Logits of a few chosen classes of every token, differentiable, and their gradients.

Their rows of the head are read one by one, for as many tokens at a time as fit a small budget:
nothing of the size ``(N, K, H)`` is held. The code is plain torch for every backend: beside the
product with the whole head this is ``K / V`` of the work.

One operator attaches them to the graph together with the tokens' statistics, so that the two
addends of each gradient are added in float32 and rounded once. Where a memory budget has no room
for sums of the gradients' size in float32, they are added tile by tile and rounded twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedce.autograd import token_ops
from fusedce.autograd.derivatives import (
    detached,
    needed_gradients,
    refuse_second_derivatives,
    transformed,
    wanted_gradients,
)
from fusedce.autograd.token_ops import Upstreams, Values
from fusedce.backends.choose import get_backend
from fusedce.backends.gradients import Dtypes, Gradients, add_rows, call_of, of_inputs
from fusedce.backends.plan import tiles_of
from fusedce.contract.labels import bad_label_code, bad_label_message
from fusedce.contract.objective import Stats
from fusedce.contract.problem import Problem, Projection, Wanted, records, schema_of
from fusedce.contract.rounding import acc_dtype

_BUDGET = 64 * 2**20  # bytes that are held at a time, at most
_LEAST = 2**18  # bytes that are held at a time under the smallest budget
_END = len(Problem._fields)
_VALUES = len(Values._fields)


def chosen_logits(problem: Problem, classes: Tensor) -> Tensor:
    """``(N, K)`` fp32 or fp64 finished logits of ``classes (N, K)``; 0 at ignored entries."""
    if transformed():
        raise RuntimeError(
            "labels must have the shape (...) inside transforms of torch.func, got (..., K)"
        )
    result: Tensor = torch.ops.fusedce.chosen_logits(*detached(problem), classes)
    return result


def with_stats(
    problem: Problem,  # its labels are one of each token's classes
    classes: Tensor,  # (N, K)
    z: Tensor,  # (N, K), their logits
    wanted: Wanted,
) -> tuple[Tensor, Stats]:
    """``z`` and the statistics of the tokens, both differentiable."""
    train = any(wanted_gradients(problem))
    with torch.no_grad():
        stats = token_ops.token_stats(problem, wanted.but(lse=wanted.lse or train))
    if not train:
        return z, stats
    values = Values(stats.nll, stats.lse, stats.entropy, stats.zmean)
    nll, lse, entropy, zmean, z = torch.ops.fusedce.class_values(*problem, *values, classes, z)
    return z, Stats(nll, lse, entropy, zmean, stats.n_valid, stats.argmax)


def likeliest(z: Tensor, valid: Tensor) -> Tensor:
    """``(N, 1)`` index of the largest valid logit in each row of ``z (N, K)``."""
    finite = z.clamp(min=torch.finfo(z.dtype).min)
    return finite.masked_fill(~valid, -math.inf).argmax(1, keepdim=True)


def logprobs(z: Tensor, best: Tensor, nll: Tensor, valid: Tensor) -> Tensor:
    """``(N, K)`` log-probabilities of the classes with logits ``z``, 0 where not valid.

    ``nll (N,)``, that of the class at ``best (N, 1)``, is exact near a probability of 1; those of
    the others, none beyond 1/2, follow from the differences of their logits to it.
    """
    z_best = z.gather(1, best)
    gap = (z - z_best).masked_fill((z == -math.inf) & (z_best == -math.inf), 0)
    gap = gap.scatter(1, best, 0)  # its gradient by z_best would cancel, and leave rounding
    return (gap - nll[:, None]).masked_fill(~valid, 0)


def bytes_beside(problem: Problem, K: int) -> int:
    """Bytes that ``K`` classes a token hold beside the other statistics."""
    in_range, upstream = 3 * 8, 2 * 4  # classes, their order, entries; logits and their gradient
    return len(problem.hidden) * K * (in_range + upstream) + _LEAST


@torch.library.custom_op(
    "fusedce::chosen_logits",
    mutates_args=(),
    schema=schema_of(Problem, more="Tensor classes", returns="Tensor"),
)
def _chosen_logits(*flat: Any) -> Tensor:
    problem, classes = Problem(*flat[:_END]), flat[_END]
    head = Projection.of(problem)
    valid, y = in_range(problem, classes)
    z = problem.hidden.new_zeros(classes.shape, dtype=head.acc)
    with torch.autocast(z.device.type, enabled=False):
        for rows in _chunks(problem, classes):
            h = _rows(problem, rows, valid[rows])
            z[rows] = _products(problem.weight[y[rows]].to(head.acc), h[:, None], 2)
    if problem.bias is not None:
        z += problem.bias[y].to(head.acc)
    z *= problem.logit_scale
    if problem.softcap is not None:
        z = problem.softcap * torch.tanh(z / problem.softcap)
    if problem.temperature is not None:
        z = (z / problem.temperature[:, None]).to(head.acc)
    z.masked_fill_(y != classes, math.nan)  # out of range, on devices whose labels are not read
    return z.masked_fill_(~valid, 0)


@_chosen_logits.register_fake
def _(*flat: Any) -> Tensor:
    problem, classes = Problem(*flat[:_END]), flat[_END]
    wide = acc_dtype(problem.hidden.dtype)
    return problem.hidden.new_empty(classes.shape, dtype=wide)


@torch.library.custom_op(
    "fusedce::class_values",
    mutates_args=(),
    schema=schema_of(
        Problem,
        Values,
        more="Tensor classes, Tensor z",
        returns="(Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
)
def _class_values(*flat: Any) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in (*flat[_END : _END + _VALUES], flat[-1]))


@_class_values.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (*flat[_END : _END + _VALUES], flat[-1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.wanted = needed_gradients(ctx, Problem)
    inputs = (*inputs[:_END], *output[:_VALUES], inputs[-2], output[-1])
    ctx.at = tuple(i for i, x in enumerate(inputs) if isinstance(x, Tensor))
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*(inputs[i] for i in ctx.at))


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    flat = list(ctx.others)
    nothing: list[Any] = [None] * len(flat)
    if all(u is None for u in upstream):
        return tuple(nothing)
    refuse_second_derivatives()
    for i, x in zip(ctx.at, ctx.saved_tensors, strict=True):
        flat[i] = x
    problem, values = flat[:_END], flat[_END:-2]
    *by_token, by_z = upstream
    made = torch.ops.fusedce.class_grads(
        *problem, *ctx.wanted, *values, *by_token, *flat[-2:], by_z
    )
    for name, grad, want in zip(
        ("hidden", "weight", "bias"), made, ctx.wanted.gradients(), strict=True
    ):
        if want:
            nothing[Problem._fields.index(name)] = grad
    return tuple(nothing)


_class_values.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op(
    "fusedce::class_grads",
    mutates_args=(),
    schema=schema_of(
        Problem,
        Wanted,
        Values,
        Upstreams,
        more="Tensor classes, Tensor z, Tensor? upstream_z",
        returns="(Tensor, Tensor, Tensor)",
    ),
)
def _class_grads(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, rest = records(flat)
    values, upstreams = Values(*rest[:_VALUES]), Upstreams(*rest[_VALUES:-3])
    classes, z, upstream_z = rest[-3:]
    grads = Gradients(problem, Wanted(), dtypes=of_inputs(problem), chunks=0)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        upstream = token_ops.upstream_of(problem, values, upstreams)
        made = get_backend(problem.backend).token_grads(
            problem, wanted, values.lse, upstream, dtypes_of_sums(problem, wanted)
        )
        grads.hidden, grads.weight, grads.bias = (
            x if want else None for x, want in zip(made, wanted.gradients(), strict=True)
        )
        if upstream_z is not None:
            add_gradients(problem, grads, classes, z, upstream_z)
        return tuple(x.to(problem.hidden.device) for x in grads.written())


_class_grads.register_fake(token_ops.fake_grads)


def add_gradients(
    problem: Problem, grads: Gradients, classes: Tensor, z: Tensor, upstream: Tensor
) -> None:
    """Add the gradients by the chosen logits, in float32 or better, for ``upstream (N, K)``."""
    head = Projection.of(problem)
    valid, y = in_range(problem, classes)
    g = upstream.to(head.acc).masked_fill(~valid, 0) * problem.logit_scale
    if problem.temperature is not None:
        t = problem.temperature[:, None].masked_fill(~valid, 1)
        g, z = (g / t).to(head.acc), (z * t).to(head.acc)
    slope = head.slope(z)
    if slope is not None:
        g = g * slope
    if grads.hidden is not None:
        for rows in _chunks(problem, classes):
            w = problem.weight[y[rows]].to(head.acc)  # (C, K, H)
            grads.hidden[rows] += _products(w, g[rows][:, :, None], 1)
    if grads.weight is not None:
        _add_to_weight(problem, grads.weight, valid, y, g)
    if grads.bias is not None:
        add_rows(grads.bias, y.reshape(-1), g.reshape(-1))


def dtypes_of_sums(problem: Problem, wanted: Wanted) -> Dtypes:
    """Dtypes in which gradients are summed: wide, or the inputs' where a budget has no room."""
    acc = acc_dtype(problem.hidden.dtype)
    wide = Dtypes(acc, acc, acc)
    if problem.memory_budget is not None:
        N, triton = len(problem.hidden), problem.backend == "triton"
        try:
            tiles_of(
                call_of(problem, wanted, N, wide, triton=triton),
                memory_budget=problem.memory_budget,
            )
        except ValueError:
            return of_inputs(problem)._replace(bias=acc)
    return wide


def _add_to_weight(
    problem: Problem,
    d_weight: Tensor,  # (V, H)
    valid: Tensor,  # (N, K)
    y: Tensor,  # (N, K) classes, in range
    g: Tensor,  # (N, K) fp32 or fp64
) -> None:
    """``d_weight[y[n, k]] += g[n, k] * hidden[n]``, tile by tile of classes."""
    (V, H), K, acc = problem.weight.shape, y.shape[1], g.dtype
    sorted_classes, order = y.reshape(-1).sort(stable=True)
    T = max(_held(problem) // (4 * H * acc.itemsize), 1)  # classes of a tile, entries at a time
    borders = torch.arange(0, V + T, T, device=y.device)
    ends = torch.searchsorted(sorted_classes, borders).tolist()
    for number, begin in enumerate(range(0, V, T)):
        if ends[number] == ends[number + 1]:
            continue
        rows = d_weight[begin : begin + T]
        total = rows.to(acc)
        for first in range(ends[number], ends[number + 1], T):
            last = min(first + T, ends[number + 1])
            entries = order[first:last]
            tokens = entries // K
            h = problem.hidden[tokens].to(acc)
            h = h.masked_fill_(~valid[tokens].any(1, keepdim=True), 0)  # whatever they hold
            h.mul_(g.reshape(-1)[entries, None])
            add_rows(total, sorted_classes[first:last] - begin, h)
        if total is not rows:
            rows.copy_(total)


def _products(w: Tensor, x: Tensor, dim: int) -> Tensor:
    """Sums of ``w * x`` over ``dim``; ``w (C, K, H)`` is overwritten.

    A matrix product might round its operands, where the user allows that for float32.
    """
    return w.mul_(x).sum(dim)


def in_range(problem: Problem, classes: Tensor, V: int | None = None) -> tuple[Tensor, Tensor]:
    """``(N, K)`` bool: entries of ``classes`` that count; and the classes, clamped to ``[0, V)``.

    ``V``: the number of classes, where it is not that of the rows of ``weight``.

    Raises:
        ValueError: a class is out of range (on a CPU; elsewhere it is clamped, and its logit NaN).
    """
    V = problem.weight.shape[0] if V is None else V
    valid = problem.but(labels=classes).valid()
    if classes.device.type == "cpu":
        bad = (valid & ((classes < 0) | (classes >= V))).reshape(-1)
        if bad.any():
            at, own = int(bad.nonzero()[0, 0]), classes.reshape(-1)
            code = bad_label_code(at, int(own[at]))
            raise ValueError(bad_label_message(code, V, problem.ignore_index, own))
    return valid, classes.long().clamp(0, V - 1)


def _rows(problem: Problem, rows: slice, valid: Tensor) -> Tensor:
    """``(C, H)`` in fp32 or fp64; 0 where no entry counts, whatever the row holds."""
    h = problem.hidden[rows].to(Projection.of(problem).acc)
    return h.masked_fill(~valid.any(1, keepdim=True), 0)


def _chunks(problem: Problem, classes: Tensor) -> Iterator[slice]:
    """Slices of tokens whose rows of the head fit the budget, as they are and in float32."""
    N, K = classes.shape
    each = K * problem.hidden.shape[1] * (4 + problem.hidden.element_size())
    step = max(_held(problem) // each, 1)
    for begin in range(0, N, step):
        yield slice(begin, min(begin + step, N))


def _held(problem: Problem) -> int:
    """Bytes to hold at a time: a quarter of the budget, which others use as well."""
    budget = problem.memory_budget
    return _BUDGET if budget is None else max(min(budget // 4, _BUDGET), _LEAST)
