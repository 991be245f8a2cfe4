"""Error messages that say what was meant: by a peer's name of an argument, or by a shape."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar, cast

from torch import Tensor, nn

from fusedce.contract.problem import Problem

P = ParamSpec("P")
R = TypeVar("R")

# Our names, and after each those of Liger-Kernel, cut-cross-entropy, QuACK, verl and torch.
_THEIRS = {
    "hidden": "_input, e, input, x",
    "weight": "c, lin_weight, linear_weight",
    "labels": "target, targets",
    "bias": "linear_bias",
    "labels.masked_fill(attention_mask == 0, ignore_index)": "attention_mask",
    "class_weight, of fused_cross_entropy": "ce_weight",
    "fused_cross_entropy(..., class_weight=class_weight)": "class_weight",
    "fused_ce(...).mean(), or fused_cross_entropy(..., reduction=reduction)": "reduction",
    "fused_ce(...).mean(num_items_in_batch)": "num_items_in_batch",
    "reduction": "size_average",
    "token_weight": "use_token_scaling",
    "softcap": "logit_softcapping, soft_cap",
    "logit_scale=1 / temperature (and softcap=softcap / temperature)": "temperature",
    "z_loss": "lse_square_scale, z_loss_weight",
    "chunk_tokens": "chunk_size",
    "backend": "impl",
    "process_group": "vocab_parallel_options",
    "shift_labels(labels), or fusedce.linear_cross_entropy": "shift",
    "fused_logprobs(...).entropy": "return_entropy",
    "fused_logprobs(...).lse": "return_lse",
    "argmax_out, or fused_argmax": "return_predicted_tokens",
    'monitor=("correct",)': "return_token_accuracy",
    'monitor=("z_loss",)': "return_z_loss",
    "nothing (weight gradients are summed in float32)": "accum_dtype",
    "nothing (no gradient is filtered)": "filter_eps",
}
_OURS = {name: ours for ours, names in _THEIRS.items() for name in names.split(", ")}


def explains_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that its ``TypeError`` for a wrong argument names the right one."""
    parameters = inspect.signature(function).parameters
    known = frozenset(parameters)
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [n for n in positional if parameters[n].default is inspect.Parameter.empty]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                ours = _OURS.get(name)
                raise TypeError(
                    f"{function.__name__}() has no argument {name!r}: "
                    + (f"use {ours}" if ours else f"it has {', '.join(sorted(known))}")
                )
        if len(args) < len(required) or "weight" in kwargs:
            _check_given(function.__name__, positional, required, len(args), kwargs)
        return function(*args, **kwargs)

    return call


def _check_given(
    name: str, positional: list[str], required: list[str], n: int, kwargs: Collection[str]
) -> None:
    """Raise ``TypeError`` for what a user of ``F.cross_entropy(logits, labels, weight)`` writes."""
    if not {"hidden", "weight", "labels"} <= set(required):
        return
    if "weight" in positional[:n] and "weight" in kwargs:
        raise TypeError(
            f"{name}() takes the head's weight (V, H) as its argument {positional.index('weight')}"
            f": weight= was given besides. Weights of classes are class_weight="
        )
    missing = [x for x in required[n:] if x not in kwargs]
    given = [x for x in required if x != "self"]
    if missing and missing != required:
        raise TypeError(
            f"{name}() needs {', '.join(given)}, but not {' and '.join(missing)} was given. It "
            f"takes no logits: pass the hidden states that go into the head and the head's weight, "
            f"{name}({', '.join(given).replace('weight', 'head.weight')})"
        )


def takes_arguments_of(
    other: Callable[P, object],
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function ``(*args, **kwargs)`` the parameters of ``other``, which says them once."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        returns = inspect.signature(function).return_annotation
        signature = inspect.signature(other).replace(return_annotation=returns)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return explains_names(cast(Callable[P, R], function))

    return decorate


def not_a_tensor(name: str, given: object) -> TypeError:
    """The error for an argument ``name`` that is not a tensor."""
    hint = ""
    if name == "labels" and given is None:
        hint = ": the collator must put labels into the batch, such as a copy of input_ids"
    elif name == "hidden" and isinstance(given, tuple):
        hint = ": pass the last of its tensors, hidden[-1]"
    elif isinstance(given, (list, tuple)) or hasattr(given, "__array__"):
        hint = f": pass torch.as_tensor({name})"
    elif isinstance(given, nn.Module) and isinstance(getattr(given, "weight", None), Tensor):
        hint = ": pass head.weight, and bias=head.bias where it has one"
    elif any(hasattr(given, x) for x in ("last_hidden_state", "hidden_states", "logits")):
        hint = (
            ": pass output.last_hidden_state of the model without its head, or "
            "output.hidden_states[-1] of one called with output_hidden_states=True"
        )
    return TypeError(f"{name} must be a tensor, got {type(given).__name__}{hint}")


def misplaced(problem: Problem) -> str:
    """The end of an error message for shapes that do not fit: the likely mistake, if there is one.

    It begins with a full stop, and is empty where nothing is likely.
    """
    hidden, weight, labels = (tuple(x.shape) for x in problem[:3])
    if problem.labels.is_floating_point() and not problem.weight.is_floating_point():
        return (
            ". weight looks like labels: the order is hidden, weight, labels, with the head's "
            "weight (V, H). Weights of classes are class_weight="
        )
    if len(weight) == 1:
        return ". It is the head's; weights of classes are class_weight="
    if labels == (*hidden[:-1], weight[0]) and len(weight) == 2:
        return ". labels look one-hot: pass labels.argmax(-1)"
    if labels == weight[:-1] != hidden[:-1] and hidden[-1:] == weight[-1:] and len(hidden) == 2:
        return ". hidden and weight look swapped: hidden comes first"
    if len(weight) == 2 and hidden[-1:] == weight[:1] and hidden[-1:] != weight[1:]:
        return (
            ". hidden looks like logits (pass the states that go into the head), or weight like "
            "its own transpose (pass weight.T)"
        )
    tokens = hidden[:-1]
    if hidden[-1:] != weight[1:] or len(tokens) == 0:
        return ""
    if labels[:-1] == tokens[:-1] and labels[-1:] in ((tokens[-1] - 1,), (tokens[-1] + 1,)):
        return (
            ". One of them looks cut, to align it with the next token: pass both uncut, with "
            "fusedce.shift_labels(labels)"
        )
    if math.prod(labels) == math.prod(tokens):
        return ". They have equally many positions: pass labels.reshape(hidden.shape[:-1])"
    return ""
