"""A rank's shard of the vocabulary, and the collectives of tokens and their gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from fusedce.agreement import ALL_GATHER, not_all_came
from fusedce.backends.gradients import Gradients, call_of
from fusedce.backends.held import Call
from fusedce.contract.problem import Problem, Wanted, acc_dtype
from fusedce.contract.task import Shard

# The name of the collective from torch 2.13 on, and before.
REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


def sharded_call(problem: Problem, shard: Shard, N: int) -> Call:
    """Sizes for a plan, of the largest shard, so that all ranks make the same plan.

    ``N``: the number of all ranks' tokens.
    """
    hidden, H = problem.hidden, problem.hidden.shape[1]
    acc = acc_dtype(hidden.dtype).itemsize
    fixed = N * (acc * H + 64)  # d_hidden, of all tokens beside those that count
    if shard.tokens is not None:
        fixed += N * H * hidden.element_size()
    wanted, triton = Wanted(hidden=True, weight=True), problem.backend == "triton"
    logit = None if triton else acc
    call = call_of(problem, wanted, shard.counted, logit=logit, triton=triton)
    return call._replace(
        N=N, V=max(shard.largest, 1), fixed=fixed, copies=max(call.copies, 3), threads=1,
        budget=shard.budget,
    )  # fmt: skip


def of_classes(grads: Gradients, real: int) -> Gradients:
    """The gradients of the first ``real`` rows, which are classes; those of padding become 0."""
    of_real = copy.copy(grads)
    if grads.weight is not None:
        grads.weight[real:] = 0
        of_real.weight = grads.weight[:real]
    if grads.bias is not None:
        of_real.bias = grads.bias[:real]
    return of_real


def all_tokens(problem: Problem, most: int, group: dist.ProcessGroup) -> Problem:
    """The problem of every rank's tokens, those of each rank padded to ``most`` by ignored ones.

    Collectives: an all-gather each of hidden states, labels, and token weights and temperatures if
    there are any; these two in float64, since ranks may hold them in different dtypes.
    """
    token_weight, temperature = problem.token_weight, problem.temperature
    assert problem.ignore_index is not None
    return problem.but(
        hidden=gather_tokens(problem.hidden, most, 0, group),
        labels=gather_tokens(problem.labels, most, problem.ignore_index, group),
        token_weight=(
            None if token_weight is None else gather_tokens(token_weight.double(), most, 0, group)
        ),
        temperature=(
            None if temperature is None else gather_tokens(temperature.double(), most, 1, group)
        ),
    )


def gather_tokens(x: Tensor, most: int, value: float, group: dist.ProcessGroup) -> Tensor:
    """``x (n, ...)`` of every rank, each padded to ``most`` tokens, one after the other."""
    padded = x.new_full((most, *x.shape[1:]), value)
    padded[: len(x)] = x
    return all_gather(padded, group)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x (n, ...)`` of every rank, one after the other: ``(ranks * n, ...)``."""
    out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    with waiting_for_ranks(group):
        getattr(dist, ALL_GATHER)(out, x.contiguous(), group=group)
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> None:
    """Add up the ranks' ``x`` in place."""
    with waiting_for_ranks(group):
        dist.all_reduce(x, group=group)


@contextlib.contextmanager
def waiting_for_ranks(group: dist.ProcessGroup) -> Iterator[None]:
    """Explain an error of a collective: other ranks have not come in time."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{not_all_came(group, 'compute a loss over a sharded vocabulary')}. Look at what the "
            f"other ranks do: each that shares the vocabulary needs the same calls and backwards, "
            f"in the same order, and one that has failed says why in its own output"
        ) from error


class RunningSums:
    """The ranks' ``d_rows (N_valid, H)``, added up piece by piece beside the computation.

    Sharded tokens are added up in the end.
    """

    def __init__(self, d_rows: Tensor | None, shard: Shard) -> None:
        self._d_rows, self._shard, self._group = d_rows, shard, shard.group
        self._started = 0  # rows
        self._works: list[dist.Work] = []

    def start(self, end: int) -> None:
        """Start the all-reduce of the rows before ``end`` that has not been started."""
        if self._d_rows is not None and self._shard.tokens is None and end > self._started:
            rows = self._d_rows[self._started : end]
            self._works.append(dist.all_reduce(rows, group=self._group, async_op=True))
            self._started = end

    def d_hidden(self, rows: Tensor, N: int, n_here: int) -> Tensor:
        """``d_hidden (n_here, H)`` of this rank's tokens, from that of the valid ``rows`` of ``N``.

        Collectives: an all-reduce of the remaining rows, or a reduce-scatter of ``(N, H)`` if the
        tokens are sharded.
        """
        d_rows, shard = self._d_rows, self._shard
        assert d_rows is not None
        self.start(len(d_rows))
        with waiting_for_ranks(self._group):
            for work in self._works:
                work.wait()
        if shard.tokens is None and len(rows) == N:
            return d_rows
        d_hidden = d_rows.new_zeros(N, d_rows.shape[1])
        d_hidden[rows] = d_rows
        if shard.tokens is None:
            return d_hidden
        mine = d_rows.new_empty(max(shard.tokens), d_rows.shape[1])
        if N:
            with waiting_for_ranks(shard.group):
                getattr(dist, REDUCE_SCATTER)(mine, d_hidden, group=shard.group)
        return mine[:n_here]
