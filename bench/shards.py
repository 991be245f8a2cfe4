"""Error of d_hidden of a sharded vocabulary if its parts are added up in bfloat16.

    python -m bench.shards

The parts of the ranks are rounded to bfloat16 and added one after the other, each sum rounded, as a
ring all-reduce does. Errors are those of the whole gradient against float64, over its norm. The
table also has torch's loss (bfloat16 logits), and parts added in float32, as `fusedce` does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

N, H, V = 64, 256, 16384
RANKS = (2, 4, 8, 16, 64)


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def row(spread: float) -> list[float]:
    """Errors of torch, of parts added in float32, and in bfloat16 for each number of ranks."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng).bfloat16()
    weight = (torch.randn(V, H, generator=rng) * spread / H**0.5).bfloat16()
    labels = torch.randint(V, (N,), generator=rng)

    g = (hidden.double() @ weight.double().t()).softmax(1)
    g[torch.arange(N), labels] -= 1
    exact = g @ weight.double() / N
    g = (g / N).bfloat16().double()  # as the products take it on a GPU

    leaf = hidden.clone().requires_grad_()
    F.cross_entropy(F.linear(leaf, weight).float(), labels).backward()
    assert leaf.grad is not None
    found = [error(leaf.grad, exact), error((g @ weight.double()).bfloat16(), exact)]
    for ranks in RANKS:
        parts = zip(g.chunk(ranks, 1), weight.double().chunk(ranks), strict=True)
        first, *others = ((a @ b).bfloat16() for a, b in parts)
        for part in others:
            first = first + part
        found.append(error(first, exact))
    return found


def main() -> None:
    heads = ["torch", "float32", *[f"bfloat16, {r} ranks" for r in RANKS]]
    print(f"| spread of logits | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for spread in (1.0, 4.0):
        print(f"| {spread:.0f} | {' | '.join(f'{x:.1e}' for x in row(spread))} |")


if __name__ == "__main__":
    main()
