"""Mixins that make TRL's GRPO, RLOO, DPO, KTO and distillation trainers use the fused functions.

The policy trainers get log-probabilities, entropies, mean logits and whether a label is the
likeliest class from the model's forward, which TRL has patched; the distillation trainer computes
the divergence of two heads. Each mixin replaces the one function that computes these from hidden
states and heads. The trainer, its masks and its logs stay as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusedce.head.observe import HeadCounts
from fusedce.loss.kl import fused_kl
from fusedce.loss.logprobs import fused_logprobs
from fusedce.trainer import check_behind

_LOGPROB_FUNCTION = "_ChunkedLogProbFunction"  # in trl.trainer.utils
_CALLER = "add_fused_lm_head"  # in the same module: makes a model's forward call it
POLICY_TRAINERS = ("GRPOTrainer", "RLOOTrainer", "DPOTrainer", "KTOTrainer")
_DISTILLATION = "trl.trainer.distillation_trainer"
_DIVERGENCE = "_chunked_divergence_loss"  # in that module


class FusedPolicyMixin:
    """``class MyTrainer(FusedPolicyMixin, GRPOTrainer)``: the same values without logits.

    It works with ``RLOOTrainer``, ``DPOTrainer`` and ``KTOTrainer`` as well, for the policy and for
    a separate reference model, with or without adapters. Logged numbers and gradients equal those
    of the trainer without the mixin, within rounding. Products are taken in the inputs' dtype;
    statistics are float32.

    Raises (when the trainer is made):
        TypeError: another trainer of TRL stands behind the mixin (ORPO, CPO, GKD, distillation).
        RuntimeError: this version of TRL computes log-probabilities in another way (known: 1.16).

    Examples:
        >>> class MyTrainer(FusedPolicyMixin, DPOTrainer):
        ...     pass
        >>> MyTrainer(model=model, args=args, train_dataset=pairs).train()
    """

    if TYPE_CHECKING:  # attributes of the trainer behind the mixin

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_behind(self, FusedPolicyMixin, "DPOTrainer")
        behind = [kind for kind in type(self).__mro__ if kind.__module__.startswith("trl.")]
        if behind and not any(kind.__name__ in POLICY_TRAINERS for kind in behind):
            raise TypeError(
                f"FusedPolicyMixin would fuse nothing in {behind[0].__name__}, whose loss computes "
                f"its log-probabilities in another way: it works with {', '.join(POLICY_TRAINERS)}"
                f" (DistillationTrainer has FusedDistillationMixin)"
            )
        super().__init__(*args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        """Fuse the models of a trainer that is otherwise ready; ``fusedce run`` calls it alone."""
        import trl.trainer.utils as trl_utils

        _check_known("FusedPolicyMixin", trl_utils, _LOGPROB_FUNCTION, _CALLER)
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                _fuse(self.accelerator.unwrap_model(model), trl_utils)


class _Fused:
    """Replaces TRL's autograd function: the same arguments and the same five results."""

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
        """The five statistics of TRL, each ``(n,)``; ``None`` where TRL has not asked for it.

        They are log-probability (always computed), entropy, log of the sum of squared
        probabilities, mean logit, and whether the label is the likeliest class.
        """
        compute: Any = functools.partial(
            fused_logprobs, hidden, weight, labels, bias=bias, ignore_index=None, softcap=softcap,
            logit_scale=float(logit_scale),
        )  # fmt: skip
        t = float(temperature)
        stats = compute(temperature=t, mean_logit="mean_logits" in outputs)
        found = {
            "log_probs": stats.logprob,
            "entropy": stats.entropy,
            "mean_logits": stats.mean_logit.detach() if "mean_logits" in outputs else None,
            "is_top1": stats.argmax == labels,
        }
        if "log_sum_sq_probs" in outputs:  # log sum p^2, from logits times 2
            with torch.no_grad():
                found["log_sum_sq_probs"] = compute(temperature=t / 2).lse - 2 * stats.lse
        names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        return tuple(found[name] if name in (*outputs, "log_probs") else None for name in names)


def _fuse(model: nn.Module, trl_utils: Any) -> None:
    """Make the forward that TRL has patched call :class:`_Fused`."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    forward, counts = base.forward, HeadCounts()
    counts.note("FusedPolicyMixin computes the log-probabilities of this model without logits")

    @functools.wraps(forward)
    def call(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **kwargs)
        counts.losses += 1
        with _replaced(trl_utils, _LOGPROB_FUNCTION, _Fused):
            return forward(*args, fused_lm_head=True, **kwargs)

    call.fusedce_counts = counts  # type: ignore[attr-defined]  # for head_report
    base.forward = call


class FusedDistillationMixin:
    """``class MyTrainer(FusedDistillationMixin, DistillationTrainer)``: the same without logits.

    :func:`fusedce.fused_kl` computes the divergence and its gradients, with four products of the
    head's size. The trainer also logs the student's entropy, which takes a forward pass and a fifth
    product. Logged numbers and gradients equal those of the trainer without the mixin, within
    rounding.

    Raises (when the trainer is made):
        RuntimeError: this version of TRL computes the divergence in another way (known: 1.16); or,
            in training, ZeRO-3 has partitioned the weight of a head.

    Examples:
        >>> class MyTrainer(FusedDistillationMixin, DistillationTrainer):
        ...     pass
        >>> MyTrainer(model=model, teacher_model=teacher, args=args, train_dataset=prompts).train()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_behind(self, FusedDistillationMixin, "DistillationTrainer")
        super().__init__(*args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        """Prepare a trainer that is otherwise ready; ``fusedce run`` calls it alone."""
        module: Any = sys.modules.get(_DISTILLATION)  # of the trainer behind the mixin
        _check_known("FusedDistillationMixin", module, _DIVERGENCE)
        self._module_of_divergence = module

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with _replaced(self._module_of_divergence, _DIVERGENCE, _divergence_loss):
            return super()._compute_loss(*args, **kwargs)  # type: ignore[misc]


def _divergence_loss(
    student_hidden_states: Tensor,  # (B, K, H)
    teacher_hidden_states: Tensor,  # (B, K, H of the teacher)
    student_lm_head_weight: Tensor,  # (V, H)
    teacher_lm_head_weight: Tensor,  # (V, H of the teacher)
    completion_mask: Tensor,  # (B, K)
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,  # (V,)
    teacher_lm_head_bias: Tensor | None = None,  # (V,)
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces TRL's function: the same arguments and results, in nats and tokens."""
    hidden, teacher = student_hidden_states, teacher_hidden_states
    labels = completion_mask.long().sub(1).masked_fill(completion_mask != 0, 0)  # 0; ignored: -1
    weight, bias = (_whole(x, hidden.dtype) for x in (student_lm_head_weight, student_lm_head_bias))
    teacher_weight, teacher_bias = (
        _whole(x, teacher.dtype) for x in (teacher_lm_head_weight, teacher_lm_head_bias)
    )
    options: dict[str, Any] = {
        "bias": bias,
        "ignore_index": -1,
        "softcap": student_final_logit_softcapping,
        "logit_scale": float(student_logit_scale),
        "temperature": float(temperature),
    }
    loss_sum, n_valid = fused_kl(
        hidden,
        weight,
        teacher,
        teacher_weight,
        labels,
        divergence="jsd",
        beta=float(beta),
        teacher_bias=teacher_bias,
        teacher_softcap=teacher_final_logit_softcapping,
        teacher_logit_scale=float(teacher_logit_scale),
        **options,
    )
    with torch.no_grad():
        entropy = fused_logprobs(hidden, weight, labels, **options).entropy.sum()
    divisor = n_valid.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    if isinstance(divisor, Tensor):
        divisor = divisor.to(loss_sum.device)
    return loss_sum / divisor, entropy, n_valid


def _check_known(mixin: str, module: Any, *names: str) -> None:
    """Raise ``RuntimeError`` unless TRL's ``module`` has all functions that a mixin replaces."""
    if missing := [name for name in names if not hasattr(module, name)]:
        raise RuntimeError(
            f"{mixin} needs a TRL whose trainer modules have {' and '.join(missing)} (known: 1.16):"
            f" use the trainer without the mixin, or fused_logprobs or fused_kl in a loop"
        )


def _whole(x: Any, dtype: torch.dtype) -> Any:
    """A parameter of a head as a plain tensor of ``dtype``; ``None`` for ``None``."""
    if hasattr(x, "ds_id") and x.numel() == 0:
        raise RuntimeError(
            "FusedDistillationMixin needs whole heads, but ZeRO-3 has partitioned one: use ZeRO-2, "
            "or the trainer without the mixin"
        )
    if hasattr(x, "placements"):  # one gather, and one reduction in backward
        x = x.full_tensor()
    return None if x is None else x.to(dtype)


@contextmanager
def _replaced(module: Any, name: str, ours: Any) -> Iterator[None]:
    """Replace the attribute ``name`` of a module inside the block."""
    theirs = getattr(module, name)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, theirs)
