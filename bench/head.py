"""Time and peak memory of a whole step of a causal LM, with and without a replaced head.

    python bench/head.py    # a table, and bench/results/head-cpu.json

The model is a small Llama with a large vocabulary, whose logits fill most of the memory. Each peak
comes from a fresh process, times from calls of both models by turns in one process.
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
from lib.engine import measure
from lib.peaks import peak_extra_bytes
from lib.results import FOLDER, caption, device_name, stamp, versions, write
from lib.tables import markdown, mebibytes, milliseconds, put

import fusedce

SHAPE = {"batch": 4, "tokens": 256, "hidden": 256, "layers": 2, "vocabulary": 128256}


def make_step(fused: bool, training: bool) -> Callable[[], object]:
    """One training step (forward, backward) or evaluation step of the model, as Trainer does it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=SHAPE["vocabulary"], hidden_size=SHAPE["hidden"], intermediate_size=512,
        num_hidden_layers=SHAPE["layers"], num_attention_heads=4, use_cache=False,
        tie_word_embeddings=True, max_position_embeddings=SHAPE["tokens"],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if fused:
        fusedce.replace_loss_head(model)
    shape = (SHAPE["batch"], SHAPE["tokens"])
    ids = torch.randint(0, SHAPE["vocabulary"], shape)
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", type=Path, help="file whose marked table to rewrite")
    args = parser.parse_args()
    rows = []
    for mode in ("training", "evaluation"):
        training = mode == "training"
        calls = {n: make_step(n == "fusedce", training) for n in ("native", "fusedce")}
        losses = {n: call() for n, call in calls.items()}
        assert abs(losses["native"] - losses["fusedce"]) < 1e-5 * losses["native"], losses
        for name, found in measure(calls, "cpu", rounds=5).items():
            kwargs = {"fused": name == "fusedce", "training": training}
            peak = peak_extra_bytes("head:make_step", kwargs)
            row = {"step": mode, "head": name, "seconds": sorted(found["seconds"])}
            rows.append(row | {"extra_peak_bytes": peak})
    data = {"shape": SHAPE, "device": device_name("cpu"), "dtype": "float32", "rows": rows}
    data |= {"versions": versions()} | stamp()
    write(FOLDER / "head-cpu.json", data)
    text = f"{table(rows)}\n\n{caption(data)}"
    print(text)
    if args.readme:
        put(args.readme, "head cpu", text)


if __name__ == "__main__":
    sys.exit(main())
