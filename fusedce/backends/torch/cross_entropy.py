"""The torch backend: cross-entropy and the statistics of tokens, and their gradients.

Of each token the statistics leave the largest logit out: with ``R`` the sum of the others'
exponentials relative to it, and ``T`` that of ``exp(z - top) * (top - z)``, the loss is
``(top - z_label) + log1p(R)`` and the entropy ``log1p(R) + T / (1 + R)``. No term is negative, so
that nothing cancels where one class has nearly all the probability. Tiles are merged, and so are
the ranks of a sharded vocabulary, by the same rule (:func:`merged`).

The gradient by a row of logits is ``p * (alpha - beta * log p) + gamma * c``, but a number of its
own at the label (:class:`Upstream`). The factors of a sum follow from its statistics, those of
tokens come from upstream.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusedce.backends.gradients import Dtypes, Gradients, call_of, check_budget
from fusedce.backends.plan import Way, tile_classes, tiles_of
from fusedce.backends.shards.merge import Mass, Merge, merged
from fusedce.backends.torch.logit_tiles import Logits, label_entry, tiles
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import Rows, blocks_of, chunks_of, valid_rows
from fusedce.backends.torch.walk import by_tiles
from fusedce.backends.two_passes import losses_and_upstream
from fusedce.contract.objective import Stats, Upstream, token_losses
from fusedce.contract.problem import Problem, Projection, Wanted

_WIDENED = 2**22  # elements of the head's rows whose copy in float32 lies beside a tile
_NEAR = 15  # nats: logits of that size have exponentials near 1, as far as a float32 goes


class Seen:
    """Statistics of a chunk's logits, gathered tile by tile."""

    def __init__(
        self,
        problem: Problem,
        y: Tensor,  # (C,) labels as rows of the weight; out of range where they lie elsewhere
        *,
        moments: bool,
        zmean: bool,
        temperature: Tensor | None = None,  # (C,)
        known: Tensor | None = None,  # (C,) bool: labels that are classes, here or elsewhere
        keep: bool = True,  # tiles as they are; else they become exponentials, without moments
    ) -> None:
        acc = Projection.of(problem).acc
        self.y, self.moments, self.temperature, self.acc = y, moments, temperature, acc
        wide = torch.zeros(len(y), dtype=torch.float64, device=y.device)
        lowest = wide + torch.finfo(acc).min
        self.mass = Mass(lowest, wide - 1, wide, torch.zeros_like(y))
        known = (y >= 0) & (y < len(problem.weight)) if known is None else known
        self.z_label = torch.where(known, -math.inf, math.nan).to(acc)
        self.zsum = wide.clone() if zmean else None
        c = problem.class_weight
        self.c = None if c is None or not zmean else c.to(acc)
        self._scratch = problem.weight.new_empty(0, dtype=acc)
        # Of the exponentials in each tile, by its first class.
        self.references: dict[int, Tensor] | None = None if keep or moments else {}

    def see(self, z: Tensor, begin: int) -> None:
        """Take in a tile ``z (v, C)``.

        One reference a tile and token is enough for its exponentials: 0 where all are near 1.
        """
        if self.temperature is not None:
            z.div_(self.temperature)
        at, inside = label_entry(self.y, begin, len(z))
        self.z_label = torch.where(inside, z.gather(0, at)[0], self.z_label)
        if self.zsum is not None:
            self.zsum += _column_sums(z, None if self.c is None else self.c[begin : begin + len(z)])
        lowest = torch.finfo(z.dtype).min
        d = z if self.references is not None else self._scratch_like(z)
        if self.moments:
            top, best = z.max(0)  # takes as long as an exponential; ten times as long as `amax`
            e = torch.sub(z, k := top.clamp(min=lowest), out=d).clamp_(min=lowest).exp()
            e.scatter_(0, best[None], 0)
            rest, best = e.sum(0).double(), best + begin
            moment = e.mul_(d).sum(0).neg_().double()  # (0 * inf is NaN, hence the clamp)
        else:  # the label is left out, and added at the end
            own = z.gather(0, at)
            z.scatter_(0, at, own.masked_fill(inside, -math.inf))
            top, best = z.amax(0), self.mass.best
            k = top.clamp(min=lowest).masked_fill_(top.abs() <= _NEAR, 0)
            e = torch.exp(z, out=d) if _all_zero(k) else torch.sub(z, k, out=d).exp_()
            if self.references is None:
                z.scatter_(0, at, own)
            else:
                self.references[begin] = k
            rest = e.sum(0).double() - 1
            moment = torch.zeros_like(rest)
        rest = rest.masked_fill_(top == -math.inf, -1)
        self.mass = merged(self.mass, Mass(k.double(), rest, moment, best))

    def _scratch_like(self, z: Tensor) -> Tensor:
        if self._scratch.numel() < z.numel():
            self._scratch = self._scratch.new_empty(z.numel())
        return self._scratch[: z.numel()].view_as(z)

    def finish(self) -> None:
        """All tiles, of all ranks, were seen."""
        if not self.moments:
            z, none = self.z_label.double(), torch.zeros_like(self.mass.top)
            label = Mass(z.clamp(min=torch.finfo(self.acc).min), none, none, self.mass.best)
            self.mass = merged(self.mass, label)

    def nll(self) -> Tensor:
        """``(C,)`` float64; NaN where the label is no class or its logit +inf."""
        z = self.z_label.double()
        bad = torch.zeros_like(z).masked_fill_(z == math.inf, math.nan)
        return (self.mass.top - z) + self.mass.rest.log1p() + bad

    def lse(self) -> Tensor:
        """``(C,)`` float64."""
        return self.mass.lse()

    def entropy(self) -> Tensor:
        """``(C,)`` float64, with ``moments``."""
        return self.mass.entropy()


class Factors:
    """An :class:`Objective` whose statistics and factors of the gradient are known."""

    def __init__(
        self,
        problem: Problem,
        rows: Rows,
        y: Tensor,  # (C,) as in Seen
        lse: Tensor,  # (C,)
        upstream: Upstream,  # of these tokens
        temperature: Tensor | None = None,  # (C,)
        references: dict[int, Tensor] | None = None,  # where tiles are exponentials (see Seen)
    ) -> None:
        head = Projection.of(problem)
        self.problem, self.rows, self.label, self.head = problem, rows, y, head
        self.y, self.at_classes = y[None], None
        if upstream.classes is not None and upstream.at_classes is not None:
            self.y = torch.cat([self.y, upstream.classes.t()])
            self.at_classes = upstream.at_classes.t().to(head.acc)
        self.temperature = temperature
        lse, acc, scale = lse.double(), head.acc, head.scale
        k = lse.masked_fill(lse.abs() <= _NEAR, 0).to(acc)
        # exp(z - lse) is exp(z - k) times a factor, and differences to 0 are exact.
        below = k.double() - lse
        to_p = below.exp()
        alpha = upstream.alpha.double()
        beta, gamma = (None if x is None else x.double() for x in (upstream.beta, upstream.gamma))
        self.k = None if _all_zero(k) else k
        self.lse, self.of_p, self.references = lse, scale * alpha, references
        self.alpha = (scale * to_p * (alpha if beta is None else alpha - beta * below)).to(acc)
        self.beta = None if beta is None else (-scale * to_p * beta).to(acc)
        self.gamma = None if gamma is None else (scale * gamma).to(acc)
        self.at_label = (scale * upstream.at_label).to(acc)

    def gradient(self, z: Tensor, begin: int) -> Tensor:
        """The derivative by the products."""
        slope = None if self.references is not None else self.head.slope(z)
        if self.temperature is not None:
            z.div_(self.temperature)
        d = z if self.k is None or self.references is not None else z.sub_(self.k)
        if self.references is not None:
            to_p = (self.references[begin].double() - self.lse).exp_()
            g = z.mul_((to_p * self.of_p).to(z.dtype))
        elif self.beta is None:
            g = d.exp_().mul_(self.alpha)
        else:  # (p is 0 where log p is -inf)
            g = d.exp()
            g.mul_(d.clamp_(min=torch.finfo(g.dtype).min).mul_(self.beta).add_(self.alpha))
        if self.gamma is not None:
            if self.problem.class_weight is None:
                g.add_(self.gamma)
            else:
                c = self.problem.class_weight[begin : begin + len(g)]
                g.addr_(c.to(g.dtype), self.gamma)
        at, inside = label_entry(self.label, begin, len(g))
        g.scatter_(0, at, torch.where(inside, self.at_label, g.gather(0, at)[0])[None])
        if slope is not None:
            g.mul_(slope)
        if self.at_classes is not None:
            at, inside = label_entry(self.y[1:], begin, len(g))
            entries = self.at_classes.masked_fill(~inside, 0)
            # A class may stand twice in a token's labels. Elsewhere than on a CPU one operation
            # would add the two in any order.
            step = len(at) if g.device.type == "cpu" else 1
            for some, x in zip(at.split(step), entries.split(step), strict=True):
                g.scatter_add_(0, some, x)
        return g


class SumOfLosses:
    """An :class:`Objective`: the losses of a chunk, whose factors follow from its statistics."""

    needs_gradient = False

    def __init__(
        self,
        problem: Problem,  # of the classes here; token weights are the chunk's
        rows: Rows,
        labels: Tensor,  # (C,) among all classes
        factor: Tensor,
        *,
        argmax: bool,
        first: int,  # the class of the first row here
        V: int,  # classes, of which not all may lie here
        merge: Merge | None,  # over the ranks of a sharded vocabulary
    ) -> None:
        self.problem, self.rows, self.labels, self.factor = problem, rows, labels, factor
        self.V, self.label, self._merge = V, labels - first, merge
        known = (labels >= 0) & (labels < self.V)
        smoothing = problem.label_smoothing > 0
        capped = problem.softcap is not None  # its slope is that of the logits
        self.seen = Seen(
            problem, self.label, moments=argmax, zmean=smoothing, known=known, keep=capped
        )
        self.see = self.seen.see

    def merge(self, z: Tensor) -> None:
        """Losses, and the factors of their gradients."""
        seen, problem = self.seen, self.problem
        if self._merge is not None:
            self._merge.seen(seen)
        seen.finish()
        self.nll, lse = seen.nll(), seen.lse()
        zmean = None if seen.zsum is None else seen.zsum / self.V
        self.lost, upstream = losses_and_upstream(
            problem, self.labels.clamp(0, self.V - 1), self.nll, lse, zmean, self.factor, self.V
        )
        references = seen.references
        factors = Factors(problem, self.rows, self.label, lse, upstream, references=references)
        self.gradient, self.y = factors.gradient, factors.y

    def losses(self) -> Tensor:
        """``(C,)`` float64."""
        return self.lost


def token_stats(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Stats:
    """One pass over the logits; holds one tile of them."""
    rows, n_valid = valid_rows(problem)
    N, acc, device = len(problem.labels), Projection.of(problem).acc, problem.hidden.device
    check_budget(problem, call_of(problem, wanted, len(rows)))

    def out(wanted: bool) -> Tensor:
        return torch.zeros(N if wanted else 0, dtype=acc, device=device)

    stats = Stats(out(True), out(wanted.lse), out(wanted.entropy), out(wanted.zmean), n_valid)
    if argmax is not None:
        argmax.fill_(-1)
        stats = stats._replace(top=out(True))
    way = tiles_of(call_of(problem, Wanted(), len(rows)), memory_budget=problem.memory_budget)
    for block, seen in _seen(problem, blocks_of(rows, way.tokens), way, wanted):
        found = {"nll": seen.nll}
        found |= {"lse": seen.lse} if wanted.lse else {}
        found |= {"entropy": seen.entropy} if wanted.entropy else {}
        for name, x in found.items():
            getattr(stats, name)[block] = x().to(acc)
        if seen.zsum is not None:
            stats.zmean[block] = (seen.zsum / len(problem.weight)).to(acc)
        if argmax is not None and stats.top is not None:
            argmax[block], stats.top[block] = seen.mass.best, seen.mass.top.to(acc)
    return stats


def loss(problem: Problem) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64; holds one tile of logits."""
    rows, n_valid = valid_rows(problem)
    call = call_of(problem, Wanted(), len(rows))
    way = tiles_of(call, memory_budget=problem.memory_budget)
    logits = Logits(Projection.of(problem), Products.of(problem.hidden))
    if problem.memory_budget is None:  # of few tokens, more classes fit into the cache
        most = tile_classes(call, None, way.tokens)
        if logits.products.logits != problem.hidden.dtype:
            most = min(most, _WIDENED // max(problem.hidden.shape[1], 1))
        way = way._replace(classes=max(way.classes, most))
    way = way._replace(classes=logits.step(way))
    total = torch.zeros((), dtype=torch.float64, device=problem.hidden.device)
    for block, seen in _seen(problem, chunks_of(rows, way.tokens), way, Wanted()):
        of_block = problem.rows(block)
        total += token_losses(of_block, seen.y, seen.nll(), seen.lse(), None).sum()
    return total.to(logits.head.acc), n_valid


def _seen(
    problem: Problem, blocks: Iterable[Rows], way: Way, wanted: Wanted
) -> Iterator[tuple[Rows, Seen]]:
    """Each block, and the statistics of its tokens."""
    logits = Logits(Projection.of(problem), Products.of(problem.hidden))
    t = problem.temperature
    for block in blocks:
        h = logits.operand(problem.hidden[block])
        seen = Seen(
            problem, problem.labels[block].long(),
            moments=wanted.entropy or wanted.argmax, zmean=wanted.zmean,
            temperature=None if t is None else t[block], keep=False,
        )  # fmt: skip
        for begin, end in tiles(len(problem.weight), way.classes):
            seen.see(logits.tile(h, begin, end), begin)
        seen.finish()
        yield block, seen


def token_grads(
    problem: Problem,
    wanted: Wanted,
    lse: Tensor,  # (N,)
    upstream: Upstream,
    dtypes: Dtypes,
) -> tuple[Tensor, Tensor, Tensor]:
    """The wanted gradients, from logits computed anew; holds one tile of them."""
    rows = (problem.valid() & upstream.used).nonzero()[:, 0]
    way = tiles_of(
        call_of(problem, wanted, len(rows), dtypes),
        chunk_tokens=problem.chunk_tokens,
        memory_budget=problem.memory_budget,
    )
    grads = Gradients(problem, wanted, dtypes=dtypes, chunks=len(rows), by_tiles=True)
    t, y = problem.temperature, problem.labels.long().clamp(0, len(problem.weight) - 1)
    blocks: list[Any] = [
        Factors(problem, block, y[block], lse[block], _at(upstream, block),
                None if t is None else t[block])
        for block in blocks_of(rows, way.tokens)
    ]  # fmt: skip
    logits = Logits(Projection.of(problem), Products.of(problem.hidden))
    by_tiles(problem, logits, blocks, way, grads)
    return grads.written()


def _at(upstream: Upstream, rows: Rows) -> Upstream:
    """Factors of the tokens ``rows``; 0 at rows that repeat the one before (see `blocks_of`)."""
    chosen = [None if x is None else x[rows] for x in upstream]
    if isinstance(rows, torch.Tensor):
        again = torch.zeros_like(rows, dtype=torch.bool)
        again[1:] = rows[1:] == rows[:-1]
        chosen = [
            x if x is None else x.masked_fill(again if x.dim() == 1 else again[:, None], 0)
            for x in chosen
        ]
    return Upstream(*chosen)  # type: ignore[arg-type]


def _all_zero(k: Tensor) -> bool:
    """Whether there is nothing to subtract; asked of no GPU, which would be waited for."""
    return k.device.type == "cpu" and not k.any()


def _column_sums(z: Tensor, c: Tensor | None) -> Tensor:
    """``sum_v c_v z_v (C,)`` float64 of a tile ``z (v, C)``; a class of weight 0 adds 0."""
    if c is None:
        return z.sum(0).double()
    return torch.mv(z.masked_fill((c == 0)[:, None], 0).t(), c).double()
