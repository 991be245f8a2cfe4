"""Divergences from a teacher over their bare products: processor time, calls taking turns.

    python bench/kl.py                                # fp32, (1024, 576, 49152), a minute
    python bench/kl.py --dtype bfloat16 --shape 1024,576,49152 --rounds 5
    python bench/kl.py --chunk 256                    # tokens of a chunk

The floor is four products of the head's size, one of the teacher and three of the student, over all
tokens at once and with buffers of their own. Class probabilities as labels have three. Ratios are
medians over rounds of one call's time by the floor's of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from lib.tables import markdown
from torch import Tensor

import fusedce
from fusedce.measure import seconds_by_round

KINDS = ("forward", "reverse", "jsd")
PROBABILITIES = "class probabilities"
FLOORS = {4: "four bare products", 3: "three bare products"}


def products(hidden: Tensor, weight: Tensor, teacher: tuple[Tensor, Tensor] | None) -> None:
    logits = hidden @ weight.T
    if teacher is not None:
        teacher[0] @ teacher[1].T
    logits @ weight
    logits.T @ hidden


def calls(
    N: int, H: int, V: int, dtype: torch.dtype, chunk: int | None
) -> dict[str, tuple[int, Callable[[], None]]]:
    """By name the number of bare products, and the call."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng)
    weight = torch.randn(V, H, generator=rng) / H**0.5
    teacher = ((hidden + 0.3 * torch.randn(N, H, generator=rng)).to(dtype), weight.to(dtype))
    given = torch.softmax(teacher[0].float() @ weight.T, -1)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    plain = [x.detach() for x in leaves]

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            loss().backward()
            for x in leaves:
                x.grad = None

        return call

    def divergence(kind: str) -> Callable[[], Tensor]:
        return lambda: fusedce.fused_kl(
            *leaves, *teacher, divergence=kind, chunk_tokens=chunk
        ).mean()

    def of_probabilities() -> Tensor:
        return fusedce.fused_cross_entropy(*leaves, given, chunk_tokens=chunk)

    found = {
        FLOORS[4]: (4, lambda: products(*plain, teacher)),
        FLOORS[3]: (3, lambda: products(*plain, None)),
    } | {kind: (4, step(divergence(kind))) for kind in KINDS}
    return found | {PROBABILITIES: (3, step(of_probabilities))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1024,576,49152", help="N,H,V")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    N, H, V = map(int, args.shape.split(","))
    made = calls(N, H, V, getattr(torch, args.dtype), args.chunk)
    timed = {name: call for name, (_, call) in made.items()}
    times = seconds_by_round(timed, args.rounds, clock=time.process_time)
    rows = []
    for name, (count, _) in made.items():
        floor = times[FLOORS[count]]
        ratios = sorted(a / b for a, b in zip(times[name], floor, strict=True))
        rows.append({
            "": name,
            "CPU seconds": f"{statistics.median(times[name]):.2f}",
            "/ bare products": f"{statistics.median(ratios):.2f}",
            "least to most": f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        })  # fmt: skip
    print(f"{args.dtype}, N={N}, H={H}, V={V}, {args.threads} thread(s)\n\n{markdown(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
