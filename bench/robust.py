"""Checks of repeated calls, CUDA graphs, a second stream and the memory plan on a device.

    python bench/robust.py --device cuda              # bench/results/robust-cuda.json
    python bench/robust.py --device cuda --small --check repeat    # for compute-sanitizer

Every check is written when it is done. The exit status is 1 if one fails; checks that a device
cannot run (graphs and streams are CUDA's) are listed as left out.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lib.engine import peak_of_call
from lib.problems import Spec, gradient_bytes, make_inputs
from lib.results import FOLDER, device_name, source, versions, write
from lib.tables import markdown
from torch import Tensor

import fusedce
from fusedce.backends.plan import choose_plan
from fusedce.tools.plan import DEVICES, call

LARGE, SMALL = (8192, 4096, 128256), (200, 128, 2500)
Found = tuple[bool | None, str]  # None: left out


def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss sum and both gradients."""
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    loss = fusedce.fused_ce(*leaves, labels).loss_sum
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


def repeat(spec: Spec, runs: int) -> Found:
    """Loss and gradients have the same bits in every run."""
    inputs = make_inputs(spec)
    first = step(*inputs)
    with torch.no_grad():
        alone = fusedce.fused_ce(*inputs).loss_sum
    for run in range(1, runs):
        again = step(*inputs)
        with torch.no_grad():
            same = fusedce.fused_ce(*inputs).loss_sum.equal(alone)
        if not same or not all(a.equal(b) for a, b in zip(first, again, strict=True)):
            return False, f"run {run + 1} differs from the first"
    return True, f"{runs} runs, bitwise"


def graph(spec: Spec, runs: int) -> Found:
    """A captured step gives the same with other inputs as the step outside of the graph."""
    if torch.device(spec.device).type != "cuda":
        return None, "CUDA graphs are CUDA's"
    static = [x.clone() for x in make_inputs(spec)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(*static)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = step(*static)
    for number in range(3):
        hidden, weight, labels = make_inputs(spec._replace(ignored=0.2 * number))
        for target, value in zip(static, (hidden.flip(0), weight, labels.flip(0)), strict=True):
            target.copy_(value)
        captured.replay()
        first = [x.clone() for x in outputs]
        captured.replay()
        if not all(a.equal(b) for a, b in zip(first, outputs, strict=True)):
            return False, f"replays of inputs {number + 1} differ"
        # A graph computes ignored rows as zeros, so products have other sizes and other roundings.
        for name, a, b in zip(("loss", "d_hidden", "d_weight"), first, step(*static), strict=True):
            gap = float((a.double() - b.double()).norm() / b.double().norm())
            if not gap < (1e-5 if name == "loss" else 5e-3):
                return False, f"{name} of inputs {number + 1} is off by {gap:.1e}"
    return True, "3 inputs, replayed twice each"


def stream(spec: Spec, runs: int) -> Found:
    """A second stream gives the same bits while the first one works."""
    if torch.device(spec.device).type != "cuda":
        return None, "streams are CUDA's"
    inputs = make_inputs(spec)
    first = step(*inputs)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    busy = torch.randn(2048, 2048, device=spec.device)
    for run in range(max(runs // 10, 1)):
        for _ in range(8):
            busy = torch.tanh(busy @ busy)
        with torch.cuda.stream(side):
            found = step(*inputs)
        torch.cuda.synchronize()
        if not all(a.equal(b) for a, b in zip(first, found, strict=True)):
            return False, f"run {run + 1} differs from the default stream"
    return True, f"{max(runs // 10, 1)} runs beside products on the default stream"


def memory(spec: Spec, runs: int) -> Found:
    """The allocator's peak beyond inputs and gradients keeps to the plan."""
    if torch.device(spec.device).type == "cpu":
        return None, "a CPU has no allocator to ask"
    inputs = make_inputs(spec)
    peak = peak_of_call(lambda: step(*inputs), spec.device) - gradient_bytes(spec)
    planned = choose_plan(call(spec.N, spec.H, spec.V, 2, DEVICES["H200"])).bytes
    said = f"{peak / 2**20:.0f} MiB, planned {planned / 2**20:.0f} MiB"
    return peak <= 1.05 * planned + 16 * 2**20, said


def kernels(spec: Spec, runs: int) -> Found:
    """Which kernels a training step takes, and their times; there is nothing to fail."""
    if torch.device(spec.device).type != "cuda":
        return None, "a CPU has no kernels"
    inputs = make_inputs(spec)
    step(*inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(*inputs)
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    return True, "; ".join(f"{e.key[:60]} {e.self_device_time_total / 1e3:.2f} ms" for e in found)


CHECKS: dict[str, Callable[[Spec, int], Found]] = {
    "repeat": repeat,
    "graph": graph,
    "stream": stream,
    "memory": memory,
    "kernels": kernels,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--small", action="store_true", help="a small problem, three runs")
    parser.add_argument(
        "--runs", type=int, help="runs of the same inputs (default 100; 3 with --small)"
    )
    parser.add_argument("--out", type=Path, help="default: results/robust-DEVICE.json")
    args = parser.parse_args()
    runs = args.runs or (3 if args.small else 100)
    N, H, V = SMALL if args.small else LARGE
    spec = Spec(N, H, V, device=args.device, ignored=0.25)
    data: dict[str, Any] = {
        "device": device_name(args.device),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "source": source(),
        "spec": spec._asdict(),
        "checks": [],
    }
    for name in args.check:
        begin = time.perf_counter()
        # The plan does not count ignored rows.
        holds, said = CHECKS[name](spec._replace(ignored=0.0) if name == "memory" else spec, runs)
        status = "left out" if holds is None else "holds" if holds else "FAILS"
        row = {"check": name, "status": status, "found": said}
        data["checks"].append(row | {"seconds": round(time.perf_counter() - begin, 1)})
        write(args.out or FOLDER / f"robust-{torch.device(args.device).type}.json", data)
        print(f"{name}: {status}: {said}", flush=True)
    print(markdown([{k: str(v) for k, v in row.items()} for row in data["checks"]]))
    return any(row["status"] == "FAILS" for row in data["checks"])


if __name__ == "__main__":
    sys.exit(main())
