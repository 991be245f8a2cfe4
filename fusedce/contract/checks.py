"""Checks of the public functions' arguments, and the casts that autocast asks for."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from .problem import ACC_DTYPE, FINITE, NUMBERS, RANGES, Problem

_LARGEST = torch.iinfo(torch.int64).max
BUDGET_VARIABLE = "FUSEDCE_MEMORY_BUDGET"
DTYPES = tuple(ACC_DTYPE)
_DEFAULTS = {name: Problem._field_defaults[name] for name in NUMBERS}


def check_problem(problem: Problem, *, several: bool = False) -> Problem:
    """Check a problem, and cast it as autocast asks; with ``several`` a token may have K labels.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    check_tensor_types(problem)
    problem = autocast(problem)
    several = several and has_several_labels(problem)
    check_tensors(problem.replace(labels=problem.labels[..., 0]) if several else problem)
    check_options(problem)
    return problem


def has_several_labels(problem: Problem) -> bool:
    """Whether ``labels (..., K)`` are several classes of each token."""
    labels, hidden = problem.labels, problem.hidden
    return (
        not labels.is_floating_point()
        and labels.dim() == hidden.dim() > 0
        and labels.shape[:-1] == hidden.shape[:-1]
        and labels.shape[-1] > 0
    )


def tempered(problem: Problem, temperature: float | Tensor) -> Problem:
    """The problem with its logits divided by a number, or by each token's or sequence's own.

    ``(c / t) * tanh((s / t) * x / (c / t))`` is ``c * tanh(s * x / c) / t``.
    """
    if isinstance(temperature, Tensor):
        shape = problem.hidden.shape[:-1]
        is_local = not hasattr(problem.hidden, "placements")  # no DTensor
        if shape and is_local and temperature.shape == (*shape[:-1], 1):
            temperature = temperature.expand(shape)  # one of each sequence
        return problem.replace(temperature=temperature)
    t, cap = check_number("temperature", temperature), problem.softcap
    if t == 1:
        return problem
    return problem.replace(
        softcap=None if cap is None else check_number("softcap", cap) / t,
        logit_scale=check_number("logit_scale", problem.logit_scale) / t,
    )


def check_options(problem: Problem) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a problem's numbers and weights are right."""
    ignored = problem.ignore_index
    if type(ignored) is not int or ignored != Problem._field_defaults["ignore_index"]:
        check_ignore_index(ignored, problem.labels)
    for name, default in _DEFAULTS.items():
        value = getattr(problem, name)
        usual = value is None if default is None else type(value) is float and value == default
        if not usual:
            check_number(name, value)
    hidden, weight = problem.hidden, problem.weight
    if problem.token_weight is not None:
        _check_weights("token_weight", problem.token_weight, hidden, hidden.shape[:-1], "(...)")
    if problem.class_weight is not None:
        _check_weights("class_weight", problem.class_weight, hidden, weight.shape[:1], "(V,)")


def flattened(problem: Problem) -> Problem:
    """Put tokens in one dimension, numbers in floats, and weights in float32 or better.

    Raises:
        TypeError, ValueError: the budget or the temperature is wrong.
    """
    hidden, labels, ignore_index = problem.hidden, problem.labels, problem.ignore_index
    changed: dict[str, Any] = {}  # (usually nothing: a copy would take 4 us)
    if hidden.dim() != 2:
        labels = labels.reshape(-1, *labels.shape[hidden.dim() - 1 :])  # (N,) or (N, K)
        changed.update(hidden=hidden.reshape(-1, hidden.shape[-1]), labels=labels)
    if ignore_index is None:  # a value that no label has
        ignore_index = torch.iinfo(labels.dtype).min
        labels = labels.clamp(min=ignore_index + 1)
        changed.update(labels=labels, ignore_index=ignore_index)
    for name in NUMBERS:
        number = getattr(problem, name)
        if number is not None and type(number) is not float:
            changed[name] = float(number)
    if problem.token_weight is not None:
        changed["token_weight"] = _in_float(problem.token_weight)
    if problem.class_weight is not None:
        changed["class_weight"] = _in_float(problem.class_weight)
    if problem.temperature is not None:
        used = labels.ne(ignore_index)
        used = used.any(1) if used.dim() == 2 else used
        changed["temperature"] = checked_temperature(problem.temperature, problem.hidden, used)
    budget = memory_budget_of(problem.memory_budget, problem.chunk_tokens)
    if budget is not problem.memory_budget:
        changed["memory_budget"] = budget
    return problem.replace(**changed) if changed else problem


def _in_float(weights: Tensor) -> Tensor:
    """Weights in one dimension, in float32 or better."""
    wide = weights.dtype in (torch.float32, torch.float64)
    return (weights if wide else weights.float()).reshape(-1)


def check_tensor_types(problem: Problem) -> None:
    """Raise ``TypeError`` unless hidden, weight, labels and bias are dense tensors.

    Inside a transform of ``torch.func``, raise ``RuntimeError``: it sees none of our derivatives.
    """
    if transformed():
        raise RuntimeError(
            "fusedce works in no transform of torch.func (grad, vmap, jacrev, jvp ...): use "
            "loss.backward() or torch.autograd.grad, or F.cross_entropy(F.linear(hidden, weight, "
            "bias), labels) inside the transform"
        )
    for name in ("hidden", "weight", "labels", "bias"):
        tensor = getattr(problem, name)
        if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor is not None and (tensor.is_nested or tensor.layout is not torch.strided):
            kind = "a nested one" if tensor.is_nested else tensor.layout
            raise TypeError(f"{name} must be a dense tensor, got {kind}")


def autocast(problem: Problem) -> Problem:
    """Cast hidden, weight and bias to one dtype: autocast's, or else the widest of theirs.

    Autocast casts them as the arguments of ``F.linear``; float64 keeps its dtype. Elsewhere the
    rule is `torch.promote_types`. A gradient is cast back to the dtype of its own argument.
    """
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    given = autocast_dtype(hidden.device)
    same = hidden.dtype == weight.dtype and (bias is None or bias.dtype == hidden.dtype)
    if given is None and same:
        return problem
    found = {x.dtype for x in (hidden, weight, bias) if x is not None}
    if given is None and not found <= {*DTYPES}:
        return problem
    wide = given or functools.reduce(torch.promote_types, found)

    def cast(x: Tensor) -> Tensor:
        kept = given is not None and (x.dtype == torch.float64 or not x.is_floating_point())
        return x if kept else x.to(wide)

    bias = None if bias is None else cast(bias)
    return problem.replace(hidden=cast(hidden), weight=cast(weight), bias=bias)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts on ``device``; ``None`` where it is off."""
    kind = device.type
    if torch.compiler.is_compiling():  # torch.compile of torch 2.11 cannot trace the questions
        available = kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
    elif not torch._C._is_any_autocast_enabled():
        return None
    else:
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
                f"{name} must be a plain tensor here, got a DTensor: pass {name}.full_tensor(); a "
                f"head sharded over its rows is a DTensor with Shard(0), and a teacher's head too"
            )
    if hidden.dtype not in DTYPES:
        raise TypeError(f"hidden must be float32, bfloat16, float16 or float64, got {hidden.dtype}")
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be (..., H) with H >= 1, got {tuple(hidden.shape)}")
    H = hidden.shape[-1]
    if weight.dtype in (torch.uint8, torch.int8):
        raise TypeError(
            f"weight must have the dtype of hidden {hidden.dtype}, or another of float32, "
            f"bfloat16, float16 and float64, got {weight.dtype} {tuple(weight.shape)}, as "
            f"quantised layers pack theirs: dequantise it, or let the layer itself run, by "
            f"model_logprobs(model, batch) or replace_loss_head(model)"
        )
    if weight.dim() != 2 or weight.shape[1] != H or len(weight) == 0:
        raise ValueError(
            f"weight must be (V, H) with V >= 1 and H={H} (from hidden), got {tuple(weight.shape)}"
        )
    if labels.is_floating_point() and labels.shape == (*hidden.shape[:-1], len(weight)):
        raise TypeError(
            f"labels must be int64 or int32 class indices, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}: class probabilities hold as many bytes as the logits. For a "
            f"teacher's head take fused_kl, for its likeliest K classes labels (N, K) of "
            f"fused_logprobs, as recipes.distillation_loss does; else F.cross_entropy of the logits"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must have the leading shape of hidden {tuple(hidden.shape[:-1])}, "
            f"got {tuple(labels.shape)}"
        )
    if labels.dtype != torch.int64:
        check_labels(labels)
    if bias is not None:
        _check_shape("bias", bias, weight.shape[:1], "(V,)")
    for name, tensor in (("weight", weight), ("bias", bias), ("labels", labels)):
        if tensor is None:
            continue
        if name != "labels" and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{name} must have the dtype of hidden {hidden.dtype}, or another of float32, "
                f"bfloat16, float16 and float64, got {tensor.dtype}"
            )
        if tensor.device != hidden.device:
            check_device(name, tensor, hidden)


def check_are_tensors(**given: object) -> None:
    """Raise ``TypeError`` unless all arguments, by their names, are tensors."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def check_device(name: str, x: Tensor, hidden: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` is on the device of ``hidden``."""
    if x.device != hidden.device:
        raise ValueError(
            f"{name} must be on the device of hidden {hidden.device}, got {x.device}: pass "
            f"{name}.to(hidden.device)"
        )


def check_labels(labels: Any) -> None:
    """Raise ``TypeError`` unless ``labels`` is a tensor of int64 or int32."""
    check_are_tensors(labels=labels)
    if labels.dtype not in (torch.int64, torch.int32):
        whole = not (labels.is_floating_point() or labels.is_complex())
        raise TypeError(
            f"labels must be int64 or int32 class indices, got {labels.dtype}"
            + (": pass labels.long()" if whole else "")
        )


def check_ignore_index(ignore_index: int | None, labels: Tensor) -> None:
    """Raise unless ``ignore_index`` is ``None`` or an int that the dtype of ``labels`` holds."""
    if ignore_index is None:
        return
    check_int("ignore_index", ignore_index, "an int or None")
    limits = torch.iinfo(labels.dtype)
    if not limits.min <= ignore_index <= limits.max:
        raise ValueError(
            f"ignore_index must fit the dtype of labels, {labels.dtype}, got {ignore_index}"
        )


def transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work."""
    return torch._C._functorch.maybe_current_level() is not None


def can_be_read(x: Tensor) -> bool:
    """Whether ``x`` has values on the CPU that no trace would make constants of.

    There reading them does not synchronise.
    """
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not transformed()
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()  # make_fx
        and not is_fake(x)
    )


def check_flag(name: str, value: bool) -> None:
    """Raise a TypeError unless ``value`` is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise a ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def is_sharded(weight: object, process_group: object) -> bool:
    """Whether the vocabulary is sharded: a group was given, or the weight is a ``DTensor``."""
    return process_group is not None or hasattr(weight, "placements")


def check_sharding(tokens_sharded: bool, vocab_size: int | None) -> None:
    """Check the arguments of a sharded vocabulary."""
    check_flag("tokens_sharded", tokens_sharded)
    if vocab_size is not None:
        check_int("vocab_size", vocab_size, "an int or None")


def refuse_sharding(tokens_sharded: bool, vocab_size: int | None) -> None:
    """Raise where an argument of a sharded vocabulary is given with a whole one."""
    check_sharding(tokens_sharded, vocab_size)
    for name, given in (("tokens_sharded", tokens_sharded), ("vocab_size", vocab_size is not None)):
        if given:
            raise ValueError(
                f"{name} is for a weight whose rows are split among ranks, got a whole one: give "
                f"process_group=, or a DTensor with Shard(0)"
            )


def with_a_row(problem: Problem) -> Problem:
    """The problem with a row in place of an empty shard of the vocabulary, to be checked."""
    weight = problem.weight
    if weight.dim() != 2 or len(weight):
        return problem
    bias = None if problem.bias is None else problem.bias.new_empty(1)
    return problem.replace(weight=weight.new_empty(1, weight.shape[1]), bias=bias)


def check_number(name: str, value: float) -> float:
    """``value`` as a float; ``TypeError`` or ``ValueError`` where :data:`RANGES` forbids it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    least, most, words = RANGES.get(name, FINITE)
    if not least <= value <= most:
        raise ValueError(f"{name} must be {words}, got {value}")
    return float(value)


def check_int(name: str, value: object, what: str = "an int", least: int | None = None) -> None:
    """Raise ``TypeError`` unless ``value`` is an int; ``ValueError`` below ``least``, if given."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be {what}, got {type(value).__name__}")
    if least is not None and not least <= value <= _LARGEST:
        raise ValueError(f"{name} must be >= {least} and fit in 64 bits, got {value}")


def check_width(name: str, x: Tensor, hidden: Tensor) -> None:
    """Raise ``TypeError`` unless ``x`` is float64 exactly where ``hidden`` is."""
    if (x.dtype == torch.float64) != (hidden.dtype == torch.float64):
        raise TypeError(
            f"{name} must be float64 exactly where hidden is, got {x.dtype} for {hidden.dtype}"
        )


def _check_shape(name: str, x: Tensor, shape: torch.Size, letters: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must be {letters} = {tuple(shape)}, got {tuple(x.shape)}")


def _check_weights(name: str, x: Tensor, hidden: Tensor, shape: torch.Size, letters: str) -> None:
    check_are_tensors(**{name: x})
    if x.is_complex():
        raise TypeError(f"{name} must be real numbers or a mask, got {x.dtype}")
    _check_shape(name, x, shape, letters)
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
        bad = ~((t > 0) & (t <= torch.finfo(torch.float32).max))
        if bad.any():
            at = int(bad.nonzero()[0, 0])
            raise ValueError(
                f"temperature must be positive and finite, got {float(t[at])} at flattened "
                f"position {at}"
            )
    return t


def check_argmax_out(argmax_out: Tensor, labels: Tensor) -> None:
    """Raise unless ``argmax_out`` is int64, with the shape of labels on the device of hidden."""
    check_are_tensors(argmax_out=argmax_out)
    if argmax_out.dtype != torch.int64:
        raise TypeError(f"argmax_out must be int64, got {argmax_out.dtype}")
    _check_shape("argmax_out", argmax_out, labels.shape, "of the shape of labels,")
    check_device("argmax_out", argmax_out, labels)
    if any(s == 0 and n > 1 for s, n in zip(argmax_out.stride(), argmax_out.shape, strict=True)):
        raise ValueError(
            "argmax_out must have memory of its own for each position, got an expanded tensor: "
            "pass argmax_out.clone(), or torch.empty_like(labels)"
        )


def memory_budget_of(memory_budget: int | None, chunk_tokens: int | None = None) -> int | None:
    """The given budget in bytes; else the environment's, unless ``chunk_tokens`` is given.

    Raises:
        TypeError, ValueError: one of them is no positive int, or both are given.
    """
    if chunk_tokens is not None:
        check_int("chunk_tokens", chunk_tokens, "an int or None", 1)
    if memory_budget is not None:
        bytes_ = "an int, in bytes (4 * 2**30 for 4 GiB), or None"
        check_int("memory_budget", memory_budget, bytes_, 1)
    if memory_budget is not None and chunk_tokens is not None:
        raise ValueError(
            f"give memory_budget or chunk_tokens, not both: the budget decides how many tokens a "
            f"chunk takes; got memory_budget={memory_budget} and chunk_tokens={chunk_tokens}"
        )
    given = os.environ.get(BUDGET_VARIABLE, "").strip()
    if memory_budget is not None or chunk_tokens is not None or not given:
        return memory_budget
    if not given.isdecimal() or len(given) > 19 or not 1 <= int(given) <= _LARGEST:
        raise ValueError(
            f"{BUDGET_VARIABLE} in the environment must be a whole number of bytes that fits in 64 "
            f"bits, got {given!r}"
        )
    return int(given)
