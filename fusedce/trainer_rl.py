"""A mixin that gives TRL's GRPO, RLOO, DPO and KTO trainers the fused log-probabilities.

These trainers ask the model's forward, which TRL has patched, for log-probabilities, entropies,
mean logits and whether a label is the likeliest class. The trainer, its loss, masks and logs stay
as they are; what is exchanged is the one function that computes those from hidden states and head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusedce.loss.logprobs import fused_logprobs

_NAME = "_ChunkedLogProbFunction"  # in trl.trainer.utils
_CALLER = "add_fused_lm_head"  # there too: what makes a model's forward call it


class FusedPolicyMixin:
    """``class MyTrainer(FusedPolicyMixin, GRPOTrainer)``: same values, fused.

    So with ``RLOOTrainer``, ``DPOTrainer`` and ``KTOTrainer``.

    Logged numbers and gradients are those of the trainer without the mixin, within rounding, where
    products are taken in the inputs' dtype; statistics are float32. No logits are built. Works for
    the policy and for a reference model of its own, with adapters too.

    Raises (when the trainer is made):
        RuntimeError: this version of TRL computes log-probabilities in another way (known: 1.16).

    Examples:
        >>> class MyTrainer(FusedPolicyMixin, DPOTrainer):
        ...     pass
        >>> MyTrainer(model=model, args=args, train_dataset=pairs).train()
    """

    if TYPE_CHECKING:  # what the trainer behind it brings

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import trl.trainer.utils as trl_utils

        missing = [name for name in (_NAME, _CALLER) if not hasattr(trl_utils, name)]
        if missing:
            raise RuntimeError(
                f"FusedPolicyMixin needs a TRL whose trainer.utils has {' and '.join(missing)} "
                f"(known: 1.16): use the trainer without the mixin, or fused_logprobs in a loop of "
                f"your own"
            )
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                _fuse(self.accelerator.unwrap_model(model), trl_utils)


class _Fused:
    """In place of TRL's autograd function: the same arguments, the same five results."""

    @staticmethod
    def apply(
        hidden: Tensor,  # (n, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        labels: Tensor,  # (n,)
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        def compute(temperature: float, mean_logit: bool = False) -> Any:
            return fused_logprobs(
                hidden,
                weight,
                labels,
                bias=bias,
                ignore_index=None,
                softcap=softcap,
                logit_scale=float(logit_scale),
                temperature=float(temperature),
                mean_logit=mean_logit,
            )

        stats = compute(temperature, mean_logit="mean_logits" in outputs)
        found = {
            "log_probs": stats.logprob,
            "entropy": stats.entropy,
            "mean_logits": stats.mean_logit.detach() if "mean_logits" in outputs else None,
            "is_top1": stats.argmax == labels,
        }
        if "log_sum_sq_probs" in outputs:  # log sum p^2, from logits that are twice as large
            with torch.no_grad():
                found["log_sum_sq_probs"] = compute(temperature / 2).lse - 2 * stats.lse
        names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        return tuple(found[name] if name in (*outputs, "log_probs") else None for name in names)


def _fuse(model: nn.Module, trl_utils: Any) -> None:
    base: Any = getattr(model, "get_base_model", lambda: model)()
    forward = base.forward

    @functools.wraps(forward)
    def call(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **kwargs)
        with _in_place(trl_utils):
            return forward(*args, fused_lm_head=True, **kwargs)

    base.forward = call


@contextmanager
def _in_place(trl_utils: Any) -> Iterator[None]:
    theirs = getattr(trl_utils, _NAME)
    setattr(trl_utils, _NAME, _Fused)
    try:
        yield
    finally:
        setattr(trl_utils, _NAME, theirs)
