"""The sum and count of a model's own loss, fused or counted by its labels.

:func:`model_loss` serves loops of one's own. A trainer's mixin shares the count by labels: where a
model's loss is not one fused cross-entropy, it is taken for the mean over its labels. A few forward
passes find out how many labels of a row it leaves out, and whether it is such a mean. The result,
:class:`LabelCount`, stays with the model, where :func:`fusedce.head_report` finds its reason.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from ..accumulate.arguments import check_losses
from ..contract.results import LossSum
from .observe import LossObserver
from .replace import LABELS, head_report, why_no_head

logger = logging.getLogger(__name__)

_SAME = {True: 1e-4, False: 1e-2}  # in float32 or not: losses that differ by less are the same


class LabelCount(NamedTuple):
    """How the labels of a model's loss are counted."""

    name: str  # "labels" or "shift_labels", of the batch that told
    shift: int  # labels of a row that the loss leaves out: 1 if it shifts, else 0
    note: str | None  # why labels are counted; None if the loss is one fused cross-entropy

    def of(self, batch: Mapping[str, Any]) -> Tensor:
        """``()`` int64: labels of a batch that its loss reads.

        Raises:
            ValueError: labels of tokens are negative and not -100, and no fused loss checks them:
                it would be a guess whether they count.
        """
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., self.shift :] if self.shift else batch["labels"]
        used = labels.ne(-100)
        if self.note is not None and labels.dim() > 1 and not labels.is_floating_point():
            least = int(labels.where(used, 0).min()) if labels.numel() else 0
            if least < 0:
                raise ValueError(
                    f"labels must be -100 where they do not count, got {least}: put -100 there, "
                    f"and have the model's loss ignore it"
                )
        return used.sum()

    def given(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch, with other labels if its loss reads none: such a mean may have NaN gradients.

        As :meth:`sum_of` counts these 0 times, the gradients become 0.
        """
        name = _name_in(batch)
        labels = batch[name]
        if labels.is_floating_point():
            return batch
        return {**batch, name: torch.where(self.of(batch) > 0, labels, labels.clamp(min=0))}

    def sum_of(self, mean: Tensor, batch: Mapping[str, Any]) -> LossSum:
        """The mean ``()`` of a batch's labels as sum and count; without labels 0, not NaN."""
        n = self.of(batch).to(mean.device)
        fine = mean.reshape(()) if mean.dtype == torch.float64 else mean.float().reshape(())
        return LossSum(torch.where(n > 0, fine, 0) * n, n)


@overload
def model_loss(model: Any, batch: Mapping[str, Any], *, losses: None = None) -> LossSum: ...
@overload
def model_loss(
    model: Any, batch: Mapping[str, Any], *, losses: Mapping[str, float]
) -> dict[str, LossSum]: ...
def model_loss(
    model: Any, batch: Mapping[str, Any], *, losses: Mapping[str, float] | None = None
) -> LossSum | dict[str, LossSum]:
    """``model(**batch).loss`` as the sum and count that :class:`fusedce.LossAccumulator` takes.

    A model's own ``loss`` is the mean over one batch, and a mean of such means weighs a token of a
    short batch more. Here the model's loss code runs unchanged, shift and ``ignore_index``
    included, and its cross-entropy divides by a power of two, which is undone.

    Where the loss is not one fused cross-entropy (DoRA on the head, several losses, no output
    head), it is the model's own mean times the number of its labels. A warning says once why no
    memory is saved, and whether a term is approximate; :func:`fusedce.head_report` repeats it. The
    first call then runs the model up to six times more, on all ranks.

    Examples:
        >>> acc.backward(fusedce.model_loss(model, batch))  # doctest: +SKIP
        >>> LOSSES = {"main": 1, "next2": 0.3}  # a model with two losses, each over its own tokens
        >>> acc = LossAccumulator(model, losses=LOSSES)  # doctest: +SKIP
        >>> with acc.window(main=counts, next2=counts_of_next2):  # doctest: +SKIP
        ...     acc.backward(**fusedce.model_loss(model, batch, losses=LOSSES))

    Args:
        model: called as it is, with DDP, FSDP or accelerate around it; before they wrap it, its
            head was replaced by :func:`fusedce.replace_loss_head`.
        batch: keyword arguments of the model, with ``labels``.
        losses: names and weights of the fused losses that the model adds up, in the order in which
            it computes them.

    Returns:
        ``loss_sum ()`` in nats, differentiable, and ``n_valid ()`` int64; with ``losses`` these of
        each by name, without its weight.

    Raises:
        ValueError: the model's loss is one fused cross-entropy, or those of ``losses``, and another
            term (a router's loss, a regulariser); to see that, the host waits for the loss. Or it
            is a sum over its labels, or does not depend on them.
        TypeError: ``batch`` is not a mapping, or ``losses`` not one of numbers.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping of tensors, got {type(batch).__name__}")
    labels = batch.get("labels", batch.get("shift_labels"))
    if not isinstance(labels, Tensor):
        raise ValueError(
            f'batch must hold "labels", got the keys {sorted(batch)}: of a model that names them '
            f"otherwise, give LossAccumulator (loss * n, n), where n labels () int64 count"
        )
    weights = check_losses(losses)
    given = {k: x for k, x in batch.items() if k != "num_items_in_batch"}
    counted = known_label_count(model)
    if counted is not None and counted.name != _name_in(given):
        counted = None
    if losses is not None or counted is None or counted.note is None:
        # A power of two: dividing by it and multiplying again rounds nothing, and a term beside the
        # cross-entropy stands out from a loss of a few nats.
        scale = 2 ** labels.numel().bit_length()
        denominator = torch.full((), scale, dtype=torch.int64, device=labels.device)
        with LossObserver(denominator) as observer:
            out = model(**given)
        loss = loss_of(out)
        if losses is not None or observer.reductions == ["mean"]:
            found = _sums(model, observer, out, loss, weights, scale)
            return found[""] if losses is None else found
        del out, loss  # logits, perhaps
        counted = find_label_count(model, given, observer)
    return counted.sum_of(loss_of(model(**counted.given(given))), given)


def _sums(
    model: Any,
    observer: LossObserver,
    out: Any,
    loss: Tensor,
    weights: Mapping[str, float],
    scale: int,
) -> dict[str, LossSum]:
    """The observed losses by name, whose weighted sum over ``scale`` is the model's loss ``()``."""
    if observer.reductions != ["mean"] * len(weights):
        raise ValueError(
            f"the loss of {type(model).__name__} must be fused means of those names, but "
            f"{len(observer.losses)} fused losses were seen, and losses= names {len(weights)} "
            f"({', '.join(weights)}): is the head replaced?"
        )
    sums = [x[0] for x in observer.losses]
    terms = [w * x / scale for w, x in zip(weights.values(), sums, strict=True)]
    _refuse_other_terms(out, loss.detach().reshape(()), torch.stack(terms), weights)
    if "" in weights:
        return {"": LossSum(loss.float().reshape(()) * scale, observer.losses[0][1])}
    # With 0 times the model's loss, FSDP's hooks on what the model returns run before the others.
    tie = 0 * loss.float().reshape(())
    return {
        name: LossSum(graph.float().reshape(()) * scale + tie, n_valid)
        for name, graph, (_, n_valid, _) in zip(
            weights, observer.graphs, observer.losses, strict=True
        )
    }


def _refuse_other_terms(
    out: Any, loss: Tensor, terms: Tensor, weights: Mapping[str, float]
) -> None:
    """Raise ``ValueError`` unless a model's ``loss ()`` is the sum of its ``terms (K,)``."""
    other = float(loss - terms.sum().to(loss))
    if not abs(other) > (1 + len(terms)) * torch.finfo(loss.dtype).eps * float(terms.abs().sum()):
        return
    if "" not in weights:
        raise ValueError(
            f"with losses= {dict(weights)} the model's loss would be {float(terms.sum()):.6g}, "
            f"but it is {float(loss):.6g}: it has other weights, or another term"
        )
    fields = out.items() if isinstance(out, Mapping) else ()
    named = [name for name, x in fields if name != "loss" and _is_number(x)]
    term = " and ".join(named) or "a regulariser or router's loss that it does not return"
    raise ValueError(
        f"the model's loss is its cross-entropy and {other:.3g} more ({term}), which is no sum "
        f"over tokens: call the model without it (output_router_logits=False), or compute the "
        f"cross-entropy with fused_ce and give acc.add_auxiliary(aux) the other term"
    )


def loss_of(outputs: Any) -> Tensor:
    """The loss ``()`` among a model's outputs: by name, alone, or the first number of a tuple."""
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (Tensor, tuple, list)):
        among = [outputs] if isinstance(outputs, Tensor) else outputs
        loss = next((x for x in among if _is_number(x)), None)
    else:
        loss = getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(f"the model returned no loss: {type(outputs).__name__}")
    return loss


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() == 1


# ---- the count by labels --------------------------------------------------------------------


def _name_in(batch: Mapping[str, Any]) -> str:
    return "labels" if batch.get("shift_labels") is None else "shift_labels"


def inner_model(model: Any) -> nn.Module:
    """The model inside of DDP, DeepSpeed's engine or ``torch.compile``."""
    while True:
        inside = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inside, nn.Module):
            return model
        model = inside


@contextlib.contextmanager
def in_evaluation(model: Any) -> Iterator[None]:
    """Have a model, in this block, in evaluation mode; afterwards its modules are as before."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def known_label_count(model: Any) -> LabelCount | None:
    """Return the result of :func:`find_label_count` that stays with a model, if there is one."""
    return inner_model(model).__dict__.get(LABELS)


def forget_label_count(model: Any) -> None:
    """Let the next batch find it out again, of a model that may have changed."""
    inner_model(model).__dict__.pop(LABELS, None)


@torch.no_grad()
def find_label_count(
    model: Any, batch: Mapping[str, Any], trained: LossObserver | None = None
) -> LabelCount:
    """Find out how a model's labels are counted, by a few forward passes in evaluation mode.

    ``trained`` has seen the losses of a forward pass in training mode, where they may be others.

    Raises:
        ValueError: the loss is a sum over its labels, does not depend on them, or ignores another
            label than -100.
    """
    name = _name_in(batch)
    labels = batch[name]
    whole = not labels.is_floating_point()
    inputs = {**batch, name: labels.clamp(min=0) if whole else labels}
    with in_evaluation(model):
        with LossObserver() as observer:
            outputs = model(**inputs)
        observer = trained or observer
        if observer.reductions == ["mean"]:
            if observer.ignored != [-100]:
                raise ValueError(
                    f"the loss of {type(model).__name__} has ignore_index={observer.ignored[0]}, "
                    f"but a trainer counts the labels that are not -100: have the model's "
                    f"F.cross_entropy ignore -100, and put -100 where labels are "
                    f"{observer.ignored[0]} now; or write a loop with LossAccumulator and "
                    f"model_loss(model, batch), which count as the loss does"
                )
            # Each batch takes this forward, since FSDP's ranks must run equally many.
            reads_first = _reads_first(model, inputs, name)
            left_out = labels.numel() - int(observer.losses[0][1])  # by a shift, or as padding
            found = LabelCount(name, int(left_out > 0 and not reads_first), None)
        else:
            exact, shift = True, 0
            if whole and labels.dim() > 1:
                try:
                    exact, shift = _probe(model, inputs, name, loss_of(outputs))
                except IndexError as error:  # of F.cross_entropy, on a CPU
                    raise ValueError(
                        f"the loss of {type(model).__name__} takes no label of -100 ({error}): "
                        f"have its F.cross_entropy ignore -100, and put -100 where labels do not "
                        f"count"
                    ) from error
            note = _note(inner_model(model), observer, exact=exact)
            logger.warning("fusedce %s", note)
            found = LabelCount(name, shift, note)
    inner_model(model).__dict__[LABELS] = found
    return found


def _reads_first(model: Any, inputs: Mapping[str, Any], name: str) -> bool:
    """Whether a fused loss reads the first label of a row."""
    labels = inputs[name].clone()
    labels[..., 1:] = -100
    with LossObserver() as observer:
        model(**{**inputs, name: labels})
    return bool(observer.losses[0][1])


def _probe(model: Any, inputs: dict[str, Any], name: str, loss: Tensor) -> tuple[bool, int]:
    """Whether a loss is the mean over its labels, and the shift, from a few more forwards."""
    labels = inputs[name]
    positions = torch.arange(labels.shape[-1], device=labels.device)

    def of(used: Tensor) -> float:
        return float(loss_of(model(**{**inputs, name: labels.masked_fill(~used, -100)})))

    # A first label that the loss does not read is as good as none: NaN, usually.
    whole, first, none = float(loss), of(positions == 0), of(positions < 0)
    if none == whole:
        raise ValueError(
            f"the loss of {type(model).__name__} does not depend on its labels, so that these do "
            f"not count what it is a mean of: divide it by yourself (the stock Trainer)"
        )
    shift = int(name == "labels" and (first == none or (first != first and none != none)))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True, shift  # its labels are inputs, too
    odd = (positions % 2 == 1).expand(labels.shape).clone()
    odd[::2] &= positions % 4 == 1  # rows of other counts: a mean of rows' means differs
    n_odd, n_even = int(odd[..., shift:].sum()), int((~odd)[..., shift:].sum())
    same = abs(whole) * _SAME[loss.dtype == torch.float32]
    of_odd, of_even = of(odd), of(~odd)  # for any number of labels: ranks' forwards go together
    if not n_odd or not n_even:
        return True, shift
    if abs((n_odd * of_odd + n_even * of_even) / (n_odd + n_even) - whole) <= same:
        return True, shift
    if abs(of_odd + of_even - whole) <= same:
        raise ValueError(
            f"the loss of {type(model).__name__} is a sum over its labels, which nothing would "
            f"divide: return its mean, or give a LossAccumulator (loss, number of tokens)"
        )
    return False, shift


def _note(model: nn.Module, observer: LossObserver, *, exact: bool) -> str:
    """Say why no memory is saved, and whether a term is approximate."""
    seen, report = len(observer.losses), head_report(model)
    if seen:
        why = f"it has {seen} fused losses, of reductions {observer.reductions}"
    elif report.since is None:
        why = why_no_head(model) or (
            "its head is not replaced: call fusedce.replace_loss_head(model) before DDP or "
            "accelerate wraps it"
        )
    else:
        why = "; ".join(line.strip() for line in str(report).splitlines()[2:])
    note = (
        f"counts the tokens of {type(model).__name__} by its labels: each micro-batch's own loss "
        f"times its tokens, over those of the step. What is not one fused loss saves no memory "
        f"({why or 'no F.cross_entropy of its output head was seen'})."
    )
    if not exact or seen > 1:
        note += (
            " The loss is no mean over these labels alone, as with several terms of other counts: "
            "their weights are approximate."
        )
    if seen > 1:
        note += (
            " In a loop of your own, LossAccumulator(model, losses={'main': 1, ...}) and "
            "model_loss(model, batch, losses=...) divide each by its own tokens."
        )
    return note
