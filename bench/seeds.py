"""Logged loss of 1 x 32 micro-batches beside 32 x 1, by lengths of sequences, over several seeds.

    python bench/seeds.py --page docs/denominator.md      # a small Llama, 10 minutes on one core
    python bench/seeds.py --size 135m --seeds 1           # SmolLM2's shape, a GPU of 80 GB

From the same initial weights and batches, a model is trained with transformers' own loss on the
whole batch (32x1, the reference), with the mean of the means of 32 micro-batches (naive 1x32), and
with a replaced head and `LossAccumulator` (fused 1x32). Another seed draws other weights and
batches: a difference matters beside that between the references of two seeds. Published runs of
135 M parameters, 2,048 tokens and 210 steps saw 0.1 to 0.7 nats, and 4e-4 with one denominator.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accumulation import bimodal, demo, pieces
from lib.results import FOLDER, Results, Row
from lib.tables import markdown, put
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce

WAYS = {"32x1": 32, "naive 1x32": 1, "fused 1x32": 1}  # sequences of a micro-batch
REGIMES = ("equal", "natural", "bimodal")


class Size(NamedTuple):
    V: int
    H: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    T: int  # tokens of the longest sequence
    border: str  # between two sequences of natural lengths
    steps: int
    learning_rate: float
    device: str = "cpu"
    dtype: torch.dtype = torch.float32  # bfloat16: by autocast
    checkpoints: bool = False

    def model(self) -> Any:
        config = LlamaConfig(
            vocab_size=self.V, hidden_size=self.H, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads, max_position_embeddings=self.T,
            tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config).train()


# Tokens are bytes: the text has half a million, too few to learn a vocabulary of words from. The
# large model keeps its 49,152 classes, of which 256 occur, so that its size is the published one.
# Its layers are checkpointed, and 32 x 1 stays one batch: 60 GB by estimate, mostly stock's logits.
SIZES = {
    "small": Size(256, 64, 192, 2, 4, 2, 256, r"\n\s*\n", steps=60, learning_rate=1e-3),
    "135m": Size(
        49152, 576, 1536, 30, 9, 3, 2048, r"\n{3,}", steps=210, learning_rate=5e-4,
        device="cuda", dtype=torch.bfloat16, checkpoints=True,
    ),
}  # fmt: skip


def sequences(size: Size, regime: str, seed: int) -> list[Tensor]:
    text = "\n\n\n".join(demo.sections())
    if regime == "natural":
        parts = re.split(size.border, text)
        return [torch.tensor(list(x.encode()[: size.T])) for x in parts if len(x) > 1]
    rng = torch.Generator().manual_seed(seed)
    lengths = bimodal(size.T, rng) if regime == "bimodal" else itertools.repeat(size.T)
    return pieces(torch.tensor(list(text.encode())), lengths, size.T)


def train(size: Size, batches: list[demo.Batch], seed: int, name: str) -> Row:
    """One way: by steps, the logged loss, the mean of all tokens and the gradient's norm."""
    torch.manual_seed(seed)
    model, fused = size.model().to(size.device), name.startswith("fused")
    if size.checkpoints:
        model.gradient_checkpointing_enable()
    if fused:
        fusedce.replace_loss_head(model)
    accumulator = fusedce.LossAccumulator(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    cast = torch.autocast(size.device, torch.bfloat16, enabled=size.dtype == torch.bfloat16)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        micro = [
            {"input_ids": ids.to(size.device), "labels": labels.to(size.device)}
            for ids, labels in demo.split(batch, WAYS[name])
        ]
        counts = [int(fusedce.count_valid(inputs["labels"])) for inputs in micro]
        if fused:
            with accumulator.window(counts):
                for inputs in micro:
                    with cast:
                        loss = fusedce.model_loss(model, inputs)
                    accumulator.backward(loss)
            logged = true = accumulator.metrics(reset=True)["loss"]
        else:
            losses = []
            for inputs in micro:
                with cast:
                    loss = model(**inputs).loss
                (loss / len(micro)).backward()
                losses.append(loss.item())
            logged = statistics.fmean(losses)
            true = sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts)
        norm = nn.utils.get_total_norm(p.grad for p in model.parameters()).item()
        optimizer.step()
        found.append((logged, true, norm))
    columns = ([round(x, 8) for x in column] for column in zip(*found, strict=True))
    return {"name": name} | dict(zip(("logged", "true", "grad_norm"), columns, strict=True))


# ---- what came out --------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """Distances from 32x1 of the same seed, and of its runs with two seeds from each other."""
    lines = []
    for regime in dict.fromkeys(row["suite"] for row in rows):
        runs = {(row["name"], row["mode"]): row for row in rows if row["suite"] == regime}
        full = [row for (name, _), row in runs.items() if name == "32x1"]
        pairs = {"32x1, another seed": list(itertools.combinations(full, 2))}
        pairs |= {name: [(runs[name, x["mode"]], x) for x in full] for name in list(WAYS)[1:]}
        lines += [
            {"lengths": regime, "": name} | distances(compared)
            for name, compared in pairs.items() if compared
        ]  # fmt: skip
    return markdown(lines, once=("lengths",))


def distances(pairs: list[tuple[Row, Row]]) -> dict[str, str]:
    """Means over pairs of runs and over steps."""

    def gaps(kind: str) -> list[list[float]]:
        return [[abs(a - b) for a, b in zip(x[kind], y[kind], strict=True)] for x, y in pairs]

    def mean(kind: str) -> float:
        return statistics.fmean(itertools.chain(*gaps(kind)))

    norm = statistics.fmean(itertools.chain(*(y["grad_norm"] for _, y in pairs)))
    return {
        "logged loss": f"{mean('logged'):.1e}",
        "at most": f"{max(map(max, gaps('logged'))):.1e}",
        "gradient's norm": f"{mean('grad_norm') / norm:.1e}",
    }


def caption(data: dict[str, Any]) -> str:
    row, packages = data["rows"][-1], data["versions"]
    return (
        f"{len(row['logged'])} steps of 32 sequences of at most {row['N']} bytes, H={row['H']}, "
        f"V={row['V']}, {row['dtype']}; {data['device']}; torch {packages['torch']}, transformers "
        f"{packages['transformers']}; {row['date']}, commit {row['commit']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REGIMES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="page whose table to rewrite")
    args = parser.parse_args()
    size = SIZES[args.size]
    size = size._replace(steps=args.steps or size.steps)
    path = args.out or FOLDER / f"seeds-{'cpu' if args.size == 'small' else args.size}.json"
    results = Results(path, size.device)
    for regime, seed in itertools.product(args.regimes, range(args.seeds)):
        key = {
            "suite": regime, "N": size.T, "H": size.H, "V": size.V,
            "dtype": str(size.dtype).removeprefix("torch."),
            "mode": f"seed {seed}, {size.steps} steps", "ignored": None, "budget": None,
        }  # fmt: skip
        if not results.has(tuple(key.values())):
            batches = demo.draw_batches(sequences(size, regime, seed), size.steps, seed)
            with demo.exactly_repeatable():
                results.put([key | train(size, batches, seed, name) for name in WAYS])
            print(f"{regime}, seed {seed}", flush=True)
    text = f"{table(results.data['rows'])}\n\n{caption(results.data)}"
    print(text)
    if args.page:
        put(args.page, f"seeds {args.size}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
