"""Checks of the public functions' arguments, and the casts that autocast asks for."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fusedce.contract.explain import misplaced, not_a_tensor, not_dense
from fusedce.contract.labels import can_be_read, check_ignore_index, check_labels
from fusedce.contract.problem import NUMBERS, RANGES, Problem, acc_dtype

_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_LARGEST = torch.iinfo(torch.int64).max
_LEAST_TEMPERATURE = 1e-30
BUDGET_VARIABLE = "FUSEDCE_MEMORY_BUDGET"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def checked(problem: Problem) -> Problem:
    """Check, cast and flatten a problem: the form that all layers but the public functions take.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, says what it must be, and
            what was given.
    """
    check_tensor_types(problem)
    problem = autocast(problem)
    check_tensors(problem)
    check_options(problem)
    return flattened(problem)


def check_options(problem: Problem) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a problem's numbers and weights are right."""
    check_softcap(problem.softcap)
    check_ignore_index(problem.ignore_index, problem.labels)
    check_chunk_tokens(problem.chunk_tokens)
    check_memory_budget(problem.memory_budget, problem.chunk_tokens)
    for name in NUMBERS:
        if name != "softcap":
            check_number(name, getattr(problem, name))
    hidden, weight = problem.hidden, problem.weight
    _check_weights("token_weight", problem.token_weight, hidden, hidden.shape[:-1], "(...)")
    _check_weights("class_weight", problem.class_weight, hidden, weight.shape[:1], "(V,)")


def flattened(problem: Problem) -> Problem:
    """Put tokens in one dimension, numbers in floats, and weights in float32 or better."""
    hidden = problem.hidden
    labels, ignore_index = problem.labels.reshape(-1), problem.ignore_index
    if ignore_index is None:  # a value that no label has
        ignore_index = torch.iinfo(labels.dtype).min
        labels = labels.clamp(min=ignore_index + 1)
    token_weight, class_weight = wide(problem.token_weight), wide(problem.class_weight)
    given = {name: getattr(problem, name) for name in NUMBERS}
    return problem.but(
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        labels=labels,
        ignore_index=ignore_index,
        memory_budget=memory_budget_of(problem.memory_budget, problem.chunk_tokens),
        token_weight=None if token_weight is None else token_weight.reshape(-1),
        class_weight=class_weight,
        **{name: x if x is None else float(x) for name, x in given.items()},
    )


def wide(x: Tensor | None) -> Tensor | None:
    """Cast a mask or weights of any dtype to float32, unless they are float32 or float64."""
    return x if x is None or x.dtype in (torch.float32, torch.float64) else x.float()


def check_tensor_types(problem: Problem) -> None:
    """Raise ``TypeError`` unless hidden, weight, labels and bias are dense tensors."""
    for name in ("hidden", "weight", "labels", "bias"):
        tensor = getattr(problem, name)
        if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
            raise not_a_tensor(name, tensor)
        if tensor is not None and (tensor.is_nested or tensor.layout is not torch.strided):
            raise not_dense(name, tensor)


def autocast(problem: Problem) -> Problem:
    """Cast hidden, weight and bias to one dtype: autocast's, or else the widest of theirs.

    Autocast casts them as the arguments of ``F.linear``; float64 keeps its dtype. Elsewhere the
    rule is `torch.promote_types`. A gradient is cast back to the dtype of its own argument.
    """
    operands = problem.hidden, problem.weight, problem.bias
    found = {x.dtype for x in operands if x is not None}
    given = autocast_dtype(problem.hidden.device)
    if given is None and (len(found) == 1 or not found <= {*DTYPES}):
        return problem
    wide = given or functools.reduce(torch.promote_types, found)

    def cast(x: Tensor) -> Tensor:
        kept = given is not None and (x.dtype == torch.float64 or not x.is_floating_point())
        return x if kept else x.to(wide)

    return problem.but(
        hidden=cast(problem.hidden),
        weight=cast(problem.weight),
        bias=None if problem.bias is None else cast(problem.bias),
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts on ``device``; ``None`` where it is off."""
    if torch.compiler.is_compiling():  # torch.compile of torch 2.11 cannot trace the questions
        kind = device.type
        available = kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
    elif not torch._C._is_any_autocast_enabled():
        return None
    else:
        kind = device.type
        available = torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if available and torch.is_autocast_enabled(kind) else None


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off, for operands that it has cast already."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def check_tensors(problem: Problem) -> None:
    """Check hidden ``(..., H)``, weight ``(V, H)``, labels ``(...)`` and bias ``(V,)``.

    Raises:
        TypeError: a dtype is not supported or differs from hidden's, or a tensor is a DTensor.
        ValueError: a shape does not fit the others, or a tensor is on another device.
    """
    hidden, weight = problem.hidden, problem.weight
    labels, bias = problem.labels, problem.bias
    for name, x in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        if hasattr(x, "placements"):
            raise TypeError(
                f"{name} must be a plain tensor here, got a DTensor: pass {name}.full_tensor(), or "
                f"for a weight sharded over its rows use fused_ce or fusedce.sharded.sharded_ce"
            )
    if hidden.dtype not in DTYPES:
        raise TypeError(f"hidden must be float32, bfloat16, float16 or float64, got {hidden.dtype}")
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be (..., H) with H >= 1, got {tuple(hidden.shape)}")
    H = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != H:
        raise ValueError(
            f"weight must be (V, H) with H={H} (from hidden), got {tuple(weight.shape)}"
            + misplaced(problem)
        )
    V = weight.shape[0]
    if V == 0:
        raise ValueError(f"weight must be (V, H) with V >= 1, got {tuple(weight.shape)}")
    if labels.is_floating_point() and labels.shape == (*hidden.shape[:-1], V):
        raise TypeError(
            f"labels must be int64 or int32 class indices, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}: class probabilities are labels of fused_cross_entropy. For "
            f"few classes per token see fusedce.recipes.distillation_loss"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must have the leading shape of hidden {tuple(hidden.shape[:-1])}, "
            f"got {tuple(labels.shape)}" + misplaced(problem)
        )
    check_labels(labels)
    if bias is not None and bias.shape != (V,):
        raise ValueError(f"bias must be (V,) with V={V} (from weight), got {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{name} must have the dtype of hidden {hidden.dtype}, or another of float32, "
                f"bfloat16, float16 and float64, got {tensor.dtype}"
            )
    for name, tensor in (("weight", weight), ("labels", labels), ("bias", bias)):
        if tensor is not None:
            check_device(name, tensor, hidden)


def check_device(name: str, x: Tensor, hidden: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` is on the device of ``hidden``."""
    if x.device != hidden.device:
        raise ValueError(
            f"{name} must be on the device of hidden {hidden.device}, got {x.device}: pass "
            f"{name}.to(hidden.device)"
        )


def check_temperature(value: float) -> float:
    """``value`` as a float; an error where it is not positive, or logits over it are infinite."""
    t = check_number("temperature", value)
    if t <= 0:
        raise ValueError(f"temperature must be positive, got {value}")
    if t < _LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature must be at least {_LEAST_TEMPERATURE}, for logits are divided by it in "
            f"float32, got {value}"
        )
    return t


def check_softcap(softcap: float | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``softcap`` is positive or ``None``."""
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap must be a number or None, got {type(softcap).__name__}")
    if not _TINY <= softcap <= _HUGE:
        raise ValueError(
            f"softcap must be None (no cap), or positive and in the range of float32, "
            f"{_TINY:.1e} to {_HUGE:.1e}, "
            f"got {softcap}"
        )


def check_flag(name: str, value: bool) -> None:
    """Raise a TypeError unless ``value`` is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


def check_placed(tokens_sharded: bool, vocab_size: int | None, *, sharded: bool) -> None:
    """Check the arguments of a sharded vocabulary, which elsewhere must have their defaults."""
    check_flag("tokens_sharded", tokens_sharded)
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int)):
        raise TypeError(f"vocab_size must be an int or None, got {type(vocab_size).__name__}")
    for name, given in (("tokens_sharded", tokens_sharded), ("vocab_size", vocab_size is not None)):
        if given and not sharded:
            raise ValueError(
                f"{name} is for a weight whose rows are split among ranks, got a whole one: give "
                f"process_group=, or a DTensor with Shard(0)"
            )


def with_a_row(problem: Problem) -> Problem:
    """The problem with a row in place of an empty shard of the vocabulary, to be checked."""
    weight = problem.weight
    if weight.dim() != 2 or len(weight):
        return problem
    return problem.but(weight=weight.new_empty(1, weight.shape[1]), bias=None)


def check_reduction(reduction: object) -> None:
    """Raise ``ValueError`` unless ``reduction`` is one of the three that torch has."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def check_number(name: str, value: float) -> float:
    """``value`` as a float; ``TypeError`` or ``ValueError`` where :data:`RANGES` does not allow it.

    Every number must be finite in float32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not -_HUGE <= value <= _HUGE:
        raise ValueError(f"{name} must be finite and in the range of float32, got {value}")
    least, most = RANGES.get(name, (value, value))
    if not least <= value <= most:
        raise ValueError(f"{name} must be in [{least}, {most}], got {value}")
    return float(value)


def check_width(name: str, x: Tensor, hidden: Tensor) -> None:
    """Raise ``TypeError`` unless ``x`` is float64 exactly where ``hidden`` is."""
    if acc_dtype(x.dtype) != acc_dtype(hidden.dtype):
        raise TypeError(
            f"{name} must be float64 exactly where hidden is, got {x.dtype} for {hidden.dtype}"
        )


def _check_weights(
    name: str, x: Tensor | None, hidden: Tensor, shape: torch.Size, letters: str
) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    if x.is_complex():
        raise TypeError(f"{name} must be real numbers or a mask, got {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"{name} must be {letters} = {tuple(shape)}, got {tuple(x.shape)}")
    check_device(name, x, hidden)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} must not require grad: it receives none here. Detach it, or, for weights of "
            'tokens, multiply fused_cross_entropy(..., reduction="none") by them'
        )


def checked_temperature(temperature: Tensor, hidden: Tensor, used: Tensor) -> Tensor:
    """Temperatures ``(N,)`` in float32 or better, with 1 at tokens that are not ``used (N,)``.

    Raises:
        TypeError: ``temperature`` is not a floating tensor.
        ValueError: its shape or device is wrong, or a value that is used is not positive and
            finite. Values are read on a CPU only, outside of transforms.
    """
    _check_weights("temperature", temperature, hidden, hidden.shape[:-1], "(...)")
    if not temperature.is_floating_point():
        raise TypeError(f"temperature must be floats, got {temperature.dtype}")
    t = temperature.reshape(-1)
    t = (t if t.dtype == torch.float64 else t.float()).masked_fill(~used, 1)
    if can_be_read(t):
        bad = ~((t > 0) & (t <= _HUGE))
        if bad.any():
            at = int(bad.nonzero()[0, 0])
            raise ValueError(
                f"temperature must be positive and finite, got {float(t[at])} at flattened "
                f"position {at}"
            )
    return t


def check_argmax_out(argmax_out: Tensor, labels: Tensor) -> None:
    """Raise unless ``argmax_out`` is int64, with the shape and on the device of ``labels``."""
    if not isinstance(argmax_out, Tensor):
        raise not_a_tensor("argmax_out", argmax_out)
    if argmax_out.dtype != torch.int64:
        raise TypeError(f"argmax_out must be int64, got {argmax_out.dtype}")
    if argmax_out.shape != labels.shape or argmax_out.device != labels.device:
        raise ValueError(
            f"argmax_out must have the shape and device of labels, {tuple(labels.shape)} on "
            f"{labels.device}, got {tuple(argmax_out.shape)} on {argmax_out.device}"
        )


def check_chunk_tokens(chunk_tokens: int | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless it is a positive int or ``None``."""
    if chunk_tokens is None:
        return
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, (int, torch.SymInt)):
        raise TypeError(f"chunk_tokens must be an int or None, got {type(chunk_tokens).__name__}")
    if not 1 <= chunk_tokens <= _LARGEST:
        raise ValueError(f"chunk_tokens must be >= 1 and fit in 64 bits, got {chunk_tokens}")


def check_memory_budget(memory_budget: int | None, chunk_tokens: int | None = None) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless it is ``None`` or a positive int, in bytes.

    Not both of the two may be given.
    """
    if memory_budget is None:
        return
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int):
        raise TypeError(
            f"memory_budget must be an int, in bytes (4 * 2**30 for 4 GiB), or None, "
            f"got {memory_budget!r}"
        )
    if not 1 <= memory_budget <= _LARGEST:
        raise ValueError(f"memory_budget must be >= 1 byte and fit in 64 bits, got {memory_budget}")
    if chunk_tokens is not None:
        raise ValueError(
            f"give memory_budget or chunk_tokens, not both: the budget decides how many tokens a "
            f"chunk takes; got memory_budget={memory_budget} and chunk_tokens={chunk_tokens}"
        )


def memory_budget_of(memory_budget: int | None, chunk_tokens: int | None = None) -> int | None:
    """The given budget in bytes; else the environment's, unless ``chunk_tokens`` is given."""
    if memory_budget is not None or chunk_tokens is not None:
        return memory_budget
    given = os.environ.get(BUDGET_VARIABLE, "").strip()
    if not given:
        return None
    if not given.isdecimal() or len(given) > 19 or not 1 <= int(given) <= _LARGEST:
        raise ValueError(
            f"{BUDGET_VARIABLE} in the environment must be a whole number of bytes that fits in 64 "
            f"bits, got {given!r}"
        )
    return int(given)
