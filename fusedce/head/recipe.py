"""The parts of an output head: a linear layer, perhaps with LoRA adapters of PEFT."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedce.contract.checks import autocast_dtype, memory_budget_of
from fusedce.loss.shards import is_vocabulary_shard


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off: it has cast the operands when the head ran."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class Operands(NamedTuple):
    """``logits = hidden @ weight.T + bias``; LoRA adds ``r`` columns to hidden and weight."""

    hidden: Tensor  # (..., H + r)
    weight: Tensor  # (V, H + r)
    bias: Tensor | None  # (V,)


class Adapter(NamedTuple):
    """One LoRA adapter in use: ``scaling * (dropout(h) @ a.T) @ b.T``."""

    a: Tensor  # (r, H)
    b: Tensor  # (V, r)
    bias: Tensor | None  # (V,)
    scaling: float
    dropout: Any


class Recipe(NamedTuple):
    """The tensors a head computes with at one moment."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    adapters: tuple[Adapter, ...]
    merged: tuple[str, ...]  # names of adapters that are merged into the weight

    def has_sharded_vocabulary(self) -> bool:
        """Whether each rank holds some rows of a plain head: a ``DTensor`` with ``Shard(0)``."""
        return not self.adapters and all(is_vocabulary_shard(x) for x in self.tensors())

    def dropouts(self) -> list[Any]:
        """Dropout modules of adapters that draw random numbers now."""
        return [a.dropout for a in self.adapters if a.dropout.training and _rate(a.dropout) > 0]

    def tensors(self) -> list[Tensor]:
        """All tensors of the recipe, in a fixed order."""
        if not self.adapters:
            return [self.weight] if self.bias is None else [self.weight, self.bias]
        every = [self.weight, self.bias, *(x for y in self.adapters for x in (y.a, y.b, y.bias))]
        return [x for x in every if x is not None]

    def of(self, tensors: list[Tensor]) -> Recipe:
        """The same recipe with other tensors, in the order of :meth:`tensors`."""
        if not self.adapters:
            weight, bias = tensors if len(tensors) == 2 else (tensors[0], None)
            return Recipe(weight, bias, (), self.merged)
        left = iter(tensors)

        def one(x: Tensor | None) -> Any:
            return None if x is None else next(left)

        weight, bias = one(self.weight), one(self.bias)
        adapters = tuple(
            a._replace(a=one(a.a), b=one(a.b), bias=one(a.bias)) for a in self.adapters
        )
        return Recipe(weight, bias, adapters, self.merged)

    def with_dropped(self, hidden: Tensor) -> Tensor:
        """Append each adapter's dropout of ``hidden (..., H)`` along the last dimension."""
        return torch.cat([hidden, *(a.dropout(hidden) for a in self.adapters)], -1)

    def operands(self, hidden: Tensor) -> Operands:
        """The linear layer as one product: ``[h, s A h] @ [W, B].T`` where LoRA is in use.

        ``hidden`` is ``(..., H)``, or the result of :meth:`with_dropped`. All operands are cast to
        its dtype, as autocast would cast them.
        """
        H = self.weight.shape[1]
        dtype = hidden.dtype
        weight, bias = self.weight, self.bias
        weight = weight if weight.dtype == dtype else weight.to(dtype)
        bias = bias if bias is None or bias.dtype == dtype else bias.to(dtype)
        if not self.adapters:
            return Operands(hidden, weight, bias)
        hidden, *dropped = hidden.split(H, -1)
        hiddens, weights = [hidden], [weight]
        for i, adapter in enumerate(self.adapters):
            x = F.linear((dropped[i] if dropped else hidden).to(adapter.a.dtype), adapter.a)
            hiddens.append((adapter.scaling * x).to(dtype))
            weights.append(adapter.b.to(dtype))
            if adapter.bias is not None:
                extra = (adapter.scaling * adapter.bias).to(dtype)
                bias = extra if bias is None else bias + extra
        return Operands(torch.cat(hiddens, -1), torch.cat(weights, -1), bias)


ATTACHED = "_fusedce_head"  # attribute of a replaced head that holds its state


def memory_budget_of_head(module: nn.Module) -> int | None:
    """The argument of :func:`fusedce.replace_loss_head`, or the environment variable."""
    attached = module.__dict__.get(ATTACHED)
    return memory_budget_of(None if attached is None else attached.memory_budget)


def check_module(head: Any) -> None:
    """Raise ``TypeError`` unless ``head`` is a module."""
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"head must be a torch.nn.Module, got {type(head).__name__}"
            + (f": pass model.get_submodule({head!r})" if isinstance(head, str) else "")
        )


def check_linear(head: nn.Module) -> None:
    """Raise unless this module can be the head.

    Raises:
        TypeError: it is no linear layer.
        ValueError: it has an adapter other than LoRA.
    """
    weight = getattr(_base_of(_active(head)), "weight", None)
    other_kind = isinstance(_base_of(_active(head)), (nn.Embedding, nn.EmbeddingBag, nn.Bilinear))
    if (
        other_kind
        or not isinstance(weight, Tensor)
        or not _is_matrix(weight)
        or not weight.is_floating_point()
    ):
        raise TypeError(
            f"head must be a linear layer with a floating weight (V, H), got {type(head).__name__}"
            + (
                f" with weight {tuple(weight.shape)} of {weight.dtype}"
                if isinstance(weight, Tensor)
                else ""
            )
        )
    if not is_sum_of_products(head):
        raise ValueError(
            f"head must be linear, or linear with LoRA, got the adapters "
            f"{head.active_adapters} of {type(head).__module__}.{type(head).__name__}"
        )


def _is_matrix(weight: Tensor) -> bool:
    # A parameter that DeepSpeed's ZeRO-3 holds in parts is empty until it is gathered.
    return weight.dim() == 2 or len(getattr(weight, "ds_shape", ())) == 2


def _active(module: Any) -> Any:
    """The trained copy or the original inside PEFT's ``modules_to_save``; others unchanged."""
    while hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        names = getattr(module, "active_adapters", None) or [module.active_adapter]
        disabled = getattr(module, "disable_adapters", False)
        saved = [n for n in names if n in module.modules_to_save]
        module = (
            module.original_module if disabled or not saved else module.modules_to_save[saved[0]]
        )
    return module


def _base_of(module: Any) -> Any:
    return getattr(module, "base_layer", module)


def linear_of(module: Any) -> Any:
    """The linear layer inside PEFT's wrappers."""
    return _base_of(_active(module))


def is_sum_of_products(module: Any) -> bool:
    """Whether :func:`recipe_of` supports the adapter of a head, if it has one."""
    if is_bare(module):
        return True
    module = _active(module)
    if not hasattr(module, "base_layer") or module.disable_adapters or module.merged:
        return True
    variants = getattr(module, "lora_variant", {})  # DoRA and others
    a = getattr(module, "lora_A", None)  # AdaLoRA keeps parameters there, no layers
    return isinstance(a, nn.ModuleDict) and not any(n in variants for n in module.active_adapters)


def recipe_of(module: Any) -> Recipe:
    """The recipe of a head now.

    It reads each parameter once, since reading a parametrized one computes it.
    """
    if is_bare(module):
        return Recipe(module.weight, module.bias, (), ())
    module = _active(module)
    base = _base_of(module)
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
    return Recipe(base.weight, getattr(base, "bias", None), adapters, merged_into(module))


def is_bare(module: Any) -> bool:
    """Whether the module is torch's own linear layer, replaced or not, without a wrapper."""
    return type(module) is nn.Linear


def merged_into(module: Any) -> tuple[str, ...]:
    """Names of the adapters that PEFT has merged into ``weight.data``."""
    if is_bare(module):
        return ()
    return tuple(getattr(_active(module), "merged_adapters", ()))


def _rate(dropout: Any) -> float:
    return float(getattr(dropout, "p", 0))
