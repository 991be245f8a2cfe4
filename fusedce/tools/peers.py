"""The losses of ours and of other libraries that are compared, with one signature.

Each takes ``hidden (N, H)``, ``weight (V, H)``, ``labels (N,)`` and options, and returns the mean
loss over valid tokens, ready for ``backward``. A peer is imported at its first call;
:func:`missing` looks for it beforehand, and the table says which are not installed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_ce(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """:func:`fusedce.fused_ce`."""
    import fusedce

    return fusedce.fused_ce(hidden, weight, labels, **options).mean()


def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Torch's own loss on float32 logits, as models of transformers compute it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def compiled_eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """:func:`eager` through ``torch.compile``."""
    return _compiled()(hidden, weight, labels)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(eager)  # here, since the compiler's import takes seconds


def torch_chunked(
    hidden: Tensor, weight: Tensor, labels: Tensor, batch_chunk_size: int | None = None
) -> Tensor:
    """``F.linear_cross_entropy``, of torch 2.12 and later."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=batch_chunk_size)
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger-Kernel's fused loss in Triton."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)


def liger_cute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger-Kernel's loss for Hopper, which its public class does not choose by itself."""
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

    return sm90.LigerFusedLinearCrossEntropySM90Function.apply(hidden, weight, labels)


def cut_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, filter_eps: float | str | None = "high"
) -> Tensor:
    """Cut-cross-entropy; ``filter_eps=None`` computes all gradients."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, labels, filter_eps=filter_eps)


def quack(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """QuACK's chunked loss."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(hidden, weight, labels, reduction="mean")


def bare_gemms(
    hidden: Tensor, weight: Tensor, labels: Tensor, mode: str = "train"
) -> Callable[[], object]:
    """The products on the valid rows that every method needs, 2 N V H FLOPs each.

    Args:
        hidden, weight, labels: as for the losses.
        mode: "forward": the logits; "frozen": also the gradient of hidden; "train": all three.
    """
    h, w = hidden.detach()[labels != -100].clone(), weight.detach()

    def gemms() -> None:
        logits = torch.mm(h, w.t())
        if mode != "forward":
            torch.mm(logits, w)
        if mode == "train":
            torch.mm(logits.t(), h)

    return gemms


FLOOR = "bare GEMMs"
COMPILED = "compiled eager"
IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "fused_ce": fused_ce,
    "eager": eager,
    COMPILED: compiled_eager,
    "F.linear_cross_entropy": torch_chunked,
    "F.linear_cross_entropy, 4096": functools.partial(torch_chunked, batch_chunk_size=4096),
    "Liger-Kernel": liger,
    "Liger-Kernel, CuTe": liger_cute,
    "cut-cross-entropy": cut_cross_entropy,
    "cut-cross-entropy, exact": functools.partial(cut_cross_entropy, filter_eps=None),
    "QuACK": quack,
}
ON_CPU = tuple(IMPLEMENTATIONS)[:5]
# Modules that a peer needs.
_NEEDS = {
    "Liger-Kernel": ("liger_kernel",),
    "Liger-Kernel, CuTe": ("liger_kernel", "cutlass"),
    "cut-cross-entropy": ("cut_cross_entropy",),
    "cut-cross-entropy, exact": ("cut_cross_entropy",),
    "QuACK": ("quack", "cutlass"),
}


NOT_INSTALLED = "is not installed"


def missing(name: str) -> str | None:
    """Why an implementation cannot run here; ``None`` if its modules are installed.

    Nothing is imported.
    """
    for module in _NEEDS.get(name, ()):
        if importlib.util.find_spec(module) is None:
            return f"{module} {NOT_INSTALLED}"
    if name.startswith("F.") and not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no F.linear_cross_entropy"
    return None
