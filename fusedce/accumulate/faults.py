"""Finds errors in a window's tensors, once at its end, and tells all ranks of them.

A fault is a row of :data:`ROW` int64, made without waiting for a device, so that the message which
ends a window can carry it: 1 + index in :data:`_KINDS`, then that error's numbers; zeros if none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fusedce.contract.labels import bad_label_message

ROW = 4
_TWICE = (
    "Or was a loss differentiated twice (retain_graph=True)? It counts twice, the second time as "
    "the next micro-batch"
)


def bad_label(code: int) -> Exception:
    """A label out of range, described by a negative count."""
    return ValueError(bad_label_message(code))


def count_differs(micro_batch: int, declared: int, counted: int) -> Exception:
    """A loss that has counted other tokens than were declared."""
    if counted > declared:
        reason = (
            "Does the loss get labels without shift_labels(labels), which drops the first of "
            "every sequence, or with another ignore_index?"
        )
    else:
        reason = "Were the labels counted before the shift, or with another ignore_index?"
    return RuntimeError(
        f"window: micro-batch {micro_batch} was declared with {declared} valid tokens, its loss "
        f"counts {counted}. {reason} {_TWICE}"
    )


def too_many(declared: int) -> Exception:
    """A micro-batch beyond the declared number."""
    return RuntimeError(
        f"window: {declared} micro-batches were declared, this is number {declared + 1}. {_TWICE}"
    )


def multiplied(bits: int) -> Exception:
    """An unexpected factor on a loss; ``bits`` are those of the factor as a float64."""
    (factor,) = struct.unpack("d", struct.pack("q", bits))
    return RuntimeError(
        f"the loss was multiplied by {factor:g} after scale(): the window has divided it "
        f"by all of its tokens already, so leave other divisions out (by the number of "
        f"micro-batches, of ranks), or name a constant that the engine divides by as "
        f"backward_divisor= (accelerate: LossAccumulator.from_accelerator)"
    )


def gradients_gone() -> Exception:
    """Gradients that were set to ``None`` or zero inside a window."""
    return RuntimeError(
        "zero_grad() was called inside a window: the gradients of its earlier micro-batches are "
        "gone, though their tokens count. Call it once a window, after optimizer.step() (to drop "
        "the window, call discard_window() as well, or leave the `with` block by raising)"
    )


def gradients_left() -> Exception:
    """Gradients that a window has found before its first micro-batch."""
    return RuntimeError(
        "the window began over gradients that were there before it: those of the last step "
        "(zero_grad() is missing after optimizer.step()), or of a backward of its own, which "
        "finish() would rescale (add it in a window with declared counts, or after finish())"
    )


def gradients_written() -> Exception:
    """Gradients that something else has changed between the micro-batches of a window."""
    return RuntimeError(
        "gradients were changed inside a window by something else than its losses: clip and "
        "unscale after finish() or the last micro-batch; a loss of another kind (a regulariser) "
        "with a backward() of its own needs a window with declared counts, or comes after finish()"
    )


def divided_by_pipeline(micro_batches: int) -> Exception:
    """A pipeline's schedule that divides the gradients of a window after its last backward."""
    return RuntimeError(
        f"the pipeline's schedule divides all gradients by its {micro_batches} micro-batches, "
        f"which the window has divided by all of its tokens already: make it with "
        f"scale_grads=False"
    )


def mean_given(n_valid: int) -> Exception:
    """Losses that were divided by their own tokens."""
    return ValueError(
        f"out must be (loss_sum, n_valid), got a mean: the loss was divided by its {n_valid} "
        f"tokens before the accumulator got it, which divides by all tokens of the window. Give "
        f"the sum: fused_ce(...) itself, or (mean * n, n)"
    )


_KINDS: tuple[Callable[..., Exception], ...] = (
    bad_label,
    count_differs,
    multiplied,
    gradients_gone,
    gradients_left,
    gradients_written,
    divided_by_pipeline,
    mean_given,
)


def first(kind: Callable[..., Exception], wrong: Tensor, *numbers: Tensor) -> Tensor:
    """The row of the first case ``(cases,)`` that is ``wrong``, with its ``numbers``; or zeros."""
    kinds = torch.full_like(wrong, 1 + _KINDS.index(kind), dtype=torch.int64)
    columns = [kinds, *numbers, *[torch.zeros_like(kinds)] * (ROW - 1 - len(numbers))]
    rows = torch.stack([moved(x, wrong.device) for x in columns], 1)
    at = wrong.int().argmax().reshape(1)
    return torch.where(wrong.any(), rows.index_select(0, at)[0], 0)


def sure(kind: Callable[..., Exception], *numbers: int) -> Tensor:
    """The row of a fault that the host knows of."""
    row = [1 + _KINDS.index(kind), *numbers]
    return torch.tensor(row + [0] * (ROW - len(row)), device="cpu")


def first_of(rows: Iterable[Tensor | None]) -> Tensor | None:
    """The first of these rows that is a fault; ``None`` without any row."""
    found: Tensor | None = None
    for row in rows:
        if found is not None and row is not None:
            row = torch.where(found[0] == 0, moved(row, found.device), found)
        found = found if row is None else row
    return found


def of_row(row: Sequence[int]) -> Exception | None:
    """The error that a row describes; ``None`` if there is none."""
    if not row[0]:
        return None
    kind = _KINDS[row[0] - 1]
    return kind(*row[1 : 1 + kind.__code__.co_argcount])


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
