"""The operators token by token: statistics, statistics with a graph, gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.autograd.derivatives import refuse_second_derivatives
from fusedce.backends.choose import get_backend
from fusedce.backends.gradients import of_inputs
from fusedce.contract.objective import Upstream
from fusedce.contract.problem import Problem, Wanted, records, schema_of
from fusedce.contract.rounding import acc_dtype


@torch.library.custom_op(
    "fusedce::token_stats",
    mutates_args=(),
    schema=schema_of(Problem, Wanted, returns="(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"),
)
def _token_stats(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _ = records(flat)
    labels = problem.labels
    argmax = labels.new_empty(len(labels) if wanted.argmax else 0, dtype=torch.int64)
    return *_computed(problem, wanted, argmax if wanted.argmax else None), argmax


@_token_stats.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _ = records(flat)
    N = problem.labels.shape[0] if wanted.argmax else 0
    return *_fake(problem, wanted), problem.labels.new_empty((N,), dtype=torch.int64)


@torch.library.custom_op(
    "fusedce::token_stats_into",
    mutates_args=("argmax_out",),
    schema=schema_of(
        Problem,
        Wanted,
        more="Tensor(a!) argmax_out",
        returns="(Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
)
def _token_stats_into(*flat: Any) -> tuple[Tensor, ...]:
    """The same with the likeliest classes where the caller wants them."""
    problem, wanted, (argmax_out,) = records(flat)
    return _computed(problem, wanted, argmax_out)


@_token_stats_into.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _ = records(flat)
    return _fake(problem, wanted)


def _computed(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> tuple[Tensor, ...]:
    with torch.autocast(problem.hidden.device.type, enabled=False):
        return tuple(get_backend(problem.backend).token_stats(problem, wanted, argmax)[:5])


def _fake(problem: Problem, wanted: Wanted) -> tuple[Tensor, ...]:
    N = problem.labels.shape[0]
    dtype = acc_dtype(problem.hidden.dtype)
    nll, lse, entropy, zmean = (
        problem.hidden.new_empty((N if want else 0,), dtype=dtype)
        for want in (True, wanted.lse, wanted.entropy, wanted.zmean)
    )
    return nll, lse, entropy, zmean, problem.labels.new_empty((), dtype=torch.int64)


class Values(NamedTuple):
    """Statistics as numbers, or their upstream gradients."""

    nll: Tensor  # (N,)
    lse: Tensor  # (N,)
    entropy: Tensor  # (N,), or (0,)
    zmean: Tensor  # (N,), or (0,)


class Upstreams(NamedTuple):
    """Upstream gradients of :class:`Values`, where there are any."""

    nll: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    zmean: Tensor | None


@torch.library.custom_op(
    "fusedce::token_values",
    mutates_args=(),
    schema=schema_of(Problem, Values, returns="(Tensor, Tensor, Tensor, Tensor)"),
)
def _token_values(*flat: Any) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in _problem_and_values(flat)[1])


@_token_values.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in _problem_and_values(flat)[1])


def _problem_and_values(flat: tuple[Any, ...]) -> tuple[Any, Any]:
    end = len(Problem._fields)
    return Problem(*flat[:end]), Values(*flat[end:])


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    problem, _ = _problem_and_values(inputs)
    ctx.set_materialize_grads(False)
    tensors = {k: x for k, x in problem._asdict().items() if isinstance(x, Tensor)}
    ctx.names = tuple(tensors)
    ctx.options = problem.but(**dict.fromkeys(tensors))
    ctx.save_for_backward(*tensors.values(), *output)


def input_grads(ctx: Any, upstream: tuple[Tensor | None, ...], grads_op: Any) -> tuple[Any, ...]:
    """Gradients for the arguments of ``token_values``, computed by ``grads_op``."""
    nothing: Any = [None] * len(Problem._fields)
    values: Any = [None] * len(Values._fields)
    needed, _ = _problem_and_values(ctx.needs_input_grad)
    wanted = Wanted(hidden=needed.hidden, weight=needed.weight, bias=bool(needed.bias))
    if all(u is None for u in upstream) or not any(wanted):
        return (*nothing, *values)
    saved = iter(ctx.saved_tensors)
    problem = ctx.options.but(**{name: next(saved) for name in ctx.names})
    names = ("hidden", "weight", "bias")
    made = grads_op(*problem, *wanted, *Values(*saved), *Upstreams(*upstream))
    grads: dict[str, Any] = dict(zip(names, made, strict=True))
    unwanted = {name: None for name in names if not getattr(wanted, name)}
    return (*Problem(*nothing).but(**{**grads, **unwanted}), *values)


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    if any(u is not None for u in upstream):
        refuse_second_derivatives()
    return input_grads(ctx, upstream, torch.ops.fusedce.token_grads)


_token_values.register_autograd(_backward, setup_context=setup_context)


@torch.library.custom_op(
    "fusedce::token_grads",
    mutates_args=(),
    schema=schema_of(Problem, Wanted, Values, Upstreams, returns="(Tensor, Tensor, Tensor)"),
)
def _token_grads(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, rest = records(flat)
    end = len(Values._fields)
    values, upstreams = Values(*rest[:end]), Upstreams(*rest[end:])
    with torch.no_grad(), torch.autocast(problem.hidden.device.type, enabled=False):
        upstream = upstream_of(problem, values, upstreams)
        dtypes = of_inputs(problem)
        backend = get_backend(problem.backend)
        return backend.token_grads(problem, wanted, values.lse, upstream, dtypes)


@_token_grads.register_fake
def fake_grads(*flat: Any) -> tuple[Tensor, ...]:
    """Gradients without values, in the inputs' dtype: ``(0,)`` where none is wanted."""
    problem, wanted, _ = records(flat)
    inputs = (problem.hidden, problem.weight, problem.bias)
    return tuple(
        problem.hidden.new_empty(x.shape if want and x is not None else (0,))
        for x, want in zip(inputs, wanted.gradients(), strict=True)
    )


def upstream_of(
    problem: Problem,
    values: Values,
    upstreams: Upstreams,
    *,
    classes: int | None = None,
    here: Tensor | None = None,  # (N,) bool
) -> Upstream:
    """Factors of the gradient of a row of logits, by

    ``d nll = p - onehot,  d lse = p,  d entropy = -p * (log p + entropy),  d zmean = c / V``.

    Where ``weight`` holds but some of the ``classes``, and some labels are not ``here``, a row
    stands in for them: ``values.nll`` is its ``-log p``, and it has no onehot.
    """
    V = problem.weight.shape[0]
    # A statistic that was not computed is (0,), and so is a gradient that a compiler makes for it.
    upstreams = Upstreams(*(u if len(x) else None for u, x in zip(upstreams, values, strict=True)))
    nll = values.nll.double()
    p_label = torch.exp(-nll)
    alpha = torch.zeros_like(p_label)
    at_label = torch.zeros_like(p_label)
    used = torch.zeros_like(problem.labels, dtype=torch.bool)
    beta = gamma = None
    if upstreams.nll is not None:
        alpha += upstreams.nll
        less_one = torch.expm1(-nll)  # p - 1 without cancellation
        at_label += upstreams.nll * (
            less_one if here is None else torch.where(here, less_one, p_label)
        )
        used |= upstreams.nll != 0
    if upstreams.lse is not None:
        alpha += upstreams.lse
        at_label += upstreams.lse * p_label
        used |= upstreams.lse != 0
    if upstreams.entropy is not None:
        entropy = values.entropy.double()
        beta = upstreams.entropy
        alpha -= beta * entropy
        # (0 at p = 0, where log p is -inf)
        surprise = p_label * (nll - entropy).masked_fill(p_label == 0, 0)
        at_label += beta * surprise
        used |= beta != 0
    if upstreams.zmean is not None:
        gamma = upstreams.zmean / (V if classes is None else classes)
        c: Tensor | float = 1.0
        if problem.class_weight is not None:
            c = problem.class_weight[problem.labels.long().clamp(0, V - 1)]
        at_label += gamma.double() * c
        used |= gamma != 0
    if problem.temperature is not None:
        # Of logits before they are divided; unused rows may have any temperature.
        sharp = 1 / problem.temperature.double().masked_fill(~used, 1)
        alpha, at_label = alpha * sharp, at_label * sharp
        beta = None if beta is None else beta * sharp
        gamma = None if gamma is None else gamma * sharp
    return Upstream(alpha, beta, gamma, at_label, used, -torch.expm1(-nll))
