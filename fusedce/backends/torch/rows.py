"""Which rows count."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedce.backends.plan import ROW_MULTIPLE
from fusedce.contract.labels import bad_label_code, bad_label_message
from fusedce.contract.problem import Problem
from fusedce.contract.task import Shard

Rows = slice | Tensor  # of a matrix; as a slice where they stand side by side


def valid_rows(
    problem: Problem, V: int | None = None, n: int | None = None
) -> tuple[Tensor, Tensor]:
    """Positions with a label to predict and a weight other than 0; the number of the former.

    ``V`` where it is not the number of rows of ``weight``. A bad label raises on a CPU; elsewhere
    the number is a negative code (see `LossSum`) and the label's logit NaN, as with the Triton
    backend. ``n`` positions, where their number is known: then nothing waits for the device, and a
    bad label is a code on a CPU, too.
    """
    labels, token_weight = problem.labels, problem.token_weight
    V = problem.weight.shape[0] if V is None else V
    valid = problem.valid()
    n_valid = valid.sum()
    bad = valid & ((labels < 0) | (labels >= V))
    if len(labels):
        first = bad.int().argmax(0)
        code = bad_label_code(first, labels.gather(0, first[None])[0].long())
        n_valid = torch.where(bad.any(), code, n_valid)
    if n is None and labels.device.type == "cpu" and n_valid < 0:
        raise ValueError(bad_label_message(int(n_valid), V, problem.ignore_index, labels))
    if token_weight is not None:
        valid = valid & ((token_weight != 0) | bad)
    if n is None:
        return valid.nonzero()[:, 0], n_valid
    return valid.int().argsort(descending=True, stable=True)[:n], n_valid


def counted_rows(problem: Problem, shard: Shard) -> tuple[Tensor, Tensor]:
    """Find rows as :func:`valid_rows` does, without waiting for a device: their number is known."""
    on_cpu = problem.labels.device.type == "cpu"
    return valid_rows(problem, shard.V, None if on_cpu else shard.counted)


def chunks_of(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    """``rows`` in chunks; none at all where there is no row."""
    return rows.split(size) if len(rows) else ()


def blocks_of(rows: Tensor, size: int) -> Iterator[Rows]:
    """``rows`` in blocks whose lengths are multiples of `ROW_MULTIPLE`, where ``size`` is one.

    The last block repeats its last row: libraries compute the last few rows of a matrix with other
    instructions, and a token would have other bits there.
    """
    for block in chunks_of(rows, size):
        missing = 0 if size % ROW_MULTIPLE else -len(block) % ROW_MULTIPLE
        if missing:
            yield torch.cat([block, block[-1:].expand(missing)])
        elif block.device.type == "cpu" and block[-1] - block[0] == len(block) - 1:
            yield slice(int(block[0]), int(block[-1]) + 1)
        else:
            yield block
