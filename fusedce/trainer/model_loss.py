"""The sum and the count of a model's own loss, for training loops that users write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedce.contract.results import LossSum
from fusedce.head.observe import LossObserver


def model_loss(model: Any, batch: Mapping[str, Any]) -> LossSum:
    """``model(**batch).loss`` as the sum and count that :class:`fusedce.LossAccumulator` takes.

    A model's own ``loss`` is the mean over one batch, and a mean of such means weighs a token of a
    short batch more. Here the model's loss code runs unchanged, shift and ``ignore_index``
    included, and its cross-entropy divides by 1.

    Args:
        model: called as it is, with DDP, FSDP or accelerate around it; before they wrap it, its
            head was replaced by :func:`fusedce.replace_loss_head`.
        batch: keyword arguments of the model, with ``labels``.

    Returns:
        ``loss_sum ()`` in nats, differentiable, and ``n_valid ()`` int64.

    Raises:
        ValueError: the model's loss is not one fused cross-entropy with the mean over its tokens,
            or holds an auxiliary loss (MoE router).
        TypeError: ``batch`` is not a mapping.

    Examples:
        >>> acc.backward(fusedce.model_loss(model, batch))  # doctest: +SKIP
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping of tensors, got {type(batch).__name__}")
    labels = batch.get("labels", batch.get("shift_labels"))
    if not isinstance(labels, Tensor):
        raise ValueError(f'batch must hold "labels", got the keys {sorted(batch)}')
    one = torch.ones((), dtype=torch.int64, device=labels.device)
    with LossObserver(one) as observer:
        out = model(**{k: x for k, x in batch.items() if k != "num_items_in_batch"})
    get = out.get if isinstance(out, Mapping) else lambda name: getattr(out, name, None)
    loss = get("loss")
    if [reduction for *_, reduction in observer.losses] != ["mean"] or loss is None:
        raise ValueError(
            f"the loss of {type(model).__name__} must be one fused cross-entropy, but "
            f"{len(observer.losses)} were seen: call fusedce.replace_loss_head(model) first, "
            f"before DDP or accelerate wraps the model, and give it labels. (Liger's patches "
            f"bypass the head: leave them out)"
        )
    if get("aux_loss") is not None:
        raise ValueError(
            "the model's loss holds an auxiliary loss, which is no sum over tokens: call the model "
            "with output_router_logits=False, or give acc.add_auxiliary(aux) its own term"
        )
    return LossSum(loss.float().reshape(()), observer.losses[0][1])
