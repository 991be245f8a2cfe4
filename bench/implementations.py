"""The losses that are compared, and the inputs they are compared on.

Each entry of :data:`IMPLEMENTATIONS` takes ``(hidden, weight, labels, **options)`` and returns the
mean loss, ready for ``backward``. Peers are imported when asked for: one that is not installed, or
cannot run here, is a row that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Spec(NamedTuple):
    """One problem: its sizes, what is asked, and what the data look like."""

    N: int
    H: int
    V: int
    dtype: str = "bfloat16"
    device: str = "cpu"
    mode: str = "train"  # "train", "frozen" (no weight gradient) or "forward" (no gradient)
    ignored: float = 0.0
    data: str = "lm"  # "lm" or "random"
    chunk_tokens: int | None = None  # fused_ce alone


def make_inputs(spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """``hidden (N, H), weight (V, H), labels (N,)``; never zeros, ignored rows hold junk.

    "random": logits are normal and the labels have nothing to do with them, as before training.
    "lm": as after it: the label's logit stands out by a gap that differs from token to token, so
    that probabilities of the labels run from 1/V to beyond 0.999 (mean loss about 2 nats).
    """
    rng = torch.Generator(spec.device).manual_seed(0)
    random = functools.partial(torch.randn, generator=rng, device=spec.device)
    weight = random(spec.V, spec.H) / spec.H**0.5  # rows of about unit length
    labels = torch.randint(0, spec.V, (spec.N,), generator=rng, device=spec.device)
    hidden = random(spec.N, spec.H)
    if spec.data == "lm":
        gap = 20 * torch.rand(spec.N, 1, generator=rng, device=spec.device).sqrt()
        hidden += gap * weight[labels] / weight[labels].square().sum(-1, keepdim=True)
    ignored = torch.randperm(spec.N, generator=rng, device=spec.device)
    labels[ignored[: round(spec.ignored * spec.N)]] = -100
    dtype = getattr(torch, spec.dtype)
    return hidden.to(dtype), weight.to(dtype), labels


def fused_ce(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    import fusedce

    return fusedce.fused_ce(hidden, weight, labels, **options).mean()


def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


_compiled = torch.compile(eager)


def compiled_eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _compiled(hidden, weight, labels)


def torch_chunked(
    hidden: Tensor, weight: Tensor, labels: Tensor, batch_chunk_size: int | None = None
) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=batch_chunk_size)
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)


def cut_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, filter_eps: float | str | None = "high"
) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, labels, filter_eps=filter_eps)


def quack(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(hidden, weight, labels, reduction="mean")


FLOOR = "bare GEMMs"
IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "fused_ce": fused_ce,
    "eager": eager,
    "compiled eager": compiled_eager,
    "F.linear_cross_entropy": torch_chunked,
    "F.linear_cross_entropy, 4096": functools.partial(torch_chunked, batch_chunk_size=4096),
    "Liger-Kernel": liger,
    "cut-cross-entropy": cut_cross_entropy,
    "cut-cross-entropy, exact": functools.partial(cut_cross_entropy, filter_eps=None),
    "QuACK": quack,
}
CPU_NAMES = tuple(IMPLEMENTATIONS)[:5]


def make_call(name: str, spec: Spec) -> Callable[[], object]:
    """A call that does the whole job once and drops the gradients; warmed up on a small input."""
    hidden, weight, labels = make_inputs(spec)
    if name == FLOOR:
        return _bare_gemms(hidden, weight, labels, spec.mode)
    loss = IMPLEMENTATIONS[name]
    options = {"chunk_tokens": spec.chunk_tokens} if spec.chunk_tokens else {}
    if spec.mode == "forward":

        @torch.no_grad()
        def forward() -> Tensor:
            return loss(hidden, weight, labels, **options)

        call: Callable[[], object] = forward
    else:
        leaves = [hidden.requires_grad_()]
        if spec.mode == "train":
            leaves.append(weight.requires_grad_())

        def step() -> None:
            loss(hidden, weight, labels, **options).backward()
            for x in leaves:
                x.grad = None

        call = step
    # What the first call of a process loads (libraries, thread pools) is nobody's extra memory.
    if name != "compiled eager":  # which would compile twice
        small = [x.detach()[:16].clone().requires_grad_(x.requires_grad) for x in (hidden, weight)]
        loss(*small, labels[:16].clamp(max=15))
    return call


def _bare_gemms(hidden: Tensor, weight: Tensor, labels: Tensor, mode: str) -> Callable[[], object]:
    """The products nobody can do without, full size, on the valid rows: 2 N V H FLOPs each."""
    h = hidden[labels != -100].clone()

    def gemms() -> None:
        logits = torch.mm(h, weight.t())
        if mode != "forward":
            torch.mm(logits, weight)
        if mode == "train":
            torch.mm(logits.t(), h)

    return gemms


def flops(spec: Spec) -> float:
    """Of the bare products."""
    valid = spec.N - round(spec.ignored * spec.N)
    return {"forward": 2, "frozen": 4, "train": 6}[spec.mode] * valid * spec.H * spec.V


def gradient_bytes(spec: Spec) -> int:
    """What ``backward`` must leave behind."""
    elements = {"forward": 0, "frozen": spec.N, "train": spec.N + spec.V}[spec.mode] * spec.H
    return elements * getattr(torch, spec.dtype).itemsize


def errors(name: str, spec: Spec) -> dict[str, float]:
    """Relative error of the loss, and normwise of the gradients, against fp64."""
    hidden, weight, labels = make_inputs(spec)
    leaves = [hidden]
    if spec.mode != "forward":
        leaves = [hidden, weight] if spec.mode == "train" else [hidden]
        for x in leaves:
            x.requires_grad_()
    options = {"chunk_tokens": spec.chunk_tokens} if spec.chunk_tokens else {}
    with torch.set_grad_enabled(spec.mode != "forward"):
        loss = IMPLEMENTATIONS[name](hidden, weight, labels, **options)
    exact_leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = F.cross_entropy(F.linear(*exact_leaves), labels)
    result = {"loss": abs(loss.item() - exact.item()) / abs(exact.item())}
    if spec.mode != "forward":
        loss.backward()
        exact.backward()
        for label, x, e in zip(("d_hidden", "d_weight"), leaves, exact_leaves, strict=False):
            assert x.grad is not None
            assert e.grad is not None
            result[label] = float((x.grad.double() - e.grad).norm() / e.grad.norm())
    return result


def peak_target(name: str, spec: list[Any]) -> Callable[[], object]:
    """For :func:`fusedce.measure.peak_extra_bytes`."""
    return make_call(name, Spec(*spec))
