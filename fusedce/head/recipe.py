"""What an output head is made of: a linear layer, perhaps inside wrappers of PEFT."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Terms(NamedTuple):
    """``logits = hidden @ weight.T + bias``, and a low-rank term beside it where LoRA adds one."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)


def check_linear(head: Any) -> None:
    if not isinstance(head, nn.Module):
        raise TypeError(f"head must be a torch.nn.Module, got {type(head).__name__}")
    try:
        weight = plain_weight(head)
    except AttributeError:
        weight = None
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise TypeError(
            f"head must be a linear layer with a floating weight (V, H), got {type(head).__name__}"
            + ("" if weight is None else f" with weight {tuple(weight.shape)} of {weight.dtype}")
        )
    if not is_sum_of_products(head):
        raise ValueError(
            f"head must be linear, or linear with LoRA, got the adapters "
            f"{head.active_adapters} of {type(head).__module__}.{type(head).__name__}"
        )


def _active(module: Any) -> Any:
    """Inside PEFT's ``modules_to_save`` wrapper: the copy that is trained, or the original."""
    while hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        names = getattr(module, "active_adapters", None) or [module.active_adapter]
        disabled = getattr(module, "disable_adapters", False)
        saved = [n for n in names if n in module.modules_to_save]
        module = (
            module.original_module if disabled or not saved else module.modules_to_save[saved[0]]
        )
    return module


def plain_weight(module: Any) -> Tensor:
    module = _active(module)
    weight: Tensor = getattr(module, "base_layer", module).weight
    return weight


def is_sum_of_products(module: Any) -> bool:
    """Whether :func:`terms_of` knows the adapter of a head, if it has one."""
    module = _active(module)
    if not hasattr(module, "base_layer") or module.disable_adapters or module.merged:
        return True
    variants = getattr(module, "lora_variant", {})  # DoRA and others
    return hasattr(module, "lora_A") and not any(n in variants for n in module.active_adapters)


class Adapter(NamedTuple):
    """One LoRA adapter in use: ``scaling * (dropout(h) @ a.T) @ b.T``."""

    a: Tensor  # (r, H)
    b: Tensor  # (V, r)
    bias: Tensor | None  # (V,)
    scaling: float
    dropout: Any


class Recipe(NamedTuple):
    """What a head computes with at one moment."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    adapters: tuple[Adapter, ...]
    merged: tuple[str, ...]  # adapters that are part of the weight

    def dropouts(self) -> list[Any]:
        """Dropouts of adapters that would draw now."""
        return [a.dropout for a in self.adapters if a.dropout.training and _rate(a.dropout) > 0]

    def tensors(self) -> list[Tensor]:
        every = [self.weight, self.bias, *(x for y in self.adapters for x in (y.a, y.b, y.bias))]
        return [x for x in every if x is not None]


def recipe_of(module: Any) -> Recipe:
    module = _active(module)
    base = getattr(module, "base_layer", module)
    names: list[str] = []
    if base is not module and not module.disable_adapters and not module.merged:
        names = [name for name in module.active_adapters if name in module.lora_A]
    adapters = tuple(
        Adapter(
            module.lora_A[name].weight,
            module.lora_B[name].weight,
            module.lora_B[name].bias,
            module.scaling[name],
            module.lora_dropout[name],
        )
        for name in names
    )
    merged = tuple(getattr(module, "merged_adapters", ()))
    return Recipe(base.weight, getattr(base, "bias", None), adapters, merged)


def _rate(dropout: Any) -> float:
    return float(getattr(dropout, "p", 0))


def with_dropped(recipe: Recipe, hidden: Tensor) -> Tensor:
    """``(..., H)`` and, beside it, what the dropout of each adapter makes of it."""
    return torch.cat([hidden, *(a.dropout(hidden) for a in recipe.adapters)], -1)


def terms_of(recipe: Recipe, hidden: Tensor) -> Terms:
    """The linear layer as one product: ``[h, s A h] @ [W, B].T`` where LoRA is in use.

    ``hidden``: ``(..., H)``, or :func:`with_dropped` where dropout has been drawn.
    """
    H = recipe.weight.shape[1]
    hidden, *dropped = hidden.split(H, -1)
    weight, bias = full(recipe.weight), None if recipe.bias is None else full(recipe.bias)
    if not recipe.adapters:
        return Terms(hidden, weight, bias)
    hiddens, weights = [hidden], [weight]
    for i, adapter in enumerate(recipe.adapters):
        a = full(adapter.a)
        x = F.linear((dropped[i] if dropped else hidden).to(a.dtype), a)
        hiddens.append((adapter.scaling * x).to(hidden.dtype))
        weights.append(full(adapter.b).to(weight.dtype))
        if adapter.bias is not None:
            extra = adapter.scaling * full(adapter.bias).to(weight.dtype)
            bias = extra if bias is None else bias + extra
    return Terms(torch.cat(hiddens, -1), torch.cat(weights, -1), bias)


def full(x: Tensor) -> Tensor:
    """A parameter that is still sharded (a DTensor) as a whole; other tensors as they are."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
