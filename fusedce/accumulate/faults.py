"""Finds errors in a window's tensors, once at its end, and tells all ranks of them.

A fault is a row of :data:`ROW` int64, made without waiting for a device, so that the message which
ends a window can carry it: its kind, then that error's numbers; zeros if none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fusedce.contract.labels import bad_label_message

ROW = 4
NONE, BAD_LABEL, OTHER_COUNT, MULTIPLIED, GONE, LEFT, WRITTEN, DIVIDED, MEAN = range(9)
TWICE = (
    "Or was a loss differentiated twice (retain_graph=True)? It counts twice, the second time as "
    "the next micro-batch"
)
_WORDS = {
    OTHER_COUNT: "window: micro-batch {} was declared with {} valid tokens, its loss counts {}. "
    "Does the loss get labels without shift_labels(labels), which drops the first of every "
    f"sequence? Were they counted before the shift, or with another ignore_index? {TWICE}",
    MULTIPLIED: "the loss was multiplied by {:g} after scale(): the window has divided it by all "
    "of its tokens already, so leave other divisions out (by the number of micro-batches, of "
    "ranks), or name a constant that the engine divides by as backward_divisor= (accelerate: "
    "LossAccumulator.from_accelerator)",
    GONE: "zero_grad() was called inside a window: the gradients of its earlier micro-batches are "
    "gone, though their tokens count. Call it once a window, after optimizer.step() (to drop the "
    "window, call discard_window() as well, or leave the `with` block by raising)",
    LEFT: "the window began over gradients that were there before it: those of the last step "
    "(zero_grad() is missing after optimizer.step()), or of another backward, which finish() would "
    "rescale (add it in a window with declared counts, or after finish())",
    WRITTEN: "gradients were changed inside a window by something else than its losses: clip and "
    "unscale after finish() or the last micro-batch; another loss (a regulariser, one of another "
    "accumulator) needs a window with declared counts, or comes after finish(). Several fused "
    'losses have one window: `with acc.window({{"next": [...], "second": [...]}}):`',
    DIVIDED: "the pipeline's schedule divides all gradients by its {} micro-batches, which the "
    "window has divided by all of its tokens already: make it with scale_grads=False",
    MEAN: "out must be (loss_sum, n_valid), got a mean: the loss was divided by its {} tokens "
    "before the accumulator got it, which divides by all tokens of the window. Give the sum: "
    "fused_ce(...) itself, or (mean * n, n)",
}


def of_row(row: Sequence[int]) -> Exception | None:
    """The error that a row describes; ``None`` if there is none."""
    kind, *numbers = row
    if kind == BAD_LABEL:
        return ValueError(bad_label_message(numbers[0]))
    if kind == MULTIPLIED:  # by the float64 of these bits
        numbers = list(struct.unpack("d", struct.pack("q", numbers[0])))
    error = ValueError if kind == MEAN else RuntimeError
    return error(_WORDS[kind].format(*numbers)) if kind else None


def first(kind: int, wrong: Tensor, *numbers: Tensor) -> Tensor:
    """The row of the first case ``(cases,)`` that is ``wrong``, with its ``numbers``; or zeros."""
    kinds = torch.full_like(wrong, kind, dtype=torch.int64)
    columns = [kinds, *numbers, *[torch.zeros_like(kinds)] * (ROW - 1 - len(numbers))]
    rows = torch.stack([moved(x, wrong.device) for x in columns], 1)
    at = wrong.int().argmax().reshape(1)
    return torch.where(wrong.any(), rows.index_select(0, at)[0], 0)


def first_of(rows: Iterable[Tensor | None]) -> Tensor | None:
    """The first of these rows that is a fault; ``None`` without any row."""
    found: Tensor | None = None
    for row in rows:
        if found is not None and row is not None:
            row = torch.where(found[0] == NONE, moved(row, found.device), found)
        found = found if row is None else row
    return found


def moved(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; a copy from the host does not wait for work queued on the device."""
    return x.to(device, non_blocking=x.device.type == "cpu")


def together(values: Iterable[Tensor]) -> Tensor:
    """Tensors of equal shape, stacked on the device of the first one."""
    values = list(values)
    return torch.stack([moved(x, values[0].device) for x in values])


def readable(device: torch.device) -> bool:
    """Whether a value on ``device`` can be read without waiting."""
    return device.type == "cpu"
