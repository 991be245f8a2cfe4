"""Numbers of every token, differentiable each with a gradient of its own.

In :mod:`fusedce.autograd.sums` the forward pass computes the gradients, since a sum has one
upstream factor. Here each token has its own factors, which are known only in backward: it computes
the logits a second time, unless they are so few that forward keeps them.

:func:`compute_stats` and its derivative :func:`compute_grads` serve every loss: of labels, of
several classes, beside a teacher. Eager code runs them in one ``torch.autograd.Function``;
compilers, modes and tensor subclasses see an operator of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..backends import class_logits
from ..backends.choose import get_backend
from ..backends.gradients import Gradients, check_divergence_budget, input_dtypes
from ..backends.shards import all_reduce
from ..backends.upstream import SavedStats, StatGrads, upstream_of
from ..contract.checks import no_autocast
from ..contract.groups import group_named
from ..contract.objective import Stats, token_losses
from ..contract.problem import ACC_DTYPE, Outputs, Problem, Task, schema_of
from . import NAMESPACE, OPERATORS
from .sums import (
    check_upstream,
    in_eager_mode,
    keeps_saved_tensors,
)

StatsOf = Callable[[Task], tuple[Stats, Tensor]]
"""As :func:`token_stats`."""

Part = TypeVar("Part", SavedStats, StatGrads)


class Found(NamedTuple):
    """Results of the statistics' operator, ``(0,)`` where not wanted; or their gradients."""

    nll: Any  # (N,); as the others (see `SavedStats`) a Tensor
    lse: Any
    entropy: Any
    zmean: Any
    z: Any
    top: Any
    n_valid: Any  # () int64
    argmax: Any  # (N,) int64

    def part(self, record: type[Part]) -> Part:
        """The fields of ``record``."""
        return record(*(getattr(self, name) for name in record._fields))


def losses(task: Task, stats_of: StatsOf | None = None) -> tuple[Tensor, Stats]:
    """``(N,)`` losses, fp32 or fp64, 0 at ignored positions; and the tokens' statistics.

    ``stats_of`` computes these where not :func:`token_stats` does.
    """
    problem, wanted, stats_of = task.problem, task.wanted, stats_of or token_stats
    if task.divergence is not None:
        stats, _ = token_stats(task)
        return stats.nll, stats
    smoothing = problem.label_smoothing > 0
    lse = wanted.lse or not problem.is_nll_only()
    stats, _ = stats_of(task.replace(wanted=wanted.replace(lse=lse, zmean=smoothing)))
    c = problem.class_weight
    y = problem.labels.long()
    y = y if c is None else y.clamp(0, c.shape[0] - 1)
    lost = token_losses(problem, y, stats.nll, stats.lse, stats.zmean if smoothing else None)
    # Weights of ignored positions, and of the class their label was clamped to, may be anything.
    return lost.masked_fill(~problem.valid(), 0), stats


def token_stats(task: Task) -> tuple[Stats, Tensor]:
    """Statistics, and logits ``(N, K)`` of labels ``(N, K)``; all but argmax are differentiable."""
    hidden, weight, bias = Outputs.of(task.problem).gradients()
    train = hidden or weight or bias
    lse = task.wanted.lse or (train and task.divergence is None)
    # The budget must suffice for the gradients, too.
    wanted = task.wanted.replace(hidden=hidden, weight=weight, bias=bias, lse=lse)
    task = task.replace(wanted=wanted)
    problem = task.problem
    if in_eager_mode(problem):
        inputs = problem.hidden, problem.weight, problem.bias
        results = _Stats.apply(*inputs, task) if train else compute_stats(task)
    else:
        results = OPERATORS.stats(*task.flat())
    found = Found(*results)
    lse = found.lse.to(found.nll.dtype)
    stats = Stats(
        found.nll, lse, found.entropy, found.zmean, found.n_valid, found.argmax, found.top
    )
    return stats, found.z


class _Stats(torch.autograd.Function):
    """The statistics in eager mode."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task
    ) -> tuple[Tensor, ...]:
        kept = None
        # (A checkpoint's two runs must save the same; other hooks may hold what they are given.)
        problem = task.problem
        whole = task.divergence is None and problem.reduce_over is None
        if whole and not keeps_saved_tensors():
            kept = get_backend(problem.backend).room_for_logits(problem)
        found = compute_stats(task, kept)
        _save(ctx, task.flat(), found, *[] if kept is None else [kept])
        ctx.wanted = Outputs(*ctx.needs_input_grad[:3])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        check_upstream(*upstream)
        return *input_grads(ctx, upstream, None), None


def compute_stats(task: Task, kept: Tensor | None = None) -> Found:
    """Statistics of the tokens.

    ``kept``: memory for the logits, see `Backend.room_for_logits`.
    """
    problem, wanted, divergence, _ = task
    labels, backend = problem.labels, get_backend(problem.backend)
    with torch.no_grad(), no_autocast(problem.hidden.device):
        if divergence is not None:
            check_divergence_budget(task)
            loss, n_valid, *_ = backend.divergence_and_grads(task.replace(wanted=Outputs()))
            lse, entropy, zmean, z, top = (loss.new_empty(0) for _ in range(5))
            argmax = labels.new_empty(0, dtype=torch.int64)
            return Found(loss, lse.double(), entropy, zmean, z, top, n_valid, argmax)
        problem = class_logits.subtract_fixed_bytes(problem, wanted)
        z = problem.hidden.new_empty(0, dtype=ACC_DTYPE[problem.hidden.dtype])
        if labels.dim() == 2:
            z = class_logits.chosen_logits(problem, labels)
            problem = class_logits.one_class(problem, z)
        argmax = labels.new_empty(len(labels) if wanted.argmax else 0, dtype=torch.int64)
        to_fill = argmax if wanted.argmax else None
        if not problem.weight.shape[0]:
            found = _without_classes(problem, wanted, to_fill)
        else:
            found = backend.token_stats(problem, wanted, to_fill, kept)
        top = cast(Tensor, found.top) if _needs_top(problem, wanted) else z.new_empty(0)
        nll, lse, entropy, zmean, n_valid, *_ = found
        if problem.reduce_over is not None:  # of a part of the classes: merged in float64
            nll, entropy, zmean = nll.double(), entropy.double(), zmean.double()
        return Found(nll, lse, entropy, zmean, z, top, n_valid, argmax)


def _without_classes(problem: Problem, wanted: Outputs, argmax: Tensor | None) -> Stats:
    """Statistics of a rank without classes, which no other rank reads."""
    if argmax is not None:
        argmax.zero_()
    N, new = problem.labels.shape[0], problem.hidden.new_zeros
    nll, lse, entropy, zmean, top = (  # (one tensor for all would be one output of the operator)
        new(N if x else 0, dtype=torch.float64)
        for x in (True, True, wanted.entropy, wanted.zmean, True)
    )
    top.fill_(-torch.inf)
    return Stats(nll, lse, entropy, zmean, problem.valid().sum(), argmax, top)


# ---- operators -----------------------------------------------------------------------------------


@torch.library.custom_op(
    f"{NAMESPACE}::stats",
    mutates_args=(),
    schema=schema_of(f"({', '.join(['Tensor'] * 8)})", *Task.records()),
)
def _stats(*flat: Any) -> tuple[Tensor, ...]:
    return tuple(compute_stats(Task.of(flat)[0]))


def _needs_top(problem: Problem, wanted: Outputs) -> bool:
    """Whether backward's logits may differ in the last bits, so that it needs the largest one.

    Merging the ranks' argmax needs it, too.
    """
    merged = problem.reduce_over is not None and wanted.argmax
    return merged or (wanted.lse and problem.by_triton())


@_stats.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, divergence, _ = Task.of(flat)[0]
    N, dtype = problem.labels.shape[0], ACC_DTYPE[problem.hidden.dtype]
    own = divergence is None
    nll, lse, entropy, zmean, top = (
        problem.hidden.new_empty((N if want else 0,), dtype=dtype)
        for want in (
            True, own and wanted.lse, own and wanted.entropy, own and wanted.zmean,
            own and _needs_top(problem, wanted),
        )
    )  # fmt: skip
    z = nll.new_empty(problem.labels.shape if problem.labels.dim() == 2 else (0,))
    lse = lse.double()
    if problem.reduce_over is not None:
        nll, entropy, zmean = nll.double(), entropy.double(), zmean.double()
    n_valid = problem.labels.new_empty((), dtype=torch.int64)
    argmax = problem.labels.new_empty((N if own and wanted.argmax else 0,), dtype=torch.int64)
    return tuple(Found(nll, lse, entropy, zmean, z, top, n_valid, argmax))


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the task and the statistics for :func:`input_grads`."""
    _save(ctx, inputs, Found(*output))
    # Not in backward: while a custom operator's runs, torch 2.13 shortens `needs_input_grad` for
    # all threads.
    needed: Any = Problem(*ctx.needs_input_grad[: len(Problem._fields)])
    ctx.wanted = Outputs(hidden=needed.hidden, weight=needed.weight, bias=bool(needed.bias))


def _save(ctx: Any, inputs: tuple[Any, ...], found: Found, *kept: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(found.top, found.n_valid, found.argmax)
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.options = tuple(_SAVED if isinstance(x, Tensor) else x for x in inputs)
    ctx.save_for_backward(*tensors, *found.part(SavedStats), *kept)


_SAVED = object()
"""Stands for a tensor among the options."""


def input_grads(ctx: Any, upstream: tuple[Tensor | None, ...], operator: Any) -> tuple[Any, ...]:
    """Gradients of hidden, weight and bias; by ``operator``, or directly if it is ``None``."""
    saved, wanted = iter(ctx.saved_tensors), ctx.wanted.gradients()
    (task,) = Task.of([next(saved) if x is _SAVED else x for x in ctx.options])
    values = SavedStats(*(next(saved) for _ in SavedStats._fields))
    kept = next(saved, None)
    grads = Found(*upstream).part(StatGrads)
    if all(u is None for u in grads) or not any(wanted):
        return None, None, None
    hidden, weight, bias = wanted
    task = task.replace(wanted=task.wanted.replace(hidden=hidden, weight=weight, bias=bias))
    if operator is None:
        made = compute_grads(task, values, grads, kept)
    else:
        made = operator(*task.flat(*values, *grads))
    return tuple(x if wants else None for x, wants in zip(made, wanted, strict=True))


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    check_upstream(*upstream)
    hidden, weight, bias = input_grads(ctx, upstream, OPERATORS.grads)
    of_problem = dict.fromkeys(Problem._fields) | {"hidden": hidden, "weight": weight, "bias": bias}
    return *of_problem.values(), *[None] * (len(ctx.options) - len(of_problem))


_stats.register_autograd(_backward, setup_context=setup_context)


def compute_grads(
    task: Task, values: SavedStats, upstreams: StatGrads, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, ``(0,)`` where not wanted."""
    problem, wanted, divergence, _ = task
    backend, dtype = get_backend(problem.backend), problem.hidden.dtype
    with torch.no_grad(), no_autocast(problem.hidden.device):
        if divergence is not None:
            weighed = task.replace(problem=_weighed(problem, upstreams.nll))
            _, _, _, *grads = backend.divergence_and_grads(weighed)
            d_hidden, d_weight, d_bias = (x.to(dtype) for x in grads)
            return d_hidden, d_weight, d_bias
        V, classes, dtypes = problem.weight.shape[0], None, input_dtypes(problem)
        group = None if problem.reduce_over is None else group_named(problem.reduce_over)
        if group is not None:
            dtypes = dtypes._replace(hidden=ACC_DTYPE[dtype])
        if not V:  # (Not like hidden: a collective sends memory as it lies.)
            made = Gradients(problem, wanted, dtypes=dtypes, chunks=0, by_tiles=True).cast_out()
        else:
            problem = class_logits.subtract_fixed_bytes(problem, wanted)
            if problem.labels.dim() == 2:
                valid, classes = class_logits.in_range(problem, problem.labels, V)
                classes = classes.masked_fill(~valid, -1)
                problem = class_logits.one_class(problem, values.z)
            upstream = upstream_of(problem, values, upstreams, V=V, classes=classes)
            made = backend.token_grads(problem, wanted, values.lse, upstream, dtypes, kept)
        d_hidden, d_weight, d_bias = made
        if group is not None and wanted.hidden:
            all_reduce(d_hidden, group)
        return d_hidden.to(dtype), d_weight, d_bias


@torch.library.custom_op(
    f"{NAMESPACE}::grads",
    mutates_args=(),
    schema=schema_of("(Tensor, Tensor, Tensor)", *Task.records(SavedStats, StatGrads)),
)
def _grads(*flat: Any) -> tuple[Tensor, ...]:
    return compute_grads(*Task.of(flat, SavedStats, StatGrads))


def _weighed(problem: Problem, upstream: Tensor | None) -> Problem:
    """The problem whose sum has the gradient that ``upstream (N,)`` asks for."""
    if upstream is None:
        upstream = problem.hidden.new_zeros(len(problem.labels))
    # The upstream gradient of an ignored position may be anything, NaN too.
    upstream = upstream.masked_fill(~problem.valid(), 0)
    weight = upstream if problem.token_weight is None else upstream * problem.token_weight
    one = torch.ones((), dtype=ACC_DTYPE[problem.hidden.dtype], device=upstream.device)
    return problem.replace(token_weight=weight, expected_upstream=one)


@_grads.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _, _ = Task.of(flat, SavedStats, StatGrads)[0]
    return Gradients(problem, wanted, dtypes=input_dtypes(problem), chunks=1).cast_out()
