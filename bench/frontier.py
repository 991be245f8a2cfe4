"""Memory against time of the loss under one memory budget after another.

    python bench/frontier.py                         # CPU, fp32 and bf16: under 8 quiet minutes
    python bench/frontier.py --only fused_ce --budgets 16 64 256
    python bench/frontier.py --readme docs/benchmarks.md
    python bench/frontier.py --errors --readme docs/accuracy.md     # errors of each way

Peaks are those of a fresh process each, beyond inputs and gradients; times are medians of calls
that take turns, over the three bare products of the same run. "none" is no budget. The rows
'reduction="none"' have an upstream gradient of each token's own: four products at any budget.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lib.engine import Call, Engine, median
from lib.problems import Spec, gradient_bytes, make_inputs
from lib.results import FOLDER, Results, caption, problem
from lib.tables import markdown, mebibytes, milliseconds, put
from torch import Tensor

import fusedce
from fusedce.backends.gradients import call_of, waiting
from fusedce.backends.held import CHUNKS, ONE_CHUNK, TILES
from fusedce.backends.plan import least_bytes, tiles_of, way_of
from fusedce.contract.problem import Problem, Wanted
from fusedce.tools.bench import COMPILED, FLOOR, IMPLEMENTATIONS, ON_CPU

BY_TOKEN = 'reduction="none"'
OURS = ("fused_ce", BY_TOKEN)
SLOW = "F.linear_cross_entropy"  # torch's own chunks take minutes on a CPU: timed once
MiB = 2**20


def prepare(name: str, budget: int | None, N: int, H: int, V: int, dtype: str, device: str) -> Any:
    """A call that does the whole job once and drops the gradients; it is warm.

    A small input warms up all but the compiled call, which would compile twice, and the products.
    """
    hidden, weight, labels = make_inputs(Spec(N, H, V, dtype=dtype, device=device))
    if name == FLOOR:
        _gemms(hidden[:300], weight)
        return lambda: _gemms(hidden, weight)
    loss = _loss(name, None if budget is None else budget * MiB)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def step(*inputs: Tensor) -> None:
        loss(*inputs).backward()
        for x in inputs[:2]:
            x.grad = None

    if name == COMPILED:
        step(*leaves, labels)
    else:
        small = [x.detach()[:300].clone().requires_grad_() for x in leaves]
        step(*small, labels[:300].clamp(max=299))
    return lambda: step(*leaves, labels)


def _loss(name: str, budget: int | None) -> Callable[..., Tensor]:
    if name == "fused_ce":
        return lambda h, w, y: fusedce.fused_ce(h, w, y, memory_budget=budget).mean()
    if name == BY_TOKEN:
        return lambda h, w, y: fusedce.fused_cross_entropy(
            h, w, y, reduction="none", memory_budget=budget
        ).mean()
    return IMPLEMENTATIONS[name]


def _gemms(hidden: Tensor, weight: Tensor) -> None:
    logits = hidden @ weight.T
    logits @ weight
    logits.T @ hidden


def planned(name: str, budget: int | None, N: int, H: int, V: int, dtype: str) -> dict[str, Any]:
    """The way that is taken on a CPU, and its planned bytes."""
    kind = getattr(torch, dtype)
    hidden, weight = (torch.empty(n, H, dtype=kind, device="meta") for n in (N, V))
    of = None if budget is None else budget * MiB
    given = Problem(hidden, weight, torch.empty(N, device="meta"), memory_budget=of)
    wanted = Wanted(hidden=True, weight=True)
    if name == BY_TOKEN:
        way = tiles_of(call_of(given, wanted, N)._replace(on_cpu=True), memory_budget=of)
    else:
        call = call_of(given, wanted, N, waiting(given), logit=4)._replace(on_cpu=True)
        way = way_of(call, memory_budget=of)
    return {"way": way.name, "planned_bytes": way.bytes}


def measure(
    engine: Engine, sizes: dict[str, Any], budgets: list[int], only: list[str] | None
) -> list[dict[str, Any]]:
    """A row for each method; fusedce has one per budget."""
    kinds: list[tuple[str, int | None]] = [(FLOOR, None)]
    for name in [*OURS, *(n for n in ON_CPU if n != "fused_ce" and not n.startswith(f"{SLOW},"))]:
        if only is None or name in only:
            # Token by token there is one way alone: the least budget, and none.
            of = {"fused_ce": budgets, BY_TOKEN: budgets[:1]}.get(name, [])
            kinds += [(name, b) for b in (*of, None)]
    calls = {
        f"{name} {budget}": Call(
            "frontier:prepare",
            {"name": name, "budget": budget, "device": engine.device, **sizes},
            process="fusedce" if name in (FLOOR, *OURS) else name,
        )
        for name, budget in kinds
    }
    found, rounds = {}, engine.rounds
    for slow in (False, True):
        some = {n: call for n, call in calls.items() if n.startswith(SLOW) == slow}
        if not some:
            continue
        engine.rounds = 1 if slow else rounds
        found |= engine.measure(some, memory=tuple(n for n in some if not n.startswith(FLOOR)))
    engine.rounds = rounds
    found = {name: found[name] for name in calls}
    rows = []
    for (name, budget), row in zip(kinds, found.values(), strict=True):
        if "extra_peak_bytes" in row:
            row["extra_peak_bytes"] -= gradient_bytes(Spec(**sizes))
        of_plan = planned(name, budget, **sizes) if name in OURS else {}
        key = {"suite": "frontier", **sizes, "name": name, "budget_mib": budget}
        rows.append(key | row | of_plan)
    return rows


def tables(data: dict[str, Any]) -> str:
    """Markdown: a table for each problem."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        groups.setdefault(problem(row), []).append(row)
    out = []
    for (_, N, H, V, dtype, *_), rows in groups.items():
        floor = median(next((r for r in rows if r["name"] == FLOOR), {}))
        lines = []
        for row in rows:
            seconds = median(row)
            lines.append({
                "": row["name"],
                "budget, MiB": row["budget_mib"] or ("none" if row["name"] in OURS else ""),
                "way": row.get("way", ""),
                "peak, MiB": row.get("failed") or mebibytes(row.get("extra_peak_bytes")),
                "planned, MiB": mebibytes(row.get("planned_bytes")),
                "median ms": milliseconds(seconds),
                "/ bare GEMMs": "" if None in (seconds, floor) else f"{seconds / floor:.2f}",
            })  # fmt: skip
        out.append(f"{dtype}, N={N}, H={H}, V={V}:\n\n{markdown(lines)}\n")
    return "\n".join([*out, caption(data)])


class Errors(NamedTuple):
    """A problem whose errors are measured, and where."""

    N: int
    H: int
    V: int
    dtypes: tuple[str, ...]
    backend: str


# The interpreter cuts what it rounds to bfloat16, where hardware rounds to nearest: float16 there.
ERRORS = (
    Errors(512, 256, 8192, ("float32", "bfloat16"), "torch"),
    Errors(32, 32, 500, ("float32", "float16"), "triton"),
)


def errors(of: Errors) -> list[dict[str, Any]]:
    """Relative errors of every way against fp64, beside eager's; gradients by norm."""
    lines = []
    for dtype in of.dtypes:
        for data in ("random", "lm"):
            hidden, weight, labels = make_inputs(Spec(*of[:3], dtype=dtype, data=data))
            wide = [x.double().requires_grad_() for x in (hidden, weight)]
            exact = _gradients(_of_logits, wide, labels)
            once = [e.to(hidden.dtype).double() for e in exact]
            for way, options in [*_options_of_ways(of, dtype).items(), ("eager", None)]:
                loss = IMPLEMENTATIONS["eager"]
                if options is not None:
                    loss = functools.partial(
                        IMPLEMENTATIONS["fused_ce"], backend=of.backend, **options
                    )
                leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
                found = [x.double() for x in _gradients(loss, leaves, labels)]
                name = way if options is None else f"fused_ce, {way}"
                lines.append(_error_line(dtype, data, name, found, exact, options))
            lines.append(_error_line(dtype, data, "the exact ones, rounded", once, exact))
            lines[-1]["error of loss"] = ""
    return lines


def _error_line(
    dtype: str,
    data: str,
    name: str,
    found: list[Tensor],
    exact: list[Tensor],
    options: dict[str, int] | None = None,
) -> dict[str, Any]:
    line: dict[str, Any] = {"dtype": dtype, "logits": data, "": name}
    line["options"] = ", ".join(f"{k}={v}" for k, v in (options or {}).items())
    for of, x, e in zip(("loss", "d_hidden", "d_weight"), found, exact, strict=True):
        line[f"error of {of}"] = f"{float((x - e).norm() / e.norm()):.1e}"
    return line


def errors_table(of: Errors) -> str:
    """Markdown: what `errors` finds."""
    where = " backend, interpreted" if of.backend == "triton" else " backend"
    return f"N={of.N}, H={of.H}, V={of.V}, {of.backend}{where}:\n\n{markdown(errors(of))}\n"


def _of_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _gradients(loss: Callable[..., Tensor], leaves: list[Tensor], labels: Tensor) -> list[Tensor]:
    found = loss(*leaves, labels)
    return [found.detach(), *torch.autograd.grad(found, leaves)]


def _options_of_ways(of: Errors, dtype: str) -> dict[str, dict[str, int]]:
    """The option that selects each way: tokens of a chunk, or the least budget in bytes."""
    N, H, V, _, backend = of
    hidden, weight = (torch.empty(n, H, dtype=getattr(torch, dtype)) for n in (N, V))
    given = Problem(hidden, weight, torch.empty(N), memory_budget=0)
    wanted, triton = Wanted(hidden=True, weight=True), backend == "triton"
    call = call_of(given, wanted, N, waiting(given), logit=None if triton else 4, triton=triton)
    least = least_bytes(call)
    found = {
        ONE_CHUNK: {"chunk_tokens": N},
        CHUNKS: {"chunk_tokens": N // 4 // 8 * 8},
        TILES: {"memory_budget": least},
    }
    assert all(way_of(call, **options).name == way for way, options in found.items())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4096,576,49152", help="N,H,V")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--only", nargs="+", help="names of methods")
    parser.add_argument("--rounds", type=int, default=1, help="timed rounds (default 1)")
    parser.add_argument("--calls", type=int, default=1, help="calls of a round (default 1)")
    parser.add_argument("--out", type=Path, default=FOLDER / "frontier-cpu.json")
    parser.add_argument(
        "--errors", action="store_true", help="measure the errors of each way and stop"
    )
    parser.add_argument("--table", type=Path, help="print the tables of measured data and stop")
    parser.add_argument("--readme", type=Path, help="file whose marked table to rewrite")
    args = parser.parse_args()
    if args.errors:
        if os.environ.get("TRITON_INTERPRET") != "1":  # which is read when fusedce is imported
            again = [sys.executable, *sys.argv]
            os.execve(sys.executable, again, os.environ | {"TRITON_INTERPRET": "1"})
        found = "\n".join(map(errors_table, ERRORS))
        print(found)
        if args.readme:
            put(args.readme, "ways cpu", found)
        return 0
    if args.table:
        print(tables(json.loads(args.table.read_text())))
        return 0
    results = Results(args.out, "cpu")
    N, H, V = map(int, args.shape.split(","))
    with Engine("cpu", rounds=args.rounds, calls=args.calls, timeout=600, warm_up=False) as engine:
        results.data["memory"] = engine.memory_method()
        for dtype in args.dtype:
            sizes = {"N": N, "H": H, "V": V, "dtype": dtype}
            results.put(measure(engine, sizes, args.budgets, args.only))
            print(tables(results.data), flush=True)
    if args.readme:
        put(args.readme, "frontier cpu", tables(results.data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
