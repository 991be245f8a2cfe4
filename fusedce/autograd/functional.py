"""The operators of :mod:`fusedce.autograd.token_ops` inside transforms of ``torch.func``.

Operators of ``torch.library`` have no derivatives there, functions of autograd do. Transforms
record every backward pass; so the gradients are a function too, whose own derivative is refused.

Under vmap, samples that share the head are tokens of one problem: everything that goes by tokens
is flattened, and one call does the work of all samples. Where the head has samples of its own, or
a gradient of the head is wanted of each sample, they are computed one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.autograd import token_ops
from fusedce.autograd.derivatives import no_second_derivative
from fusedce.contract.problem import Problem, Wanted

_BY_TOKENS = ("hidden", "labels", "token_weight", "temperature")
_BEFORE = len(Problem._fields)


def _token_stats(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
    B = info.batch_size
    if not _share_the_head(in_dims):
        return _one_by_one(torch.ops.fusedce.token_stats, B, in_dims, flat)
    flat = _flattened(B, in_dims, flat)
    *stats, n_valid, argmax = torch.ops.fusedce.token_stats(*flat)
    own = Problem(*flat[:_BEFORE]).valid().view(B, -1).sum(1)
    # A bad label (negative, on a GPU) is every sample's: their losses stay apart, its is NaN.
    return (
        (
            *(x.view(B, -1) for x in stats),
            torch.where(n_valid < 0, n_valid, own),
            argmax.view(B, -1),
        ),
        (0,) * 6,
    )


torch.library.register_vmap(token_ops._token_stats, _token_stats)


class TokenValues(torch.autograd.Function):
    """``token_values``: statistics with a graph."""

    @staticmethod
    def forward(*flat: Any) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in flat[_BEFORE:])

    setup_context = staticmethod(token_ops.setup_context)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        return token_ops.input_grads(ctx, upstream, TokenGrads.apply)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
        B = info.batch_size
        if not _share_the_head(in_dims):
            return _one_by_one(TokenValues.apply, B, in_dims, flat)
        values = TokenValues.apply(*_flattened(B, in_dims, flat))
        return tuple(x.view(B, -1) for x in values), (0,) * 4


class TokenGrads(torch.autograd.Function):
    """``token_grads``, once differentiable."""

    @staticmethod
    def forward(*flat: Any) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = torch.ops.fusedce.token_grads(*flat)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> None:
        raise no_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
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
    """The samples' tokens, one sample after the other; the head as it is."""
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
