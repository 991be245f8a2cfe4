"""What each option of the loss costs over the plain call, and fused_logprobs against eager.

    python bench/options.py                          # CPU, fp32 and bf16: a few minutes
    python bench/options.py --device cuda --N 8192 --H 4096 --V 128256 --dtype bfloat16
    python bench/options.py --table bench/results/options-cpu.json     # print what was measured

Times are medians of interleaved calls in one process, memory is the peak of one call above inputs
and gradients' owners in a fresh process each. The floor is the bare products in the same run: one
for a forward pass, three for both, four where backward computes the logits again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import put
from torch import Tensor

import fusedce
from fusedce.measure import median_seconds, memory_method, peak_extra_bytes

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
FLOOR = "bare GEMMs"
# A process each, for both passes: where the options differ in memory at all.
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
    """The calls that are compared, by name; the first is the one the others are set against."""
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
    """A call that does the whole job once; warmed up on a small input."""
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


def measure(args: argparse.Namespace, dtype: str) -> Iterator[dict[str, Any]]:
    sizes = {"N": args.N, "H": args.H, "V": args.V, "dtype": dtype, "device": args.device}
    for group in ("options", "logprobs"):
        names = [FLOOR, *losses(group, 4, 16, args.device, getattr(torch, dtype))]
        for mode in ("forward", "both"):
            make = {n: {"group": group, "name": n, "mode": mode} | sizes for n in names}
            calls = {n: prepare(**make[n]) for n in names}
            seconds = median_seconds(calls, args.repeats)
            del calls
            for name in names:
                memory = None
                if mode == "both" and name in WITH_MEMORY and not args.no_memory:
                    memory = peak_extra_bytes("options:prepare", make[name], device=args.device)
                times = seconds[name]
                yield make[name] | {"seconds": times, "peak_extra_bytes": memory}
                median = times[len(times) // 2]
                print(f"{dtype} {mode} {name}: {median * 1e3:.1f} ms", file=sys.stderr, flush=True)


def table(data: dict[str, Any]) -> str:
    """Markdown, one table per dtype and group."""
    out = []
    rows = data["rows"]
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        for group in ("options", "logprobs"):
            here = [r for r in rows if (r["dtype"], r["group"]) == (dtype, group)]
            by = {(r["name"], r["mode"]): r for r in here}
            base = next(r["name"] for r in here if r["name"] != FLOOR)
            out += [
                f"{dtype}, N={here[0]['N']}, H={here[0]['H']}, V={here[0]['V']}:\n",
                f"| call | forward ms | of {base} | of one GEMM | both ms | of {base} "
                f"| of {4 if group == 'logprobs' else 3} GEMMs | peak MiB |",
                "|---|---|---|---|---|---|---|---|",
            ]
            for name in dict.fromkeys(r["name"] for r in here):
                cells = [name]
                for mode in ("forward", "both"):
                    t = _median(by[name, mode])
                    of = [t / _median(by[other, mode]) for other in (base, FLOOR)]
                    cells += [f"{t * 1e3:.0f}", *(f"{x:.2f}" for x in of)]
                peak = by[name, "both"]["peak_extra_bytes"]
                cells.append("-" if peak is None else f"{peak / 2**20:.0f}")
                out.append("| " + " | ".join(cells) + " |")
            out.append("")
    return "\n".join(out)


def _median(row: dict[str, Any]) -> float:
    return row["seconds"][len(row["seconds"]) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--N", type=int, default=256)
    parser.add_argument("--H", type=int, default=384)
    parser.add_argument("--V", type=int, default=16003)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, help="default: results/options-DEVICE.json beside this")
    parser.add_argument("--table", type=Path, help="print the table of measured data and stop")
    parser.add_argument("--readme", type=Path, help="file whose marked table to rewrite")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    out = args.out or Path(__file__).parent / "results" / f"options-{args.device}.json"
    out.parent.mkdir(exist_ok=True)
    data: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "memory": memory_method(args.device),
        "rows": [],
    }
    for dtype in args.dtype:
        for row in measure(args, dtype):
            data["rows"].append(row)
            out.write_text(json.dumps(data, indent=1) + "\n")
    print(table(data))
    if args.readme:
        put(args.readme, f"options {args.device}", table(data).strip())


if __name__ == "__main__":
    main()
