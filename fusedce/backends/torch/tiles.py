"""Tiles of logits and what is gathered from them: the parts of the torch backend."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_TILE_ELEMENTS_CPU = 2**20  # a tile of logits stays in the CPU's cache
_TILE_ELEMENTS_DEVICE = 2**26


class Head:
    """The output projection, read by tiles of the vocabulary."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float
    ) -> None:
        self.weight, self.bias, self.softcap, self.scale = weight, bias, softcap, logit_scale
        self.acc = torch.float64 if weight.dtype == torch.float64 else torch.float32

    def tiles(self, C: int) -> Iterator[tuple[int, int]]:
        V = self.weight.shape[0]
        elements = _TILE_ELEMENTS_CPU if self.weight.device.type == "cpu" else _TILE_ELEMENTS_DEVICE
        step = min(max(elements // max(C, 1), 256), 8192)
        for begin in range(0, V, step):
            yield begin, min(begin + step, V)

    def logits(self, h: Tensor, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """``(v, C)`` logits of one tile, from exact products of the inputs."""
        w = self.weight[begin:end].to(self.acc)
        if self.bias is not None:
            b = self.bias[begin:end, None].to(self.acc)
            z = torch.addmm(b, w, h.t(), beta=self.scale, alpha=self.scale, out=out)
        else:
            z = torch.mm(w, h.t(), out=out)
            if self.scale != 1.0:
                z.mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z


class MeanLogit:
    """``zmean = sum_v c_v z_v / V`` without a soft-cap: a product with the mean row of the head.

    So label smoothing costs nothing per logit; its gradient is an outer product.
    """

    def __init__(self, head: Head, class_weight: Tensor | None) -> None:
        weight, acc, self.scale = head.weight, head.acc, head.scale
        V, H = weight.shape
        c = weight.new_ones(V, dtype=acc) if class_weight is None else class_weight.to(acc)
        self.c = c / V
        row = torch.zeros(H, dtype=torch.float64, device=weight.device)
        for part, c_part in zip(weight.split(8192), self.c.split(8192), strict=True):
            row += c_part @ part.to(acc)
        self.row = row.to(acc)  # (H,)
        self.bias = torch.zeros((), dtype=torch.float64, device=weight.device)
        if head.bias is not None:  # a masked class (-inf) of weight 0 is no target
            self.bias += (self.c * head.bias.to(acc).masked_fill(self.c == 0, 0)).sum()
        self.hidden_sum = torch.zeros(H, dtype=acc, device=weight.device)
        self.sum = torch.zeros((), dtype=torch.float64, device=weight.device)

    def of(self, h: Tensor) -> Tensor:
        """``(C,)`` float64 for ``h (C, H)``."""
        return self.scale * ((h @ self.row).double() + self.bias)

    def add_hidden_gradient(self, dh: Tensor, u: Tensor | float) -> None:
        """``dh (C, H) +=`` upstream gradient ``u`` of zmean, times its derivative."""
        if isinstance(u, Tensor):
            dh.addr_((self.scale * u).to(dh.dtype), self.row)
        else:
            dh.add_(self.row, alpha=self.scale * u)

    def gather(self, h: Tensor, u: Tensor | float) -> None:
        """What the gradients of the head will need of this chunk."""
        u = (self.scale * u) * torch.ones(len(h), dtype=torch.float64, device=h.device)
        self.hidden_sum += u.to(h.dtype) @ h
        self.sum += u.sum()

    def add_head_gradients(self, d_weight: Tensor | None, d_bias: Tensor | None) -> None:
        if d_weight is not None:
            for part, c in zip(d_weight.split(8192), self.c.split(8192), strict=True):
                part.copy_(part.to(c.dtype).addr(c, self.hidden_sum))
        if d_bias is not None:
            d_bias.add_((self.c * self.sum).to(d_bias.dtype))


class TileStats:
    """Maxima, sums of exponentials and label logits, gathered tile by tile."""

    def __init__(self, y: Tensor, acc: torch.dtype, *, argmax: bool = False) -> None:
        self.y = y
        # NaN stays where no tile holds the label.
        self.z_label = torch.full((len(y),), math.nan, dtype=acc, device=y.device)
        self.maxima: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.places: list[Tensor] | None = [] if argmax else None

    def add(self, z: Tensor, begin: int) -> None:
        """Take in a tile ``z (v, C)``; it becomes ``exp(z - k)``, 0 at the labels, in place."""
        local = self.y - begin
        inside = (local >= 0) & (local < len(z))
        local = local.clamp(0, len(z) - 1)[None]
        self.z_label = torch.where(inside, z.gather(0, local)[0], self.z_label)
        if self.places is None:
            k = z.amax(0)
        else:  # costs as much as three exponentials on a CPU
            k, place = z.max(0)
            self.places.append(place + begin)
        # A tile of nothing but -inf must give exp(-inf) = 0, not exp(-inf + inf).
        k = k.clamp_(min=torch.finfo(z.dtype).min)
        z.sub_(k).exp_()
        z.scatter_(0, local, z.gather(0, local).masked_fill_(inside, 0))
        self.maxima.append(k)
        self.sums.append(z.sum(0))

    def losses(self) -> Tensor:
        """``(C,)`` float64: ``log(1 + exp(L - z_label))``, NaN where no tile held the label."""
        z_label = self.z_label.double()
        gap = self._others() - z_label
        return torch.logaddexp(gap, torch.zeros_like(gap)) + nan_at_inf(z_label)

    def lse(self) -> Tensor:
        """``(C,)`` float64: the log-sum-exp of all logits."""
        return torch.logaddexp(self._others(), self.z_label.double())

    def argmax(self) -> Tensor:
        """``(C,)`` int64: the likeliest class."""
        assert self.places is not None
        best = torch.stack(self.maxima).argmax(0, keepdim=True)
        return torch.stack(self.places).gather(0, best)[0]

    def _others(self) -> Tensor:
        """``L``: the log-sum-exp of the logits but the label's."""
        maxima = torch.stack(self.maxima).double()  # (tiles, C)
        top = maxima.amax(0)
        others = (torch.stack(self.sums).double() * (maxima - top).exp_()).sum(0)
        return top + others.log()

    def factors(self, lse: Tensor) -> Tensor:
        """``exp(k - lse) (tiles, C)`` float64: what turns each tile into probabilities."""
        return (torch.stack(self.maxima).double() - lse).exp_()


def nan_at_inf(z: Tensor) -> Tensor:
    """0, or NaN where ``z`` is +inf: the log-probability there is inf - inf."""
    return torch.zeros_like(z).masked_fill_(z == math.inf, math.nan)
