"""Errors of bfloat16 gradients, relative to rounding the exact gradients once, by option.

PYTHONPATH=tests python tests/support/rounding.py           # writes both tables of docs/accuracy.md
PYTHONPATH=tests python tests/support/rounding.py triton    # that of one backend
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce import fused_cross_entropy, fused_logprobs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"
BEGIN, END = (
    {
        "torch": "<!-- one rounding -->",
        "triton": "<!-- one rounding, triton -->",
    },
    "<!-- end -->",
)
OF_SUMS = ("label_smoothing", "z_loss", "softcap", "logit_scale", "token_weight", "class_weight")
Loss = Callable[..., Tensor]  # of hidden, weight, bias and a backend


class Draw(NamedTuple):
    """Inputs, described by numbers. ``sharp``: a class has nearly all the probability."""

    logits: str  # flat, peaked or sharp
    shared: float  # mean cosine of two rows of the head
    bias: bool
    seed: int
    N: int = 96
    H: int = 64
    V: int = 400

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, torch.Generator]:
        """``hidden, weight, bias, labels``, and a generator for what options need."""
        rng = torch.Generator().manual_seed(self.seed)
        weight = torch.randn(self.V, self.H, generator=rng)
        mean = torch.randn(self.H, generator=rng)
        weight = weight * math.sqrt(1 - self.shared) + mean * math.sqrt(self.shared)
        weight = (weight / self.H**0.5).bfloat16()
        size = {"flat": 1.0, "peaked": 6.0, "sharp": 20.0}[self.logits]
        hidden = (size * torch.randn(self.N, self.H, generator=rng)).bfloat16()
        labels = torch.randint(self.V, (self.N,), generator=rng)
        if self.logits != "flat":  # most of them are as predicted
            right = torch.rand(self.N, generator=rng) < 0.6
            labels = torch.where(right, (hidden.double() @ weight.double().t()).argmax(1), labels)
        bias = torch.randn(self.V, generator=rng).bfloat16() if self.bias else None
        return hidden, weight, bias, labels, rng


def draws(backend: str, seeds: int) -> list[Draw]:
    """Inputs of a table; small and few for the Triton backend, which the interpreter runs."""
    if backend == "triton":
        kinds = [("flat", 0.0), ("peaked", 0.9), ("sharp", 0.9)]
        return [Draw(*kind, True, seed, 32, 32, 300) for kind in kinds for seed in range(seeds)]
    product = itertools.product(
        ("flat", "peaked", "sharp"), (0.0, 0.5, 0.9), (False, True), range(seeds)
    )
    return [Draw(*of) for of in product]


def losses(labels: Tensor, V: int, rng: torch.Generator) -> Iterator[tuple[str, Loss]]:
    """Every option, every pair of options of a sum, and losses with factors of each token's own."""
    N = len(labels)
    options = {
        "label_smoothing": {"label_smoothing": 0.1},
        "z_loss": {"z_loss": 1e-3},
        "softcap": {"softcap": 15.0},
        "logit_scale": {"logit_scale": 0.7},
        "token_weight": {"token_weight": torch.rand(N, generator=rng) + 0.1},
        "class_weight": {"class_weight": torch.rand(V, generator=rng) + 0.5},
    }
    upstream = torch.rand(N, generator=rng) / N
    several = torch.randint(V, (N, 8), generator=rng)
    several[:, 0] = labels
    of_several = torch.rand(N, 8, generator=rng) / N

    def summed(**given):
        return lambda h, w, b, backend: fused_cross_entropy(
            h, w, labels, bias=b, backend=backend, **given
        )

    def by_token(y, factors, **given):
        def loss(h, w, b, backend):
            stats = fused_logprobs(h, w, y, bias=b, backend=backend, **given)
            return (stats.logprob * factors).sum()

        return loss

    yield "plain", summed()
    for name in OF_SUMS:
        yield name, summed(**options[name])
    for one, other in itertools.combinations(OF_SUMS, 2):
        yield f"{one}, {other}", summed(**options[one], **options[other])
    yield "log-probabilities", by_token(labels, upstream)
    yield "log-probabilities, temperature", by_token(labels, upstream, temperature=0.7)
    yield "labels (..., K)", by_token(several, of_several)
    yield "labels (..., K), temperature", by_token(several, of_several, temperature=0.7)


def errors(draw: Draw, backend: str, only: str = "") -> Iterator[tuple[str, list[float]]]:
    """The error of each gradient over its rounding error, by the names of :func:`losses`."""
    hidden, weight, bias, labels, rng = draw.tensors()
    for name, loss in losses(labels, draw.V, rng):
        if only in name:
            got = _gradients(loss, (hidden, weight, bias), torch.bfloat16, backend)
            exact = _gradients(loss, (hidden, weight, bias), torch.float64, "torch")
            yield name, [_over_once(x, e) for x, e in zip(got, exact, strict=True)]


def eager(loss: Loss) -> Loss:
    """``loss`` of float32 logits that eager's bfloat16 product made, as `F.linear(...).float()`."""

    def of_logits(h, w, b, backend):
        logits = torch.nn.functional.linear(h, w, b).float()
        return loss(logits, torch.eye(len(w)), None, "torch")

    return of_logits


def beside_eager(loss: Loss, inputs: tuple[Tensor | None, ...]) -> list[tuple[float, float]]:
    """Ours on the torch backend and eager's error of each gradient, in roundings."""
    exact = _gradients(loss, inputs, torch.float64, "torch")
    found = (_gradients(x, inputs, torch.bfloat16, "torch") for x in (loss, eager(loss)))
    ours, theirs = ([_over_once(x, e) for x, e in zip(f, exact, strict=True)] for f in found)
    return list(zip(ours, theirs, strict=True))


def _gradients(
    loss: Loss, inputs: tuple[Tensor | None, ...], dtype: torch.dtype, backend: str
) -> tuple[Tensor, ...]:
    given = [None if x is None else x.to(dtype).requires_grad_() for x in inputs]
    return torch.autograd.grad(loss(*given, backend), [x for x in given if x is not None])


def _over_once(got: Tensor, exact: Tensor) -> float:
    once = (exact.bfloat16().double() - exact).norm()
    return float((got.double() - exact).norm() / once)


def table(backend: str, seeds: int) -> dict[str, tuple[float, float]]:
    """Median and 99th percentile by option."""
    found: dict[str, list[float]] = {}
    for draw in draws(backend, seeds):
        for name, ratios in errors(draw, backend):
            found.setdefault(name, []).extend(ratios)
    return {
        name: (statistics.median(x), statistics.quantiles(x, n=100, method="inclusive")[98])
        for name, x in found.items()
    }


def stated(backend: str) -> dict[str, tuple[float, float]]:
    """The committed table of docs/accuracy.md, as :func:`table` returns it."""
    lines = PAGE.read_text().split(BEGIN[backend])[1].split(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    return {name: (float(median), float(high)) for name, median, high in rows}


def write(backend: str, found: dict[str, tuple[float, float]]) -> None:
    """Put a table between its marks."""
    rows = ["| | median | 99th percentile |", "|---|---|---|"]
    rows += [f"| {name} | {median:.2f} | {high:.2f} |" for name, (median, high) in found.items()]
    head, rest = PAGE.read_text().split(BEGIN[backend])
    tail = rest.split(END, 1)[1]
    PAGE.write_text(f"{head}{BEGIN[backend]}\n" + "\n".join(rows) + f"\n{END}{tail}")


def main() -> None:
    """Write the tables of the backends that are named, by default of both."""
    from support.interpreter import as_on_hardware

    torch.set_num_threads(1)
    for backend in sys.argv[1:] or BEGIN:
        with as_on_hardware():
            write(backend, table(backend, seeds={"torch": 3, "triton": 1}[backend]))


if __name__ == "__main__":
    main()
