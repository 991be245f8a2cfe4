"""Check that a head is linear: its native loss against the fused one on a few random tokens.

A head is probed when it is replaced, in training and in evaluation. A head whose class is not
torch's own is probed again for each other dtype and autocast in which it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedce.contract.checks import autocast_dtype
from fusedce.head.call import HeadCall
from fusedce.head.optimizer_clock import CLOCK
from fusedce.head.recipe import recipe_of
from fusedce.head.report import HeadCounts
from fusedce.loss.fused_ce import fused_ce

TOKENS = 4


class Mode(NamedTuple):
    """The conditions that a head's behaviour may depend on."""

    training: bool
    hidden: torch.dtype  # of the head's input
    weight: torch.dtype
    autocast: torch.dtype | None  # None: no autocast


def mode_of(module: nn.Module, hidden: Tensor, weight: Tensor) -> Mode:
    """The mode in which ``module`` would run now."""
    return Mode(module.training, hidden.dtype, weight.dtype, autocast_dtype(hidden.device))


def is_plain(kind: type) -> bool:
    """Whether a class of layers has torch's own forward, which needs no probe."""
    return getattr(kind, "forward", None) is nn.Linear.forward


def can_probe(weight: Tensor) -> bool:
    """Whether the weight has values here, so that a probe needs no other rank."""
    return not (
        weight.is_meta
        or hasattr(weight, "full_tensor")
        or weight.numel() == 0
        or weight.untyped_storage().size() == 0
    )


class Products(NamedTuple):
    """The result of a probe in one mode."""

    dtype: torch.dtype  # of the product's operands
    logits: torch.dtype


def probe(module: nn.Module, forward: Any, mode: Mode, weight: Tensor) -> Products:
    """Find the dtypes in which ``forward`` multiplies and returns logits in this mode.

    Raises:
        ValueError: ``forward`` is not ``hidden @ weight.T + bias``; the message gives the error.
    """
    # Autograd cannot use parameters that were created in inference mode.
    with torch.inference_mode(weight.is_inference()):
        return _probe(module, forward, mode, weight)


def _probe(module: nn.Module, forward: Any, mode: Mode, weight: Tensor) -> Products:
    rng = torch.Generator().manual_seed(0)
    V, H = weight.shape
    hidden = torch.randn(TOKENS, H, generator=rng, dtype=torch.float32, device="cpu")
    hidden = hidden.to(weight.device, mode.hidden)
    labels = torch.randint(0, V, (TOKENS,), generator=rng, device="cpu").to(weight.device)
    device, wanted = hidden.device.type, not weight.is_inference()
    with _training(module, mode.training), torch.set_grad_enabled(wanted):
        with torch.autocast(device, mode.autocast, enabled=mode.autocast is not None):
            with restoring(module):
                native = _of_native(module, forward, hidden, labels, V)
            usual = cast_of(hidden, mode.autocast)
            results = []
            for dtype in dict.fromkeys((usual, mode.hidden, weight.dtype, native.dtype)):
                with restoring(module):
                    results.append(_of_fused(module, hidden, labels, dtype))
    fused = min(results, key=lambda x: _error(x.logits.to(native.dtype), native.logits))
    # Native logits are rounded to their dtype, fused ones are not; TF32 rounds both differently.
    eps = max(torch.finfo(d).eps for d in (fused.dtype, native.dtype))
    if device == "cuda" and torch.get_float32_matmul_precision() != "highest":
        eps = max(eps, 2.0**-10)
    largest = max(float(native.logits.abs().max()), 1.0)
    pairs = [("loss", fused.loss, native.loss, eps)]
    if wanted:
        eps = max(eps, torch.finfo(mode.hidden).eps)
        pairs.append(("gradient", fused.gradient, native.gradient, eps))
    for name, a, b, eps in pairs:
        error = _error(a, b) / max(float(b.double().norm()), 1e-30)
        if not error <= 4 * eps * largest + 1e-5:
            raise ValueError(
                f"head must be linear, logits = hidden @ weight.T + bias, but in "
                f"{'training' if mode.training else 'evaluation'} the {name} of "
                f"{type(module).__name__} differs from that by {error:.1e} (relative) on "
                f"{TOKENS} random tokens"
            )
    return Products(fused.dtype, native.dtype)


def _error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


def cast_of(hidden: Tensor, autocast: torch.dtype | None) -> torch.dtype:
    """Dtype in which ``F.linear`` multiplies this hidden state."""
    return hidden.dtype if autocast is None or hidden.dtype == torch.float64 else autocast


class _Run(NamedTuple):
    """The results of one head on the random tokens."""

    dtype: torch.dtype
    logits: Tensor
    loss: Tensor
    gradient: Tensor  # of the hidden state; empty where there is none


def _gradient(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x)[0] if loss.requires_grad else x.new_empty(0)


def _of_native(module: nn.Module, forward: Any, hidden: Tensor, labels: Tensor, V: int) -> _Run:
    x = hidden.clone().requires_grad_(torch.is_grad_enabled())
    try:
        logits = forward(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as e:
        raise ValueError(
            f"head must be linear, but {type(module).__name__} cannot be run on {TOKENS} random "
            f"tokens, a {hidden.dtype} tensor {tuple(hidden.shape)}: {e}"
        ) from e
    if not isinstance(logits, Tensor) or logits.shape != (len(labels), V):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"head must return (tokens, V) logits with V={V} (from its weight), got {got}"
        )
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    return _Run(logits.dtype, logits.detach(), loss.detach(), _gradient(loss, x))


def _of_fused(module: nn.Module, hidden: Tensor, labels: Tensor, dtype: torch.dtype) -> _Run:
    """The fused loss, with products in ``dtype``."""
    x = hidden.clone().requires_grad_(torch.is_grad_enabled())
    recipe = recipe_of(module)
    rows = x.to(dtype)
    rows = recipe.with_dropped(rows) if recipe.dropouts() else rows
    call = HeadCall(module, recipe, rows, HeadCounts(""), CLOCK.now)
    with torch.autocast(hidden.device.type, enabled=False):
        h, weight, bias = call.operands(rows, [t.detach() for t in recipe.tensors()])
        loss = fused_ce(h, weight, labels, bias=bias)[0]
        logits = F.linear(h, weight, bias)
    return _Run(dtype, logits.detach(), loss.detach(), _gradient(loss, x))


@contextmanager
def _training(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module in training or evaluation mode, and restore its modes at the end."""
    modes = [(m, m.training) for m in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


@contextmanager
def restoring(module: nn.Module) -> Iterator[None]:
    """Restore random states and buffers (of a spectral norm) at the end."""
    buffers = [(b, b.clone()) for b in module.buffers()]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        yield
    with torch.no_grad():
        for b, before in buffers:
            b.copy_(before)
