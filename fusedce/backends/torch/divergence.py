"""The torch backend: a student beside a teacher or given probabilities, and its gradients.

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

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fusedce.backends.plan import Call, Way, compared_classes
from fusedce.backends.shards.merge import Merge
from fusedce.backends.torch.cross_entropy import Seen
from fusedce.backends.torch.logit_tiles import Logits, label_entry
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import Rows
from fusedce.contract.divergence import FORWARD, INFINITE, JSD, REVERSE, TARGETS, Divergence
from fusedce.contract.problem import Problem


def compared(divergence: Divergence, call: Call, way: Way) -> Any:
    """The class of objectives, up to the arguments that depend on a chunk."""
    kind = _ToTargets if divergence.kind == TARGETS else _ToTeacher
    return functools.partial(kind, divergence, compared_classes(call, way))


class _Compared:
    """An objective whose losses are complete once its gradient was asked for."""

    needs_gradient = True

    def __init__(
        self,
        divergence: Divergence,
        step: int,  # classes that are compared at a time: they stay in a core's own cache
        problem: Problem,  # token weights are the chunk's
        rows: Rows,
        labels: Tensor,  # (C,) among all classes
        factor: Tensor,
        *,
        argmax: bool,  # (not asked for)
        first: int,
        V: int,
        merge: Merge | None,
    ) -> None:
        self.problem, self.divergence, self.rows, self.step = problem, divergence, rows, step
        self.student = divergence.student(problem)
        self.here, self.acc = len(problem.weight), self.student.acc
        self.V, self._merge = V, merge
        self.label = torch.full_like(labels, -1)
        outer = factor.double() / divergence.temperature * problem.logit_scale
        self.of_rows = self.weighted(torch.ones_like(labels, dtype=torch.float64) * outer)
        self.start(labels - first, (labels >= 0) & (labels < V))

    def start(self, labels: Tensor, known: Tensor) -> None:
        """Before the first tile."""

    def of_part(self, s: Tensor, begin: int) -> Tensor:
        """The derivative by the products of a part of a tile, which it may overwrite."""
        raise NotImplementedError

    def losses(self) -> Tensor:
        """``(C,)`` float64, once the gradient was asked for."""
        raise NotImplementedError

    def weighted(self, x: Tensor) -> Tensor:
        """``x (C,)`` times the tokens' weights."""
        w = self.problem.token_weight
        return x if w is None else x * w.double()

    @property
    def y(self) -> Tensor:
        """``(1, C)`` classes whose entries stand out; out of range for none."""
        return self.label[None]

    def gradient(self, s: Tensor, begin: int) -> Tensor:
        """The derivative by the products."""
        of_rows = self.of_rows.to(self.acc)
        for first in range(0, len(s), self.step):
            part = s[first : first + self.step]
            torch.mul(self.of_part(part, begin + first), of_rows, out=part)
        return s


class _ToTeacher(_Compared):
    """Beside a teacher's logits, which wait as the student's do."""

    def start(self, labels: Tensor, known: Tensor) -> None:
        divergence, problem = self.divergence, self.problem
        teacher = divergence.teacher()
        self.head = Logits(teacher.projection, Products.of(teacher.hidden))
        self.there = self.head.operand(teacher.hidden[self.rows])
        C, device = len(labels), labels.device
        self.t = torch.empty(self.here, C, dtype=self.acc, device=device)
        self.scratch = torch.empty(2, min(self.step, self.here), C, dtype=self.acc, device=device)
        self.seen, self.seen_there = (
            Seen(problem, self.label, moments=False, zmean=False) for _ in range(2)
        )
        self.ce = None
        if divergence.ce_weight:
            self.label = self.labels = labels
            self.ce = Seen(problem, labels, moments=False, zmean=False, known=known)

    def see(self, s: Tensor, begin: int) -> None:
        """Make the teacher's tile, too."""
        t = self.t[begin : begin + len(s)]
        self.head.tile(self.there, begin, begin + len(s), out=t)
        for first in range(0, len(s), self.step):
            part = slice(first, first + self.step)
            self.seen.see(s[part], begin + first)
            self.seen_there.see(t[part], begin + first)
            if self.ce is not None:
                self.ce.see(s[part] * self.divergence.temperature, begin + first)

    def merge(self, z: Tensor) -> None:
        """The divergence itself, where its gradient needs it."""
        if self._merge is not None:
            self._merge.seen(self.seen, self.seen_there, *([] if self.ce is None else [self.ce]))
        if self.ce is not None:
            self.ce.finish()
        lse, lse_t = self.seen.lse(), self.seen_there.lse()
        self.lse, self.lse_t = lse.to(self.acc), lse_t.to(self.acc)
        self.half_shift = ((lse_t - lse) / 2).to(self.acc)
        self.kl, self.mean, self.total = (torch.zeros_like(lse) for _ in range(3))
        self.kind = self.divergence.kind
        if self.kind == FORWARD:
            return
        for begin in range(0, self.here, self.step):
            self._walk(z[begin : begin + self.step], begin)
        if self._merge is not None:
            sums = self._merge.sums(self.kl, self.mean, self.total)
            self.kl, self.mean, self.total = sums
        # The sum of q is not 1, for their log-sum-exps were rounded, and the mean is too large by
        # the same factor. (For "reverse" it is known. Logits that are all -inf need the clamp.)
        if self.kind == REVERSE:
            self.mean *= (self.lse - lse).clamp_(-1, 1).exp_()
        else:
            self.mean /= self.total

    def losses(self) -> Tensor:
        """``(C,)`` float64."""
        kl = self.kl
        if self._merge is not None and self.kind == FORWARD:
            (kl,) = self._merge.sums(kl)
        loss = kl.masked_fill(kl >= INFINITE, torch.inf)
        if self.ce is not None:
            loss += self.divergence.ce_weight * self.ce.nll()
        return self.weighted(loss)

    def of_part(self, s: Tensor, begin: int) -> Tensor:
        """The derivative by the products."""
        if self.kind == FORWARD:
            self._walk(s, begin)
            return s
        # q x - q mean, with q x in t
        t = self.t[begin : begin + len(s)]
        return torch.addcmul(t, s, self.mean.to(s.dtype), value=-1, out=s)

    def _of_ce(self, s: Tensor, begin: int) -> Tensor:
        """``weight * (softmax - onehot)`` at temperature 1."""
        t, ce = self.divergence.temperature, self.ce
        assert ce is not None
        g = (s * t).sub_(ce.lse().to(self.acc)).exp_()
        at, inside = label_entry(self.labels, begin, len(g))
        of_label = (-ce.nll()).expm1().to(self.acc)
        g.scatter_(0, at, torch.where(inside, of_label, g.gather(0, at)[0])[None])
        return g.mul_(self.divergence.ce_weight * t)

    def _walk(self, s: Tensor, begin: int) -> None:
        """Add a tile's part of the divergence, and overwrite its logits for :meth:`of_part`.

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
        t = self.t[begin : begin + len(s)]
        first, second = self.scratch[:, : len(s)]
        slope = self.student.slope(s)
        more = None if self.ce is None else self._of_ce(s, begin)
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
        q = s.sub_(self.lse).exp_()  # in s
        both = t.sub_(self.lse_t).exp_().add_(q)  # p + q, in t
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
        big = torch.maximum(s.sub_(self.lse), t.sub_(self.lse_t), out=s).exp_()  # max(p, q), in s
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


class _ToTargets(_Compared):
    """Beside given probabilities ``t``.

    The cross-entropy is ``T * nll[y] + sum over v of t[v] * (z[y] - z[v])``, with ``T`` the sum of
    ``t`` and ``y`` its largest class: where the student is sure of ``y``, nothing cancels.
    """

    def start(self, labels: Tensor, known: Tensor) -> None:
        wide = torch.zeros_like(labels, dtype=torch.float64)
        top, self.label, others = wide - math.inf, torch.zeros_like(labels), wide
        for begin in range(0, self.here, self.step):
            t = self._weighed(begin, min(begin + self.step, self.here))
            x, at = t.max(1)
            others = others + t.scatter_(1, at[:, None], 0).sum(1)
            less = torch.minimum(x, top)
            others = others + less.masked_fill(less == -math.inf, 0)
            self.label = torch.where(x > top, at + begin, self.label)
            top = torch.maximum(x, top)
        if self._merge is not None:
            top, self.label, others = self._merge.largest(top, self.label, others)
        self.others, self.total = others, others + top
        self.apart = wide.clone()  # what the second walk adds
        self.seen = Seen(self.problem, self.label, moments=False, zmean=False, known=known)

    def see(self, s: Tensor, begin: int) -> None:
        """Take in a tile."""
        self.seen.see(s, begin)

    def merge(self, z: Tensor) -> None:
        """Losses but for what the second walk adds."""
        if self._merge is not None:
            self._merge.seen(self.seen)
        self.seen.finish()
        nll, lse, z_loss = self.seen.nll(), self.seen.lse(), self.problem.z_loss
        self.lse, of_lse = lse.to(self.acc), 2 * z_loss * lse
        self.alpha = (self.total + of_lse).to(self.acc)
        at_label = self.total * (-nll).expm1() + self.others + of_lse * (-nll).exp()
        self.at_label = at_label.to(self.acc)
        self.loss = self.total * nll + z_loss * lse.square()

    def losses(self) -> Tensor:
        """``(C,)`` float64."""
        apart = self.apart
        if self._merge is not None:
            (apart,) = self._merge.sums(apart)
        loss = self.loss + apart
        return self.weighted(loss.masked_fill(loss >= INFINITE, torch.inf))

    def of_part(self, s: Tensor, begin: int) -> Tensor:
        """The derivative by the products."""
        slope = self.student.slope(s)
        t = self._weighed(begin, begin + len(s)).t()
        self.apart += (self.seen.z_label - s).mul_(t).sum(0)
        g = (s - self.lse).exp_().mul_(self.alpha).sub_(t)
        at, inside = label_entry(self.label, begin, len(g))
        g.scatter_(0, at, torch.where(inside, self.at_label, g.gather(0, at)[0])[None])
        return g if slope is None else g.mul_(slope)

    def _weighed(self, begin: int, end: int) -> Tensor:
        """``(C, v)`` of a tile: class weights times smoothed probabilities."""
        t = self.divergence.given()[self.rows, begin:end].to(self.acc, copy=True)
        if smoothing := self.problem.label_smoothing:
            t.mul_(1 - smoothing).add_(smoothing / self.V)
        if self.problem.class_weight is not None:
            t.mul_(self.problem.class_weight[begin:end].to(t.dtype))
        return t
