"""Peak memory on the CPU, each measurement in a process of its own."""

from pathlib import Path

import pytest
import torch

from fusedce import fused_ce
from fusedce.measure import peak_extra_bytes

N, H, V = 1024, 64, 16384  # fp32 logits: 64 MiB; weight and its gradient: 4 MiB each


def prepare(dtype: str, grad: bool):
    rng = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = torch.randn(N, H, generator=rng).to(kind).requires_grad_(grad)
    weight = (0.1 * torch.randn(V, H, generator=rng)).to(kind).requires_grad_(grad)
    labels = torch.randint(0, V, (N,), generator=rng)

    def step(n=N, chunk_tokens=64):
        out = fused_ce(hidden[:n], weight, labels[:n], chunk_tokens=chunk_tokens)
        if grad:
            out.loss_sum.backward()
        return out

    with torch.no_grad():
        fused_ce(hidden[:4], weight[:16], labels[:4] % 16)
    return step


def eager_forward():
    hidden, weight = torch.randn(N, H), torch.randn(V, H)
    torch.nn.functional.linear(hidden[:4], weight[:16])
    return lambda: torch.nn.functional.linear(hidden, weight)


@pytest.mark.parametrize(
    ("dtype", "grad", "most_mib"),
    [
        # gradients of weight and hidden, chunk of logits, tiles and their temporaries
        ("float32", True, 4.3 + 4 + 10),
        ("float32", False, 12),
        ("bfloat16", True, 2.2 + 4 + 2 + 14),  # and the float32 accumulator
    ],
)
def test_no_logits(dtype, grad, most_mib, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)  # the measuring process imports this file
    extra = peak_extra_bytes("test_memory:prepare", {"dtype": dtype, "grad": grad}) / 2**20
    assert 0 < extra < most_mib


def test_the_measurement_sees_logits(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert peak_extra_bytes("test_memory:eager_forward") / 2**20 > 60
