"""The loss under the names and with the order of arguments of other libraries.

To switch, change one import; both names compute :func:`fusedce.fused_cross_entropy`.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from fusedce.contract.explain import explains_names
from fusedce.contract.labels import shift_labels
from fusedce.loss.cross_entropy import fused_cross_entropy

Reduction = Literal["mean", "sum", "none"]


class FusedLinearCrossEntropyLoss(nn.Module):
    """A module for ``loss(weight, hidden, labels, bias)``, the order of Liger-Kernel's users.

    The options are those of :func:`fusedce.fused_cross_entropy` and have its meanings; an option
    or argument under a peer's name is an error that says what ours is called.

    Examples:
        >>> loss = FusedLinearCrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
        >>> hidden, head = torch.randn(6, 16), torch.nn.Linear(16, 100)
        >>> loss(head.weight, hidden, torch.randint(100, (6,)), head.bias).shape
        torch.Size([])

    Args:
        ignore_index, softcap, logit_scale, label_smoothing, z_loss, class_weight, reduction,
            chunk_tokens, memory_budget, backend: as in :func:`fusedce.fused_cross_entropy`.
            ``class_weight (V,)`` becomes a buffer, which moves with the module and is not saved.

    Raises:
        TypeError: an unknown option, which the message translates.
    """

    class_weight: Tensor | None

    @explains_names
    def __init__(
        self,
        *,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        class_weight: Tensor | None = None,  # (V,) numbers
        reduction: Reduction = "mean",
        chunk_tokens: int | None = None,
        memory_budget: int | None = None,  # bytes
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.reduction: Reduction = reduction
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "chunk_tokens": chunk_tokens,
            "memory_budget": memory_budget,
            "backend": backend,
        }

    @explains_names
    def forward(
        self,
        weight: Tensor,  # (V, H)
        hidden: Tensor,  # (..., H)
        labels: Tensor,  # (...) int64 or int32
        bias: Tensor | None = None,  # (V,)
        *,
        token_weight: Tensor | None = None,  # (...) numbers or bool
    ) -> Tensor:
        """The loss: ``()``, or the shape of ``labels`` with reduction "none"."""
        return fused_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            token_weight=token_weight,
            class_weight=self.class_weight,
            reduction=self.reduction,
            **self.options,
        )

    def extra_repr(self) -> str:
        """The options, for ``repr`` of the module."""
        shown = {"reduction": self.reduction, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


@explains_names
def linear_cross_entropy(
    hidden: Tensor,  # (..., T, H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) floats
    labels: Tensor,  # (..., T) int64 or int32
    bias: Tensor | None = None,  # (V,) floats
    ignore_index: int | None = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: bool | int = 0,
    *,
    token_weight: Tensor | None = None,  # (..., T) numbers or bool
    class_weight: Tensor | None = None,  # (V,) numbers
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
) -> Tensor:
    """:func:`fusedce.fused_cross_entropy` in the order of arguments of cut-cross-entropy.

    Examples:
        >>> hidden, weight = torch.randn(2, 5, 16), torch.randn(100, 16)
        >>> tokens = torch.randint(100, (2, 5))
        >>> linear_cross_entropy(hidden, weight, tokens, shift=1, reduction="none")[:, 0]
        tensor([0., 0.])

    Args:
        shift: how many positions ahead of its hidden state a label stands: 0 for aligned labels;
            ``True`` or 1 for next-token prediction with labels that are the tokens themselves.
        token_weight: belongs to the labels, and moves with them.
        hidden, weight, labels, bias, ignore_index, softcap, reduction, class_weight,
            label_smoothing, z_loss, logit_scale, chunk_tokens, memory_budget, backend: as in
            :func:`fusedce.fused_cross_entropy`.

    Returns:
        ``()``, or with "none" the shape of ``labels``: each loss where its *label* stands, so 0 at
        the first ``shift`` positions.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fusedce.fused_cross_entropy`;
            ``ValueError`` also for a ``shift`` outside ``[0, T)``, or ``ignore_index=None`` with
            a shift (the last positions have no label).
    """
    if not isinstance(shift, int):
        raise TypeError(f"shift must be an int or a bool, got {type(shift).__name__}")
    offset = int(shift)
    if offset and isinstance(labels, Tensor):  # fused_cross_entropy refuses anything else
        T = labels.shape[-1] if labels.dim() else 1
        if ignore_index is None:
            raise ValueError("ignore_index must be an int with shift: the last labels are missing")
        if not 0 <= offset < T:
            raise ValueError(f"shift must be in [0, T) with T={T} (from labels), got {shift}")
        if isinstance(token_weight, Tensor) and token_weight.shape == labels.shape:
            token_weight = token_weight.roll(-offset, -1)
        labels = shift_labels(labels, offset=offset, ignore_index=ignore_index)
    loss = fused_cross_entropy(
        hidden, weight, labels, bias=bias, token_weight=token_weight, class_weight=class_weight,
        reduction=reduction, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
        label_smoothing=label_smoothing, z_loss=z_loss, chunk_tokens=chunk_tokens,
        memory_budget=memory_budget, backend=backend,
    )  # fmt: skip
    return loss.roll(offset, -1) if offset and reduction == "none" else loss
