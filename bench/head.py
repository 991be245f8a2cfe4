"""Time and peak memory of a whole step of a causal LM, with and without a replaced head.

    python bench/head.py               # a table, and bench/results/head-cpu.json
    python bench/head.py --device cuda
    python bench/head.py --overhead    # microseconds of Python beside fused_ce called by hand
    python bench/head.py --generate    # a decoding step beside the untouched model's

The model is a small Llama with a large vocabulary, whose logits fill most of the memory. Each peak
comes from a fresh process, times from interleaved calls of both models in one process.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from report import put

import fusedce
from fusedce import measure as _measure

MiB = 2**20
SHAPE = {"batch": 4, "tokens": 256, "hidden": 256, "layers": 2, "vocabulary": 128256}


def make_step(fused: bool, training: bool, device: str, dtype: str) -> Callable[[], object]:
    """One training step (forward, backward) or evaluation step of the model, as Trainer does it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=SHAPE["vocabulary"], hidden_size=SHAPE["hidden"], intermediate_size=512,
        num_hidden_layers=SHAPE["layers"], num_attention_heads=4, use_cache=False,
        tie_word_embeddings=True, max_position_embeddings=SHAPE["tokens"],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device, getattr(torch, dtype))
    if fused:
        fusedce.replace_loss_head(model)
    shape = (SHAPE["batch"], SHAPE["tokens"])
    ids = torch.randint(0, SHAPE["vocabulary"], shape, device=device)
    labels = ids.clone()
    labels[:, : SHAPE["tokens"] // 4] = -100

    def train() -> float:
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate() -> float:
        return float(model(input_ids=ids, labels=labels).loss)

    model.train(training)
    for p in model.parameters():  # gradients are there in every step but the first
        p.grad = torch.zeros_like(p) if training else None
    return train if training else evaluate


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| step | head | median ms | extra peak MiB |", "|---|---|---|---|"]
    for row in rows:
        ms = 1e3 * statistics.median(row["seconds"])
        mib = row["extra_peak_bytes"] / MiB
        lines.append(f"| {row['step']} | {row['head']} | {ms:.0f} | {mib:.0f} |")
    return "\n".join(lines)


def overhead(repeats: int) -> None:
    """Microseconds that a step of a replaced head takes beyond ``fused_ce`` called by hand.

    The head is so small that nearly all of the time is Python. Both take turns; the figure is the
    least time of this thread, since other processes can only add to it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64, bias=False)
    model = fusedce.replace_loss_head(torch.nn.Sequential(embedding, head))
    ids, labels = torch.randint(0, 64, (2, 8)), torch.randint(0, 64, (16,))

    def replaced() -> torch.Tensor:
        return F.cross_entropy(model(ids).float().view(-1, 64), labels)

    def by_hand() -> torch.Tensor:
        return fusedce.fused_ce(embedding(ids).view(-1, 16), head.weight, labels).mean()

    parts: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, forward in (("replaced", replaced), ("by hand", by_hand)):
            begin = time.thread_time_ns()
            loss = forward()
            middle = time.thread_time_ns()
            loss.backward()
            end = time.thread_time_ns()
            parts.setdefault(f"{name}, forward", []).append(middle - begin)
            parts.setdefault(f"{name}, backward", []).append(end - middle)
    for quantile in (0.0, 0.05, 0.5):
        us = {k: sorted(v)[int(quantile * (repeats - 1))] / 1e3 for k, v in parts.items()}
        more = sum(v if k.startswith("replaced") else -v for k, v in us.items())
        each = ", ".join(f"{k} {v:.0f}" for k, v in us.items())
        print(f"quantile {quantile}: {more:.0f} us a step ({each})")


def generate(repeats: int, new: int = 16) -> None:
    """Time of a decoding step with a replaced head, relative to the untouched model.

    A small Llama with a small vocabulary runs ``generate``, so that Python takes most of the time.
    Both take turns in one process, measured by the time of one thread.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    native = transformers.LlamaForCausalLM(config).eval()
    replaced = fusedce.replace_loss_head(copy.deepcopy(native))
    prompt = torch.randint(0, 1000, (1, 16))
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
        "static cache": {"do_sample": False, "cache_implementation": "static"},
    }
    for way, options in ways.items():
        seconds: dict[str, list[int]] = {"native": [], "replaced": []}
        for _ in range(repeats):
            tokens = []
            for name, model in (("native", native), ("replaced", replaced)):
                torch.manual_seed(0)
                begin = time.thread_time_ns()
                tokens.append(
                    model.generate(
                        prompt, max_new_tokens=new, min_new_tokens=new, pad_token_id=0,
                        disable_compile=True, **options,
                    )
                )  # fmt: skip
                seconds[name].append(time.thread_time_ns() - begin)
            assert torch.equal(*tokens), way
        a, b = seconds["native"], seconds["replaced"]
        ratio = statistics.median(y / x for x, y in zip(a, b, strict=True))
        us = statistics.median(a) / new / 1e3
        print(f"{way}: {ratio:.3f} times the {us:.0f} us of a native step (median of {repeats})")


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--readme", type=Path, help="file whose marked table to rewrite")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--overhead", action="store_true", help="measure the overhead of Python alone"
    )
    parser.add_argument("--generate", action="store_true", help="measure a decoding step alone")
    args = parser.parse_args()
    if args.overhead:
        return overhead(2000)
    if args.generate:
        return generate(30)
    rows = []
    for mode in ("training", "evaluation"):
        kwargs = {"training": mode == "training", "device": args.device, "dtype": args.dtype}
        calls = {n: make_step(n == "fusedce", **kwargs) for n in ("native", "fusedce")}
        losses = {n: call() for n, call in calls.items()}
        assert abs(losses["native"] - losses["fusedce"]) < 1e-5 * losses["native"], losses
        seconds = _measure.median_seconds(calls, args.repeats)
        for name in calls:
            peak = _measure.peak_extra_bytes(
                "head:make_step", {"fused": name == "fusedce", **kwargs}, device=args.device
            )
            rows.append(
                {"step": mode, "head": name, "seconds": seconds[name], "extra_peak_bytes": peak}
            )
    print(table(rows))
    if args.readme:
        put(args.readme, f"head {args.device}", table(rows))
    data = {
        "shape": SHAPE, "device": args.device, "dtype": args.dtype, "rows": rows,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip
    out = Path(__file__).parent / "results" / f"head-{args.device}.json"
    out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
