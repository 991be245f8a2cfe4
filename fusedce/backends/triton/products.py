"""Products of cuBLAS with float32 results: tile by tile in one buffer, or added to a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusedce.backends.plan import WEIGHT_ROWS, exp_block, multiple_of_16
from fusedce.backends.triton import archs
from fusedce.backends.triton.archs import Architecture
from fusedce.backends.triton.launch import say_once, span


@functools.cache
def product(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The function to call with ``(a, b, out=c)`` for ``c = a @ b`` in float32."""
    if dtype == torch.float32:
        return torch.mm
    if widens(torch.mm, device, dtype):
        return functools.partial(torch.mm, out_dtype=torch.float32)
    if device.type != "cpu":
        kind = str(dtype).removeprefix("torch.")
        say_once(f"torch multiplies {kind} on {device} into no float32: it multiplies in float32")
    return _of_widened


def _of_widened(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return torch.mm(a.float(), b.float(), out=out)


@functools.cache
def widens(operation: object, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch.mm`` or ``torch.addmm`` has an ``out_dtype`` there, and is right.

    CUDA has it, ``addmm`` beside a float32 addend from torch 2.11 on. An earlier ``addmm`` took it
    and gave something else (pytorch issue 154086), so a product of small whole numbers, which is
    exact, is compared.
    """
    if device.type != "cuda":
        return False
    whole = torch.arange(256, device=device).view(16, 16) % 13 - 6
    x, out = whole.to(dtype), torch.ones(16, 16, device=device, dtype=torch.float32)
    exact = x.float() @ x.float()
    try:
        if operation is torch.mm:
            torch.mm(x, x, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, x, x, out_dtype=torch.float32, out=out)
            exact += 1
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return out.equal(exact)


def scaled_by(h: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``h (C, H)`` times ``factors (C,)`` in its dtype, and the factor left out of it: None for 1.

    That is the largest one in float16, whose range is not that of the factors.
    """
    if factors is None:
        return h, None
    largest = None
    if h.dtype == torch.float16:
        largest = factors.abs().amax().clamp_(min=torch.finfo(torch.float32).tiny)
        factors = factors / largest
    h = (h.float() * factors[:, None]).to(h.dtype)
    return h, largest


def add_product(
    total: Tensor,  # (R, H), in a dtype of its own
    a: Tensor,  # (R, T)
    b: Tensor,  # (T, H)
    factor: float = 1.0,
    largest: Tensor | None = None,  # () fp32: another factor
    *,
    first: bool = False,  # total is not yet written
    scratch: Tensor | None = None,  # fp32, for products that cannot be added in place
) -> None:
    """``total (+)= factor * largest * a @ b``."""
    dtype, device, H = b.dtype, b.device, b.shape[1]
    same = total.dtype == dtype
    wide = total.dtype == torch.float32
    if largest is None and (same or (wide and widens(torch.addmm, device, dtype))):
        # Added in the product's epilogue: half the traffic of a product that is added later.
        asked = {} if same else {"out_dtype": torch.float32}
        torch.addmm(total, a, b, beta=0 if first else 1, alpha=factor, out=total, **asked)
        return
    step = WEIGHT_ROWS
    if scratch is not None:
        step = max(scratch.numel() // H, 1)
    for begin in range(0, len(total), step):
        some = total[begin : begin + step]
        if scratch is None or scratch.numel() < H:
            added = torch.empty(some.shape, dtype=torch.float32, device=device)
        else:
            added = scratch[: some.numel()].view_as(some)
        product(device, dtype)(a[begin : begin + step], b, out=added)
        if largest is not None:
            added.mul_(largest)
        if first:
            some.copy_(added.mul_(factor))
        else:
            some.add_(added, alpha=factor)


# A tile of a chunk's logits: first row, number of rows, first class, number of classes, and the
# products themselves, whose rows are padded.
Tile = tuple[int, int, int, int, Tensor]


class Tiles:
    """Shared float32 buffer for the products of up to ``C`` tokens.

    They are the tiles of the logits, or rows of the gradient of the hidden states.
    """

    def __init__(
        self,
        weight: Tensor,
        C: int,
        arch: Architecture,
        *,
        of_logits: bool = True,  # whether :meth:`logits` will be called
    ) -> None:
        V, H = weight.shape
        self.weight, self._product = weight, product(weight.device, weight.dtype)
        self.block = exp_block(V, arch.exp_block_v)
        processors = archs.processors(weight.device)
        self.most_rows, self.most = arch.tile_shape(C, V, H, self.block, processors)
        self._columns = weight.t().split(self.most, 1)
        self._rows_of_hidden = arch.rows_of_hidden(C, H, processors)
        self.products = torch.empty(
            max(
                self.most_rows * multiple_of_16(self.most) if of_logits else 0,
                min(self._rows_of_hidden, C) * H,
            ),
            dtype=torch.float32,
            device=weight.device,
        )

    def logits(self, h: Tensor) -> Iterator[Tile]:
        """Tiles of ``h (C, H) @ weight.T``, each in the same buffer."""
        C, step, begin = h.shape[0], self.most_rows, 0
        for w in self._columns:
            T = w.shape[1]
            for first in range(0, C, step):
                some = span(h, first, min(first + step, C))
                rows = some.shape[0]
                products = self.products.as_strided((rows, T), (multiple_of_16(T), 1))
                self._product(some, w, out=products)
                yield first, rows, begin, T, products
            begin += T

    def of_hidden(self, g: Tensor) -> Iterator[tuple[int, int]]:
        """Rows of ``g (C, V) @ weight`` in the buffer: number of the first, how many."""
        C, H, step = g.shape[0], self.weight.shape[1], self._rows_of_hidden
        for begin in range(0, C, step):
            n = min(step, C - begin)
            rows, products = span(g, begin, begin + n), self.products.as_strided((n, H), (H, 1))
            self._product(rows, self.weight, out=products)
            yield begin, n
