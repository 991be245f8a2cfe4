"""Selection of the tokens that count, and their division into chunks and blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedce.backends.plan import ROW_MULTIPLE
from fusedce.contract.labels import bad_label_code, bad_label_message
from fusedce.contract.problem import Problem

Rows = slice | Tensor  # of a matrix; as a slice where they stand side by side


def used_tokens(problem: Problem, V: int) -> tuple[Tensor, Tensor]:
    """``(N,)`` bool: tokens with a label to predict and a weight other than 0; the former's number.

    A bad label raises on a CPU; elsewhere the number is a negative code (see `LossSum`) and the
    label's logit NaN, as with the Triton backend, and nothing waits for the device.
    """
    labels, valid = problem.labels, problem.valid()
    bad = valid & ((labels < 0) | (labels >= V))
    n_valid = count_or_code(labels, valid, bad)
    if labels.device.type == "cpu" and n_valid < 0:
        raise ValueError(bad_label_message(int(n_valid), V, problem.ignore_index, labels))
    if problem.token_weight is not None:
        valid = valid & ((problem.token_weight != 0) | bad)
    return valid, n_valid


def count_or_code(labels: Tensor, valid: Tensor, bad: Tensor) -> Tensor:
    """``()`` int64: the number of ``valid`` tokens, or the code of the first bad label."""
    n_valid = valid.sum()
    if not len(labels):
        return n_valid
    first = bad.int().argmax(0)
    code = bad_label_code(first, labels.gather(0, first[None])[0].long())
    return torch.where(bad.any(), code, n_valid)


def valid_rows(problem: Problem, V: int | None = None) -> tuple[Tensor, Tensor]:
    """Positions of :func:`used_tokens`; the number of tokens with a label to predict.

    ``V``: the number of classes, where it is not that of the rows of ``weight``. Waits for the
    device.
    """
    used, n_valid = used_tokens(problem, problem.weight.shape[0] if V is None else V)
    return used.nonzero()[:, 0], n_valid


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
