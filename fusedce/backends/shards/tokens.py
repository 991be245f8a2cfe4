"""A backend's statistics of tokens and their gradients, over the classes of all ranks.

Each rank gives the backend its own rows as a vocabulary of their own. A token whose label lies on
another rank has its label in row 0 for the statistics, whose sums over the ranks leave that out;
for the gradients it has none. The ranks exchange a few numbers a token, and in backward, where each
of them computes the logits of its classes again, their addends of ``d_hidden`` are summed once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.choose import Backend
from fusedce.backends.gradients import Dtypes, Gradients
from fusedce.backends.shards.collectives import (
    all_reduce,
    entropy_of,
    label_and_others,
    nll_and_lse,
    of_ranks,
)
from fusedce.contract.labels import used_tokens
from fusedce.contract.objective import Stats, Upstream
from fusedce.contract.problem import Problem, Shard, Wanted, acc_dtype


class OfShard(NamedTuple):
    """The two functions of a backend; the problems' labels are among all classes."""

    backend: Backend
    shard: Shard

    def token_stats(self, problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Stats:
        """Statistics over all ranks' classes, equal on all ranks.

        Collectives: one all-gather of float64 numbers a token: two, one more each for entropy and
        mean logit, two more for argmax.
        """
        V, acc = self.shard.V, acc_dtype(problem.hidden.dtype)
        used, n_valid = used_tokens(problem, V)
        mine = self._of_here(problem, wanted, used)
        others, z_labels, *more = of_ranks(mine, self.shard)  # (ranks, N) each
        known = (problem.labels >= 0) & (problem.labels < V)
        nll, lse = nll_and_lse(others.logsumexp(0), z_labels, known)
        total = torch.logaddexp(others, z_labels)  # of each shard
        entropy = entropy_of(total, lse, more.pop(0)) if wanted.entropy else None
        zmean = more.pop(0).sum(0) / V if wanted.zmean else None
        if argmax is not None:
            tops, classes = more
            likeliest = classes.gather(0, tops.argmax(0, keepdim=True))[0].long()
            argmax.copy_(likeliest.masked_fill_(~used, -1))

        def rounded(x: Tensor | None) -> Tensor:
            return nll.new_empty(0, dtype=acc) if x is None else x.to(acc).masked_fill(~used, 0)

        lse = lse.masked_fill(~used, 0) if wanted.lse else lse[:0]
        return Stats(rounded(nll), lse, rounded(entropy), rounded(zmean), n_valid, argmax)

    def _of_here(self, problem: Problem, wanted: Wanted, used: Tensor) -> list[Tensor]:
        """Numbers for the other ranks, ``(N,)`` float64 each.

        These are the log-sum-exp of the logits but the label's, the label's logit where it lies
        here, entropy, sum of the logits, the largest logit and its class.
        """
        V, N, device = len(problem.weight), len(used), used.device
        nowhere = torch.full((N,), -math.inf, dtype=torch.float64, device=device)
        if not V:
            none = torch.zeros_like(nowhere)
            more = [none] * (wanted.entropy + wanted.zmean)
            return [nowhere, nowhere, *more, *[nowhere, none][: 2 * wanted.argmax]]
        local, here = self._local(problem, used, elsewhere=0)
        argmax = torch.empty(N, dtype=torch.int64, device=device) if wanted.argmax else None
        found = self.backend.token_stats(local, wanted.but(lse=True), argmax)
        z, others = label_and_others(found.nll, found.lse)
        mine = [torch.where(here, others, found.lse.double()), torch.where(here, z, nowhere)]
        if wanted.entropy:
            mine.append(found.entropy.double())
        if wanted.zmean:
            mine.append(found.zmean.double() * V)
        if argmax is not None and found.top is not None:
            mine += [found.top.double(), (argmax + self.shard.first).double()]
        return mine

    def token_grads(
        self, problem: Problem, wanted: Wanted, lse: Tensor, upstream: Upstream, dtypes: Dtypes
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's inputs.

        Collectives: one all-reduce of ``(N, H)`` in float32, if that of hidden is wanted.
        """
        dtype, V = dtypes.hidden, len(problem.weight)
        dtypes = dtypes._replace(hidden=acc_dtype(problem.hidden.dtype))
        if V:
            local, _ = self._local(problem, problem.valid() & upstream.used, elsewhere=V)
            if upstream.classes is not None:
                classes = upstream.classes - self.shard.first
                classes = classes.masked_fill((classes < 0) | (upstream.classes < 0), -1)
                upstream = upstream._replace(classes=classes)
            made = self.backend.token_grads(local, wanted, lse, upstream, dtypes)
        else:
            # (Not like hidden: a collective sends memory as it lies.)
            grads = Gradients(problem, wanted, dtypes=dtypes, chunks=0, by_tiles=True)
            made = grads.written()
        d_hidden, d_weight, d_bias = made
        if wanted.hidden:
            all_reduce(d_hidden, self.shard.group)
        return d_hidden.to(dtype), d_weight, d_bias

    def _local(self, problem: Problem, used: Tensor, *, elsewhere: int) -> tuple[Problem, Tensor]:
        """The tokens ``used (N,)`` over the classes here; and where labels lie here, ``(N,)``.

        ``elsewhere`` is the label of a token whose own lies on another rank.
        """
        V, c = len(problem.weight), problem.class_weight
        y = problem.labels.long() - self.shard.first
        here = (y >= 0) & (y < V)
        return problem.but(
            labels=torch.where(here, y, elsewhere).masked_fill_(~used, -100),
            ignore_index=-100,
            token_weight=None,
            class_weight=None if c is None else c[self.shard.first : self.shard.first + V],
        ), here
