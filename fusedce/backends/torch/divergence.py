"""The torch backend: a student beside a teacher or given probabilities, and its gradients.

The student's logits of a chunk of tokens are made tile by tile of the vocabulary, ``(v, C)``, and
so are the teacher's where there is one. Once the log-sum-exps are known, a second walk over the
tiles turns the student's logits into the gradient, in their place. One product for the teacher,
three for the student. Products are of large tiles; the passes between them go over small ones,
which stay in a core's own cache while they are read a dozen times.

With ``h = (log q - log p) / 2`` (p of the teacher, q of the student) and ``t = tanh(h)``, the
difference ``q - p`` is ``(p + q) * t``, which does not cancel. To each class's part of a divergence
what sums to 0 over all classes is added::

    forward   p log(p/q) - p + q = (p + q) * (h * (t - 1) + t)     gradient   q - p
    reverse   q log(q/p) - q + p = (p + q) * (h * (t + 1) - t)                q (2 h - KL)
    jsd       beta p log(p/m) + (1 - beta) q log(q/m)          (1 - beta) q (log(q/m) - KL(q||m))

so that none is negative, and errors of a log-sum-exp, which are errors of all ``h`` at once, enter
in second order. Near equality nothing is left of the probabilities themselves: ``h`` comes from the
difference of two logits. "jsd" is made from ``e = expm1(-2 |h|)`` and the larger probability.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients, call_of, waiting
from fusedce.backends.held import compared_classes
from fusedce.backends.plan import way_of_divergence
from fusedce.backends.protocol import Summed
from fusedce.backends.shards.collectives import all_reduce, sharded_call
from fusedce.backends.shards.merge import largest, nll_and_lse, of_ranks, sums
from fusedce.backends.torch.logit_tiles import (
    NEAR,
    Logits,
    Sums,
    TileStats,
    label_entry,
    maxima,
    tiles,
)
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import chunks_of, valid_rows
from fusedce.contract.divergence import (
    FORWARD,
    INFINITE,
    JSD,
    NEVER,
    REVERSE,
    TARGETS,
    Divergence,
)
from fusedce.contract.objective import expected_upstream
from fusedce.contract.problem import Problem, Projection
from fusedce.contract.task import Shard, Task

FAR = 64  # nats: rounding a log-sum-exp of that size to float32 changes a probability by 4e-6


def divergence_and_grads(task: Task) -> Summed:
    """Each token's loss, and the wanted gradients of their sum; holds each head's logits.

    With a sharded vocabulary each rank walks over its classes.
    """
    problem, wanted, divergence, shard = task
    assert divergence is not None
    hidden, device = problem.hidden, problem.hidden.device
    V, H = problem.weight.shape
    rows, n_valid = valid_rows(problem, None if shard is None else shard.V)
    call = call_of(problem, wanted, len(rows), waiting(problem))
    if shard is not None:
        call = sharded_call(problem, shard, len(rows))
        if problem.class_weight is not None:
            classes = problem.class_weight[shard.first : shard.first + V]
            problem = problem.but(class_weight=classes)
    products = Products.of(hidden)
    acc, gemm = products.acc, products.gradients
    way = way_of_divergence(
        call,
        divergence.teacher_size(),
        chunk_tokens=problem.chunk_tokens,
        memory_budget=problem.memory_budget,
    )
    step, train = way.classes, any(wanted.gradients())
    parts = chunks_of(rows, way.tokens)
    grads = Gradients(problem, wanted, dtypes=waiting(problem), chunks=len(parts))
    factor = expected_upstream(problem, n_valid)
    losses = torch.zeros(len(hidden), dtype=acc, device=device)
    compare = _ToTargets if divergence.kind == TARGETS else _ToTeacher
    most = min(way.tokens, len(rows))
    compared = compare(problem, divergence, most, compared_classes(call, way), shard)

    for at, chunk in enumerate(parts):
        h, C = hidden[chunk].to(acc), len(chunk)
        compared.start(h, chunk, step)
        outer = problem.logit_scale / divergence.temperature * factor.double()
        of_rows = torch.ones(C, dtype=torch.float64, device=device) * outer
        w = None if problem.token_weight is None else problem.token_weight[chunk].double()
        of_rows = (of_rows if w is None else of_rows * w).to(acc)[:, None]  # (C, 1)
        scaled = (h * of_rows).to(gemm)
        dh = None
        if grads.hidden is not None:  # zeros, as a rank may have no classes
            dh = torch.zeros(C, H, dtype=acc, device=device)
        for begin, end in tiles(V, step):
            for first in range(begin, end, compared.step):
                compared.gradient(first, min(first + compared.step, end))
            if not train:
                continue
            g = compared.s[begin:end].to(gemm)  # (v, C)
            if dh is not None:
                products(g.t(), compared.logits.rows(begin, end, gemm), dh, add=begin > 0)
            if grads.weight is not None:
                products(g, scaled, grads.weight[begin:end], add=at > 0)
            if grads.bias is not None:
                grads.bias[begin:end] += torch.mv(compared.s[begin:end], of_rows[:, 0])
        loss = compared.losses()
        losses[chunk] = (loss if w is None else loss * w).to(acc)
        if dh is not None and grads.hidden is not None:
            grads.hidden[chunk] = dh.mul_(of_rows).to(grads.hidden.dtype)
    if shard is not None and grads.hidden is not None:
        all_reduce(grads.hidden, shard.group)
    return Summed(losses, n_valid, factor, *grads.written())


class _Exponentials(Sums):
    """Sums of the exponentials of tiles of logits that stay.

    All tiles share the first one's maximum as their reference (0 where that fits as well), until a
    sum shows that it is too low: then the tile has its own. Only tiles of the latter kind, and the
    first, are searched for their maximum.
    """

    k: Tensor | None = None  # (C,)

    def take(self, z: Tensor, scratch: Tensor) -> None:
        """Take in a tile ``z (v, C)``; ``scratch`` of its shape is overwritten."""
        if self.k is None:
            k = maxima(z)
            self.k = k.masked_fill(k.abs() <= NEAR, 0)
        if not self.add(z, self.k, scratch):
            self.add(z, maxima(z), scratch)


class _Lse(NamedTuple):
    """A log-sum-exp as a number of the logits' dtype, and the rest of it where that shows."""

    high: Tensor  # (C,)
    low: Tensor | None  # (C,)

    @classmethod
    def of(cls, lse: Tensor, dtype: torch.dtype) -> _Lse:
        """Split ``lse (C,)`` float64."""
        high = lse.to(dtype)
        low = (lse - high).masked_fill_(high.isinf(), 0).to(dtype)
        return cls(high, low if bool((high.abs() > FAR).any()) else None)

    def taken_from(self, z: Tensor) -> Tensor:
        """``z - lse`` in the place of ``z (v, C)``."""
        z.sub_(self.high)
        return z if self.low is None else z.sub_(self.low)


class _CrossEntropy(NamedTuple):
    """The student's cross-entropy of the label, at temperature 1."""

    nll: Tensor  # (C,) float64
    lse: _Lse
    y: Tensor  # (C,)
    weight: float  # of its gradient by the logits that are divided by the temperature
    temperature: float

    def gradient(self, s: Tensor, begin: int) -> Tensor:
        """``weight * (softmax - onehot) (v, C)`` of a tile of logits."""
        g = self.lse.taken_from(torch.mul(s, self.temperature)).exp_()
        at, inside = label_entry(self.y, begin, len(g))
        of_label = (-self.nll).expm1().to(g.dtype)
        g.scatter_(0, at, torch.where(inside, of_label, g.gather(0, at)[0])[None])
        return g.mul_(self.weight)


class _ToTeacher:
    """The student's logits of one chunk after another beside the teacher's."""

    def __init__(
        self, problem: Problem, divergence: Divergence, most: int, step: int, shard: Shard | None
    ) -> None:
        self.problem, self.divergence, self.step, self.shard = problem, divergence, step, shard
        self.student, self.teacher = divergence.student(problem), divergence.teacher()
        self.logits = Logits(self.student, Products.of(problem.hidden))
        self.teacher_logits = Logits(self.teacher.projection, Products.of(self.teacher.hidden))
        self.of_student, self.of_teacher = (_buffer(problem, most) for _ in range(2))
        self.scratch = [_buffer(problem, most, self.step) for _ in range(2)]

    def start(self, h: Tensor, chunk: Tensor, classes: int) -> None:
        """Make the logits of ``h (C, H)``, positions ``chunk``, by products of ``classes``."""
        problem, divergence = self.problem, self.divergence
        V, C = len(problem.weight), len(h)
        self.s, self.t = (x[: V * C].view(V, C) for x in (self.of_student, self.of_teacher))
        of_student, of_teacher = _Exponentials(), _Exponentials()
        y, temperature = _rows_of(problem.labels[chunk], self.shard), divergence.temperature
        ce = TileStats(y, self.s.dtype) if divergence.ce_weight else None
        here = self.logits.operand(h)
        there = self.teacher_logits.operand(self.teacher.hidden[chunk])
        for begin, end in tiles(V, classes):
            s = self.logits.tile(here, begin, end, out=self.s[begin:end])
            t = self.teacher_logits.tile(there, begin, end, out=self.t[begin:end])
            for first, s_part, t_part in zip(
                range(begin, end, self.step), s.split(self.step), t.split(self.step), strict=True
            ):
                scratch = self.scratch[0][: s_part.numel()].view_as(s_part)
                of_student.take(s_part, scratch)
                if ce is not None:
                    ce.add(torch.mul(s_part, temperature, out=scratch), first)
                of_teacher.take(t_part, scratch)
        lse, lse_t = of_student.lse(y), of_teacher.lse(y)
        of_label: tuple[Tensor, ...] = () if ce is None else (ce.losses(), ce.lse())
        if self.shard is not None:
            (lse, lse_t), of_label = _over_ranks([lse, lse_t], ce, V, self.shard)
        self.lse, self.lse_t = _Lse.of(lse, h.dtype), _Lse.of(lse_t, h.dtype)
        self.half_shift = ((lse_t - lse) / 2).to(h.dtype)
        self.kl, self.mean, self.total = (torch.zeros_like(lse) for _ in range(3))
        self._add_impossible(lse, lse_t)
        self.ce = None
        if ce is not None:
            weight = divergence.ce_weight * temperature
            nll, ce_lse, *_ = of_label
            self.ce = _CrossEntropy(nll, _Lse.of(ce_lse, h.dtype), y, weight, temperature)
        if divergence.kind != FORWARD:  # the gradient needs the divergence itself
            for begin, end in tiles(V, self.step):
                self._walk(begin, end)
            if self.shard is not None:
                of_all = sums([self.kl, self.mean, self.total], self.shard)
                self.kl, self.mean, self.total = of_all
        # The sum of q is not 1, for their log-sum-exps were rounded, and the mean is too large by
        # the same factor. (For "reverse" it is known. Logits that are all -inf need the clamp.)
        if divergence.kind == REVERSE:
            taken = self.lse.high.double() + (0 if self.lse.low is None else self.lse.low)
            self.mean *= (taken - lse).clamp_(-1, 1).exp_()
        if divergence.kind == JSD:
            self.mean /= self.total

    def _add_impossible(self, lse: Tensor, lse_t: Tensor) -> None:
        """Make the divergence infinite where a bias of -inf excludes what the other head may give.

        The walk takes -inf for a large number, times which a small probability would be finite.
        """
        heads = [(self.student, self.s, lse), (self.teacher.projection, self.t, lse_t)]
        if self.divergence.kind == REVERSE:
            heads.reverse()
        (head, _, _), (other, z, norm) = heads
        if self.divergence.kind == JSD or head.bias is None or head.softcap is not None:
            return
        excluded = head.bias <= -NEVER
        if other.bias is not None:
            excluded &= other.bias > -NEVER
        for some in chunks_of(excluded.nonzero()[:, 0], self.step):
            given = (z[some].double() - norm).exp_().amax(0)  # above 0 as far as float64 goes
            self.kl.masked_fill_(given > 0, math.inf)

    def losses(self) -> Tensor:
        """``(C,)`` float64, once all tiles were walked over."""
        kl = self.kl
        if self.shard is not None and self.divergence.kind == FORWARD:
            (kl,) = sums([kl], self.shard)
        loss = kl.masked_fill(kl >= INFINITE, torch.inf)
        return loss if self.ce is None else loss + self.divergence.ce_weight * self.ce.nll

    def gradient(self, begin: int, end: int) -> None:
        """Write the gradient of a tile, by logits over the temperature, in their place."""
        if self.divergence.kind == FORWARD:
            self._walk(begin, end)
            return
        # q x - q mean, with q x in t
        s, t = self.s[begin:end], self.t[begin:end]
        torch.addcmul(t, s, self.mean.to(s.dtype), value=-1, out=s)

    def _walk(self, begin: int, end: int) -> None:
        """Add a tile's part of the divergence, and overwrite its logits for :meth:`gradient`.

        Contents of the four buffers, ``(v, C)`` each:

        ======  ================  ==============================  =================================
        buffer  before            while it runs                   after
        ======  ================  ==============================  =================================
        s       student's logits  q; "jsd": max(p, q)             "forward": the gradient; else q
        t       teacher's logits  p + q; "jsd": -abs(log p/q)     "forward": scratch; else q * x
        first   scratch           h; "jsd": log p/q               scratch
        second  scratch           tanh(h); "jsd": exp of t        scratch
        ======  ================  ==============================  =================================

        ``h`` is the module's, called ``half`` here. The gradient of the last two kinds is ``q * (x
        - mean)`` with x a logarithm; ``self.mean`` sums ``q * x`` over the classes, for "jsd"
        ``self.total`` sums q. The results of "jsd" in s and t hold the factor ``1 - beta``.
        """
        s, t = self.s[begin:end], self.t[begin:end]
        first, second = (x[: s.numel()].view_as(s) for x in self.scratch)
        slope = self.student.slope(s)
        more = None if self.ce is None else self.ce.gradient(s, begin)
        half = torch.sub(s, t, out=first)
        torch.add(self.half_shift, half, alpha=0.5, out=half)
        if self.divergence.kind == JSD:
            self._jsd(s, t, half, second)
        else:
            self._kl(s, t, half, second)
        written = [s] if self.divergence.kind == FORWARD else [s, t]
        if more is not None:
            written[-1].add_(more)
        if slope is not None:
            for x in written:
                x.mul_(slope)

    # In the two methods below, each assignment names what its buffer holds from there on.

    def _kl(self, s: Tensor, t: Tensor, half: Tensor, scratch: Tensor) -> None:
        tanh = torch.tanh(half, out=scratch)
        q = self.lse.taken_from(s).exp_()  # in s
        both = self.lse_t.taken_from(t).exp_().add_(q)  # p + q, in t
        if self.divergence.kind == FORWARD:
            g = torch.mul(both, tanh, out=s)  # q - p, the gradient
            part = torch.sub(g, both, out=both)  # (p + q) * (tanh - 1), in t
            self.kl += torch.addcmul(g, half, part, out=part).sum(0)
            return
        part = tanh.mul_(both)  # q - p, in scratch
        self.kl -= torch.addcmul(part, half, both.add_(part), value=-1, out=part).sum(0)
        torch.mul(half.mul_(2), q, out=t)  # q log(q / p)
        self.mean += t.sum(0)

    def _jsd(self, s: Tensor, t: Tensor, half: Tensor, scratch: Tensor) -> None:
        beta = self.divergence.beta
        big = torch.maximum(self.lse.taken_from(s), self.lse_t.taken_from(t), out=s).exp_()  # in s
        d = half.mul_(-2)  # log p - log q, in half
        minus = torch.abs(d, out=t).neg_()  # -|d|, in t
        teacher = d > 0  # has the larger probability
        ratio = torch.exp(minus, out=scratch)  # of the smaller probability to the larger one
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
        self.kl -= part.mul_(big).sum(0)
        torch.mul(d.clamp_(min=0).add_(log).neg_(), q, out=t)  # q log(q / m)
        self.mean += t.sum(0)
        self.total += q.sum(0)
        t.mul_(1 - beta)
        torch.mul(q, 1 - beta, out=s)


class _ToTargets:
    """The student's logits of one chunk after another beside given probabilities ``t``.

    The cross-entropy is ``T * nll[y] + sum over v of t[v] * (z[y] - z[v])``, with ``T`` the sum of
    ``t`` and ``y`` its largest class: where the student is sure of ``y``, nothing cancels.
    """

    def __init__(
        self, problem: Problem, divergence: Divergence, most: int, step: int, shard: Shard | None
    ) -> None:
        self.problem, self.divergence, self.step, self.shard = problem, divergence, step, shard
        self.student = divergence.student(problem)
        self.logits = Logits(self.student, Products.of(problem.hidden))
        self.of_student = _buffer(problem, most)
        self.scratch = [_buffer(problem, most, self.step) for _ in range(2)]

    def start(self, h: Tensor, chunk: Tensor, classes: int) -> None:
        """Make the logits of ``h (C, H)``, positions ``chunk``, by products of ``classes``."""
        V, C = len(self.problem.weight), len(h)
        self.chunk, self.s = chunk, self.of_student[: V * C].view(V, C)
        total = torch.zeros(C, dtype=torch.float64, device=h.device)  # of all classes but y
        of_label, y = total - math.inf, torch.zeros_like(chunk)
        for begin, end in tiles(V, self.step):
            t = self._weighed(begin, end)
            value, place = t.max(1)
            total = total + t.scatter_(1, place[:, None], 0).sum(1)
            less = torch.minimum(value, of_label)
            total += less.masked_fill_(less == -math.inf, 0)
            y = torch.where(value > of_label, place + begin, y)
            of_label = torch.maximum(value, of_label)
        if self.shard is not None:
            of_label, y, total = largest(of_label, y, total, self.shard)
        self.y = y
        stats, here = TileStats(self.y, h.dtype), self.logits.operand(h)
        for begin, end in tiles(V, classes):
            s = self.logits.tile(here, begin, end, out=self.s[begin:end])
            for first, part in zip(range(begin, end, self.step), s.split(self.step), strict=True):
                stats.add(self.scratch[0][: part.numel()].view_as(part).copy_(part), first)
        nll, lse, self.z_label = stats.losses(), stats.lse(), stats.z_label
        if self.shard is not None:
            _, (nll, lse, z_label) = _over_ranks([], stats, V, self.shard)
            self.z_label = z_label.to(h.dtype)
        z_loss = self.problem.z_loss
        of_all = total + of_label
        of_lse = 2 * z_loss * lse
        self.lse = _Lse.of(lse, h.dtype)
        self.alpha = (of_all + of_lse).to(h.dtype)
        self.at_label = (of_all * (-nll).expm1() + total + of_lse * (-nll).exp()).to(h.dtype)
        self.loss = of_all * nll + z_loss * lse.square()
        self.apart = torch.zeros_like(self.loss)  # what the walk over the tiles adds

    def losses(self) -> Tensor:
        """``(C,)`` float64, once all tiles were walked over."""
        apart = self.apart if self.shard is None else sums([self.apart], self.shard)[0]
        loss = self.loss + apart
        return loss.masked_fill(loss >= INFINITE, torch.inf)

    def gradient(self, begin: int, end: int) -> None:
        """Write the gradient of a tile in the logits' place."""
        s = self.s[begin:end]
        slope = self.student.slope(s)
        t = self._weighed(begin, end).t()
        t = self.scratch[1][: t.numel()].view_as(s).copy_(t)
        behind = torch.sub(self.z_label, s, out=self.scratch[0][: s.numel()].view_as(s))
        self.apart += behind.mul_(t).sum(0)
        g = self.lse.taken_from(s).exp_().mul_(self.alpha).sub_(t)
        at, inside = label_entry(self.y, begin, len(g))
        g.scatter_(0, at, torch.where(inside, self.at_label, g.gather(0, at)[0])[None])
        if slope is not None:
            g.mul_(slope)

    def _weighed(self, begin: int, end: int) -> Tensor:
        """``(C, v)`` of a tile: class weights times smoothed probabilities."""
        t = self.divergence.given()[:, begin:end].index_select(0, self.chunk).to(self.s.dtype)
        if smoothing := self.problem.label_smoothing:
            V = len(self.problem.weight) if self.shard is None else self.shard.V
            t.mul_(1 - smoothing).add_(smoothing / V)
        if self.problem.class_weight is not None:
            t.mul_(self.problem.class_weight[begin:end].to(t.dtype))
        return t


def _rows_of(labels: Tensor, shard: Shard | None) -> Tensor:
    """``(C,)`` int64 labels as rows of the weight; out of range where they lie elsewhere."""
    return labels.long() if shard is None else labels.long() - shard.first


def _over_ranks(
    lses: list[Tensor],  # (C,) of classes here
    stats: TileStats | None,  # of the classes here
    V: int,  # classes here
    shard: Shard,
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Log-sum-exps over all ranks; the label's loss, log-sum-exp and logit if there are ``stats``.

    Collectives: one all-gather of a float64 a token for each log-sum-exp, and two for the stats.
    """
    rows = list(lses)
    if stats is not None:
        inside = (stats.y >= 0) & (stats.y < V)
        rows += [stats.others(), stats.z_label.masked_fill(~inside, -math.inf)]
    of_all = of_ranks(rows, shard)
    merged = [x.logsumexp(0) for x in of_all[: len(lses)]]
    if stats is None:
        return merged, ()
    others, z_labels = of_all[len(lses) :]
    y = stats.y + shard.first
    nll, lse = nll_and_lse(others.logsumexp(0), z_labels, (y >= 0) & (y < shard.V))
    return merged, (nll, lse, z_labels.amax(0))


def _buffer(problem: Problem, tokens: int, classes: int | None = None) -> Tensor:
    size = tokens * (len(problem.weight) if classes is None else classes)
    return torch.empty(size, dtype=Projection.of(problem).acc, device=problem.hidden.device)
