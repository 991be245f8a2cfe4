"""How far gradient accumulation drifts from the batch it stands for: regimes x splits x losses.

    python bench/accumulation.py --device cpu     # a small Llama, under 15 minutes on 2 cores
    python bench/accumulation.py --device cuda    # SmolLM-135M's configuration, up to 2048 tokens
    python bench/accumulation.py --regime bimodal --steps 5
    python bench/accumulation.py --plot bench/results/accumulation-cpu.json

The same 32 sequences of a step are trained on as 32x1, 16x2, 2x16 and 1x32 (sequences in a
micro-batch x micro-batches), naively (mean of the micro-batches' means) and through
`fusedce.LossAccumulator`. Same initial weights, order of samples and AdamW, float32. Everything is
compared with 32x1; what rounding alone does is shown by 32x1 with its rows permuted ("floor").
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accumulation_plot import draw, print_table
from torch import Tensor, nn

from fusedce import LossAccumulator, count_valid, demo
from fusedce.demo.run import SEQUENCES, Batch

SPLITS = ((32, 1), (16, 2), (2, 16), (1, 32))
LEARNING_RATE = 1e-3


class Setup(NamedTuple):
    """What a device is given to do."""

    long: int  # tokens: the larger maximum length
    short: int  # the smaller one
    steps: int
    model: dict[str, Any]  # of LlamaConfig


SETUPS = {
    "cpu": Setup(
        long=512,
        short=128,
        steps=30,
        model={
            "vocab_size": demo.VOCABULARY,
            "hidden_size": 96,
            "intermediate_size": 288,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
        },
    ),
    "cuda": Setup(
        long=2048,
        short=512,
        steps=60,
        model={  # SmolLM-135M
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    ),
}


# ---- regimes: what lengths the sequences have -----------------------------------------------


def regimes(tokens: list[list[int]], setup: Setup, seed: int) -> dict[str, list[Tensor]]:
    """Sequences of each regime, from the same text; ``tokens`` are whole sections."""
    stream = torch.tensor([token for section in tokens for token in section])
    rng = torch.Generator().manual_seed(seed)

    def pieces(lengths: Iterator[int]) -> list[Tensor]:
        found, at = [], 0
        while at + setup.long <= len(stream):
            length = next(lengths)
            found.append(stream[at : at + length])
            at += length
        return found

    def bimodal() -> Iterator[int]:
        while True:
            yield int(torch.randint(4, 13, (), generator=rng))
            yield setup.long

    def uniform() -> Iterator[int]:
        while True:
            yield setup.long // 2

    return {
        f"natural, up to {setup.long}": [torch.tensor(x[: setup.long]) for x in tokens],
        f"natural, up to {setup.short}": [torch.tensor(x[: setup.short]) for x in tokens],
        f"bimodal, 4 to 12 and {setup.long}": pieces(bimodal()),
        f"uniform, {setup.long // 2}": pieces(uniform()),
    }


# ---- one run --------------------------------------------------------------------------------


class Run(NamedTuple):
    logged: list[float]  # nats per token, as this way of training reports each step
    true: list[float]  # sum over the step's tokens / their number
    first_grad_norm: float
    weights: Tensor  # all of them after the last step, flat, on the CPU
    seconds: float


def split(batch: Batch, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Padded ``(input_ids, labels)`` micro-batches of ``rows`` sequences."""
    parts = [batch[i : i + rows] for i in range(0, len(batch), rows)]
    return [(demo.pad(part, 0), demo.pad(part, -100)) for part in parts]


def naive(model: nn.Module, micro: list[tuple[Tensor, Tensor]]) -> tuple[float, demo.Losses]:
    outs = []
    for input_ids, labels in micro:
        out = demo.loss_of(model, input_ids, labels)
        (out.mean() / len(micro)).backward()
        outs.append(out)
    return sum(out.mean().item() for out in outs) / len(outs), outs


class Fused:
    """The same through one accumulator, kept for the whole run."""

    def __init__(self) -> None:
        self.accumulator = LossAccumulator()

    def __call__(
        self, model: nn.Module, micro: list[tuple[Tensor, Tensor]]
    ) -> tuple[float, demo.Losses]:
        outs = []
        with self.accumulator.window([count_valid(labels) for _, labels in micro]):
            for input_ids, labels in micro:
                outs.append(demo.loss_of(model, input_ids, labels))
                self.accumulator.backward(outs[-1])
        return self.accumulator.metrics(reset=True)["loss"], outs


def train(
    model: nn.Module,
    start: dict[str, Tensor],
    batches: list[Batch],
    rows: int,
    way: Callable,
    learning_rate: float = LEARNING_RATE,
) -> Run:
    begin = time.perf_counter()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    logged, true, first = [], [], 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss, outs = way(model, split(batch, rows))
        logged.append(loss)
        true.append(sum(x.loss_sum.item() for x in outs) / sum(int(x.n_valid) for x in outs))
        if len(true) == 1:
            first = float(nn.utils.get_total_norm(p.grad for p in model.parameters()))
        optimizer.step()
    return Run(logged, true, first, flat(model), time.perf_counter() - begin)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def permuted(batches: list[Batch], seed: int) -> list[Batch]:
    rng = torch.Generator().manual_seed(seed + 1)
    return [[batch[i] for i in torch.randperm(len(batch), generator=rng)] for batch in batches]


# ---- the grid -------------------------------------------------------------------------------


def grid(
    model: nn.Module, sequences: dict[str, list[Tensor]], steps: int, seed: int, device: str
) -> dict[str, Any]:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before = flat(model)
    found: dict[str, Any] = {}
    for regime, samples in sequences.items():
        batches = demo.draw_batches([x.to(device) for x in samples], steps, seed)
        runs = {"32x1": train(model, start, batches, 32, naive)}
        runs["floor"] = train(model, start, permuted(batches, seed), 32, naive)
        for rows, micro in SPLITS[1:]:
            runs[f"naive {rows}x{micro}"] = train(model, start, batches, rows, naive)
        for rows, micro in SPLITS:
            runs[f"fused {rows}x{micro}"] = train(model, start, batches, rows, Fused())
        lengths = sorted(len(x) for x in samples)
        found[regime] = {
            "sequences": len(samples),
            "lengths": {
                "min": lengths[0],
                "median": lengths[len(lengths) // 2],
                "max": lengths[-1],
            },
            "runs": {name: compare(run, runs["32x1"], before) for name, run in runs.items()},
        }
        print_table(regime, found[regime])
    return found


def compare(run: Run, full: Run, before: Tensor) -> dict[str, Any]:
    """The run's curves, and how far it is from 32x1."""

    def worst(kind: str) -> float:
        pairs = zip(getattr(run, kind), getattr(full, kind), strict=True)
        return float(torch.tensor([abs(a - b) for a, b in pairs], dtype=torch.float64).max())

    moved = torch.linalg.vector_norm(full.weights - before)
    return {
        "logged": run.logged,
        "true": run.true,
        "logged_gap": worst("logged"),
        "true_gap": worst("true"),
        # relative to how far training moved the weights
        "weights_gap": float(torch.linalg.vector_norm(run.weights - full.weights) / moved),
        "first_grad_norm_ratio": run.first_grad_norm / full.first_grad_norm,
        "seconds": run.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--regime", default="", help="only regimes whose name begins so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--picture", type=Path, help="default: beside the data")
    parser.add_argument("--plot", type=Path, help="draw this data again, train nothing")
    options = parser.parse_args()
    if options.plot is not None:
        draw(
            json.loads(options.plot.read_text()),
            options.picture or options.plot.with_suffix(".png"),
        )
        return

    from transformers import LlamaConfig, LlamaForCausalLM

    begin = time.perf_counter()
    kind = torch.device(options.device).type
    setup = SETUPS[kind]
    steps = options.steps or setup.steps
    texts = demo.sections()
    encode = demo.train_tokenizer(texts, setup.long)
    torch.manual_seed(options.seed)
    config = LlamaConfig(**setup.model, attention_dropout=0.0, use_cache=False)
    model = LlamaForCausalLM(config).float().train().to(options.device)
    if kind != "cpu":  # 32 padded sequences of 2048 tokens at a time
        model.gradient_checkpointing_enable()
    sequences = regimes([encode(text) for text in texts], setup, options.seed)
    sequences = {k: v for k, v in sequences.items() if k.startswith(options.regime)}
    with demo.exactly_repeatable():
        found = grid(model, sequences, steps, options.seed, options.device)
    data = {
        "device": options.device,
        "device_name": torch.cuda.get_device_name() if kind == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "steps": steps,
        "seed": options.seed,
        "sequences_per_step": SEQUENCES,
        "model": setup.model,
        "learning_rate": LEARNING_RATE,
        "seconds": time.perf_counter() - begin,
        "regimes": found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"accumulation-{kind}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    draw(data, options.picture or path.with_suffix(".png"))
    print(f"{path}, {data['seconds']:.0f} s")


if __name__ == "__main__":
    main()
