"""What a trainer's batch holds: the labels a model's loss can see, and packed documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.head.loss_observer import LossObserver


def labels_of(batch: dict[str, Any], shift: int) -> Tensor:
    """The labels that the model's loss can see."""
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return batch["labels"][..., shift:]


def _document_starts(batch: dict[str, Any]) -> Tensor | None:
    """Where packed documents begin, but for the first of a row: bool like the labels, or None."""
    labels = batch.get("labels", batch.get("shift_labels"))
    if "attention_mask" in batch or labels is None:
        return None
    if (positions := batch.get("position_ids")) is not None and positions.shape == labels.shape:
        starts = positions == 0
    elif (cu_seqlens := batch.get("cu_seq_lens_q")) is not None and len(labels) == 1:
        starts = torch.zeros_like(labels, dtype=torch.bool)
        starts[0, cu_seqlens[:-1].long()] = True
    else:
        return None
    starts[:, 0] = False
    return starts


def mask_borders(batch: dict[str, Any]) -> None:
    """The first token of a packed document is no label: the token before it is of another one.

    That is where the document starts in ``labels``, and one before it in ``shift_labels``.
    """
    starts = _document_starts(batch)
    if starts is None:
        return
    for name, where in (("labels", starts), ("shift_labels", starts.roll(-1, 1))):
        if name in batch:
            batch[name] = batch[name].masked_fill(where, -100)


def attends_across_documents(model: Any, row: dict[str, Any]) -> bool:
    """Whether the loss of the last packed document of a row changes with the tokens before it."""
    starts = _document_starts(row)
    if starts is None or "input_ids" not in row or not bool(starts.any()):
        return False
    begin = int(starts[0].nonzero().max())
    labels: dict[str, Tensor] = {
        name: row[name].clone() for name in ("labels", "shift_labels") if name in row
    }
    for label in labels.values():
        label[:, : begin + 1] = -100
    other = row["input_ids"].clone()
    other[:, :begin] = other[:, :begin].flip(1)
    sums = []
    for ids in (row["input_ids"], other):
        with LossObserver() as observer:
            model(**(row | labels | {"input_ids": ids}))
        sums.append(observer.losses[0][0])
    return not torch.allclose(sums[0], sums[1], rtol=1e-5)
