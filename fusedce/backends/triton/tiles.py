"""Products of cuBLAS in float32, a tile at a time, in one buffer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedce.backends.plan import exp_block, rows_of_hidden
from fusedce.backends.triton.archs import Architecture
from fusedce.backends.triton.operands import multiple, span
from fusedce.backends.triton.products import product

# Of a chunk's logits: the first row, how many; the first class, how many; and the products
# themselves, their rows padded.
Tile = tuple[int, int, int, int, Tensor]


class Tiles:
    """Of the logits of at most ``C`` tokens, and of the gradient of their hidden states."""

    def __init__(
        self,
        weight: Tensor,
        C: int,
        arch: Architecture,
        *,
        of_logits: bool = True,  # else :meth:`logits` is not asked for
    ) -> None:
        V, H = weight.shape
        self.weight, self._product = weight, product(weight.device, weight.dtype)
        self.block = exp_block(V, arch.exp_block_v)
        self.most_rows, self.most = arch.tile_shape(C, V, H, self.block)
        self._sizes = [self.most] * (V // self.most) + ([V % self.most] if V % self.most else [])
        self._columns = weight.t().split_with_sizes(self._sizes, 1)
        self._rows_of_hidden = rows_of_hidden(H, arch.tile_elements)
        self.products = torch.empty(
            max(
                self.most_rows * multiple(self.most) if of_logits else 0,
                min(self._rows_of_hidden, C) * H,
            ),
            dtype=torch.float32,
            device=weight.device,
        )

    def logits(self, h: Tensor) -> Iterator[Tile]:
        """``h (C, H) @ weight.T``."""
        C, most_rows, products = h.shape[0], self.most_rows, self.products
        some_rows = [(0, C, h)]
        if most_rows < C:
            some_rows = [
                (number * most_rows, len(some), some)
                for number, some in enumerate(h.split(most_rows))
            ]
        shape = (0, 0)
        begin = 0
        for T, w in zip(self._sizes, self._columns, strict=True):
            for first, rows, some in some_rows:
                if shape != (rows, T):
                    shape = (rows, T)
                    products = self.products.as_strided(shape, (multiple(T), 1))
                self._product(some, w, out=products)
                yield first, rows, begin, T, products
            begin += T

    def of_hidden(self, g: Tensor) -> Iterator[tuple[int, int]]:
        """``g (C, V) @ weight``, some rows at a time: the first one, and how many."""
        C, H, step = g.shape[0], self.weight.shape[1], self._rows_of_hidden
        for begin in range(0, C, step):
            n = min(step, C - begin)
            rows, products = span(g, begin, begin + n), self.products.as_strided((n, H), (H, 1))
            self._product(rows, self.weight, out=products)
            yield begin, n
