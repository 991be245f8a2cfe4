"""Tiles of logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedce.backends.plan import Way
from fusedce.backends.torch.products import Products
from fusedce.contract.problem import Projection

_ELEMENTS, _LEAST = 2**19, 256  # of a tile where its products take no longer than a pass over it


def tiles(V: int, step: int) -> Iterator[tuple[int, int]]:
    """The first class of each tile of ``step`` classes, and the one after its last."""
    for begin in range(0, V, step):
        yield begin, min(begin + step, V)


def label_entry(y: Tensor, begin: int, rows: int) -> tuple[Tensor, Tensor]:
    """Where labels ``y (C,)`` stand in a tile ``(rows, C)``, as an index ``(1, C)``; and whether.

    The index is in range for all of them. ``y (K, C)``: an index ``(K, C)``.
    """
    local = y - begin
    inside = (local >= 0) & (local < rows)
    local = local.clamp(0, rows - 1)
    return local if y.dim() == 2 else local[None], inside


class Logits:
    """Logits of a head, tile by tile, in memory that every tile uses again."""

    def __init__(self, head: Projection, products: Products) -> None:
        self.head, self.products = head, products
        self._z = self._w = head.weight.new_empty(0, dtype=head.acc)
        self._widened = (0, 0)  # the rows that are in `_w`

    def operand(self, hidden: Tensor) -> Tensor:
        """``hidden (C, H)`` as :meth:`tile` takes it."""
        return hidden.to(self.products.logits)

    def tile(self, h: Tensor, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """``(v, C)`` logits of classes ``begin`` to ``end``, in ``out`` or until the next tile."""
        head, w = self.head, self.rows(begin, end, self.products.logits)
        z = self._product(w, h, out)
        if head.bias is not None:
            z.add_(head.bias[begin:end].to(z.dtype)[:, None])
        if head.scale != 1.0:
            z.mul_(head.scale)
        if head.softcap is not None:
            z.div_(head.softcap).tanh_().mul_(head.softcap)
        return z

    def step(self, way: Way) -> int:
        """Classes of a tile: those of the plan, or fewer, so that its logits stay in the cache."""
        if not self.products.exact_bf16:
            return way.classes
        return min(way.classes, max(_ELEMENTS // max(way.tokens, 1), _LEAST))

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """``(v, H)`` rows of the weight; widened ones stay until others are asked for."""
        w = self.head.weight[begin:end]
        if w.dtype == dtype:
            return w
        self._w = _as_large_as(self._w, w.numel())
        wide = self._w[: w.numel()].view(w.shape)
        if self._widened != (begin, end):
            wide.copy_(w)
            self._widened = (begin, end)
        return wide

    def _product(self, w: Tensor, h: Tensor, out: Tensor | None) -> Tensor:
        if self.products.by_onednn(w):
            z: Tensor = torch.ops.mkldnn._linear_pointwise(w, h, None, "none", [], "")
            return z if out is None else out.copy_(z)
        if out is None:
            self._z = _as_large_as(self._z, len(w) * len(h))
            out = self._z[: len(w) * len(h)].view(len(w), len(h))
        return self.products(w, h.t(), out)

    def scratch(self, tile: Tensor) -> Tensor:
        """Memory of the shape of ``tile (v, C)``, until the next tile."""
        self._z = _as_large_as(self._z, tile.numel())
        return self._z[: tile.numel()].view(tile.shape)


def _as_large_as(buffer: Tensor, elements: int) -> Tensor:
    return buffer if buffer.numel() >= elements else buffer.new_empty(elements)
