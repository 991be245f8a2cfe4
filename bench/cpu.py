"""Forward + backward of the loss on a CPU: fused_ce, eager, torch's chunked op, the bare GEMMs.

    python bench/cpu.py     # both sizes, both dtypes: a table, and bench/results/cpu.json

All are timed interleaved in one run; peak memory beyond the gradients comes from a fresh process
each. The floor is three full-size GEMMs on the valid rows, 6 * N_valid * V * H FLOPs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from fusedce import fused_ce
from fusedce._measure import median_seconds, peak_extra_bytes

sys.path.insert(0, str(Path(__file__).parent))
H, V = 576, 49152
# Torch's chunked op with its own choice of chunks, and with one chunk of up to 4096 tokens.
TORCH_CHUNKED = ["F.linear_cross_entropy", "F.linear_cross_entropy, 4096"]
RESULTS = Path(__file__).parent / "results"


def make_inputs(N: int, ignored: float, dtype: str) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = torch.randn(N, H, generator=rng).to(kind).requires_grad_()
    weight = (0.04 * torch.randn(V, H, generator=rng)).to(kind).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=rng)
    labels[torch.randperm(N, generator=rng)[: round(ignored * N)]] = -100
    return hidden, weight, labels


def prepare(name: str, N: int, ignored: float, dtype: str) -> Callable[[], object]:
    """A call that computes loss and gradients once, and drops them."""
    hidden, weight, labels = make_inputs(N, ignored, dtype)

    def fused() -> torch.Tensor:
        return fused_ce(hidden, weight, labels).mean()

    def eager() -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    def torch_chunked(batch_chunk_size: int | None = None) -> torch.Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=batch_chunk_size)
        return F.linear_cross_entropy(hidden, weight, labels, options=options)

    def gemms() -> None:
        logits = h @ w.t()
        logits @ w
        logits.t() @ h

    if name == "bare GEMMs":
        h, w = hidden.detach()[labels != -100].clone(), weight.detach()
        return gemms
    loss = {
        "fused_ce": fused,
        "eager": eager,
        TORCH_CHUNKED[0]: torch_chunked,
        TORCH_CHUNKED[1]: partial(torch_chunked, 4096),
    }[name]

    def step() -> None:
        loss().backward()
        hidden.grad = weight.grad = None

    # What the first call of a process loads (libraries, thread pools) is nobody's extra memory.
    large = hidden, weight, labels
    hidden, weight = (x.detach()[:16].clone().requires_grad_() for x in large[:2])
    labels = labels[:16].clamp(max=15)
    step()
    hidden, weight, labels = large
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--no-torch-chunked", action="store_true", help="it is slow")
    args = parser.parse_args()
    rows = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, H={H}, V={V}")
    print("| N | ignored | dtype | | median s | range | / bare GEMMs | extra peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for N in args.tokens:
        for dtype in args.dtypes:
            names = ["bare GEMMs", "fused_ce", "eager"]
            if hasattr(torch.nn, "LinearCrossEntropyOptions") and not args.no_torch_chunked:
                names += TORCH_CHUNKED
            calls = {name: prepare(name, N, 0.25, dtype) for name in names}
            seconds = median_seconds(calls, args.repeats)
            floor = statistics.median(seconds["bare GEMMs"])
            gradients = (N + V) * H * getattr(torch, dtype).itemsize
            for name in names:
                kwargs = {"name": name, "N": N, "ignored": 0.25, "dtype": dtype}
                extra = peak_extra_bytes("cpu:prepare", kwargs) - gradients
                median = statistics.median(seconds[name])
                row = kwargs | {
                    "seconds": seconds[name],
                    "median_s": median,
                    "ratio_to_gemms": median / floor,
                    "extra_peak_mib": None if name == "bare GEMMs" else extra / 2**20,
                }
                rows.append(row)
                memory = "" if name == "bare GEMMs" else f"{extra / 2**20:.0f}"
                low, high = min(seconds[name]), max(seconds[name])
                print(
                    f"| {N} | 25% | {dtype} | {name} | {median:.3f} | {low:.3f}-{high:.3f} "
                    f"| {median / floor:.2f} | {memory} |",
                    flush=True,
                )
    masked = {
        f"{share:.0%} ignored": prepare("fused_ce", 1024, share, "float32") for share in (0.0, 0.75)
    }
    seconds = median_seconds(masked, args.repeats)
    none, most = (statistics.median(x) for x in seconds.values())
    print(f"\nN=1024 float32: 75% ignored takes {most / none:.2f} of the time with none")
    RESULTS.mkdir(exist_ok=True)
    data = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "H": H,
        "V": V,
        "rows": rows,
        "masked_ratio": most / none,
    }
    (RESULTS / "cpu.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
