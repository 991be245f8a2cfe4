"""Problems to measure, the calls that solve them, and the suites made of both."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import losses

Shape = tuple[int, int, int]  # N, H, V
# SmolLM twice, Llama 3.2 1B
SHAPES: list[Shape] = [(1024, 576, 49152), (4096, 576, 49152), (512, 2048, 128256)]
# the smallest at which no call may be slower than eager, an odd one, and a model
PAIR_SHAPES: list[Shape] = [(64, 256, 8192), (256, 384, 16003), SHAPES[0]]
SUITES = {
    "time": "forward + backward",
    "forward": "forward alone, no gradient",
    "memory": "peak beyond inputs and gradients",
    "masked": "share of ignored labels",
    "budget": "time and memory under a memory budget",
    "eager": "every function and option, each beside eager code of its own",
}
BLOCK = 256  # tokens whose float64 logits the truth holds at a time
MiB = 2**20


class Spec(NamedTuple):
    """One problem: its sizes and the mode of the call."""

    N: int
    H: int
    V: int
    dtype: str = "bfloat16"
    device: str = "cpu"
    mode: str = "train"  # or "forward": no gradient
    ignored: float = 0.0
    budget: int | None = None  # MiB; fused_ce alone


def make_inputs(spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """``hidden (N, H), weight (V, H), labels (N,)``; never zeros, ignored rows hold junk.

    As after training, the label's logit stands out by a gap that differs from token to token, so
    that probabilities of the labels run from 1/V to beyond 0.999 (mean loss about 2 nats).
    """
    rng = torch.Generator(spec.device).manual_seed(0)
    random = functools.partial(torch.randn, generator=rng, device=spec.device)
    weight = random(spec.V, spec.H) / spec.H**0.5  # rows of about unit length
    labels = torch.randint(0, spec.V, (spec.N,), generator=rng, device=spec.device)
    hidden = random(spec.N, spec.H)
    gap = 20 * torch.rand(spec.N, 1, generator=rng, device=spec.device).sqrt()
    hidden += gap * weight[labels] / weight[labels].square().sum(-1, keepdim=True)
    ignored = torch.randperm(spec.N, generator=rng, device=spec.device)
    labels[ignored[: round(spec.ignored * spec.N)]] = -100
    dtype = getattr(torch, spec.dtype)
    return hidden.to(dtype), weight.to(dtype), labels


# ---- calls ----------------------------------------------------------------------------------


def make_call(name: str, spec: Sequence[Any]) -> Callable[[], object]:
    """A call that does the whole job once and drops the gradients; warmed up on a few rows."""
    of = Spec(*spec)
    loss = losses.OF_PAIRS.get(name) or losses.LOSSES.get(name)
    # Pairs are so many that they share their inputs.
    hidden, weight, labels = (_shared_inputs if name in losses.OF_PAIRS else make_inputs)(of)
    if loss is None:
        return losses.bare_gemms(hidden, weight, labels, of.mode)
    for x in (hidden, weight):
        x.requires_grad_(of.mode == "train")
    _forget(name)

    @torch.set_grad_enabled(of.mode != "forward")
    def run(hidden: Tensor, labels: Tensor, **options: Any) -> None:
        out = loss(hidden, weight, labels, **options)
        if out.requires_grad:  # a loss in chunks has done it
            out.backward()
        hidden.grad = weight.grad = None

    # Libraries and thread pools that the first call of a process loads are not counted as memory.
    if name != losses.COMPILED:  # which would compile twice
        run(hidden.detach()[:16].clone().requires_grad_(hidden.requires_grad), labels[:16])
    return functools.partial(run, hidden, labels, **_options(of))


_shared_inputs = functools.lru_cache(1)(make_inputs)


def _forget(name: str) -> None:
    """Reset torch.compile, which would compile for dynamic shapes at the second shape."""
    if name == losses.COMPILED:
        torch.compiler.reset()


def _options(spec: Spec) -> dict[str, Any]:
    return {"memory_budget": spec.budget * MiB} if spec.budget else {}


# ---- errors ---------------------------------------------------------------------------------


def errors(name: str, spec: Sequence[Any]) -> dict[str, float]:
    """Relative error of the mean loss, and normwise of the gradients, against float64.

    Empty for the bare products, and for losses that differ from the plain one.
    """
    if name == losses.FLOOR or name in losses.OPTIONS | losses.DIVERGENCES | losses.OF_PAIRS:
        return {}
    of = Spec(*spec)
    _forget(name)
    hidden, weight, labels = make_inputs(of)
    leaves = [hidden, weight] if of.mode == "train" else []
    for x in leaves:
        x.requires_grad_()
    with torch.set_grad_enabled(of.mode != "forward"):
        loss = losses.LOSSES[name](hidden, weight, labels, **_options(of))
    if loss.requires_grad:
        loss.backward()
    found = [loss.detach(), *(x.grad for x in leaves)]
    names = ("loss", "d_hidden", "d_weight")
    exact = _truth(of._replace(mode="", budget=None))
    return {
        label: float((x.double() - e).norm() / e.norm())
        for label, x, e in zip(names, found, exact, strict=False)
    }


@functools.lru_cache(1)
def _truth(spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss and its gradients in float64, of `BLOCK` tokens at a time."""
    hidden, weight, labels = make_inputs(spec)
    h, w = hidden.double(), weight.double()
    used = (labels != -100).nonzero()[:, 0]
    total, d_hidden, d_weight = h.new_zeros(()), torch.zeros_like(h), torch.zeros_like(w)
    for rows in used.split(BLOCK):
        logp = F.log_softmax(h[rows] @ w.T, -1)
        at = labels[rows, None]
        total -= logp.gather(1, at).sum()
        slope = logp.exp_().scatter_add_(1, at, torch.full_like(at, -1, dtype=h.dtype))
        d_hidden[rows] = slope @ w
        d_weight.addmm_(slope.T, h[rows])
    return total / len(used), d_hidden / len(used), d_weight / len(used)


# ---- suites ---------------------------------------------------------------------------------


def flops(spec: Spec) -> float:
    """FLOPs of the bare products."""
    valid = spec.N - round(spec.ignored * spec.N)
    return {"forward": 2, "train": 6}[spec.mode] * valid * spec.H * spec.V


def gradient_bytes(spec: Spec) -> int:
    """Bytes of the gradients that ``backward`` leaves."""
    elements = (spec.N + spec.V) * spec.H if spec.mode == "train" else 0
    return elements * getattr(torch, spec.dtype).itemsize


def problems(
    suite: str, shapes: Sequence[Shape] = (), device: str = "cpu"
) -> Iterator[tuple[Spec, list[str]]]:
    """The problems of a suite, of its own shapes unless some are given, and what runs on each."""
    made = functools.partial(Spec, device=device)
    peers = [*losses.ON_CPU] if device == "cpu" else [*losses.IMPLEMENTATIONS]
    if suite in ("time", "memory", "forward"):
        mode = "forward" if suite == "forward" else "train"
        # (Two-byte inputs on a CPU are for tests.)
        dtypes = ["float32"] if device == "cpu" else ["float32", "bfloat16"]
        for shape, dtype in itertools.product(shapes or SHAPES, dtypes):
            same = ["eager, plain"] if dtype == "float32" else []  # as eager
            names = [name for name in peers if name not in same]
            yield made(*shape, dtype=dtype, mode=mode, ignored=0.25), names
    elif suite == "masked":
        for shape, share in itertools.product(shapes or SHAPES[:1], (0.0, 0.25, 0.5, 0.75, 0.9)):
            yield made(*shape, dtype="float32", ignored=share), ["fused_ce", "eager"]
    elif suite == "budget":
        for shape, mib in itertools.product(shapes or SHAPES[:1], (16, 64, 256, None)):
            names = ["fused_ce"] if mib else ["fused_ce", 'reduction="none"']
            yield made(*shape, dtype="float32", ignored=0.25, budget=mib), names
    elif suite == "eager":
        modes = itertools.product(("train", "forward"), (0.0, 0.75))
        for shape, (mode, ignored) in itertools.product(shapes or PAIR_SHAPES, modes):
            spec = made(*shape, dtype="float32", mode=mode, ignored=ignored)
            yield spec, _pair_names(mode, ignored)


def _pair_names(mode: str, ignored: float) -> list[str]:
    """Ours and eager's by turns, of the pairs that such a problem has."""
    return [
        prefix + name
        for name in losses.PAIRS
        if mode == "forward" or name not in losses.EVALUATED
        if not ignored or name not in losses.EVALUATED  # which have no labels
        for prefix in ("ours: ", losses.EAGER)
    ]


def tiny(spec: Spec) -> Spec:
    """The problem in small sizes, such that the problems of a suite stay different."""
    N, H, V = max(spec.N // 256, 8), max(spec.H // 64, 8), max(spec.V // 512, 64)
    return spec._replace(N=N, H=H, V=V)
