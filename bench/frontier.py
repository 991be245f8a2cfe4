"""Memory against time: what the loss holds, and takes, under one memory budget after another.

    python bench/frontier.py                         # CPU, fp32 and bf16: some minutes
    python bench/frontier.py --only fused_ce --budgets 16 64 256
    python bench/frontier.py --readme docs/benchmarks.md
    python bench/frontier.py --errors --readme docs/accuracy.md     # of each way, against fp64

Peaks are those of a fresh process each, beyond inputs and gradients; times are medians of calls
that take turns, over the three bare products of the same run. "none" is no budget. The rows
'reduction="none"' have an upstream gradient of each token's own: four products at any budget.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lib.engine import Call, Engine, median
from lib.problems import Spec, gradient_bytes, make_inputs
from lib.results import FOLDER, Results, caption, problem
from lib.tables import markdown, mebibytes, milliseconds, put
from torch import Tensor

import fusedce
from fusedce.backends.gradients import call_of, waiting
from fusedce.backends.plan import tiles_of, way_of
from fusedce.contract.problem import Problem, Wanted
from fusedce.tools.peers import COMPILED, FLOOR, IMPLEMENTATIONS, ON_CPU

BY_TOKEN = 'reduction="none"'
OURS = ("fused_ce", BY_TOKEN)
SLOW = "F.linear_cross_entropy"  # torch's own chunks take minutes on a CPU: timed once
MiB = 2**20


def prepare(name: str, budget: int | None, N: int, H: int, V: int, dtype: str, device: str) -> Any:
    """A call that does the whole job once and drops the gradients; warmed up on a small input."""
    hidden, weight, labels = make_inputs(Spec(N, H, V, dtype=dtype, device=device))
    if name == FLOOR:
        return lambda: _gemms(hidden, weight)
    loss = _loss(name, None if budget is None else budget * MiB)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def step(*inputs: Tensor) -> None:
        loss(*inputs).backward()
        for x in inputs[:2]:
            x.grad = None

    if name != COMPILED:  # (which would compile twice)
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
    """The way that is taken on a CPU, and what it is planned to hold."""
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
    """A row for each method, of ours for each budget."""
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


def errors(N: int, H: int, V: int) -> str:
    """Markdown: relative errors of every way against fp64, beside eager's; gradients by norm."""
    lines = []
    for dtype in ("float32", "bfloat16"):
        for data in ("random", "lm"):
            hidden, weight, labels = make_inputs(Spec(N, H, V, dtype=dtype, data=data))
            wide = [x.double().requires_grad_() for x in (hidden, weight)]
            exact = _gradients(_of_logits, wide, labels)
            once = [e.to(hidden.dtype).double() for e in exact]
            rows = {f"fused_ce, {way}": budget for way, budget in _budgets(N, H, V, dtype).items()}
            for name, budget in (rows | {"eager": None}).items():
                loss = _loss("fused_ce", budget * MiB) if budget else IMPLEMENTATIONS["eager"]
                leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
                found = _gradients(loss, leaves, labels)
                values = [float((x.double() - e).norm() / e.norm())
                          for x, e in zip(found, exact, strict=True)]  # fmt: skip
                lines.append({
                    "dtype": dtype, "logits": data, "": name,
                    "budget, MiB": budget or "", "error of loss": f"{values[0]:.1e}",
                    "error of d_hidden": f"{values[1]:.1e}",
                    "error of d_weight": f"{values[2]:.1e}",
                })  # fmt: skip
            rounded = [float((x - e).norm() / e.norm()) for x, e in zip(once, exact, strict=True)]
            lines.append({
                "dtype": dtype, "logits": data, "": "the exact ones, rounded", "budget, MiB": "",
                "error of loss": "", "error of d_hidden": f"{rounded[1]:.1e}",
                "error of d_weight": f"{rounded[2]:.1e}",
            })  # fmt: skip
    return f"N={N}, H={H}, V={V}:\n\n{markdown(lines)}"


def _of_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _gradients(loss: Callable[..., Tensor], leaves: list[Tensor], labels: Tensor) -> list[Tensor]:
    found = loss(*leaves, labels)
    return [found.detach(), *torch.autograd.grad(found, leaves)]


def _budgets(N: int, H: int, V: int, dtype: str) -> dict[str, int]:
    """A budget in MiB for each way, the largest that is enough."""
    return {
        str(planned("fused_ce", mib, N, H, V, dtype)["way"]): mib for mib in (6, 8, 12, 16, 24, 512)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4096,576,49152", help="N,H,V")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--only", nargs="+", help="names of methods")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 2)")
    parser.add_argument("--calls", type=int, default=1, help="calls of a round (default 1)")
    parser.add_argument("--out", type=Path, default=FOLDER / "frontier-cpu.json")
    parser.add_argument("--errors", action="store_true", help="of each way, and stop")
    parser.add_argument("--table", type=Path, help="print the tables of measured data and stop")
    parser.add_argument("--readme", type=Path, help="file whose marked table to rewrite")
    args = parser.parse_args()
    if args.errors:
        found = f"{errors(512, 256, 8192)}\n"
        print(found)
        if args.readme:
            put(args.readme, "ways cpu", found)
        return 0
    if args.table:
        print(tables(json.loads(args.table.read_text())))
        return 0
    results = Results(args.out, "cpu")
    N, H, V = map(int, args.shape.split(","))
    with Engine("cpu", rounds=args.rounds, calls=args.calls, timeout=600) as engine:
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
