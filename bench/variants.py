"""Variants of our own code against each other; the results decide the numbers in `archs.py`.

    python bench/variants.py --device cuda       # bench/results/variants-cuda.json
    python bench/variants.py --dry               # tiny problems, interpreted, on any machine

Training's exponentials come from one GEMM with an epilogue, or from the vendor's products with a
kernel after each; the last lines say up to which hidden size the first one was faster, and what
the rule in `archs.py` costs beside the best one. The forward kernel runs with every row of blocks
that tuning would try. The kernels of one training step are timed one by one. Every burst is
written as soon as it is done; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, in all processes

import torch
from lib.engine import MEASURED, Call, Engine, median
from lib.problems import Spec, make_inputs, tiny
from lib.results import FOLDER, Results, problem
from lib.tables import markdown, milliseconds
from lib.variants import CANDIDATES
from model import SHAPES

import fusedce
from fusedce.backends.triton import archs
from fusedce.backends.triton.archs import Blocks
from fusedce.backends.triton.forward import loss as forward_loss
from fusedce.contract.problem import Problem

ONE_GEMM, PRODUCTS = "one GEMM", "products and kernels"
_CHOICE = {ONE_GEMM: "1", PRODUCTS: "0"}


def training(name: str, spec: list[Any]) -> Callable[[], object]:
    """One step by the Triton backend, whose exponentials are made as ``name`` says."""
    hidden, weight, labels = make_inputs(Spec(*spec))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def step() -> None:
        os.environ["FUSEDCE_EXP_GEMM"] = _CHOICE[name]
        out = fusedce.fused_ce(hidden, weight, labels, backend="triton")
        torch.autograd.grad(out.loss_sum, leaves)

    return step


def forward(blocks: list[Any], spec: list[Any]) -> Callable[[], object]:
    """The forward kernel with these blocks."""
    problem = Problem(*make_inputs(Spec(*spec)))
    return lambda: forward_loss(problem, Blocks(*blocks))


def kernels(spec: list[Any]) -> dict[str, float]:
    """Device seconds of each kernel of a training step (on a CPU: of each operator of torch)."""
    spec_ = Spec(*spec)
    step = training(ONE_GEMM, spec)
    step()
    on_cpu = torch.device(spec_.device).type == "cpu"
    kind = torch.profiler.ProfilerActivity.CPU if on_cpu else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[kind]) as profile:
        step()
        if not on_cpu:
            torch.get_device_module(spec_.device).synchronize()
    field = "self_cpu_time_total" if on_cpu else "self_device_time_total"
    return {e.key: getattr(e, field) / 1e6 for e in profile.key_averages() if getattr(e, field)}


def rule(found: Mapping[int, tuple[float, float]], now: int) -> str:
    """Say up to which hidden size one GEMM should be taken.

    ``found`` holds seconds of (one GEMM, products and kernels) by hidden size, ``now`` is the
    rule in use. A rule's price is the time of what it takes over the time of the faster way.
    """

    def price(up_to: int) -> float:
        ours = sum(a if up_to >= H else b for H, (a, b) in found.items())
        return ours / sum(map(min, found.values()))

    best = min((0, *sorted(found)), key=price)
    return (
        f"One GEMM up to H = {best} would have been right (time over the faster way of each: "
        f"{price(best):.3f}); up to H = {now}, as archs.py has it, costs {price(now):.3f}."
    )


def measure(engine: Engine, results: Results, spec: Spec, candidates: list[Blocks]) -> None:
    """Time the ways of training, then the forward kernel's blocks, and write a row for each."""
    groups = {
        "training": {
            name: Call("variants:training", {"name": name, "spec": list(spec)}, name)
            for name in _CHOICE
        },
        "forward blocks": {
            str(tuple(blocks)): Call(
                "variants:forward", {"blocks": list(blocks), "spec": list(spec)}, "forward"
            )
            for blocks in candidates
        },
    }
    for suite, calls in groups.items():
        key = {"suite": suite, **spec._asdict()}
        held = results.rows(problem(key))
        rows = {name: held.get(name, {**key, "name": name}) for name in calls}

        def keep(name: str, found: dict[str, Any], rows: dict[str, Any] = rows) -> None:
            rows[name] = {k: v for k, v in rows[name].items() if k not in MEASURED} | found
            results.put_unfinished(rows[name])

        engine.measure(calls, held=rows, on_row=keep)
        done = [{k: v for k, v in row.items() if k != "unfinished"} for row in rows.values()]
        results.put(done)


def summary(data: Mapping[str, Any], now: int) -> str:
    """Tables of both groups, and the rule by hidden size."""
    lines, by_H = [], {}
    for suite in ("training", "forward blocks"):
        rows = [r for r in data["rows"] if r["suite"] == suite]
        lines.append(f"\n{suite}:\n")
        lines.append(markdown([
            {
                "N, H, V": f"{r['N']}, {r['H']}, {r['V']}", "": r["name"],
                "median ms": r.get("failed") or milliseconds(median(r)),
                "rounds": " ".join(milliseconds(x) for x in r.get("rounds", ())),
            }
            for r in rows
        ]))  # fmt: skip
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for row in data["rows"]:
        seconds = median(row)
        if row["suite"] == "training" and seconds is not None:
            times.setdefault((row["N"], row["H"], row["V"]), {})[row["name"]] = seconds
    for (_, H, _), found in times.items():
        if len(found) == len(_CHOICE):
            a, b = by_H.get(H, (0.0, 0.0))
            by_H[H] = a + found[ONE_GEMM], b + found[PRODUCTS]
    if by_H:
        lines.append("\n" + rule(by_H, now))
    if data.get("kernels"):
        ordered = sorted(data["kernels"].items(), key=lambda item: -item[1])[:12]
        lines.append("\nKernels of one training step of the first shape, by one GEMM:\n")
        lines.append(markdown([{"kernel": k[:80], "ms": milliseconds(t)} for k, t in ordered]))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 5; 2 on a CPU)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of them")
    parser.add_argument("--dry", action="store_true", help="tiny problems, interpreted on a CPU")
    parser.add_argument("--out", type=Path, help="default: results/variants-DEVICE.json")
    args = parser.parse_args()
    begin = time.monotonic()
    device = "cpu" if args.dry else args.device
    row = archs.architecture(torch.device(device))
    walks = row.two_bytes
    candidates = list(dict.fromkeys((walks.forward, *CANDIDATES.get(row.name, ()))))
    results = Results(args.out or FOLDER / f"variants-{device}.json", device)
    left = 0
    with Engine(device, rounds=args.rounds, calls=1 if args.dry else None) as engine:
        for number, shape in enumerate(SHAPES[: args.shapes]):
            spec = Spec(*shape, device=device)
            spec = tiny(spec) if args.dry else spec
            keys = [problem({"suite": s, **spec._asdict()}) for s in ("training", "forward blocks")]
            if all(results.has(key) for key in keys):
                continue
            if time.monotonic() - begin > args.seconds:
                left += 1
                continue
            print(f"N={spec.N} H={spec.H} V={spec.V}", flush=True)
            measure(engine, results, spec, candidates)
            if number == 0:
                status, answer = engine.ask(ONE_GEMM, "variants:kernels", {"spec": list(spec)})
                results.more(kernels=answer if status == "ok" else {})
    print(summary(results.data, walks.gemm_up_to))
    if left:
        print(f"{left} shapes are left: run the same again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
