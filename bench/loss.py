"""Time, memory and accuracy of the loss, against its peers and the bare GEMMs.

    python bench/loss.py --device cpu                  # minutes; bench/results/loss-cpu.json
    python bench/loss.py --device cuda                 # on a GPU: loss-cuda.json
    python bench/loss.py --device cuda --suite time forward --quick
    python bench/report.py bench/results/loss-cpu.json # tables and plots from the JSON

Suites: ``time`` (forward + backward), ``frozen`` (no weight gradient), ``forward`` (no gradient),
``memory``, ``scaling`` (in N and in V), ``masked`` (share of ignored labels), ``accuracy``,
``budget`` (time against the memory of a chunk). Every implementation runs in a process of its own
and is checked against fp64 before it is timed; rounds go from one to the next, so that a drifting
machine favours none. The floor is the bare products on the valid rows in the same dtype.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from implementations import CPU_NAMES, FLOOR, IMPLEMENTATIONS, Spec, flops, gradient_bytes
from pool import Pool

from fusedce.measure import peak_extra_bytes

RESULTS = Path(__file__).parent / "results"
OURS = ["fused_ce"]
# (N, H, V): Llama 3 8B twice, Gemma 2 2B, Llama 3.2 1B, Qwen 2.5 0.5B, a small step of Llama 3 8B
SHAPES = {
    "cuda": [(8192, 4096, 128256), (32768, 4096, 128256), (8192, 2304, 256000),
             (8192, 2048, 128256), (4096, 896, 151936), (2048, 4096, 128256)],
    "cpu": [(1024, 576, 49152), (4096, 576, 49152)],
}  # fmt: skip
FORWARD_SHAPES = [(8192, 4096, 128256), (8192, 2304, 256000), (8192, 2048, 128256),
                  (2048, 896, 151936)]  # fmt: skip


def problems(suite: str, device: str) -> Iterator[tuple[Spec, list[str]]]:
    """What a suite measures: each problem and the implementations to run on it."""
    everyone = list(CPU_NAMES if device == "cpu" else IMPLEMENTATIONS)
    gpu = device != "cpu"
    shapes = SHAPES["cuda" if gpu else "cpu"]
    dtypes = ["bfloat16"] if gpu else ["float32", "bfloat16"]
    ignored = 0.0 if gpu else 0.25
    small = shapes[0]

    def spec(shape: tuple[int, int, int], dtype: str = dtypes[0], **more: Any) -> Spec:
        return Spec(*shape, dtype=dtype, device=device, **{"ignored": ignored, **more})

    if suite in ("time", "memory"):
        for shape in shapes if suite == "time" else shapes[:1] if gpu else shapes:
            for dtype in dtypes:
                yield spec(shape, dtype), everyone
    elif suite == "frozen":
        for dtype in dtypes:
            yield spec(small, dtype, mode="frozen"), [*OURS, "eager"]
    elif suite == "forward":
        peers = [n for n in everyone if not n.startswith("F.linear")]
        for shape in FORWARD_SHAPES if gpu else shapes[:1]:
            for dtype in dtypes:
                yield spec(shape, dtype, mode="forward"), peers
        for share in (0.0, 0.75):
            yield spec(small, mode="forward", ignored=share), OURS
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
        size = 4
        for mib in (64, 128, 256, 512, 1024, 2048, 4096) if gpu else (12, 24, 48, 96, 192):
            tokens = max(mib * 2**20 // (V * size), 1)
            yield spec(small, chunk_tokens=min(tokens, N)), OURS
        yield spec(small), everyone


def check_of(spec: Spec, full: bool) -> Spec:
    """The problem on which errors are measured: fp64 logits must fit, and be quick."""
    N, V = (512, spec.V) if spec.device != "cpu" else (256 if full else 128, 8192)
    chunk = None if spec.chunk_tokens is None else max(spec.chunk_tokens * N // spec.N, 1)
    return spec._replace(N=min(N, spec.N), V=min(V, spec.V), chunk_tokens=chunk)


def measure(
    pool: Pool, suite: str, spec: Spec, names: list[str], rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each implementation."""
    timed = suite not in ("accuracy", "memory")
    with_memory = suite in ("memory", "budget", "forward", "scaling")
    running = [FLOOR, *names] if timed else names
    rows: dict[str, dict[str, Any]] = {}
    for name in running:
        status, answer = pool.ask(name, "prepare", spec, check_of(spec, suite == "accuracy"))
        rows[name] = {"suite": suite, "name": name, **spec._asdict()}
        rows[name] |= {"errors": answer, "seconds": []} if status == "ok" else {"failed": answer}
    repeats = 1 if spec.device == "cpu" else 3
    for i in range(rounds + 1 if timed else 0):  # the first round warms up
        for name in running[i % len(running) :] + running[: i % len(running)]:
            if "failed" in rows[name]:
                continue
            status, answer = pool.ask(name, "seconds", repeats)
            if status != "ok":
                rows[name]["failed"] = answer
            elif i:
                rows[name]["seconds"] += answer
    for name in names:
        if with_memory and "failed" not in rows[name]:
            try:
                rows[name]["extra_peak_bytes"] = extra_peak(pool, name, spec)
            except RuntimeError as e:
                rows[name]["failed"] = str(e).strip().splitlines()[-1]
    for name in running:
        pool.ask(name, "drop")
        rows[name]["flops"] = flops(spec)
        yield rows[name]


def extra_peak(pool: Pool, name: str, spec: Spec) -> int | None:
    """Peak beyond inputs and gradients; on a CPU in a fresh process, whose heap is clean."""
    if spec.device == "cpu":
        arguments = {"name": name, "spec": list(spec)}
        return peak_extra_bytes("implementations:peak_target", arguments) - gradient_bytes(spec)
    status, answer = pool.ask(name, "device_peak")
    return answer - gradient_bytes(spec) if status == "ok" else None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "liger-kernel", "cut-cross-entropy", "quack-kernels"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def device_name(device: str) -> str:
    if device != "cpu":
        return torch.get_device_module(device).get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    models = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {torch.get_num_threads()} threads"


def main() -> None:
    suites = ["time", "frozen", "forward", "memory", "scaling", "masked", "accuracy", "budget"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--suite", nargs="+", choices=suites, default=suites)
    parser.add_argument("--only", nargs="+", help="implementations to run (default: all)")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 3 on a CPU, else 5)")
    parser.add_argument("--quick", action="store_true", help="the first problem of each suite")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one order")
    parser.add_argument("--out", type=Path, help="JSON to write, added to suite by suite")
    args = parser.parse_args()
    rounds = args.rounds or (3 if args.device == "cpu" else 5)
    out = args.out or RESULTS / f"loss-{args.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    # A partial run replaces its own suites and keeps the others.
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = [row for row in old if row["suite"] not in args.suite]
    pool = Pool(args.timeout)
    try:
        for suite in args.suite:
            for number, (spec, names) in enumerate(problems(suite, args.device)):
                if args.quick and number:
                    break
                chosen = [n for n in names if not args.only or n in args.only]
                shape = f"N={spec.N} H={spec.H} V={spec.V} {spec.dtype} {spec.mode}"
                print(f"{suite} {number + 1}: {shape} ignored={spec.ignored:.0%}", flush=True)
                for row in measure(pool, suite, spec, chosen, rounds):
                    rows.append(row | {"date": datetime.date.today().isoformat()})
                    seconds = sorted(row.get("seconds", []))
                    middle = f"{1e3 * seconds[len(seconds) // 2]:10.2f} ms" if seconds else ""
                    print(f"    {row['name']:30} {row.get('failed', middle)}", flush=True)
            data = {"device": device_name(args.device), "versions": versions(), "rows": rows}
            out.write_text(json.dumps(data, indent=1) + "\n")
    finally:
        pool.close()
    print(f"written: {out}")


if __name__ == "__main__":
    main()
