"""Replace the loss head of any causal language model by one call."""

from __future__ import annotations

import sys
import warnings
import weakref
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..contract.checks import memory_budget_of
from ..contract.groups import is_dtensor
from .lent_input import Head, ShardedForward, classes_of, head_of, take_back
from .loss import cross_entropy
from .observe import HeadCounts, HeadReport

ModelT = TypeVar("ModelT", bound=nn.Module)
_TRL = (
    "TRL has installed a fused head of its own on this model: its trainers run that one and never "
    "the replaced one. SFTTrainer runs the replaced one behind fusedce.FusedTrainerMixin; leave "
    "replace_loss_head out for the others (DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer)"
)
_TORCH = str(Path(torch.__file__).parent)
_WATCH = "_fusedce_watch"  # attribute that holds the handle of a hook
LABELS = "_fusedce_labels"  # an attribute: how a model's labels are counted (model_loss.py)


def replace_loss_head(
    model: ModelT, *, head: nn.Module | None = None, memory_budget: int | None = None
) -> ModelT:
    """Make ``model`` compute its loss without logits, in training and in evaluation.

    The head's own code runs, with its casts, dropout, scales and adapters; only its product is not
    computed. It returns lazy logits, on which the model's own loss code runs; real ones are
    computed, once, for code that looks at them. Losses, gradients, hooks, writes and checkpoints
    are those of the untouched model. The page of the replaced head says what is fused, what costs
    as much as before, and what is refused; :func:`head_report` reports a run. Use the logits of a
    training step before ``optimizer.step()``.

    Examples:
        >>> model = replace_loss_head(AutoModelForCausalLM.from_pretrained(name))
        >>> model(input_ids=ids, labels=ids).loss.backward()

    Args:
        model: a causal language model of transformers, or any ``nn.Module`` that ends in a linear
            head.
        head: the output head, where ``model.get_output_embeddings()`` does not name it; by default
            the only ``nn.Linear``, the only one whose weight is that of an ``nn.Embedding``, or the
            only one that has a row for each row of one.
        memory_budget: bytes that the loss may hold, as in :func:`fusedce.fused_ce`.

    Returns:
        ``model`` itself. Calling this again changes nothing but a ``memory_budget`` that is given;
        :func:`restore_loss_head` undoes it.

    Raises:
        TypeError: ``model`` is not a module, or the head is not a linear layer; ``memory_budget``
            is not an int.
        ValueError: no head was found or several; ``head`` is not a module of ``model``;
            ``memory_budget`` is not positive.

    Where tensor parallelism shards the rows of the head's weight (``tp_plan="auto"`` of
    transformers), the loss has the collectives of :func:`fusedce.sharded.sharded_ce`, and all ranks
    of the mesh must read logits together. If ``resize_token_embeddings``, or adding or removing an
    adapter of PEFT, gives the model another head, that is replaced at the next forward.
    """
    memory_budget_of(memory_budget)
    _check_model(model)
    named = head is None
    head = find_head(model) if head is None else head
    _check_head(model, head)
    replaced = head_of(head)
    if replaced is None:
        for module in model.modules():
            module.__dict__.pop(LABELS, None)  # found out with the head as it was
        _restore(head)  # it may have been replaced before an adapter was put around it
        head.register_forward_pre_hook(Head(HeadCounts(), cross_entropy, memory_budget))
        head.register_forward_hook(take_back, prepend=True, always_call=True)
        if "forward" in head.__dict__ and is_dtensor(head._parameters.get("weight")):
            head.forward = ShardedForward(head)
    elif memory_budget is not None:
        replaced.memory_budget = memory_budget
    if named:
        _watch(model, memory_budget)
    return model


def restore_loss_head(model: ModelT) -> ModelT:
    """Undo :func:`replace_loss_head`; a model without a replaced head stays as it is.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_model(model)
    _restore(model)
    for module in model.modules():
        if _WATCH in module.__dict__:
            module.__dict__.pop(_WATCH).remove()
        module.__dict__.pop(LABELS, None)
    return model


def head_report(model: nn.Module) -> HeadReport:
    """Report what the replaced head of ``model`` has done since it was replaced.

    It holds ``active`` (whether the output head is a replaced one now), ``since`` (local time),
    ``calls`` of the head, ``losses_fused``, ``logits_made`` (how often), and ``places``: for each
    place that made logits the operation, the user's line, the shape and the bytes. ``notes`` say
    why the original head runs, or why tokens are counted by labels. Its ``str`` is a readable
    summary.
    Several heads are added up. With ``FUSEDCE_EXPLAIN=1`` in the environment, each place is printed
    once, as it happens.

    Raises:
        TypeError: ``model`` is not a module.

    Examples:
        >>> print(head_report(model))
    """
    _check_model(model)
    heads = {m: attached.report for m in model.modules() if (attached := head_of(m)) is not None}
    counts = list(heads.values())
    places = tuple(p for one in counts for p in one.places.values())
    notes = [note for one in counts for note in one.notes]
    by_labels = (m.__dict__[LABELS].note for m in model.modules() if LABELS in m.__dict__)
    notes += [note for note in by_labels if note is not None]
    return HeadReport(
        active=bool(heads) and _named_head(model) in (None, *heads),
        since=min((one.since for one in counts), default=None),
        losses_fused=sum(one.losses for one in counts),
        logits_made=sum(p.times for p in places),
        places=places,
        notes=tuple(dict.fromkeys(notes)),
        calls=sum(one.calls for one in counts),
    )


def why_no_head(model: nn.Module) -> str | None:
    """Why the head of ``model`` cannot be replaced; ``None`` if it can."""
    try:
        _check_head(model, find_head(model))
    except (TypeError, ValueError) as why:
        return str(why).partition(". ")[0]  # what comes then is a remedy in another call
    return None


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _check_head(model: nn.Module, head: Any) -> None:
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"head must be a torch.nn.Module, got {type(head).__name__}"
            + (f": pass model.get_submodule({head!r})" if isinstance(head, str) else "")
        )
    if isinstance(head, (nn.Embedding, nn.EmbeddingBag, nn.Bilinear)) or classes_of(head) is None:
        shape = getattr(getattr(head, "weight", None), "shape", None)
        raise TypeError(
            f"head must be a linear layer with a weight (V, H), or hold one, got "
            f"{type(head).__name__}" + (f" with weight {tuple(shape)}" if shape else "")
        )
    if all(m is not head for m in model.modules()):
        raise ValueError(
            f"head must be a module of model, got a {type(head).__name__} that "
            f"{type(model).__name__} does not hold: pass model.get_submodule(...)"
        )


def _restore(model: nn.Module) -> None:
    for module in model.modules():
        for key in [k for k, h in module._forward_pre_hooks.items() if isinstance(h, Head)]:
            del module._forward_pre_hooks[key]
        for key in [k for k, h in module._forward_hooks.items() if h is take_back]:
            del module._forward_hooks[key]
        forward = module.__dict__.get("forward")
        if isinstance(forward, ShardedForward):
            module.forward = forward.original


# ---- which module is the head ---------------------------------------------------------------


def _named_head(model: nn.Module) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def find_head(model: nn.Module) -> nn.Module:
    """The output head of a model; ``ValueError`` if there is none, or several could be."""
    head = _named_head(model)
    if isinstance(head, nn.Module):
        return head
    if callable(getattr(model, "get_output_embeddings", None)):
        raise ValueError(
            f"model has no output embeddings: {type(model).__name__}.get_output_embeddings() "
            f"returned {type(head).__name__}. If it ends in a linear layer, pass head=that layer"
        )
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise ValueError(
            f"model must have a linear output head: {type(model).__name__} has no "
            f"get_output_embeddings() and no nn.Linear"
        )
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    rows, weights = {m.num_embeddings for m in tables}, {m.weight for m in tables}
    tied = [n for n, m in linears.items() if m._parameters.get("weight") in weights]
    likely = [n for n, m in linears.items() if m.out_features in rows]
    for names in (list(linears), tied, likely):
        if len(names) == 1:
            return linears[names[0]]
    raise ValueError(
        f"head must be given: {type(model).__name__} has no get_output_embeddings(), and each of "
        f"{', '.join(likely or linears)} could be its output head. "
        f"Pass head=model.get_submodule(...)"
    )


def _runs_trl_head() -> bool:
    """Whether TRL's forward, not the model's own, has called the decoder whose hook runs now."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and "fused_lm_head" in frame.f_code.co_varnames


# ---- heads that come later ------------------------------------------------------------------


class _Watch:
    """Hook that replaces a model's new head before the model runs.

    It stands on the model's decoder, which no adapter of PEFT wraps.
    """

    def __init__(self, model: nn.Module | None, memory_budget: int | None = None) -> None:
        # The copy of a decoder has no model.
        self.model: Any = (lambda: None) if model is None else weakref.ref(model)
        self.memory_budget = memory_budget

    def __call__(self, module: nn.Module, args: Any) -> None:
        model = self.model()
        if torch.compiler.is_compiling() or model is None or _WATCH not in module.__dict__:
            return
        head = _named_head(model)
        if not isinstance(head, nn.Module):
            return
        attached = head_of(head)
        if attached is not None:
            if _TRL not in attached.report.notes and _runs_trl_head():
                attached.report.note(_TRL)
                warnings.warn(_TRL, stacklevel=2)
            return
        try:
            replace_loss_head(model, memory_budget=self.memory_budget)
        except (TypeError, ValueError) as e:
            module.__dict__.pop(_WATCH).remove()
            warnings.warn(
                f"the model has another head now, which is not replaced: {e}", stacklevel=2
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch:
        return _Watch(memo.get(id(self.model())), self.memory_budget)

    def __reduce__(self) -> Any:
        return _Watch, (self.model(), self.memory_budget)


def _watch(model: nn.Module, memory_budget: int | None) -> None:
    owner: Any = next(
        (m for m in model.modules() if isinstance(getattr(m, "base_model", None), nn.Module)
         and callable(getattr(m, "get_output_embeddings", None))
         and not type(m).__module__.startswith("peft.")), None,
    )  # fmt: skip
    if owner is None:
        return
    handles = owner.base_model.__dict__
    if _WATCH in handles:
        if memory_budget is None:
            return
        handles.pop(_WATCH).remove()
    handles[_WATCH] = owner.base_model.register_forward_pre_hook(_Watch(owner, memory_budget))
