"""Log-probabilities of labels under a whole model, through its own head: for policy losses.

The model runs without labels, its head replaced for this call if it is not. The head's own code,
adapters and caps included, gives lazy logits, whose statistics are those of ``fused_logprobs``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..contract.checks import (
    can_be_read,
    check_int,
    check_number,
    checked_temperature,
    memory_budget_of,
)
from ..contract.labels import bad_label_message, count_or_code, shift_labels
from ..contract.results import TokenStats, TokenStatsAndTop, TopK
from ..loss.logprobs import fused_logprobs
from ..loss.topk import fused_topk
from .lazy import LazyLogits
from .loss import CrossEntropy, FusedLoss, is_fusable
from .model_loss import inner_model
from .replace import head_report, replace_loss_head, restore_loss_head
from .rules import LogitForm

IGNORED = -100
_NOT_INPUTS = ("labels", "shift_labels", "num_items_in_batch")


@overload
def model_logprobs(
    model: Any, batch: Mapping[str, Any], *, temperature: float | Tensor = 1.0, top: None = None,
    memory_budget: int | None = None,
) -> TokenStats: ...  # fmt: skip
@overload
def model_logprobs(
    model: Any, batch: Mapping[str, Any], *, temperature: float | Tensor = 1.0, top: int,
    memory_budget: int | None = None,
) -> TokenStatsAndTop: ...  # fmt: skip
def model_logprobs(
    model: Any,
    batch: Mapping[str, Any],  # input_ids (B, T) ..., labels or shift_labels (B, T)
    *,
    temperature: float | Tensor = 1.0,  # or (B, T) or (B, 1) floats
    top: int | None = None,
    memory_budget: int | None = None,  # bytes
) -> TokenStats | TokenStatsAndTop:
    """Log-probability of each label, entropy, log-sum-exp and argmax under a model, no logits.

    The statistics of :func:`fusedce.fused_logprobs`, where the model's own head makes the logits:
    its adapters (LoRA, ``modules_to_save``), its bias, casts, scale and soft-cap belong to them.
    Position ``i`` predicts token ``i + 1``, so the last position of a row, and of a packed document
    (``position_ids``), holds 0, 0, 0 and -1, as do those whose label is -100.

    Examples:
        >>> stats = fusedce.model_logprobs(model, batch, temperature=0.7)  # doctest: +SKIP
        >>> used = stats.argmax >= 0  # doctest: +SKIP
        >>> (-stats.logprob * advantages).sum() / used.sum()  # doctest: +SKIP

    Args:
        model: a language model, with DDP or accelerate around it. Its head need not be
            replaced; it stays as it is. With FSDP, call :func:`fusedce.replace_loss_head` before
            that wraps it. It runs in the mode that it is in (dropout), with or without gradients.
        batch: keyword arguments of the model. Labels are ``labels (B, T)``, not shifted, with -100
            at prompts and padding; or ``shift_labels (B, T)``, aligned; or else ``input_ids`` where
            ``attention_mask`` is 1. The labels of an encoder-decoder or masked language model
            (``...ForMaskedLM``) are aligned.
        temperature: positive divisor of the finished logits: a number, or floats ``(B, T)``, one
            per position, or ``(B, 1)``, one per sequence, without gradient.
        top: number of likeliest classes to return as well, as :func:`fusedce.fused_topk` does; what
            :func:`fusedce.recipes.filtered_logprob` needs for a sampler with top-k or top-p.
        memory_budget: as in :func:`fusedce.fused_ce`.

    Returns:
        :class:`TokenStats` of ``(B, T)`` each, with ``top`` a :class:`TokenStatsAndTop` with these
        as its fifth; all but ``argmax`` and the classes are differentiable. Where the head's logits
        cannot stay lazy (DoRA, quantised heads), they are made, which :func:`fusedce.head_report`
        says of a replaced head; the values are the same.

    Raises:
        TypeError: ``batch`` is not a mapping, ``temperature`` no number or floats, or ``top`` no
            int.
        ValueError: there are no labels; the model returns no logits, or those of other positions
            than the labels; its head is not found (pass ``head=`` to ``replace_loss_head``).
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping of tensors, got {type(batch).__name__}")
    budget = memory_budget_of(memory_budget)
    given = {k: x for k, x in batch.items() if k not in _NOT_INPUTS}
    labels = _aligned_labels(inner_model(model), batch, given)
    t = _checked_temperature(temperature, labels)
    with _lazy_head(inner_model(model)):
        logits = logits_of(model(**given))
    if logits is None:
        raise ValueError(f"the model must return logits, {type(model).__name__} returned none")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"the logits must be (..., V) of the labels' shape {tuple(labels.shape)}, got "
            f"{tuple(logits.shape)}: leave out logits_to_keep, ignored labels cost nothing"
        )
    if top is not None:
        check_int("top", top)
        if not 1 <= top <= logits.shape[-1]:
            raise ValueError(f"top must be in [1, V] with V={logits.shape[-1]}, got {top}")
    flat, target = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    train = torch.is_grad_enabled() and flat.requires_grad
    statistics, values = TokenStatistics(target, t, top or 0, budget), None
    if is_fusable(flat, target, train=train):
        fused = FusedStatistics(flat, statistics)
        if fused.compute(train=train):
            next(iter(flat.expr.steps)).head.report.losses += 1
            values = FusedLoss.apply(flat, fused, fused.loss.dtype) if train else fused.loss
    if values is None:
        values = statistics.of_real(flat + 0)
    return statistics.named(values, labels.shape)


class TokenStatistics:
    """The statistics that are wanted of each token, and how they are computed.

    The values ``(N, 3 + K)`` that are differentiable, of the entropy, the log-sum-exp, the label's
    log-probability and those of the ``K`` likeliest classes, are one tensor: one node of autograd.

    Attributes:
        argmax: classes ``(N,)`` that were found with the last values.
        index: classes ``(N, K)``, chosen once: backward's real logits may order them otherwise.
    """

    argmax: Tensor
    index: Tensor | None = None

    def __init__(
        self, target: Tensor, temperature: float | Tensor, top: int, memory_budget: int | None
    ) -> None:
        self.target, self.temperature, self.top = target, temperature, top
        self.memory_budget = memory_budget

    def of_operands(self, hidden: Tensor, options: dict[str, Any]) -> Tensor:
        """The values, of the operands of logits and the options of a fused loss."""
        options["temperature"] = self.temperature
        if self.memory_budget is not None:
            options["memory_budget"] = self.memory_budget
        labels = self.target
        if self.top:
            others = {name: x for name, x in options.items() if name != "ignore_index"}
            if self.index is None:
                with torch.no_grad():
                    self.index = fused_topk(hidden, k=self.top, **others).index
            index = self.index.where((labels != IGNORED)[:, None], IGNORED)
            labels = torch.cat([labels[:, None], index], 1)
        stats = fused_logprobs(hidden, labels=labels, **options)
        self.argmax = stats.argmax
        logprobs = stats.logprob.view(len(labels), -1)
        return torch.cat([stats.entropy[:, None], stats.lse[:, None], logprobs], 1)

    def of_real(self, z: Tensor) -> Tensor:
        """The values, of real logits ``z (N, V)`` by torch; NaN where a device's label is bad."""
        t, V, used = self.temperature, z.shape[-1], self.target != IGNORED
        bad = used & ((self.target < 0) | (self.target >= V))
        if can_be_read(bad) and bad.any():
            code = int(count_or_code(self.target, used, bad))
            raise ValueError(bad_label_message(code, V, IGNORED, self.target))
        z = z if z.dtype == torch.float64 else z.float()
        z = z / (t[:, None] if isinstance(t, Tensor) else t)
        log_p = z.log_softmax(-1)
        self.argmax = z.argmax(-1).where(used, -1)
        if self.index is None:  # of equal logits the classes of the lowest index, as `fused_topk`
            order = z.detach().sort(dim=-1, descending=True, stable=True).indices
            self.index = order[:, : self.top]
        classes = torch.cat([self.target.long().clamp(0, V - 1)[:, None], self.index], 1)
        # A logit of -inf adds 0 to the entropy, not 0 * inf.
        entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(z.dtype).min)).sum(-1, keepdim=True)
        found = torch.cat([entropy, z.logsumexp(-1, keepdim=True), log_p.gather(-1, classes)], 1)
        return found.masked_fill(bad[:, None], torch.nan).where(used[:, None], 0)

    def named(self, values: Tensor, shape: torch.Size) -> TokenStats | TokenStatsAndTop:
        """The values as fields of that shape."""
        entropy, lse, logprob = (x.reshape(shape) for x in values[:, :3].unbind(1))
        stats = TokenStats(logprob, entropy, lse, self.argmax.reshape(shape))
        if not self.top or self.index is None:
            return stats
        index = self.index.where((self.target != IGNORED)[:, None], -1)
        return TokenStatsAndTop(
            *stats, TopK(values[:, 3:].reshape(*shape, -1), index.reshape(*shape, -1))
        )


class FusedStatistics(CrossEntropy):
    """The statistics of lazy logits, as a loss that is no number but a tensor."""

    def __init__(self, logits: LazyLogits, statistics: TokenStatistics) -> None:
        super().__init__(
            F.cross_entropy, logits, statistics.target, None, IGNORED, "none", label_smoothing=0.0
        )
        self.statistics = statistics

    def _loss_of(self, form: LogitForm) -> tuple[Tensor, None]:
        return self.statistics.of_operands(form.hidden, self._options(form)), None

    def _native(self, z: Tensor) -> Tensor:
        return self.statistics.of_real(z)


def logits_of(out: Any) -> Tensor | None:
    """The logits in what a model returned: the lazy ones, or those that it names or returns."""
    leaves = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    lazy = [x for x in leaves if isinstance(x, LazyLogits)]
    if len(lazy) == 1:
        return lazy[0]
    named = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if isinstance(named, Tensor):
        return named
    floats = [x for x in leaves if x.is_floating_point() and x.dim()]
    return floats[0] if len(floats) == 1 else None


def _aligned_labels(model: Any, batch: Mapping[str, Any], given: dict[str, Any]) -> Tensor:
    """``(B, T)``: what each position predicts; adds a decoder's inputs to ``given``."""
    labels, aligned = batch.get("labels"), batch.get("shift_labels")
    if isinstance(aligned, Tensor):
        return aligned
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if decodes or getattr(model, "loss_type", None) == "ForMaskedLM":
        if not isinstance(labels, Tensor):
            raise ValueError(f'batch must hold "labels", got the keys {sorted(batch)}')
        if decodes and "decoder_input_ids" not in given:
            shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
            if shifted is None:  # Whisper shifts on the way to its loss alone
                given["labels"] = labels
            else:
                given["decoder_input_ids"] = shifted(labels)
        return labels

    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    of_ids = labels is None and isinstance(ids, Tensor)
    labels = ids if of_ids else labels
    if not isinstance(labels, Tensor):
        raise ValueError(
            f'batch must hold "labels", "shift_labels" or "input_ids", got the keys {sorted(batch)}'
        )
    is_padding = None
    if of_ids and isinstance(mask, Tensor) and mask.shape == labels.shape:
        is_padding = mask == 0
        labels = labels.masked_fill(is_padding, IGNORED)
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != labels.shape:
        positions = None
    aligned = shift_labels(labels, position_ids=positions)
    # With padding on the left, it predicts the first token.
    return aligned if is_padding is None else aligned.masked_fill(is_padding, IGNORED)


def _checked_temperature(temperature: float | Tensor, labels: Tensor) -> float | Tensor:
    """A number, or floats ``(B * T,)``."""
    if not isinstance(temperature, Tensor):
        return check_number("temperature", temperature)
    if temperature.shape == (*labels.shape[:-1], 1):
        temperature = temperature.expand(labels.shape)
    return checked_temperature(temperature, labels[..., None], labels.flatten() != IGNORED)


@contextlib.contextmanager
def _lazy_head(model: nn.Module) -> Iterator[None]:
    """Have the head replaced, in this block if it is not already."""
    if head_report(model).since is not None:
        yield
        return
    replace_loss_head(model)
    try:
        yield
    finally:
        restore_loss_head(model)
