"""Time, memory and accuracy of the loss, against its peers and the bare GEMMs.

    python bench/loss.py                               # all: bench/results/loss-cpu.json
    python bench/loss.py --suite time forward --shape 1024,576,49152 --dtype bfloat16
    python bench/loss.py --suite time forward --resume --seconds 420
    python bench/loss.py --suite eager --rounds 7      # over eager: bench/results/eager-cpu.json
    python bench/report.py bench/results/loss-cpu.json # tables and plots from the JSON
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 MKL_ENABLE_INSTRUCTIONS=AVX512_E2 \
        python bench/loss.py --suite time forward      # as a CPU without AMX: loss-cpu-avx512-bf16
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
        python bench/loss.py --suite time forward      # as one with AVX2 alone: loss-cpu-avx2

Calls take turns in one process, so that a drifting machine favours none, in processor time of one
thread (`--threads` above one: wall time, which needs a quiet machine). Errors are relative, of
gradients in the norm, against float64. The floor is the bare products on the valid rows in the same
dtype. The JSON is written after every burst; --resume goes on from what it holds already for this
code, and --seconds begins no problem after that long. (`bench/gpu.py` measures on a GPU.)
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lib.engine import MEASURED, Call, Engine, median
from lib.problems import LOSSES, SUITES, Spec, flops, gradient_bytes, problems
from lib.results import FOLDER, Results, device_name, problem
from lib.tables import mebibytes, milliseconds

from fusedce.tools.bench import FLOOR

EMULATORS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_WITH_MEMORY = ("memory", "budget")


def results_file(suites: list[str]) -> Path:
    """Where results go: the name says which CPU was emulated, if one was.

    The table over eager has a file of its own: it may come from another machine.
    """
    if suites == ["eager"]:
        return FOLDER / "eager-cpu.json"
    limits = " ".join(os.environ.get(name, "").upper() for name in EMULATORS)
    of = "-avx2" if "AVX2" in limits else "-avx512-bf16" if "BF16" in limits else ""
    return FOLDER / f"loss-cpu{of}.json"


def measure(
    engine: Engine, results: Results, suite: str, spec: Spec, names: list[str], *,
    resume: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure and write a row for each implementation, each burst as soon as it is done.

    ``resume``: go on from the rows that ``results`` holds.
    """
    timed = suite != "memory"
    key = {"suite": suite, **spec._asdict()}
    held = results.rows(problem(key)) if resume else {}
    rows = {
        name: {**key, "name": name, "flops": flops(spec)} | held.get(name, {})
        for name in ([FLOOR, *names] if timed else names)
    }
    calls = {}
    for name, row in rows.items():
        row.pop("unfinished", None)
        if "errors" not in row and "failed" not in row:
            check = {"name": name, "spec": list(spec)}
            status, answer = engine.ask("all", "lib.problems:errors", check)
            row["errors" if status == "ok" else "failed"] = answer
            results.put_unfinished(row)
        if "failed" not in row:
            of_call = {"name": name, "spec": list(spec)}
            calls[name] = Call("lib.problems:make_call", of_call, "all", gradient_bytes(spec))
    # A peak costs a process: training steps have a suite for it.
    memory = tuple(calls) if suite in _WITH_MEMORY else ()

    def keep(name: str, found: dict[str, Any]) -> None:
        rows[name] = {k: v for k, v in rows[name].items() if k not in MEASURED} | found
        results.put_unfinished(rows[name])

    engine.measure(calls, time=timed, memory=memory, held=rows, on_row=keep)
    results.put(list(rows.values()))
    return list(rows.values())


def said(row: dict[str, Any]) -> str:
    """A row's figures in one line."""
    ms, mib = milliseconds(median(row)), mebibytes(row.get("extra_peak_bytes"))
    words = [row.get("failed", ""), ms and f"{ms:>8} ms", mib and f"{mib:>6} MiB"]
    return " ".join(word for word in words if word) or "checked"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="suites: " + "; ".join(f"{name}: {what}" for name, what in SUITES.items()),
    )
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--only", nargs="+", choices=list(LOSSES), help="losses to run")
    parser.add_argument("--shape", nargs="+", help="N,H,V: only problems of these sizes")
    parser.add_argument("--dtype", nargs="+", help="only problems of these dtypes")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 3)")
    parser.add_argument("--calls", type=int, help="calls of a round (default 1)")
    parser.add_argument("--quick", action="store_true", help="the first problem of each suite")
    parser.add_argument("--resume", action="store_true", help="leave out what --out holds already")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one order")
    parser.add_argument("--dry", action="store_true", help="the suites at tiny sizes")
    parser.add_argument("--out", type=Path, help="JSON to write, added to problem by problem")
    args = parser.parse_args()
    begin = time.monotonic()
    torch.set_num_threads(args.threads)
    limits = " ".join(f"{name}={os.environ[name]}" for name in EMULATORS if name in os.environ)
    results = Results(args.out or results_file(args.suite), "cpu", limits=limits)
    print(device_name("cpu"), flush=True)
    left = 0
    with Engine("cpu", rounds=args.rounds, calls=args.calls, timeout=args.timeout) as engine:
        for suite in args.suite:
            for number, (spec, names) in enumerate(problems(suite, dry=args.dry)):
                if args.quick and number:
                    break
                sizes = f"{spec.N},{spec.H},{spec.V}"
                if sizes not in (args.shape or [sizes]) or spec.dtype not in (
                    args.dtype or [spec.dtype]
                ):
                    continue
                shape = f"N={spec.N} H={spec.H} V={spec.V} {spec.dtype} {spec.mode}"
                print(f"{suite} {number + 1}: {shape} ignored={spec.ignored:.0%}", flush=True)
                if args.resume and results.has(problem({"suite": suite, **spec._asdict()})):
                    print("    measured already")
                    continue
                if time.monotonic() - begin > args.seconds:
                    left += 1
                    continue
                chosen = [n for n in names if not args.only or n in args.only]
                rows = measure(engine, results, suite, spec, chosen, resume=args.resume)
                for row in rows:
                    print(f"    {row['name']:30} {said(row)}", flush=True)
    print(f"written: {results.path}")
    if left:
        print(f"{left} problems are left: run the same again with --resume")
    return 0


if __name__ == "__main__":
    sys.exit(main())
