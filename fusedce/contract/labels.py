"""Labels: the next-token shift, the count of valid tokens, and the codes of bad labels.

The shift and the count belong together. Counting before the shift includes the first label of
every sequence, which no position predicts; a loss divided by that count is too small.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from .checks import (
    can_be_read,
    check_are_tensors,
    check_ignore_index,
    check_int,
    check_labels,
)
from .problem import Problem

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def shift_labels(
    labels: Tensor,  # (..., T) int64 or int32
    *,
    offset: int = 1,
    position_ids: Tensor | None = None,  # (..., T) int
    cu_seqlens: Tensor | None = None,  # (documents + 1,) int
    ignore_index: int = -100,
) -> Tensor:
    """Align labels with the positions that predict them: ``out[..., i] = labels[..., i + offset]``.

    The last ``offset`` positions of every sequence, and of every packed document, predict nothing
    and become ``ignore_index``. The result has the shape, dtype and device of ``labels``, and is
    what :func:`fusedce.fused_ce` expects.

    Examples:
        >>> shift_labels(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])

    Args:
        labels: ``(..., T)``, int64 or int32, one row per sequence, not yet shifted.
        offset: how many tokens ahead a position predicts. 1 is next-token prediction, more serves
            multi-token-prediction heads, 0 leaves aligned labels as they are.
        position_ids: ``(..., T)``, positions within each packed document. A target counts only
            where its position is exactly ``offset`` after the position that predicts it.
        cu_seqlens: ``(documents + 1,)``, cumulative document lengths ``[0, n_1, n_1 + n_2, ...]``
            of one packed row, for labels of shape ``(T,)`` or ``(1, T)``. Tokens after the last
            border count as one more document.
        ignore_index: the label of positions that predict nothing.

    Raises:
        TypeError, ValueError: an argument has a wrong type, shape or value, or documents are marked
            twice. Values of ``cu_seqlens`` are checked on a CPU only, to avoid synchronisation.
    """
    check_labels(labels)
    if labels.dim() == 0:
        raise ValueError("labels must be (..., T) with at least one dimension, got a 0-d tensor")
    check_int("offset", offset, least=0)
    if ignore_index is None:
        raise TypeError("ignore_index must be an int, the label of the last positions, got None")
    if labels.dim() == 1 and offset and position_ids is None and cu_seqlens is None:
        _warn_of_flattened(labels)
    check_ignore_index(ignore_index, labels)
    if position_ids is not None and cu_seqlens is not None:
        raise ValueError("give position_ids or cu_seqlens, not both: each marks the documents")
    for name, x in (("position_ids", position_ids), ("cu_seqlens", cu_seqlens)):
        if x is not None:
            check_are_tensors(**{name: x})

    # Whole rows throughout: a size of T - offset would be one that torch.export has to ask about.
    T = labels.shape[-1]
    same = torch.arange(T, device=labels.device) < T - offset
    if position_ids is not None:
        if position_ids.shape != labels.shape:
            raise ValueError(
                f"position_ids must have the shape of labels {tuple(labels.shape)}, "
                f"got {tuple(position_ids.shape)}"
            )
        position = position_ids.long()  # narrow integers wrap at the end of their range
        same = same & (position.roll(-offset, -1) == position + offset)
    elif cu_seqlens is not None:
        document = _document_index(labels, cu_seqlens)
        same = same & (document.roll(-offset) == document)
    return labels.roll(-offset, -1).masked_fill(~same, ignore_index)


def _warn_of_flattened(labels: Tensor) -> None:
    """Warn if ``labels (N,)`` is a view of several rows: it would be shifted as one sequence."""
    if torch.compiler.is_compiling() or labels._base is None:
        return
    rows = labels._base
    if rows.dim() == 2 and len(rows) > 1 and rows.numel() == labels.numel():
        warnings.warn(
            f"labels are {len(rows)} sequences in one dimension, and are shifted as one: the first "
            f"token of each would be predicted from the one before it. Shift labels (B, T) first, "
            f"as in fusedce.shift_labels(labels).view(-1)",
            stacklevel=3,
        )


def count_valid(
    labels: Tensor | Mapping[str, Any],
    *,
    offset: int = 1,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Number of tokens that will be trained on: labels other than ``ignore_index`` after the shift.

    Examples:
        >>> count_valid(torch.tensor([[5, 6, 7], [8, -100, 9]]))
        tensor(3)

    Args:
        labels: ``(..., T)``, int64 or int32, **not yet shifted**; or a batch (a mapping) that
            holds such labels under ``"labels"``. For labels that are aligned already pass
            ``offset=0``.
        offset, position_ids, cu_seqlens, ignore_index: as in :func:`shift_labels`; they must be
            those that the loss is computed with.

    Returns:
        ``()`` int64 tensor, in tokens, on the device of the labels (no host synchronisation).

    Raises:
        TypeError, ValueError: as :func:`shift_labels`; ``ValueError`` also for a mapping without
            ``"labels"``.
    """
    if isinstance(labels, Mapping):
        if "labels" not in labels:
            raise ValueError(f'labels: a batch must hold "labels", got the keys {sorted(labels)}')
        labels = labels["labels"]
    shifted = shift_labels(
        cast(Tensor, labels), offset=offset, position_ids=position_ids, cu_seqlens=cu_seqlens,
        ignore_index=ignore_index,
    )  # fmt: skip
    return (shifted != ignore_index).sum()


def _document_index(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The number ``(T,)`` of each position's document."""
    T = labels.shape[-1]
    if labels.numel() != T:
        raise ValueError(
            f"cu_seqlens describes one packed row: labels must be (T,) or (1, T), "
            f"got {tuple(labels.shape)}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens must be (documents + 1,) integers, "
            f"got shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    if can_be_read(cu_seqlens):
        borders = cu_seqlens.tolist()
        rising = all(a <= b for a, b in pairwise(borders))
        if borders[0] != 0 or borders[-1] > T or not rising:
            raise ValueError(f"cu_seqlens must rise from 0 to at most T={T}, got {borders}")
    positions = torch.arange(T, device=labels.device)
    return torch.bucketize(positions, cu_seqlens[1:].to(labels.device, torch.int64), right=True)


# A label out of range must not be trained on silently, and on a GPU it must not kill the process
# with a device assert either. There the loss becomes NaN, and the count becomes a negative number
# that packs position and value, from which a host makes the error message when it reads the count.


def bad_label_code(position: Tensor, value: Tensor) -> Tensor:
    """The negative ``n_valid`` that reports ``labels[position] == value`` as out of range.

    All are ``()`` int64.
    """
    value = value.clamp(_INT32_MIN, _INT32_MAX) - _INT32_MIN
    return -1 - ((position.clamp(max=_INT32_MAX) << 32) | value)


def bad_label_message(
    code: int,
    V: int | None = None,
    ignore_index: int | None = None,
    labels: Tensor | None = None,  # (N,), where reading them does not synchronise
) -> str:
    """The error message for a negative ``n_valid`` made by :func:`bad_label_code`."""
    packed = -1 - code
    position, value = packed >> 32, (packed & 0xFFFFFFFF) + _INT32_MIN
    got = str(value if labels is None else int(labels[position]))
    if labels is None and value in (_INT32_MIN, _INT32_MAX):  # the code holds 32 bits
        got = f"{value} or beyond"
    limit = "V" if V is None else f"V={V}"
    ignored = ", or ignore_index" + ("" if ignore_index is None else f"={ignore_index}")
    if ignore_index in (_INT32_MIN, torch.iinfo(torch.int64).min):  # the value that replaced None
        ignored = ""
    hint = f" (pass ignore_index={value} if it marks ignored positions)" if value == -1 else ""
    return (
        f"labels must hold class indices in 0 <= label < {limit}{ignored}: "
        f"got {got} at flattened position {position}{hint}"
    )


def used_tokens(problem: Problem, V: int | None = None) -> tuple[Tensor, Tensor]:
    """``(N,)`` bool: valid tokens with a weight other than 0; ``()``: the number of valid tokens.

    A bad label raises on a CPU; elsewhere the number is a negative code (see `LossSum`) and the
    label's logit NaN, as with the Triton backend, and nothing waits for the device. ``V``: the
    number of classes, where it is not that of the rows of ``weight``.
    """
    V = problem.weight.shape[0] if V is None else V
    labels, valid = problem.labels, problem.valid()
    bad = valid & ((labels < 0) | (labels >= V))
    if labels.device.type == "cpu" and not bad.any():  # a third of the launches
        n_valid = valid.sum()
    else:
        n_valid = count_or_code(labels, valid, bad)
    if labels.device.type == "cpu" and n_valid < 0:
        raise ValueError(bad_label_message(int(n_valid), V, problem.ignore_index, labels))
    if problem.token_weight is not None:
        valid = valid & ((problem.token_weight != 0) | bad)
    return valid, n_valid


def used_rows(problem: Problem) -> tuple[Tensor | slice, int, Tensor]:
    """Positions of the tokens of :func:`used_tokens`, their number, and the number of valid tokens.

    A slice if all positions are used, which a CPU sees by the least and the largest label.
    """
    labels, ignored = problem.labels, cast(int, problem.ignore_index)
    N, V = labels.shape[0], problem.weight.shape[0]
    if labels.device.type == "cpu" and N and problem.token_weight is None:
        low, high = labels.aminmax()
        least, most = int(low), int(high)
        if least >= 0 and most < V and not least <= ignored <= most:
            return slice(0, N), N, torch.full((), N, dtype=torch.int64, device=labels.device)
    used, n_valid = used_tokens(problem)
    rows = used.nonzero()[:, 0]
    return rows, len(rows), n_valid


def count_or_code(labels: Tensor, valid: Tensor, bad: Tensor) -> Tensor:
    """``()`` int64: the number of ``valid`` tokens, or the code of the first bad label."""
    n_valid = valid.sum()
    if not len(labels):
        return n_valid
    first = bad.int().argmax(0)
    code = bad_label_code(first, labels.gather(0, first[None])[0].long())
    return torch.where(bad.any(), code, n_valid)
