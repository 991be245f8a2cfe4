"""Documents packed into one row: where they begin, and whether attention crosses their borders.

Packing without padding needs an attention that reads ``position_ids`` or ``cu_seq_lens``. One that
does not lets each document read those before it, and no shape or loss tells. Whether it does is
found by trying: other tokens in one document must not change the losses of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .head.model_logprobs import model_logprobs
from .head.model_loss import in_evaluation

# A batch of text may hold these; others, such as images, belong to certain tokens.
_OF_TEXT = {
    "input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "use_cache",
    "return_dict", "output_attentions", "output_hidden_states", "output_router_logits",
}  # fmt: skip
# The least change of a token's loss that is no rounding, nats: in float32, and in two bytes.
_LEAK, _LEAK_OF_TWO_BYTES = 1e-4, 0.1


def document_starts(batch: Mapping[str, Any], like: Tensor) -> Tensor | None:
    """``(B, T)`` bool, shaped as ``like``: first positions of packed documents but a row's first.

    ``None`` if the batch tells of no documents.
    """
    positions, cu_seqlens = batch.get("position_ids"), batch.get("cu_seq_lens_q")
    if isinstance(positions, Tensor) and positions.shape == like.shape:
        starts = positions == 0
    elif isinstance(cu_seqlens, Tensor) and like.dim() == 2 and len(like) == 1:
        starts = torch.zeros_like(like, dtype=torch.bool)
        starts[0, cu_seqlens[:-1].long()] = True
    else:
        return None
    starts[:, 0] = False  # the first document of a row crosses nothing
    return starts


@torch.no_grad()
def leak_across_documents(model: Any, batch: Mapping[str, Any]) -> float | None:
    """By how many nats a token's loss changes with the document before it; 0 up to rounding.

    The model runs twice, in evaluation mode, once with other tokens in the first document of each
    row. ``None`` if that cannot tell: the batch holds no second document or more than text, or
    the model has no output head.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not _OF_TEXT.issuperset(batch):
        return None
    starts = document_starts(batch, ids)
    if starts is None:
        return None
    later = starts.cumsum(1) > 0
    changed = torch.where(later.any(1, keepdim=True) & ~later, ids.roll(1, 1), ids)
    given = {k: x for k, x in batch.items() if k not in ("labels", "shift_labels")}
    labels = ids.where(later, -100).roll(-1, 1)
    labels[:, -1] = -100
    labels = labels.masked_fill(~later | starts.roll(-1, 1), -100)  # of later documents alone
    try:
        with in_evaluation(model):
            before, after = (
                model_logprobs(model, given | {"input_ids": x, "shift_labels": labels}).logprob
                for x in (ids, changed)
            )
    except ValueError:  # no head, or no logits
        return None
    if torch.equal(ids, changed) or not (labels != -100).any():
        return None
    change = float((after - before).abs().max())
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    narrow = parameter is not None and (
        parameter.itemsize < 4 or torch.is_autocast_enabled(parameter.device.type)
    )
    return change if change > (_LEAK_OF_TWO_BYTES if narrow else _LEAK) else 0.0


def leak_message(name: str, change: float) -> str:
    """The fault of a model of this class in its attention, and its remedy."""
    return (
        f"the attention of {name} crosses the borders of packed documents: other tokens in one "
        f"change a loss in the next by {change:.2g} nats. Its position_ids restart, but its "
        f"attention does not read them: take one of variable length "
        f"(attn_implementation='flash_attention_2'), leave attention_mask out of packed batches "
        f"and set use_cache=False (transformers then makes a mask of position_ids), or do not pack"
    )
