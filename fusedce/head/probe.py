"""Whether a head does what it looks like: fused against native on a few random tokens.

Asked when a head is replaced, in training and in evaluation, and again whenever a head of a kind
that is not torch's own is called in another dtype or under another autocast.
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
from fusedce.head.clock import CLOCK
from fusedce.head.recipe import recipe_of
from fusedce.head.report import Report
from fusedce.loss.fused_ce import fused_ce

TOKENS = 4


class Mode(NamedTuple):
    """What a head may make its behaviour depend on."""

    training: bool
    hidden: torch.dtype  # as it is handed to the head
    weight: torch.dtype
    autocast: torch.dtype | None


def mode_of(module: nn.Module, hidden: Tensor, weight: Tensor) -> Mode:
    return Mode(module.training, hidden.dtype, weight.dtype, autocast_dtype(hidden.device))


def is_plain(kind: type) -> bool:
    """Whether a class of layers has torch's own forward, which is known in every mode."""
    return getattr(kind, "forward", None) is nn.Linear.forward


def can_probe(weight: Tensor) -> bool:
    """Whether there is something to compute with, and no other rank has to take part."""
    return not (
        weight.is_meta
        or weight.is_inference()
        or hasattr(weight, "full_tensor")
        or weight.numel() == 0
        or weight.untyped_storage().size() == 0
    )


def probe(module: nn.Module, forward: Any, mode: Mode, weight: Tensor) -> torch.dtype:
    """The dtype of the logits that ``forward`` makes in this mode.

    Raises:
        ValueError: it is not ``hidden @ weight.T + bias``; the message says how far off.
    """
    with torch.inference_mode(False):
        return _probe(module, forward, mode, weight)


def _probe(module: nn.Module, forward: Any, mode: Mode, weight: Tensor) -> torch.dtype:
    rng = torch.Generator().manual_seed(0)
    V, H = weight.shape
    hidden = torch.randn(TOKENS, H, generator=rng).to(weight.device, mode.hidden)
    labels = torch.randint(0, V, (TOKENS,), generator=rng).to(weight.device)
    device = hidden.device.type
    with _training(module, mode.training), torch.enable_grad():
        with torch.autocast(device, mode.autocast, enabled=mode.autocast is not None):
            with restoring(module):
                native = _of_native(module, forward, hidden, labels, V)
            with restoring(module):
                fused = _of_fused(module, hidden, labels, mode)
    # Native logits are rounded to their dtype, fused ones are not; TF32 rounds both, otherwise.
    dtype = mode.autocast or mode.hidden
    eps = torch.finfo(dtype).eps
    if device == "cuda" and torch.get_float32_matmul_precision() != "highest":
        eps = max(eps, 2.0**-10)
    tolerance = 4 * eps * max(native.largest, 1.0) + 1e-5
    for name, a, b in zip(("loss", "gradient"), fused, native[:2], strict=True):
        error = float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))
        if not error <= tolerance:
            raise ValueError(
                f"head must be linear, logits = hidden @ weight.T + bias, but in "
                f"{'training' if mode.training else 'evaluation'} the {name} of "
                f"{type(module).__name__} differs from that by {error:.1e} (relative) on "
                f"{TOKENS} random tokens"
            )
    return native.dtype


class _Native(NamedTuple):
    loss: Tensor
    gradient: Tensor
    largest: float  # of the logits
    dtype: torch.dtype


def _of_native(module: nn.Module, forward: Any, hidden: Tensor, labels: Tensor, V: int) -> _Native:
    x = hidden.clone().requires_grad_()
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
    (gradient,) = torch.autograd.grad(loss, x)
    return _Native(loss.detach(), gradient, float(logits.detach().abs().max()), logits.dtype)


def _of_fused(
    module: nn.Module, hidden: Tensor, labels: Tensor, mode: Mode
) -> tuple[Tensor, Tensor]:
    x = hidden.clone().requires_grad_()
    recipe = recipe_of(module)
    rows = x if mode.autocast is None or x.dtype == torch.float64 else x.to(mode.autocast)
    rows = recipe.with_dropped(rows) if recipe.dropouts() else rows
    call = HeadCall(module, recipe, rows, Report(""), CLOCK.now)
    with torch.autocast(hidden.device.type, enabled=False):
        h, weight, bias = call.operands(rows, [t.detach() for t in recipe.tensors()])
        loss = fused_ce(h, weight, labels, bias=bias)[0]
    (gradient,) = torch.autograd.grad(loss, x)
    return loss.detach(), gradient


@contextmanager
def _training(module: nn.Module, training: bool) -> Iterator[None]:
    """In training or in evaluation for a while."""
    modes = [(m, m.training) for m in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


@contextmanager
def restoring(module: nn.Module) -> Iterator[None]:
    """Random numbers and buffers (of a spectral norm) are as before when this ends."""
    buffers = [(b, b.clone()) for b in module.buffers()]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        yield
    with torch.no_grad():
        for b, before in buffers:
            b.copy_(before)
