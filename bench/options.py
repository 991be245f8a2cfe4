"""Time of each option of the loss over the plain call, and of fused_logprobs over eager.

    python bench/options.py                          # CPU, fp32 and bf16: a few minutes
    python bench/options.py --device cuda --N 8192 --H 4096 --V 128256 --dtype bfloat16
    python bench/options.py --table bench/results/options-cpu.json     # print what was measured

Times are medians of interleaved calls, ours in one process and eager's in another; memory is the
peak of one call above its inputs. The floor is the bare products in the same run: one for a forward
pass, three for both passes, four where backward computes the logits again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lib.engine import Call as Measured
from lib.engine import Engine, median
from lib.results import FOLDER, Results, caption, problem
from lib.tables import markdown, mebibytes, milliseconds, put
from torch import Tensor

import fusedce
from fusedce.tools.bench import FLOOR

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
# Their peaks of both passes are measured, in a process each: only these differ in memory.
WITH_MEMORY = ("plain", 'reduction="none"', "eager", "fused_logprobs")


def _options(N: int, V: int, device: str, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    rng = torch.Generator(device).manual_seed(1)
    some = torch.rand(N, generator=rng, device=device)
    return {
        "plain": {},
        "bias": {"bias": torch.randn(V, generator=rng, device=device).to(dtype)},
        "logit_scale": {"logit_scale": 0.5},
        "softcap": {"softcap": 30.0},
        "label_smoothing": {"label_smoothing": 0.1},
        "label_smoothing + softcap": {"label_smoothing": 0.1, "softcap": 30.0},
        "z_loss": {"z_loss": 1e-4},
        "token_weight": {"token_weight": some},
        "token_weight, half of them 0": {"token_weight": (some - 0.5).clamp(min=0)},
        "argmax_out": {"argmax_out": torch.empty(N, dtype=torch.int64, device=device)},
    }


def _class_weighted(V: int, device: str) -> dict[str, Call]:
    c = torch.linspace(0.5, 2, V, device=device)
    per_token = partial(fusedce.fused_cross_entropy, reduction="none")
    return {
        "class_weight": partial(fusedce.fused_cross_entropy, class_weight=c),
        'reduction="none"': lambda h, w, y: per_token(h, w, y).sum(),
    }


def _fused_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    stats = fusedce.fused_logprobs(hidden, weight, labels)
    return (stats.logprob + 0.01 * stats.entropy).sum()


def _eager_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    logprob = log_p.gather(-1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return (logprob + 0.01 * entropy).sum()


def losses(group: str, N: int, V: int, device: str, dtype: torch.dtype) -> dict[str, Call]:
    """The calls to compare, by name; ratios are taken over the first."""
    if group == "logprobs":
        return {"eager": _eager_logprobs, "fused_logprobs": _fused_logprobs}
    options = _options(N, V, device, dtype)
    calls: dict[str, Call] = {
        name: lambda h, w, y, o=o: fusedce.fused_ce(h, w, y, **o).loss_sum  # type: ignore[misc]
        for name, o in options.items()
    }
    return calls | _class_weighted(V, device)


def prepare(
    group: str, name: str, mode: str, N: int, H: int, V: int, dtype: str, device: str
) -> Callable[[], object]:
    """A call that computes the loss once; it was warmed up on a small input."""
    kind = getattr(torch, dtype)
    rng = torch.Generator(device).manual_seed(0)
    weight = (torch.randn(V, H, generator=rng, device=device) / H**0.5).to(kind)
    hidden = torch.randn(N, H, generator=rng, device=device).to(kind)
    labels = torch.randint(0, V, (N,), generator=rng, device=device)
    both = mode == "both"
    if name == FLOOR:
        return partial(_gemms, hidden, weight, 4 if group == "logprobs" else 3, both)
    small = losses(group, 4, 16, device, kind)[name]
    call = losses(group, N, V, device, kind)[name]

    def run(call: Call, *inputs: Tensor) -> object:
        leaves = [x.detach().requires_grad_(both) for x in inputs[:2]]
        with torch.set_grad_enabled(both):
            out = call(*leaves, inputs[2])
        return torch.autograd.grad(out, leaves) if both else out

    run(small, hidden[:4], weight[:16], labels[:4] % 16)
    return partial(run, call, hidden, weight, labels)


def _gemms(hidden: Tensor, weight: Tensor, count: int, both: bool) -> None:
    logits = hidden @ weight.T
    for _ in range(count - 3 if both else 0):
        logits = hidden @ weight.T
    if both:
        logits @ weight
        logits.T @ hidden


def measure(
    engine: Engine, group: str, mode: str, sizes: dict[str, Any], *, memory: bool
) -> list[dict[str, Any]]:
    """A row for each call of a group."""
    names = [FLOOR, *losses(group, 4, 16, engine.device, getattr(torch, sizes["dtype"]))]
    calls = {
        n: Measured(
            "options:prepare",
            {"group": group, "name": n, "mode": mode, "device": engine.device, **sizes},
            process="eager" if n in (FLOOR, "eager") else "fusedce",
        )
        for n in names
    }
    heavy = tuple(n for n in names if n in WITH_MEMORY) if memory and mode == "both" else ()
    found = engine.measure(calls, memory=heavy)
    key = {"suite": group, "mode": mode, **sizes}
    return [key | {"name": name} | found[name] for name in names]


def tables(data: dict[str, Any]) -> str:
    """Markdown, one table per problem and group; a row per call, both passes beside each other."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        groups.setdefault(problem(row | {"mode": None}), []).append(row)
    out = []
    for (group, N, H, V, dtype, *_), rows in groups.items():
        by = {(r["name"], r["mode"]): r for r in rows}
        base = next(r["name"] for r in rows if r["name"] != FLOOR)
        products = 4 if group == "logprobs" else 3
        lines = []
        for name in dict.fromkeys(r["name"] for r in rows):
            line: dict[str, object] = {"call": name}
            for mode, floor in (("forward", "one GEMM"), ("both", f"{products} GEMMs")):
                row = by.get((name, mode), {})
                line[f"{mode}, median ms"] = row.get("failed") or milliseconds(median(row))
                line[f"{mode} / {base}"] = _ratio(row, by.get((base, mode), {}))
                line[f"{mode} / {floor}"] = _ratio(row, by.get((FLOOR, mode), {}))
            peak = by.get((name, "both"), {}).get("extra_peak_bytes")
            line["peak MiB"] = mebibytes(peak)
            lines.append(line)
        out.append(f"{dtype}, N={N}, H={H}, V={V}:\n\n{markdown(lines)}\n")
    return "\n".join([*out, caption(data)])


def _ratio(row: dict[str, Any], base: dict[str, Any]) -> str:
    a, b = median(row), median(base)
    return "" if a is None or b is None else f"{a / b:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--N", type=int, default=256)
    parser.add_argument("--H", type=int, default=384)
    parser.add_argument("--V", type=int, default=16003)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, help="timed rounds (default 5; 2 on a CPU)")
    parser.add_argument("--calls", type=int, help="calls of a round (default 10; 2 on a CPU)")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--resume", action="store_true", help="leave out what --out holds already")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--out", type=Path, help="default: results/options-DEVICE.json beside this")
    parser.add_argument("--table", type=Path, help="print the tables of measured data and stop")
    parser.add_argument("--readme", type=Path, help="file whose marked table to rewrite")
    args = parser.parse_args()
    if args.table:
        print(tables(json.loads(args.table.read_text())))
        return 0
    begin = time.monotonic()
    results = Results(args.out or FOLDER / f"options-{args.device}.json", args.device)
    with Engine(args.device, rounds=args.rounds, calls=args.calls) as engine:
        results.data["memory"] = engine.memory_method()
        for dtype in args.dtype:
            sizes = {"N": args.N, "H": args.H, "V": args.V, "dtype": dtype}
            for group in ("options", "logprobs"):
                for mode in ("forward", "both"):
                    key = problem({"suite": group, "mode": mode, **sizes})
                    if args.resume and results.has(key):
                        continue
                    if time.monotonic() - begin > args.seconds:
                        print(f"left: {dtype} {group} {mode}; run the same again with --resume")
                        continue
                    memory = not args.no_memory
                    results.put(measure(engine, group, mode, sizes, memory=memory))
    print(tables(results.data))
    if args.readme:
        put(args.readme, f"options {args.device}", tables(results.data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
