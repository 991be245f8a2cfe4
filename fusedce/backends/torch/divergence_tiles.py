"""The torch backend: a student beside a teacher, and its gradients.

The student's logits of a chunk of tokens are made tile by tile of the vocabulary, ``(v, C)``, and
so are the teacher's where there is one. Once the log-sum-exps are known, a second walk over the
tiles turns the student's logits into the gradient, in their place. One product for the teacher,
three for the student. Products are of large tiles; the passes between them go over small ones,
which stay in a core's own cache while they are read a dozen times.

With ``h = (log q - log p) / 2`` (p of the teacher, q of the student) and ``t = tanh(h)``, the
difference ``q - p`` is ``(p + q) * t``, which does not cancel. Each class's part of a divergence
gets an additional term; over all classes these terms sum to 0::

    forward   p log(p/q) - p + q = (p + q) * (h * (t - 1) + t)     gradient   q - p
    reverse   q log(q/p) - q + p = (p + q) * (h * (t + 1) - t)                q (2 h - KL)
    jsd       beta p log(p/m) + (1 - beta) q log(q/m)          (1 - beta) q (log(q/m) - KL(q||m))

so that none is negative, and errors of a log-sum-exp, which are errors of all ``h`` at once, enter
in second order. Near equality nothing is left of the probabilities themselves: there ``h`` comes
from the difference of two logits. Where the heads' log-sum-exps differ, logits may be far larger
than log-probabilities, and it comes from the difference of these. "jsd" is made from
``e = expm1(-2 |h|)`` and the larger probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...contract.labels import used_tokens
from ...contract.problem import (
    FORWARD,
    INFINITE,
    JSD,
    NEVER,
    REVERSE,
    Divergence,
    Problem,
    Shard,
    Task,
)
from ..gradients import (
    Gradients,
    Summed,
    allocate,
    expected_upstream,
    saved_grad_dtypes,
    sizes_of,
)
from ..plan import FEW_CHUNKS, Plan, choose_plan, compared_classes
from ..shards import (
    all_reduce,
    nll_and_lse,
    of_ranks,
    sharded_sizes,
    sums,
)
from .logit_tiles import (
    Logits,
    Sums,
    TileLabels,
    TileStats,
    chunks_of,
    exp_,
    maxima,
    tiles,
)
from .products import Products

_NEAR = 0.5
"""Log-sum-exps of both heads no further apart than this, in nats: logits are subtracted.

Their difference is exact near equality, and else rounded like the log-sum-exps' difference. Further
apart log-probabilities are subtracted, which are small where the logits may not be.
"""


def divergence_and_grads(task: Task) -> Summed:
    """Each token's loss, and the wanted gradients of their sum; holds a chunk of both logits.

    With a sharded vocabulary each rank walks over its classes.
    """
    problem, wanted, divergence, shard = task
    assert divergence is not None
    used, n_valid = used_tokens(problem, None if shard is None else shard.V)
    rows = used.nonzero()[:, 0]
    call = sizes_of(problem, wanted, len(rows), saved_grad_dtypes(problem))
    if shard is not None:
        call = sharded_sizes(problem, shard, len(rows))
    hidden, device = problem.hidden, problem.hidden.device
    products = Products.of(hidden)
    acc, gemm = products.acc, products.operands
    of_both = call.with_teacher(*divergence.teacher_sizes())
    plan = choose_plan(
        of_both, chunk_tokens=problem.chunk_tokens, memory_budget=problem.memory_budget
    )
    parts = chunks_of(rows, plan.tokens)
    grads = Gradients(
        problem, wanted, dtypes=saved_grad_dtypes(problem), chunks=len(parts),
        wide=plan.name != FEW_CHUNKS,
    )  # fmt: skip
    compared = _Compared(
        problem, divergence, plan, compared_classes(call, plan.tokens, plan.classes), shard,
        train=any(wanted.gradients()),
    )  # fmt: skip
    factor = expected_upstream(problem, n_valid)
    outer = problem.logit_scale / divergence.temperature * factor.double()
    losses = torch.zeros(len(hidden), dtype=acc, device=device)
    weights = problem.token_weight
    if weights is None:
        weights = torch.ones((), dtype=acc, device=device).expand(len(hidden))

    for at, chunk in enumerate(parts):
        h, w = hidden[chunk].to(acc), weights[chunk].double()
        loss, g = compared(h, chunk)  # (C,), (V, C)
        losses[chunk] = (loss.masked_fill(loss >= INFINITE, math.inf) * w).to(acc)
        if not compared.train:
            continue
        # One factor of all hidden states, such as 1 / n, would round them all in one direction.
        g.mul_((outer * w).to(acc))
        right = h.to(gemm)
        dh = None if grads.hidden is None else torch.zeros_like(h)
        for begin, end in tiles(len(g), plan.classes):
            tile = g[begin:end].to(gemm)
            if dh is not None:
                products(tile.t(), compared.logits.rows(begin, end, gemm), dh, add=True)
            if grads.weight is not None:
                products(tile, right, grads.weight[begin:end], add=at > 0)
        if grads.bias is not None:
            grads.bias += g.sum(1)
        if dh is not None and grads.hidden is not None:
            grads.hidden[chunk] = dh.to(grads.hidden.dtype)
    if shard is not None and grads.hidden is not None:
        all_reduce(grads.hidden, shard.group)
    return Summed(losses, n_valid, factor, *grads.cast_out())


def log_softmax_(z: Tensor, lse: Tensor) -> Tensor:
    """``z (v, C) - lse`` in the place of ``z``; ``lse (C,)`` float64 goes as two numbers of ``z``'s
    dtype, exact for large logits."""
    high = lse.to(z.dtype)
    low = (lse - high).masked_fill_(high.isinf(), 0)
    return z.sub_(high).sub_(low.to(z.dtype))


class _Compared:
    """The student's logits of one chunk after another, beside the teacher's.

    Calls take hidden states ``h (C, H)`` and their positions ``(C,)``. They return the losses
    ``(C,)`` in float64, and to train the gradients ``(V, C)`` by logits over the temperature, which
    stay until the next call.
    """

    def __init__(
        self,
        problem: Problem,
        divergence: Divergence,
        plan: Plan,
        step: int,  # classes that are compared at a time
        shard: Shard | None,
        *,
        train: bool,  # the gradients are asked for
    ) -> None:
        self.train = train
        self.problem, self.divergence, self.shard = problem, divergence, shard
        self.classes, self.step = plan.classes, step
        self.student, self.teacher = divergence.student(problem), divergence.teacher()
        self.logits = Logits(self.student, plan)
        self.teachers = Logits(self.teacher, plan, "the teacher's weight")
        acc, device = self.student.acc, problem.hidden.device
        self.of_chunk = allocate(plan, "logits of a chunk", acc, device)  # (heads, V, C)
        self.scratch = allocate(plan, "tiles compared", acc, device)

    def all(self, logits: Logits, h: Tensor, out: Tensor) -> Tensor:
        """``(V, C)`` logits of a head."""
        V, C = len(self.problem.weight), len(h)
        out, operand = out.view(-1)[: V * C].view(V, C), logits.operand(h)
        for begin, end in tiles(V, self.classes):
            logits.tile(operand, begin, end, out=out[begin:end])
        return out

    def small(self, *whole: Tensor) -> Iterator[tuple[Any, ...]]:
        """Tiles of ``whole (V, C)``: the first class, the rows of each, and two of scratch."""
        for begin, end in tiles(len(whole[0]), self.step):
            some = [x[begin:end] for x in whole]
            yield begin, *some, *(x[: some[0].numel()].view_as(some[0]) for x in self.scratch)

    def merged(self, *lses: Tensor) -> list[Tensor]:
        """Log-sum-exps over all ranks. Collectives: one all-gather of a float64 a token each."""
        if self.shard is None:
            return list(lses)
        return [x.logsumexp(0) for x in of_ranks(list(lses), self.shard)]

    def of_label(self, stats: TileStats) -> tuple[Tensor, Tensor, Tensor]:
        """The label's loss, log-sum-exp and logit. Collectives: one all-gather of two float64."""
        if self.shard is None:
            return stats.losses(), stats.lse(), stats.z_label
        y, here = stats.y + self.shard.first, (stats.y >= 0) & (stats.y < len(self.problem.weight))
        rows = [stats.others, stats.z_label.masked_fill(~here, -math.inf)]
        others, z_labels = of_ranks(rows, self.shard)
        nll, lse = nll_and_lse(others.logsumexp(0), z_labels, (y >= 0) & (y < self.shard.V))
        return nll, lse, z_labels.amax(0)

    def __call__(self, h: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        divergence, shard, dtype = self.divergence, self.shard, h.dtype
        of_student, of_teacher = self.of_chunk
        s = self.all(self.logits, h, of_student)
        t = self.all(self.teachers, divergence.teacher_hidden[chunk], of_teacher)
        y = self.problem.labels[chunk].long() - (0 if shard is None else shard.first)
        labels = TileLabels(y, len(s), self.step)
        stats = TileStats(labels, dtype) if divergence.ce_weight else None  # at temperature 1
        sums_s, sums_t = Sums(), Sums()
        for begin, of_s, of_t, scratch, _ in self.small(s, t):
            sums_s.add(of_s, maxima(of_s), scratch)
            sums_t.add(of_t, maxima(of_t), scratch)
            if stats is not None:
                stats.add(torch.mul(of_s, divergence.temperature, out=scratch), begin)
        lse, lse_t = self.merged(sums_s.lse(y), sums_t.lse(y))
        of_label = None if stats is None else self.of_label(stats)
        shift = lse_t - lse
        far = shift.abs() > _NEAR  # (C,)
        some_far, half_shift = bool(far.any()), (shift / 2).to(dtype)
        terms = self._jsd if divergence.kind == JSD else self._kl
        kl, mean = self._impossible(s, t, lse, lse_t), torch.zeros_like(lse)
        total = torch.zeros_like(lse)
        for begin, of_s, of_t, half, scratch in self.small(s, t):
            slope = self.student.slope(of_s)
            of_ce = self._of_ce(of_s, labels, begin, *of_label[:2]) if of_label else None
            torch.add(half_shift, torch.sub(of_s, of_t, out=half), alpha=0.5, out=half)
            log_q, log_p = log_softmax_(of_s, lse), log_softmax_(of_t, lse_t)  # in of_s and of_t
            if some_far:
                apart = torch.sub(log_q, log_p, out=scratch).div_(2)
                torch.where(far, apart, half, out=half)
            kl += terms(log_q, log_p, half, scratch)
            written = [of_s]
            if divergence.kind != FORWARD:
                written.append(of_t)
                mean += of_t.sum(0)
                total += of_s.sum(0)
            if of_ce is not None:
                written[-1].add_(of_ce)
            if slope is not None:
                for x in written:
                    x.mul_(slope)
        if shard is not None:
            kl, *more = sums([kl] if divergence.kind == FORWARD else [kl, mean, total], shard)
            mean, total = more or (mean, total)
        if divergence.kind != FORWARD:
            # Probabilities are rounded, and so their sum is not quite 1: it is divided out.
            torch.addcmul(t, s, (mean / total).to(dtype), value=-1, out=s)
        return kl + divergence.ce_weight * of_label[0] if of_label else kl, s

    def _impossible(self, s: Tensor, t: Tensor, lse: Tensor, lse_t: Tensor) -> Tensor:
        """``(C,)``: inf where a bias of -inf excludes a class that the other head allows, else 0.

        The walk replaces -inf by a large number; a small probability times that would be finite.
        """
        head, (other, z, norm) = self.student, (self.teacher, t, lse_t)
        if self.divergence.kind == REVERSE:
            head, other, z, norm = other, head, s, lse
        found = torch.zeros_like(lse)
        if self.divergence.kind == JSD or head.bias is None or head.softcap is not None:
            return found
        excluded = head.bias <= -NEVER
        if other.bias is not None and other.softcap is None:
            excluded &= other.bias > -NEVER
        for some in chunks_of(excluded.nonzero()[:, 0], self.step):
            given = (z[some].double() - norm).exp_().amax(0)  # above 0 as far as float64 goes
            found.masked_fill_(given > 0, math.inf)
        return found

    def _of_ce(self, s: Tensor, labels: TileLabels, begin: int, nll: Tensor, lse: Tensor) -> Tensor:
        """``(v, C)``: gradient of the label's cross-entropy by a tile of logits."""
        temperature = self.divergence.temperature
        g = exp_(log_softmax_(torch.mul(s, temperature), lse))
        if at := labels.of(begin):
            g[at] = (-nll[at[1]]).expm1().to(g.dtype)
        return g.mul_(self.divergence.ce_weight * temperature)

    # The two methods below return a tile's part of the divergence, (C,) float32 or float64. Buffers
    # are (v, C): s = log q and t = log p become the gradient and nothing ("forward"), else q and
    # q * x, whose gradient is q * (x - sum over v of q * x). `half` holds h of the module's first
    # lines. Each assignment names what its buffer holds from there on.

    def _kl(self, s: Tensor, t: Tensor, half: Tensor, scratch: Tensor) -> Tensor:
        tanh = torch.tanh(half, out=scratch)
        q = exp_(s)
        both = exp_(t).add_(q)  # p + q, in t
        if self.divergence.kind == FORWARD:
            g = torch.mul(both, tanh, out=s)  # q - p, the gradient
            return torch.addcmul(g, half, torch.sub(g, both, out=both), out=both).sum(0)
        g = tanh.mul_(both)  # q - p, in scratch
        part = torch.addcmul(g, half, both.add_(g), value=-1, out=g).sum(0)
        torch.mul(half.mul_(2), q, out=t)  # q log(q / p)
        return part.neg_()

    def _jsd(self, s: Tensor, t: Tensor, half: Tensor, scratch: Tensor) -> Tensor:
        beta = self.divergence.beta
        big = exp_(torch.maximum(s, t, out=s))  # in s
        d = half.mul_(-2)  # log p - log q, in half
        minus = torch.abs(d, out=t).neg_()  # -|d|, in t
        teacher = d > 0  # has the larger probability
        ratio = exp_(scratch.copy_(minus))  # of the smaller probability to the larger one
        q = ratio.where(teacher, 1.0).mul_(big)
        of_p, of_q = d.new_tensor([beta, 1 - beta])
        weight = torch.where(teacher, of_q, of_p)  # of the smaller probability
        less = minus.expm1().mul_(weight)
        of_small = ratio.mul_(weight)  # in scratch
        log = less.log1p()  # of the mixture over `big`
        part = torch.addcmul(log, minus, of_small, value=-1).addcmul_(less, log)
        if self.divergence.is_uneven():  # near 0 only the sum of two positive numbers is exact
            far = less < -0.5
            mixture = of_small + torch.where(teacher, of_p, of_q)
            log = log.where(~far, mixture.log())
            part = part.where(~far, mixture.mul_(log).addcmul_(minus, of_small, value=-1))
        found = part.mul_(big).sum(0).neg_()
        torch.mul(d.clamp_(min=0).add_(log).neg_(), s.copy_(q), out=t)  # q log(q / m)
        t.mul_(1 - beta)
        return found
