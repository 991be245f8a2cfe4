"""Statistics of every token's logits, differentiable each with a gradient of its own.

In :mod:`fusedce.autograd.summed` the forward pass computes the gradients, since a sum has one
upstream factor. Here each token has its own factors, which are known only in backward: it computes
the logits a second time, tile by tile, and stores none.

The file holds the functions that the layers above call, the operators of ``torch.library`` behind
them (statistics, statistics with a graph, gradients), and both as functions of autograd for
transforms of ``torch.func``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.autograd.derivatives import (
    detached,
    needed_gradients,
    no_second_derivative,
    refuse_second_derivatives,
    transformed,
    wanted_gradients,
)
from fusedce.backends.choose import get_backend
from fusedce.backends.gradients import of_inputs
from fusedce.contract.objective import Stats, Upstream, token_losses
from fusedce.contract.problem import Problem, Projection, Wanted, records, schema_of
from fusedce.contract.rounding import acc_dtype


def losses(problem: Problem, wanted: Wanted) -> tuple[Tensor, Stats]:
    """``(N,)`` losses, fp32 or fp64, 0 at ignored positions; and the tokens' statistics."""
    smoothing = problem.label_smoothing > 0
    lse = wanted.lse or not problem.of_nll_alone()
    stats = token_stats(problem, wanted.but(lse=lse, zmean=smoothing))
    y = problem.labels.long().clamp(0, problem.weight.shape[0] - 1)
    lost = token_losses(problem, y, stats.nll, stats.lse, stats.zmean if smoothing else None)
    # Weights of ignored positions, and of the class their label was clamped to, may be anything.
    return lost.masked_fill(~problem.valid(), 0), stats


def token_stats(problem: Problem, wanted: Wanted) -> Stats:
    """Statistics in one pass; all but argmax are differentiable in hidden, weight and bias."""
    return class_stats(problem, None, problem.hidden.new_empty(0), wanted)[0]


def class_stats(
    problem: Problem,
    classes: Tensor | None,  # (N, K) rows of weight, -1 for none
    z: Tensor,  # (N, K) their logits; (0,) for none
    wanted: Wanted,
) -> tuple[Stats, Tensor]:
    """:func:`token_stats`, and ``z``, differentiable as well."""
    gradients = wanted_gradients(problem)
    train = any(gradients)
    if transformed():  # inside vmap a tensor does not know that a transform around wants it
        train = torch.is_grad_enabled()
    with torch.no_grad():
        hidden, weight, bias = gradients.gradients()  # the budget must suffice for them, too
        wanted = wanted.but(hidden=hidden, weight=weight, bias=bias, lse=wanted.lse or train)
        stats = Stats(*torch.ops.fusedce.token_stats(*detached(problem), *wanted))
    if not train:
        return stats, z
    values = Values(stats.nll, stats.lse, stats.entropy, stats.zmean, z)
    attach = TokenValues.apply if transformed() else torch.ops.fusedce.token_values
    nll, lse, entropy, zmean, z = attach(*problem, *values, classes)
    return Stats(nll, lse, entropy, zmean, stats.n_valid, stats.argmax), z


# ---- operators -----------------------------------------------------------------------------------


@torch.library.custom_op(
    "fusedce::token_stats",
    mutates_args=(),
    schema=schema_of(Problem, Wanted, returns="(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"),
)
def _token_stats(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _ = records(flat)
    labels, backend = problem.labels, get_backend(problem.backend)
    argmax = labels.new_empty(len(labels) if wanted.argmax else 0, dtype=torch.int64)
    with torch.autocast(problem.hidden.device.type, enabled=False):
        found = backend.token_stats(problem, wanted, argmax if wanted.argmax else None)
    return *found[:5], argmax


@_token_stats.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _ = records(flat)
    N, dtype = problem.labels.shape[0], acc_dtype(problem.hidden.dtype)
    nll, lse, entropy, zmean = (
        problem.hidden.new_empty((N if want else 0,), dtype=dtype)
        for want in (True, wanted.lse, wanted.entropy, wanted.zmean)
    )
    n_valid = problem.labels.new_empty((), dtype=torch.int64)
    argmax = problem.labels.new_empty((N if wanted.argmax else 0,), dtype=torch.int64)
    return nll, lse, entropy, zmean, n_valid, argmax


class Values(NamedTuple):
    """Statistics of the tokens, as arguments and results of operators."""

    nll: Tensor  # (N,)
    lse: Tensor  # (N,)
    entropy: Tensor  # (N,), or (0,)
    zmean: Tensor  # (N,), or (0,)
    z: Tensor  # (N, K) logits of chosen classes, or (0,)


class Upstreams(NamedTuple):
    """Upstream gradients of :class:`Values`, where there are any."""

    nll: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    zmean: Tensor | None
    z: Tensor | None


@torch.library.custom_op(
    "fusedce::token_values",
    mutates_args=(),
    schema=schema_of(
        Problem,
        Values,
        more="Tensor? classes",
        returns="(Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
)
def _token_values(*flat: Any) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in _problem_and_values(flat)[1])


@_token_values.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in _problem_and_values(flat)[1])


def _problem_and_values(flat: tuple[Any, ...]) -> tuple[Any, Any]:
    end = len(Problem._fields)
    return Problem(*flat[:end]), Values(*flat[end : end + len(Values._fields)])


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the problem and the statistics for :func:`input_grads`."""
    problem, _ = _problem_and_values(inputs)
    ctx.set_materialize_grads(False)
    ctx.wanted = needed_gradients(ctx, Problem)
    tensors = {k: x for k, x in problem._asdict().items() if isinstance(x, Tensor)}
    ctx.names = tuple(tensors)
    ctx.options = problem.but(**dict.fromkeys(tensors))
    ctx.save_for_backward(*tensors.values(), *output, inputs[-1])


def input_grads(ctx: Any, upstream: tuple[Tensor | None, ...], grads_op: Any) -> tuple[Any, ...]:
    """Gradients for the arguments of ``token_values``, computed by ``grads_op``."""
    nothing: Any = [None] * len(Problem._fields)
    values: Any = [None] * (len(Values._fields) + 1)
    wanted = ctx.wanted
    if all(u is None for u in upstream) or not any(wanted):
        return (*nothing, *values)
    saved = iter(ctx.saved_tensors)
    problem = ctx.options.but(**{name: next(saved) for name in ctx.names})
    names = ("hidden", "weight", "bias")
    *of_tokens, classes = saved
    made = grads_op(*problem, *wanted, *of_tokens, *Upstreams(*upstream), classes)
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
    schema=schema_of(
        Problem,
        Wanted,
        Values,
        Upstreams,
        more="Tensor? classes",
        returns="(Tensor, Tensor, Tensor)",
    ),
)
def _token_grads(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, rest = records(flat)
    end = len(Values._fields)
    values, upstreams, classes = Values(*rest[:end]), Upstreams(*rest[end:-1]), rest[-1]
    with torch.no_grad(), torch.autocast(problem.hidden.device.type, enabled=False):
        upstream = upstream_of(problem, values, upstreams, chosen=classes)
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
    here: Tensor | None = None,  # (N,) bool: whether the label is a row of weight; None: all are
    chosen: Tensor | None = None,  # (N, K) the classes of values.z, rows of weight; -1 for none
) -> Upstream:
    """Factors of the gradient of a row of logits, by

    ``d nll = p - onehot,  d lse = p,  d entropy = -p * (log p + entropy),  d zmean = c / V``.

    With a sharded vocabulary ``weight`` holds some of the ``classes`` alone. The backends need a
    label among its rows for every token, so a token whose label lies on another rank (``here`` is
    False) gets row 0 of this rank as its label. ``values.nll`` is ``-log p`` of that row, whose
    gradient is that of any class but the label's: ``p`` in place of ``p - 1``.
    """
    V = problem.weight.shape[0]
    # A statistic that was not computed is (0,), and so is a gradient that a compiler makes for it.
    upstreams = Upstreams(*(u if u is not None and len(u) else None for u in upstreams))
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
        # The factors become those of the undivided logits; unused rows may have any temperature.
        sharp = 1 / problem.temperature.double().masked_fill(~used, 1)
        alpha, at_label = alpha * sharp, at_label * sharp
        beta = None if beta is None else beta * sharp
        gamma = None if gamma is None else gamma * sharp
    at_classes = None
    if upstreams.z is not None and chosen is not None:
        head, t = Projection.of(problem), problem.temperature
        none = chosen < 0
        at_classes = upstreams.z.double().masked_fill(none, 0) * head.scale
        t = 1.0 if t is None else t.double()[:, None].masked_fill(none, 1)
        slope = head.slope(values.z.masked_fill(none, 0) * t)
        at_classes = at_classes / t if slope is None else at_classes / t * slope
        used = used | (at_classes != 0).any(1)
    others = -torch.expm1(-nll)
    return Upstream(alpha, beta, gamma, at_label, used, others, chosen, at_classes)


# ---- inside transforms of torch.func ------------------------------------------------------------
#
# Operators of torch.library have no derivatives there, functions of autograd do. Transforms record
# every backward pass; so the gradients are a function too, whose own derivative is refused.
#
# Under vmap, samples that share the head are tokens of one problem: everything that goes by tokens
# is flattened, and one call does the work of all samples. Where the head has samples of its own, or
# a gradient of the head is wanted of each sample, they are computed one after the other.


_BY_TOKENS = ("hidden", "labels", "token_weight", "temperature")
_BEFORE = len(Problem._fields)


def _vmap_token_stats(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
    B = info.batch_size
    if not _share_the_head(in_dims):
        return _one_by_one(torch.ops.fusedce.token_stats, B, in_dims, flat)
    flat = _flattened(B, in_dims, flat)
    *stats, n_valid, argmax = torch.ops.fusedce.token_stats(*flat)
    own = Problem(*flat[:_BEFORE]).valid().view(B, -1).sum(1)
    # A bad label (a negative count, on a GPU) is reported for all samples; their losses are right.
    return (
        (
            *(x.view(B, -1) for x in stats),
            torch.where(n_valid < 0, n_valid, own),
            argmax.view(B, -1),
        ),
        (0,) * 6,
    )


torch.library.register_vmap(_token_stats, _vmap_token_stats)


class TokenValues(torch.autograd.Function):
    """``token_values``: statistics with a graph."""

    @staticmethod
    def forward(*flat: Any) -> tuple[Tensor, ...]:
        """Copies of the statistics."""
        return tuple(x.clone() for x in flat[_BEFORE:-1])

    setup_context = staticmethod(setup_context)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the inputs, by a function that refuses to be differentiated again."""
        return input_grads(ctx, upstream, TokenGrads.apply)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
        """All samples in one call where they share the head, else one after the other."""
        B = info.batch_size
        if not _share_the_head(in_dims):
            return _one_by_one(TokenValues.apply, B, in_dims, flat)
        values = TokenValues.apply(*_flattened(B, in_dims, flat))
        return tuple(x.view(B, len(x) // B) for x in values), (0,) * 5


class TokenGrads(torch.autograd.Function):
    """``token_grads``, whose own derivative is an error."""

    @staticmethod
    def forward(*flat: Any) -> tuple[Tensor, ...]:
        """Gradients of hidden, weight and bias."""
        made: tuple[Tensor, ...] = torch.ops.fusedce.token_grads(*flat)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save nothing: there is no backward."""

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> None:
        """Raise ``RuntimeError``."""
        raise no_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
        """All samples in one call where they share the head and no gradient of it is wanted."""
        B = info.batch_size
        wanted = Wanted(*flat[_BEFORE : _BEFORE + len(Wanted._fields)])
        if not _share_the_head(in_dims) or wanted.weight or wanted.bias:
            return _one_by_one(TokenGrads.apply, B, in_dims, flat)
        d_hidden, d_weight, d_bias = TokenGrads.apply(*_flattened(B, in_dims, flat))
        if wanted.hidden:
            d_hidden = d_hidden.view(B, -1, d_hidden.shape[-1])
        return (d_hidden, d_weight, d_bias), (0 if wanted.hidden else None, None, None)


def _share_the_head(in_dims: tuple[Any, ...]) -> bool:
    batched = {name for name, d in zip(Problem._fields, in_dims, strict=False) if d is not None}
    return batched <= set(_BY_TOKENS)


def _flattened(B: int, in_dims: tuple[Any, ...], flat: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the samples' tokens one after the other, and the head as it is."""
    made = list(flat)
    for i, (x, d) in enumerate(zip(flat, in_dims, strict=True)):
        by_tokens = i >= _BEFORE or Problem._fields[i] in _BY_TOKENS
        if isinstance(x, Tensor) and by_tokens:
            each = x.expand(B, *x.shape) if d is None else x.movedim(d, 0)
            made[i] = each.reshape(-1, *each.shape[2:])
    return tuple(made)


def _one_by_one(
    operation: Any, B: int, in_dims: tuple[Any, ...], flat: tuple[Any, ...]
) -> tuple[Any, Any]:
    results = [
        operation(*(x if d is None else x.select(d, i) for x, d in zip(flat, in_dims, strict=True)))
        for i in range(B)
    ]
    stacked = tuple(torch.stack(x) for x in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
