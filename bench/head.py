"""Time and peak memory of a whole step of a causal LM, with and without a replaced head.

    python bench/head.py               # a table, and bench/results/head-cpu.json
    python bench/head.py --device cuda

The model is a small Llama with a large vocabulary, whose logits fill most of the memory. Each peak
comes from a fresh process, times from interleaved calls of both models in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from lib.results import FOLDER, versions, write
from lib.tables import markdown, mebibytes, milliseconds, put

import fusedce
from fusedce import measure as _measure

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
    cells = [
        {
            "step": row["step"],
            "head": row["head"],
            "median ms": milliseconds(statistics.median(row["seconds"])),
            "extra peak MiB": mebibytes(row["extra_peak_bytes"]),
        }
        for row in rows
    ]
    return markdown(cells, once=("step",))


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--readme", type=Path, help="file whose marked table to rewrite")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
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
    data = {"shape": SHAPE, "device": args.device, "dtype": args.dtype, "rows": rows}
    write(FOLDER / f"head-{args.device}.json", data | {"versions": versions()})


if __name__ == "__main__":
    sys.exit(main())
