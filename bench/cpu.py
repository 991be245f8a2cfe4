"""The loss on a CPU beside the others: time by turns in one process, and errors at the same sizes.

    python bench/cpu.py                                # one thread; bench/results/cpu-<kind>.json
    python bench/cpu.py --readme docs/benchmarks.md    # then the table of all kinds measured so far
    python bench/cpu.py --only 1024 --dtype bfloat16 --out /tmp/some.json
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 MKL_ENABLE_INSTRUCTIONS=AVX512_E2 \
        python bench/cpu.py                            # emulates a CPU without AMX
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
        python bench/cpu.py                            # emulates AVX2 alone

Time is `time.process_time` of one thread, so that neighbours on a shared machine are not counted;
with `--threads` above one it is wall time, which needs a quiet machine. Ratios are over the fastest
of a problem. Errors are relative, of gradients in the norm, against float64 at the very sizes of
the table. The name of a kind says whether the CPU was real or emulated.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lib.problems import Spec, make_inputs
from lib.results import FOLDER, caption, device_name, source, versions, write
from lib.tables import markdown, milliseconds, put
from torch import Tensor

from fusedce.measure import seconds_by_round
from fusedce.tools.bench import COMPILED, IMPLEMENTATIONS

SHAPES = [(1024, 576, 49152), (4096, 576, 49152), (512, 2048, 128256)]
EMULATORS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
OURS, EAGER = "fused_ce", "eager"
CHUNKS = 8
BLOCK = 256  # tokens whose float64 logits the truth holds at a time
KEYS = ("N", "H", "V", "dtype", "mode")


def plain_eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Torch's own loss on logits of the inputs' dtype."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


def chunks_by_hand(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Eager, eight chunks of tokens one after the other, each differentiated before the next."""
    count = (labels != -100).sum()
    total = hidden.new_zeros((), dtype=torch.float32)
    for h, y in zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True):
        loss = F.cross_entropy(F.linear(h, weight).float(), y, reduction="sum") / count
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    return total


LOSSES: dict[str, Callable[..., Tensor]] = {
    OURS: IMPLEMENTATIONS[OURS],
    EAGER: IMPLEMENTATIONS[EAGER],
    "eager, plain": plain_eager,
    COMPILED: IMPLEMENTATIONS[COMPILED],
    "eight chunks": chunks_by_hand,
    "F.linear_cross_entropy, 4096": IMPLEMENTATIONS["F.linear_cross_entropy, 4096"],
}


def kind() -> str:
    """The best products of bfloat16 that torch may use here, as a part of a file's name."""
    limits = " ".join(os.environ.get(name, "").upper() for name in EMULATORS)
    if "AVX2" in limits or not torch.cpu._is_avx512_supported():
        return "avx2"
    if "BF16" not in limits and torch.cpu._is_amx_tile_supported():
        return "amx"
    return "avx512-bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"


def emulation() -> str:
    """The variables that limit the CPU, or "real"."""
    found = [f"{name}={os.environ[name]}" for name in EMULATORS if name in os.environ]
    return f"emulated, {' '.join(found)}" if found else "real"


def truth(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss and its gradients in float64, of `BLOCK` tokens at a time."""
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


def measure(spec: Spec, names: list[str], rounds: int, clock: Callable[[], float]) -> list[Any]:
    """Rows of one problem, training and evaluation, one for each name."""
    torch.compiler.reset()
    hidden, weight, labels = make_inputs(spec)
    exact = truth(hidden, weight, labels)
    leaves = [x.requires_grad_() for x in (hidden, weight)]

    def step(name: str, train: bool) -> list[Tensor]:
        for x in leaves:
            x.grad = None
        with torch.set_grad_enabled(train):
            loss = LOSSES[name](hidden, weight, labels)
        if loss.requires_grad:
            loss.backward()
        return [loss.detach(), *(x.grad for x in leaves if x.grad is not None)]

    found = []
    for mode in ("training", "evaluation"):
        calls = {name: functools.partial(step, name, mode == "training") for name in names}
        times = seconds_by_round(calls, rounds, clock=clock)
        for name in names:
            errors = [
                float((x.double() - e).norm() / e.norm())
                for x, e in zip(step(name, mode == "training"), exact, strict=False)
            ]
            row = dict(zip(KEYS, (*spec[:4], mode), strict=True), name=name, errors=errors)
            found.append(row | {"seconds": times[name], "date": time.strftime("%Y-%m-%d")})
    return found


def _problems(rows: list[Any]) -> list[dict[str, Any]]:
    """The rows of each problem by name, in the order of measuring."""
    by_problem: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        by_problem.setdefault(tuple(row[k] for k in KEYS), {})[row["name"]] = row
    return list(by_problem.values())


def table(rows: list[Any]) -> str:
    """Each implementation of each problem: time over the fastest, and errors."""
    cells = []
    for by_name in _problems(rows):
        best = min(statistics.median(row["seconds"]) for row in by_name.values())
        for name, row in by_name.items():
            median = statistics.median(row["seconds"])
            cells.append(
                {
                    "N, H, V": "{N}, {H}, {V}".format(**row),
                    "dtype": row["dtype"],
                    "": row["mode"],
                    "loss": name,
                    "median ms": milliseconds(median),
                    "/ fastest": f"{median / best:.2f}",
                    "errors of loss, d_hidden, d_weight": ", ".join(
                        f"{x:.1e}" for x in row["errors"]
                    ),
                }
            )
    return markdown(cells, once=("N, H, V", "dtype", ""))


def page() -> str:
    """Every kind of CPU that was measured: ratios over the fastest, errors beside eager's."""
    files = sorted(FOLDER.glob("cpu-*.json"))
    parts = []
    for data in (json.loads(file.read_text()) for file in files):
        cells = []
        for by_name in _problems(data["rows"]):
            medians = {name: statistics.median(row["seconds"]) for name, row in by_name.items()}
            ours, eager = by_name[OURS], by_name[EAGER]
            cells.append(
                {
                    "N, H, V": "{N}, {H}, {V}".format(**ours),
                    "dtype": ours["dtype"],
                    "": ours["mode"],
                    **{
                        name: f"{median / min(medians.values()):.2f}"
                        for name, median in medians.items()
                    },
                    "largest error": f"{max(ours['errors']):.0e}",
                    "eager's": f"{max(eager['errors']):.0e}",
                }
            )
        columns = ("N, H, V", "dtype")
        parts.append(f"{data['cpu']}\n\n{markdown(cells, once=columns)}\n\n{caption(data)}")
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="+", help="which N to measure")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", type=Path, help="file whose marked table to write, from disk")
    args = parser.parse_args()
    if args.readme:
        put(args.readme, "processor cpu", page())
        return 0
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    data: dict[str, Any] = {
        "cpu": f"{kind()} ({emulation()})",
        "device": device_name("cpu"),
        "versions": versions(),
        "source": source(),
        "rows": [],
    }
    for N, H, V in SHAPES:
        for dtype in args.dtype if not args.only or N in args.only else ():
            rows = measure(Spec(N, H, V, dtype, ignored=0.25), args.losses, args.rounds, clock)
            data["rows"] += rows
            write(args.out or FOLDER / f"cpu-{kind()}.json", data)
            print(table(rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
