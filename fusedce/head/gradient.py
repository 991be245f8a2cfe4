"""The gradient of a fused loss on its way back to the head, and the head's own node.

It travels along torch's own graph as a :class:`LazyGradient`: hooks, casts and views treat it as
the gradient of the logits, whose values are computed if code reads them. At the head's node,
:class:`LazyLinear`, one that nobody has read gives way to the gradients of the head's operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..contract.checks import no_autocast
from ..ranks.layout import is_vocabulary_shard
from .lazy import (
    AUTOGRAD,
    CODE,
    LazyLogits,
    caller,
    materialized,
    op_schema,
    snapshot,
    without_data,
)
from .linear_call import Expr, LinearCall, Memory, changes_values, whole

aten = torch.ops.aten
Gradients = list[Tensor | None]  # of hidden state, weight and perhaps bias


class LazyLinear(torch.autograd.Function):
    """Lazy logits ``(..., V)`` of a linear call, as a function of its operands."""

    @staticmethod
    def forward(
        ctx: Any, call: LinearCall, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> LazyLogits:
        """Compute nothing."""
        ctx.set_materialize_grads(False)
        # Not `save_for_backward`: its hooks would offload a weight that backward rarely reads,
        # and `LinearCall.operands` has a check of its own for what was changed meanwhile.
        ctx.call, ctx.given = call, (hidden, weight, bias)
        call.needed = ctx.needs_input_grad[1:]
        shape = (*hidden.shape[:-1], weight.shape[0])
        expr = Expr(call, None, (), {}, shape)
        meta = torch.empty(shape, dtype=hidden.dtype, device="meta")
        return LazyLogits(expr, Memory(expr), meta, hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """The gradients of the operands: those of the losses, or computed from a real gradient.

        Collectives: with real gradients of a sharded vocabulary, two all-gathers a parameter.
        """
        call, needed, given = ctx.call, ctx.needs_input_grad[1:], ctx.given
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.given = None  # a kept loss keeps none of them
        if grad is None:
            return None, None, None, None
        check_not_batched(grad)
        if isinstance(grad, LazyGradient) and (parts := grad.arrived_at(call)):
            return (None, *_sum(parts, call), None)[:4]
        # Without a graph the call's own operands, which gather what an engine has freed since.
        given = given if torch.is_grad_enabled() else (*call.operands(by_all_ranks=True), None)
        hidden, weight = given[0], whole(given[1])
        with no_autocast(grad.device):
            grad = materialized(grad, "backward").to(hidden.dtype)
            rows = grad.reshape(-1, grad.shape[-1])
            d_hidden = grad @ weight if needed[0] else None
            d_weight = rows.T @ hidden.reshape(-1, hidden.shape[-1]) if needed[1] else None
            d_bias = rows.sum(0) if needed[2] else None
        if is_vocabulary_shard(given[1]):
            d_weight = None if d_weight is None else _own_rows(d_weight, given[1])
            d_bias = None if d_bias is None else _own_rows(d_bias, given[2])
        return None, d_hidden, d_weight, d_bias


def check_not_batched(grad: Tensor) -> None:
    """Raise ``RuntimeError`` for a batch of gradients, which ``vmap`` passes to a backward."""
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "a replaced head takes one gradient at a time, not many (is_grads_batched=True, "
            "vectorize=True): call fusedce.restore_loss_head(model) for this, since the backward "
            "passes of fusedce's lazy logits cannot be vectorised"
        )


def _own_rows(grad: Tensor, like: Tensor) -> Tensor:
    """The part of a whole parameter's gradient that is this rank's, as a ``DTensor``."""
    with torch.enable_grad():  # the adjoint of `whole`: right for uneven shards and any placement
        leaf = like.detach().requires_grad_()
        return torch.autograd.grad(whole(leaf), leaf, grad)[0]


# A gradient carries these, and no table beside the graph: hooks and `retain_grad` see one at every
# node, and autograd itself adds up those of several losses.
class Part:
    """One loss's part of the gradients of linear calls, computed when it is first asked for."""

    def __init__(self, compute: Callable[[], dict[LinearCall, Gradients]], *, ready: bool) -> None:
        self.compute, self.ready = functools.cache(compute), ready
        if ready:
            self.compute()

    def take(self, call: LinearCall) -> Gradients:
        """The gradients of the call's operands, once."""
        return self.compute().pop(call)


def _sum(parts: list[Part], call: LinearCall) -> Gradients:
    """The sum of several losses' gradients, added one at a time into those of the first."""
    # Ready gradients first: they may be written into, and others are then never held beside them.
    first, *others = sorted(parts, key=lambda part: not part.ready)
    total = first.take(call)
    for part in others:
        _add(total, part.take(call))
    return total


def _add(total: Gradients, more: Gradients) -> None:
    for t, g in zip(total, more, strict=True):
        if t is not None and g is not None:
            t.add_(g)


# For each call: how many operators that change values the gradient has to pass yet, and its parts.
Load = dict[LinearCall, tuple[int, list[Part]]]


# Anomaly mode asks these of each gradient, from inside the node that made it.
_QUESTIONS = (aten.isnan, aten.ne, aten.any, aten._local_scalar_dense)


class LazyGradient(LazyLogits):
    """The gradient of logits on its way to the head, without values until code reads them.

    Operators of the autograd nodes on its way are noted. Any other operator, of a hook, of a user's
    function or of a graph inside one, gets the real gradient, and so does a sum with one.

    Attributes:
        load: the parts of the operands' gradients that it carries.
        nodes: numbers of the autograd nodes on its way.
    """

    load: Load
    nodes: frozenset[int]

    @classmethod
    def carrying(
        cls, load: Load, nodes: frozenset[int], expr: Expr, meta: Tensor, device: torch.device
    ) -> LazyGradient:
        """The gradient ``expr`` of logits, which carries ``load``."""
        new = cls(expr, Memory(expr), meta, device)
        new.load, new.nodes = load, nodes
        return new

    def arrived_at(self, call: LinearCall) -> list[Part] | None:
        """The parts of a call's gradients, where this has come to its logits unread."""
        steps, parts = self.load.get(call, (0, None))
        # If it has passed fewer operators than the logits did, a user's function took some of them.
        return parts if self.memory.values is None and steps == 0 else None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = caller.set(max(caller.get(), CODE))
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            caller.reset(before)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is aten.index_add_.default:  # of index_select's node, into new zeros
            sums = cls.__torch_dispatch__(aten.index_add.default, types, args, kwargs)
            if isinstance(sums, LazyGradient):
                args[0].__dict__.update(sums.__dict__)  # the node goes on with this very object
                return args[0]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        grads = [t for t in tensors if isinstance(t, LazyGradient)]
        nodes = frozenset().union(*(g.nodes for g in grads))
        load: Load | None = None
        is_asked = func.overloadpacket in _QUESTIONS
        if not (is_asked or op_schema(func).writes) and _is_called_by(nodes) and all(
            isinstance(t, LazyGradient) or not t.dim() or not t.is_floating_point()
            or func is aten.tanh_backward.default  # which takes the logits, too
            for t in tensors
        ):  # fmt: skip
            # (New zeros carry nothing: `index_add_` fills them.)
            load = {} if func is aten.new_zeros.default else _added(grads, changes_values(func))
        if load is None:
            return func(*materialized(args, "backward"), **materialized(kwargs, "backward"))
        meta = func(*without_data(args), **{k: v for k, v in kwargs.items() if k != "device"})
        expr = Expr(None, func, snapshot(args), kwargs, tuple(meta.shape))
        return cls.carrying(load, nodes, expr, meta, grads[0].device)


def _is_called_by(nodes: frozenset[int]) -> bool:
    """Whether one of these autograd nodes calls the operator, and no code that it runs."""
    # By number: a node of another graph, of a checkpoint say, has a number of its own.
    node: Any = torch._C._current_autograd_node()
    return caller.get() == AUTOGRAD and node is not None and node._sequence_nr() in nodes


def _added(grads: Sequence[LazyGradient], passed: bool) -> Load | None:
    """Add the lazy gradients' loads by name; ``None`` if the result must be real."""
    total: Load = {}
    for g in grads:
        if g.memory.values is not None:
            return None
        for call, (steps, parts) in g.load.items():
            before = total.get(call, (steps - passed, []))
            if before[0] != steps - passed or set(before[1]) & set(parts):
                return None  # they come from different places, or from one twice
            total[call] = before[0], before[1] + parts
    return total
