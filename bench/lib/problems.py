"""Problems to measure, their inputs, and the suites made of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.tools.bench import COMPILED, IMPLEMENTATIONS, ON_CPU

OURS = ["fused_ce"]
# (N, H, V): Llama 3 8B twice, Gemma 2 2B, Llama 3.2 1B, Qwen 2.5 0.5B twice, a small step of
# Llama 3 8B
SHAPES = {
    "gpu": [(8192, 4096, 128256), (32768, 4096, 128256), (8192, 2304, 256000),
            (8192, 2048, 128256), (4096, 896, 151936), (2048, 896, 151936),
            (2048, 4096, 128256)],
    "cpu": [(1024, 576, 49152), (4096, 576, 49152)],
}  # fmt: skip
FORWARD_SHAPES = [(8192, 4096, 128256), (8192, 2304, 256000), (8192, 2048, 128256),
                  (2048, 896, 151936)]  # fmt: skip
SUITES = {
    "time": "forward + backward (on a GPU its peak as well)",
    "frozen": "forward + backward without a weight gradient",
    "forward": "forward alone, no gradient",
    "memory": "peak beyond inputs and gradients",
    "scaling": "time and memory as N and V grow",
    "masked": "share of ignored labels",
    "accuracy": "errors against fp64, on flat and on peaked logits",
    "budget": "time against the memory of a chunk",
}


class Spec(NamedTuple):
    """One problem: its sizes, the mode of the call, and the kind of data."""

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


def flops(spec: Spec) -> float:
    """FLOPs of the bare products."""
    valid = spec.N - round(spec.ignored * spec.N)
    return {"forward": 2, "frozen": 4, "train": 6}[spec.mode] * valid * spec.H * spec.V


def gradient_bytes(spec: Spec) -> int:
    """Bytes of the gradients that ``backward`` leaves."""
    elements = {"forward": 0, "frozen": spec.N, "train": spec.N + spec.V}[spec.mode] * spec.H
    return elements * getattr(torch, spec.dtype).itemsize


def problems(
    suite: str, device: str, *, gpu: bool, dry: bool = False
) -> Iterator[tuple[Spec, list[str]]]:
    """The problems of a suite, each with the implementations to run on it.

    ``gpu`` chooses a GPU's problems; ``dry`` shrinks them, to see the script through anywhere.
    """
    everyone = list(IMPLEMENTATIONS if gpu else ON_CPU)
    shapes = SHAPES["gpu" if gpu else "cpu"]
    dtypes = ["bfloat16"] if gpu else ["float32", "bfloat16"]
    ignored = 0.0 if gpu else 0.25
    small = shapes[0]

    def spec(shape: tuple[int, int, int], dtype: str = dtypes[0], **more: Any) -> Spec:
        made = Spec(*shape, dtype=dtype, device=device, **{"ignored": ignored, **more})
        return tiny(made) if dry else made

    if suite in ("time", "memory"):
        for number, shape in enumerate(shapes):
            # Compiling takes a minute of a GPU's hour; once shows what it is.
            slow = {COMPILED} if gpu and number else set()
            for dtype in dtypes:
                yield spec(shape, dtype), [n for n in everyone if n not in slow]
    elif suite == "frozen":
        for dtype in dtypes:
            yield spec(small, dtype, mode="frozen"), [*OURS, "eager"]
    elif suite == "forward":
        peers = [n for n in everyone if not n.startswith("F.linear")]
        for number, shape in enumerate(FORWARD_SHAPES if gpu else shapes[:1]):
            slow = {COMPILED} if gpu and number else set()
            for dtype in dtypes:
                yield spec(shape, dtype, mode="forward"), [n for n in peers if n not in slow]
        yield spec(small, mode="forward", ignored=0.75), OURS
    elif suite == "scaling":
        _, H, V = small
        for N in (1024, 4096, 16384, 65536) if gpu else (256, 512, 1024, 2048):
            yield spec((N, H, V)), [*OURS, "eager"]
        for vocabulary in (32768, 65536, 131072, 262144) if gpu else (12288, 24576, 49152, 98304):
            yield spec((small[0], H, vocabulary)), [*OURS, "eager"]
    elif suite == "masked":
        for share in (0.0, 0.25, 0.5, 0.75, 0.9):
            yield spec(small, ignored=share), [*OURS, "eager"]
    elif suite == "accuracy":
        for data in ("lm", "random"):
            for dtype in dtypes:
                yield spec(small, dtype, data=data), everyone
        yield spec(small, dtypes[-1], chunk_tokens=small[0] // 64), OURS
    elif suite == "budget":
        N, _, V = small
        size = 2 if gpu else 4
        for mib in (256, 512, 1024, 2048) if gpu else (12, 24, 48, 96, 192):
            tokens = max(mib * 2**20 // (V * size), 1)
            yield spec(small, chunk_tokens=min(tokens, N)), OURS
        yield spec(small), everyone


def tiny(spec: Spec) -> Spec:
    """The problem in small sizes, such that the problems of a suite stay different."""
    chunk = None if spec.chunk_tokens is None else max(spec.chunk_tokens // 512, 1)
    N, H, V = max(spec.N // 256, 8), max(spec.H // 64, 8), max(spec.V // 512, 64)
    return spec._replace(N=N, H=H, V=V, chunk_tokens=chunk)


def check_of(spec: Spec, *, full: bool) -> Spec:
    """A smaller problem to measure errors on, whose fp64 logits fit in memory."""
    N, V = (512, spec.V) if spec.device != "cpu" else (256 if full else 128, 8192)
    chunk = None if spec.chunk_tokens is None else max(spec.chunk_tokens * N // spec.N, 1)
    return spec._replace(N=min(N, spec.N), V=min(V, spec.V), chunk_tokens=chunk)
