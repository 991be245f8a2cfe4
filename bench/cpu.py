"""Processor time of the loss on a CPU over the bare products', in interleaved calls.

    python bench/cpu.py                      # bfloat16, one thread; bench/results/cpu-<sets>.json
    python bench/cpu.py --readme docs/benchmarks.md              # and its table there
    python bench/cpu.py --dtype float32 --out /tmp/float32.json
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
        python bench/cpu.py --out /tmp/avx2.json                 # emulates AVX2 alone

Time is `time.process_time` of one thread, so that neighbours on a shared machine are not counted.
Training is over three bare products of the inputs' dtype, evaluation over one. `--only N` leaves
out the other problems.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lib.problems import Spec, make_inputs
from lib.results import FOLDER, caption, device_name, instruction_sets, source, versions, write
from lib.tables import markdown, put

from fusedce.measure import seconds_by_round
from fusedce.tools.bench import COMPILED, IMPLEMENTATIONS

SHAPES = [(1024, 576, 49152), (4096, 576, 49152), (512, 2048, 128256)]
OURS = "fused_ce"


def calls(spec: Spec, *, compiled: bool) -> dict[str, Callable[[], object]]:
    """The timed calls by name; "evaluation" has no gradient."""
    hidden, weight, labels = make_inputs(spec)
    leaves = [x.requires_grad_() for x in (hidden, weight)]

    @torch.no_grad()
    def three() -> None:
        logits = torch.mm(hidden, weight.t())
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    @torch.no_grad()
    def one() -> None:
        torch.mm(hidden, weight.t())

    def step(name: str) -> None:
        IMPLEMENTATIONS[name](hidden, weight, labels).backward()
        for x in leaves:
            x.grad = None

    @torch.no_grad()
    def evaluation() -> None:
        IMPLEMENTATIONS[OURS](hidden, weight, labels)

    found: dict[str, Callable[[], object]] = {
        "three products": three,
        OURS: lambda: step(OURS),
        "one product": one,
        f"{OURS}, evaluation": evaluation,
    }
    if compiled:
        found[COMPILED] = lambda: step(COMPILED)
    return found


def seconds(spec: Spec, rounds: int, *, compiled: bool) -> dict[str, list[float]]:
    """Processor seconds of each call, by turns; one more round warms up."""
    torch.compiler.reset()
    return seconds_by_round(calls(spec, compiled=compiled), rounds, clock=time.process_time)


def tables(data: dict[str, Any]) -> str:
    """The ratios as Markdown."""
    cells = []
    for row in data["rows"]:
        medians = {name: statistics.median(x) for name, x in row["seconds"].items()}
        three, one = medians["three products"], medians["one product"]
        theirs = medians.get(COMPILED)
        cells.append(
            {
                "N, H, V": "{N}, {H}, {V}".format(**row),
                "dtype": row["dtype"],
                "three products, ms": round(1e3 * three),
                "fused_ce": f"{medians[OURS] / three:.2f}",
                "compiled eager": "" if theirs is None else f"{theirs / three:.2f}",
                "fused_ce, evaluation, over one product": (
                    f"{medians[f'{OURS}, evaluation'] / one:.2f}"
                ),
            }
        )
    return f"{markdown(cells)}\n\n{caption(data)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", type=int, nargs="+", help="which N to measure")
    parser.add_argument("--without-compiled", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", type=Path, help="file whose marked table to rewrite")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sets = "-".join(x.lower().replace("-", "") for x in instruction_sets())
    out = args.out or FOLDER / f"cpu-{sets}.json"
    data = {
        "device": device_name("cpu"),
        "versions": versions(),
        "source": source(),
        "rows": [],
    }
    for N, H, V in SHAPES:
        if args.only and N not in args.only:
            continue
        spec = Spec(N, H, V, args.dtype)
        times = seconds(spec, args.rounds, compiled=not args.without_compiled)
        day = time.strftime("%Y-%m-%d")
        row = {"N": N, "H": H, "V": V, "dtype": args.dtype, "date": day, "seconds": times}
        data["rows"].append(row)
        write(out, data)
        print(tables(data | {"rows": [row]}), flush=True)
    if args.readme:
        put(args.readme, "processor cpu", tables(json.loads(out.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
