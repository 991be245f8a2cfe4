"""Logits of a few chosen classes of every token, differentiable, and their gradients.

Their rows of the head are read one by one, for as many tokens at a time as fit a small budget:
nothing of the size ``(N, K, H)`` is held. The weight gradient goes by tiles of classes: of each its
entries are summed in float32 and rounded once, and no sum is of the size of the head. Plain torch,
for every backend: beside the product with the whole head this is ``K / V`` of the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedce.autograd.derivatives import detached, refuse_second_derivatives, transformed
from fusedce.backends.gradients import add_rows
from fusedce.contract.labels import bad_label_code, bad_label_message
from fusedce.contract.problem import Problem, Wanted, schema_of
from fusedce.contract.projection import Projection
from fusedce.contract.rounding import acc_dtype

_BUDGET = 64 * 2**20  # bytes that are held at a time, without a budget
_LEAST = 2**18  # and with one
_END = len(Problem._fields)


def chosen_logits(problem: Problem, classes: Tensor) -> Tensor:
    """``(N, K)`` fp32 or fp64 finished logits of ``classes (N, K)``; 0 at ignored entries."""
    if transformed():
        raise RuntimeError(
            "labels must have the shape (...) inside transforms of torch.func, got (..., K)"
        )
    result: Tensor = torch.ops.fusedce.chosen_logits(*problem, classes)
    return result


def bytes_beside(problem: Problem, K: int, wanted: Wanted) -> int:
    """What stays of ``K`` classes a token, and of their gradients, beside the other statistics.

    Autograd adds the gradients of the inputs to those of the statistics, when both are there.
    """
    N, H = problem.hidden.shape
    found = (
        N * K * (3 * 8 + 2 * 4)
    )  # classes in range, their order, entries; z and what is upstream
    if wanted.hidden:
        found += problem.hidden.element_size() * N * H
    if wanted.weight:
        found += problem.hidden.element_size() * problem.weight.shape[0] * H
    return found + _LEAST


@torch.library.custom_op(
    "fusedce::chosen_logits",
    mutates_args=(),
    schema=schema_of(Problem, more="Tensor classes", returns="Tensor"),
)
def _chosen_logits(*flat: Any) -> Tensor:
    problem, classes = detached(Problem(*flat[:_END])), flat[_END]
    head = Projection.of(problem)
    valid, y = _valid(problem, classes)
    z = problem.hidden.new_zeros(classes.shape, dtype=head.acc)
    with torch.autocast(z.device.type, enabled=False):
        for rows in _chunks(problem, classes):
            h = _rows(problem, rows, valid[rows])
            z[rows] = torch.bmm(problem.weight[y[rows]].to(head.acc), h[:, :, None])[:, :, 0]
    if problem.bias is not None:
        z += problem.bias[y].to(head.acc)
    z *= problem.logit_scale
    if problem.softcap is not None:
        z = problem.softcap * torch.tanh(z / problem.softcap)
    if problem.temperature is not None:
        z = z / problem.temperature[:, None]
    return z.masked_fill_(~valid, 0)


@_chosen_logits.register_fake
def _(*flat: Any) -> Tensor:
    problem, classes = Problem(*flat[:_END]), flat[_END]
    wide = acc_dtype(problem.hidden.dtype)
    return problem.hidden.new_empty(classes.shape, dtype=wide)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    ctx.others = [None if i in tensors else x for i, x in enumerate(inputs)]
    ctx.at = tuple(tensors)
    ctx.save_for_backward(*tensors.values(), output)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    refuse_second_derivatives()
    *tensors, z = ctx.saved_tensors
    flat = list(ctx.others)
    for i, x in zip(ctx.at, tensors, strict=True):
        flat[i] = x
    needed: Any = Problem(*ctx.needs_input_grad[:_END])
    wanted = Wanted(hidden=needed.hidden, weight=needed.weight, bias=needed.bias)
    made = torch.ops.fusedce.chosen_grads(*flat[:_END], *wanted, flat[_END], z, upstream)
    nothing: Any = [None] * _END
    d: list[Any] = [g if want else None for g, want in zip(made, wanted.gradients(), strict=True)]
    return (*Problem(*nothing).but(hidden=d[0], weight=d[1], bias=d[2]), None)


_chosen_logits.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op(
    "fusedce::chosen_grads",
    mutates_args=(),
    schema=schema_of(
        Problem,
        Wanted,
        more="Tensor classes, Tensor z, Tensor upstream",
        returns="(Tensor, Tensor, Tensor)",
    ),
)
def _chosen_grads(*flat: Any) -> tuple[Tensor, ...]:
    problem = Problem(*flat[:_END])
    wanted = Wanted(*flat[_END:-3])
    classes, z, upstream = flat[-3:]
    head = Projection.of(problem)
    valid, y = _valid(problem, classes)
    g = upstream.to(head.acc).masked_fill(~valid, 0) * problem.logit_scale
    if problem.temperature is not None:
        t = problem.temperature[:, None].masked_fill(~valid, 1)
        g, z = (g / t).to(head.acc), (z * t).to(head.acc)
    slope = head.slope(z)
    if slope is not None:
        g = g * slope
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    d_hidden, d_weight, d_bias = (
        x.new_zeros(x.shape) if want and x is not None else hidden.new_empty(0)
        for x, want in zip((hidden, weight, bias), wanted.gradients(), strict=True)
    )
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        if wanted.hidden:
            for rows in _chunks(problem, classes):
                w = weight[y[rows]].to(head.acc)
                d_hidden[rows] = torch.bmm(g[rows][:, None], w)[:, 0].to(hidden.dtype)
        if wanted.weight:
            _add_to_weight(problem, d_weight, valid, y, g)
        if wanted.bias and bias is not None:
            total = torch.zeros(bias.shape, dtype=head.acc, device=bias.device)
            add_rows(total, y.reshape(-1), g.reshape(-1))
            d_bias.copy_(total)
    return d_hidden, d_weight, d_bias


def _add_to_weight(
    problem: Problem,
    d_weight: Tensor,  # (V, H)
    valid: Tensor,  # (N, K)
    y: Tensor,  # (N, K) classes, in range
    g: Tensor,  # (N, K) fp32 or fp64
) -> None:
    """``d_weight[y[n, k]] += g[n, k] * hidden[n]``, tile by tile of classes."""
    (V, H), K, held = problem.weight.shape, y.shape[1], _held(problem)
    acc = g.dtype
    sorted_classes, order = y.reshape(-1).sort(stable=True)
    T = max(held // (4 * H * acc.itemsize), 1)  # classes of a tile, and entries at a time
    borders = torch.arange(0, V + T, T, device=y.device)
    ends = torch.searchsorted(sorted_classes, borders).tolist()
    for number, begin in enumerate(range(0, V, T)):
        if ends[number] == ends[number + 1]:
            continue
        rows = d_weight[begin : begin + T]
        total = rows if rows.dtype == acc else torch.zeros(rows.shape, dtype=acc, device=y.device)
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


@_chosen_grads.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted = Problem(*flat[:_END]), Wanted(*flat[_END:-3])
    inputs = (problem.hidden, problem.weight, problem.bias)
    return tuple(
        problem.hidden.new_empty(x.shape if want and x is not None else (0,))
        for x, want in zip(inputs, wanted.gradients(), strict=True)
    )


def _valid(problem: Problem, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries count, and classes that may index; a bad one raises on a CPU."""
    V = problem.weight.shape[0]
    valid = problem.but(labels=classes).valid()
    if classes.device.type == "cpu":
        bad = (valid & ((classes < 0) | (classes >= V))).view(-1)
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
    """Tokens whose rows of the head are held at a time, as they are and in float32."""
    N, K = classes.shape
    each = K * problem.hidden.shape[1] * (4 + problem.hidden.element_size())
    step = max(_held(problem) // each, 1)
    for begin in range(0, N, step):
        yield slice(begin, min(begin + step, N))


def _held(problem: Problem) -> int:
    """Bytes to hold at a time: of a budget that others use as well, a quarter."""
    budget = problem.memory_budget
    return _BUDGET if budget is None else max(min(budget // 4, _BUDGET), _LEAST)
