"""The torch backend: divergences of a student from a teacher, and the student's gradients.

Of a chunk of tokens both heads' logits are made, tile by tile of the vocabulary, ``(v, C)``; when
both log-sum-exps are known, a second walk over the tiles turns the student's logits into factors
of the gradient, in their place. One product for the teacher, three for the student.

With ``d = log p - log q`` (p of the teacher, q of the student) everything is made from
``big = max(p, q)`` and ``e = expm1(-|d|)``: the smaller one is ``big * (1 + e)``. To each class's
part of a divergence what sums to 0 over all classes is added::

    forward   p d - p + q                       gradient    q - p
    reverse   q (-d) - q + p                                q (-d - KL)
    jsd       beta p log(p/m) + (1 - beta) q log(q/m)       (1 - beta) q (log(q/m) - KL(q||m))

so that none is negative, and errors of a log-sum-exp, which are errors of all ``d`` at once, enter
in second order. Near equality nothing is left of the probabilities themselves: ``d`` is the
difference of two logits, and ``q - p`` is ``big * e``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients, call_of, waiting
from fusedce.backends.plan import way_of_divergence
from fusedce.backends.protocol import Diverged
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import chunks_of, valid_rows
from fusedce.backends.torch.tiles import Logits, TileStats, label_entry, tiles
from fusedce.contract.divergence import FORWARD, INFINITE, JSD, Divergence
from fusedce.contract.objective import expected_upstream
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.projection import Projection


def divergence_and_grads(problem: Problem, divergence: Divergence, wanted: Wanted) -> Diverged:
    """Each token's loss, and the wanted gradients of their sum; holds two logits a class."""
    hidden = problem.hidden
    (V, H), (N, device) = problem.weight.shape, (len(hidden), hidden.device)
    rows, n_valid = valid_rows(problem)
    student, teacher = divergence.heads(problem)
    products = Products.of(hidden)
    acc, gemm = products.acc, products.gradients
    of_s, of_t = Logits(student, products), Logits(teacher, Products.of(divergence.hidden))
    way = way_of_divergence(
        call_of(problem, wanted, len(rows), waiting(problem), logit=2 * acc.itemsize),
        divergence.weight.shape[1],
        chunk_tokens=problem.chunk_tokens,
        memory_budget=problem.memory_budget,
    )
    step, train = way.classes, any(wanted.gradients())
    parts = chunks_of(rows, way.tokens)
    grads = Gradients(problem, wanted, dtypes=waiting(problem), chunks=len(parts))
    factor = expected_upstream(problem, n_valid)
    losses = torch.zeros(N, dtype=acc, device=device)
    size = V * min(way.tokens, len(rows))
    of_student, of_teacher = (torch.empty(size, dtype=acc, device=device) for _ in range(2))
    scratch = [
        torch.empty(step * min(way.tokens, len(rows)), dtype=acc, device=device) for _ in range(2)
    ]

    for at, chunk in enumerate(parts):
        h, y, C = hidden[chunk].to(acc), problem.labels[chunk].long(), len(chunk)
        s, t = of_student[: V * C].view(V, C), of_teacher[: V * C].view(V, C)
        there = of_t.operand(divergence.hidden[chunk])
        stats = _logits(of_s, of_s.operand(h), y, s, step, scratch[0])
        lse_t = _logits(of_t, there, y, t, step, scratch[0]).lse()
        del there
        pair = _Pair(student, divergence, s, t, stats.lse(), lse_t, scratch)
        ce = _CrossEntropy.of(divergence, stats, s, step) if divergence.ce_weight else None
        kl, mean = pair.walk(step, ce)
        loss = kl.masked_fill(kl >= INFINITE, torch.inf)
        if ce is not None:
            loss = loss + divergence.ce_weight * ce.nll
        of_rows = torch.full_like(loss, problem.logit_scale / divergence.temperature) * factor
        if problem.token_weight is not None:
            w = problem.token_weight[chunk].double()
            loss, of_rows = loss * w, of_rows * w
        losses[chunk] = loss.to(acc)
        if not train:
            continue
        of_rows = of_rows.to(acc)[:, None]  # (C, 1)
        scaled = (h * of_rows).to(gemm)
        dh = None if grads.hidden is None else torch.zeros(C, H, dtype=acc, device=device)
        for begin, end in tiles(V, step):
            g = pair.gradient(begin, end, mean).to(gemm)  # (v, C)
            if dh is not None:
                products(g.t(), of_s.rows(begin, end, gemm), dh, add=True)
            if grads.weight is not None:
                products(g, scaled, grads.weight[begin:end], add=at > 0)
            if grads.bias is not None:
                grads.bias[begin:end] += torch.mv(g.to(acc), of_rows[:, 0])
        if grads.hidden is not None and dh is not None:
            grads.hidden[chunk] = dh.mul_(of_rows).to(grads.hidden.dtype)
    return Diverged(losses, n_valid, factor, *grads.written())


def _logits(
    logits: Logits, h: Tensor, y: Tensor, out: Tensor, step: int, scratch: Tensor
) -> TileStats:
    """``out (V, C)`` filled with logits of ``h (C, H)``; what their log-sum-exp is made of."""
    stats = TileStats(y, logits.head.acc)
    for begin, end in tiles(len(out), step):
        z = logits.tile(h, begin, end, out=out[begin:end])
        stats.add(scratch[: z.numel()].view_as(z).copy_(z), begin)
    return stats


class _CrossEntropy(NamedTuple):
    """Of the student's logits, multiplied by the temperature again."""

    nll: Tensor  # (C,) float64
    lse: Tensor  # (C,) float64
    y: Tensor  # (C,)
    weight: float  # of its gradient by the logits that are divided by the temperature
    temperature: float

    @classmethod
    def of(cls, divergence: Divergence, stats: TileStats, s: Tensor, step: int) -> _CrossEntropy:
        t = divergence.temperature
        if t != 1:
            stats = TileStats(stats.y, s.dtype)
            for begin, end in tiles(len(s), step):
                stats.add(s[begin:end] * t, begin)
        return cls(stats.losses(), stats.lse(), stats.y, divergence.ce_weight * t, t)

    def gradient(self, s: Tensor, begin: int) -> Tensor:
        """``weight * (softmax - onehot) (v, C)`` of a tile of logits."""
        g = torch.mul(s, self.temperature).sub_(self.lse.to(s.dtype)).exp_()
        at, inside = label_entry(self.y, begin, len(g))
        of_label = (-self.nll).expm1().to(g.dtype)
        g.scatter_(0, at, torch.where(inside, of_label, g.gather(0, at)[0])[None])
        return g.mul_(self.weight)


class _Pair:
    """A chunk's logits of both; ``s`` becomes minus the gradient by the student's logits."""

    def __init__(
        self,
        student: Projection,
        divergence: Divergence,
        s: Tensor,  # (V, C), overwritten, as t
        t: Tensor,
        lse_s: Tensor,  # (C,) float64
        lse_t: Tensor,
        scratch: list[Tensor],
    ) -> None:
        self.student, self.divergence = student, divergence
        self.s, self.t, self.scratch = s, t, scratch
        self.lse, self.lse_t = lse_s.to(s.dtype), lse_t.to(s.dtype)
        self.shift = (lse_s - lse_t).to(s.dtype)
        self.kl = torch.zeros_like(lse_s)
        self.mean = torch.zeros_like(lse_s)  # sum of q * log(q / p or m)

    def walk(self, step: int, ce: _CrossEntropy | None) -> tuple[Tensor, Tensor]:
        """``(C,)`` float64 divergences, and the means that the gradients of some need."""
        for begin, end in tiles(len(self.s), step):
            s, t = self.s[begin:end], self.t[begin:end]
            first, second = (x[: s.numel()].view_as(s) for x in self.scratch)
            slope = self.student.slope(s)
            more = None if ce is None else ce.gradient(s, begin)
            big = torch.sub(s, self.lse, out=first)
            big = torch.maximum(big, torch.sub(t, self.lse_t, out=second), out=big).exp_()
            t.sub_(s).add_(self.shift)  # d
            minus = torch.abs(t, out=second).neg_()
            e = torch.expm1(minus, out=s)
            of_kind = self._forward if self.divergence.kind == FORWARD else self._others
            of_kind(t, e, big, minus)
            written = [s] if self.divergence.kind == FORWARD else [s, t]
            if more is not None:
                written[-1].sub_(more)
            if slope is not None:
                for part in written:
                    part.mul_(slope)
        return self.kl, self.mean

    def _forward(self, d: Tensor, e: Tensor, big: Tensor, scratch: Tensor) -> None:
        """``p - q`` in the place of ``e``."""
        part = torch.clamp(d, max=0, out=scratch).mul_(e).add_(d)
        drop = torch.copysign(e, d, out=e)  # (p - q) / big
        self.kl += part.sub_(drop).mul_(big).sum(0)
        drop.mul_(big)

    def _others(self, d: Tensor, e: Tensor, big: Tensor, scratch: Tensor) -> None:
        """``q`` in the place of ``e``, and ``-q * x`` in that of ``d``, x a logarithm."""
        if self.divergence.kind == JSD:
            beta = self.divergence.beta
            x = d.gt(0).to(d.dtype).mul_(1 - 2 * beta).add_(beta)  # weight of the smaller one
            part = torch.addcmul(-scratch, scratch, e, value=-1).mul_(x)  # w |d| (1 + e)
            x.mul_(e)
            log = x.log1p()  # log(m / big)
            part.add_(log).addcmul_(x, log).mul_(big).neg_()
            drop = torch.copysign(e, d, out=e)
            q = drop.clamp_(min=0).neg_().add_(1).mul_(big)
            d.clamp_(min=0).add_(log).mul_(q)  # -q log(q / m)
            self.mean -= d.sum(0)
            d.mul_(1 - beta)
            q.mul_(1 - beta)
        else:
            drop = torch.copysign(e, d, out=e)
            part = torch.clamp(d, min=0, out=scratch).mul_(drop).sub_(d).add_(drop).mul_(big)
            q = drop.clamp_(min=0).neg_().add_(1).mul_(big)
            d.mul_(q)
            self.mean -= d.sum(0)
        self.kl += part.sum(0)

    def gradient(self, begin: int, end: int, mean: Tensor) -> Tensor:
        """``(v, C)`` of a tile, once."""
        s = self.s[begin:end]
        if self.divergence.kind == FORWARD:
            return s.neg_()
        # q x - q mean, with -q x in t
        return torch.addcmul(self.t[begin:end], s, mean.to(s.dtype), out=s).neg_()
