"""Train one small model three ways on real text; two of them must agree.

    python examples/demo.py                 # two minutes on two cores; `make demo` sets itself up
    python examples/demo.py --quick --out /tmp/out

Look at: C, 32 micro-batches through :class:`fusedce.LossAccumulator`, lies on A, the same sequences
as one batch; B, the mean of the micro-batches' means, does not. Exit status 1 if that is not so.
The picture and the numbers are in ``out/demo.png`` and ``out/demo.json``.

The same 32 sequences make one optimizer step:

* A: as one padded batch with the mean over its tokens, the reference;
* B: as 32 micro-batches of one sequence, each loss its own mean, averaged: the well-known bug of
  gradient accumulation, which weighs a token of a short sequence more than one of a long one
  (https://github.com/huggingface/transformers/issues/34242);
* C: as 32 micro-batches again, through the accumulator.

Initial weights, samples, order and optimizer are the same; float32, no dropout, deterministic
algorithms. Nothing is downloaded. The text ships with Python: the topics of `pydoc`, each split at
its section borders (two blank lines). A section is one training sequence of natural length, cut at
``MAX_TOKENS``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedce import LossAccumulator, LossSum, count_valid, fused_ce, shift_labels

SEQUENCES, QUICK_SEQUENCES = 32, 16  # per optimizer step
LEARNING_RATE = 1e-3
MAX_TOKENS = 512
VOCABULARY = 4096
HIDDEN, LAYERS, HEADS = 128, 2, 4
END = "<end>"
FULL, NAIVE, WINDOW = "A full batch", "B naive mean", "C LossAccumulator"
COLORS = {FULL: "#222222", NAIVE: "#d55e00", WINDOW: "#0072b2"}  # safe for the colour-blind
TOLERANCE = 1e-5  # nats, the largest allowed distance of C from A, in float32
VISIBLE = 1e-2  # nats, the least distance of B from A for the comparison to mean anything
KINDS = ("logged", "true")

Batch = list[Tensor]  # one optimizer step: SEQUENCES tensors (T,) int64 of different T
MicroBatches = list[tuple[Tensor, Tensor]]  # input_ids and labels, (rows, T) int64 each
Losses = list[LossSum]  # of the micro-batches of a step
# Runs backward; returns the loss to log and the micro-batches' losses.
TrainStep = Callable[[nn.Module, MicroBatches], tuple[float, Losses]]


class StepLoss(NamedTuple):
    """The losses of one optimizer step, in nats per token."""

    logged: float  # the loss that the run reports for the step
    true: float  # sum over the step's tokens / their number, at the same weights


Runs = dict[str, list[StepLoss]]  # of FULL, NAIVE, WINDOW


def run(*, steps: int, out: Path, seed: int, device: torch.device, quick: bool = False) -> int:
    """Train, compare, write ``out/demo.png`` and ``out/demo.json``; return the exit status.

    ``quick`` takes half the sequences for a step.
    """
    begin = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)  # an error comes before the training
    texts = sections()
    tokenize = train_tokenizer(texts)
    sequences = [torch.tensor(tokenize(text), device=device) for text in texts]
    size = QUICK_SEQUENCES if quick else SEQUENCES
    batches = draw_batches(sequences, steps, seed, size)
    model = build_model(seed).to(device)
    lengths = sorted(len(sequence) for sequence in sequences)
    median, parameters = statistics.median(lengths), sum(p.numel() for p in model.parameters())
    print(
        f"""One model, trained three ways on the same data ({device}, float32)
  text   {len(texts)} sections of Python's own documentation
         {lengths[0]} to {lengths[-1]} tokens, median {median:.0f}; longer ones are cut
  model  Llama, {LAYERS} layers, H={HIDDEN}, V={VOCABULARY}, {parameters / 1e6:.1f} M parameters
  step   {size} sequences, AdamW at {LEARNING_RATE:g}; {steps} steps per run
  {FULL:18} one padded batch: the reference
  {NAIVE:18} {size} micro-batches of one sequence, mean of their means
  {WINDOW:18} the same micro-batches, one denominator: should equal A
"""
    )
    with exactly_repeatable():
        runs = train_all(model, batches)
    wrong = problem(runs)
    settings = {
        "steps": steps, "seed": seed, "device": str(device), "sequences_per_step": size,
        "max_tokens": MAX_TOKENS, "V": VOCABULARY, "H": HIDDEN, "layers": LAYERS,
        "learning_rate": LEARNING_RATE, "sequence_lengths": lengths,
    }  # fmt: skip
    picture, data = out / "demo.png", out / "demo.json"
    draw(runs, picture)
    data.write_text(json.dumps(as_data(runs, settings, wrong), indent=1) + "\n")
    print(f"\n{loss_table(runs)}\n\nPicture  {picture}\nData     {data}")
    print(f"Took     {time.perf_counter() - begin:.0f} s\n")
    print(f"FAILED: {wrong}" if wrong else f"OK: {verdict(runs)}")
    return 1 if wrong else 0


# ---- data and model --------------------------------------------------------------------------


def sections() -> list[str]:
    """The sections of all documents of `pydoc_data.topics`, in a fixed order."""
    from pydoc_data.topics import topics

    return [
        section
        for _, text in sorted(topics.items())
        for section in re.split(r"\n{3,}", text.strip("\n"))
    ]


def train_tokenizer(texts: list[str], longest: int = MAX_TOKENS) -> Callable[[str], list[int]]:
    """Train a byte-level BPE of `VOCABULARY` entries; return its encoder.

    The encoder appends `END` and cuts at ``longest`` tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.encode(END).ids  # one token, which no section holds
    return lambda text: [*tokenizer.encode(text).ids, *end][:longest]


def build_model(seed: int) -> nn.Module:
    """A small Llama in float32 with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_TOKENS,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).float().train()


def draw_batches(
    sequences: list[Tensor], steps: int, seed: int, size: int = SEQUENCES
) -> list[Batch]:
    """Batches of ``size`` sequences for each step, from shuffled epochs one after the other."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps * size:
        order += torch.randperm(len(sequences), generator=generator).tolist()
    return [[sequences[i] for i in order[step * size : (step + 1) * size]] for step in range(steps)]


def pad(batch: Batch, value: int) -> Tensor:
    """``(SEQUENCES, T)``, padded on the right: under causal attention no token sees padding."""
    return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=value)


def hidden_states(model: Any, input_ids: Tensor) -> Tensor:
    """Hidden states ``(B, T, H)`` of the decoder, without the head's logits."""
    return model.model(input_ids=input_ids).last_hidden_state


# ---- the three ways to train ----------------------------------------------------------------


def loss_of(model: Any, input_ids: Tensor, labels: Tensor) -> LossSum:
    """The loss sum of ``input_ids (B, T)``; ``labels (B, T)`` are shifted here."""
    return fused_ce(hidden_states(model, input_ids), model.lm_head.weight, shift_labels(labels))


def split(batch: Batch, rows: int) -> MicroBatches:
    """``(input_ids, labels)`` of each ``rows`` sequences of a batch, padded on the right."""
    parts = [batch[i : i + rows] for i in range(0, len(batch), rows)]
    return [(pad(part, 0), pad(part, -100)) for part in parts]


def mean_of_means(model: nn.Module, micro: MicroBatches) -> tuple[float, Losses]:
    """B, and A with one micro-batch: the mean of the micro-batches' means."""
    outs = []
    for input_ids, labels in micro:
        out = loss_of(model, input_ids, labels)
        (out.mean() / len(micro)).backward()
        outs.append(out)
    return statistics.fmean(out.mean().item() for out in outs), outs


def one_denominator(model: nn.Module, micro: MicroBatches) -> tuple[float, Losses]:
    """C: the micro-batches through a :class:`LossAccumulator`."""
    accumulator, outs = LossAccumulator(model), []
    with accumulator.window([count_valid(labels) for _, labels in micro]):
        for input_ids, labels in micro:
            outs.append(loss_of(model, input_ids, labels))
            accumulator.backward(outs[-1])
    return accumulator.metrics()["loss"], outs


def train_all(model: nn.Module, batches: list[Batch]) -> Runs:
    """Train the model three times from the same weights."""
    train_steps: dict[str, tuple[int, TrainStep]] = {
        FULL: (len(batches[0]), mean_of_means),
        NAIVE: (1, mean_of_means),
        WINDOW: (1, one_denominator),
    }
    start = {name: value.clone() for name, value in model.state_dict().items()}
    runs: Runs = {}
    for name, (rows, train_step) in train_steps.items():
        model.load_state_dict(start)
        begin, history = time.perf_counter(), []
        for step in train(model, batches, rows, train_step):
            history.append(step)
            line = f"{name:18} step {len(history)} of {len(batches)}, loss {step.logged:.4f}"
            if sys.stdout.isatty() or len(history) == len(batches):  # a file gets the last one
                print(f"{line}, {time.perf_counter() - begin:.0f} s", end="\r", flush=True)
        print(flush=True)
        runs[name] = history
    return runs


def train(
    model: nn.Module, batches: list[Batch], rows: int, train_step: TrainStep
) -> Iterator[StepLoss]:
    """Train with plain AdamW; yield the logged loss and the true mean loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in batches:
        optimizer.zero_grad()
        logged, outs = train_step(model, split(batch, rows))
        optimizer.step()
        loss_sum = sum(out.loss_sum.item() for out in outs)
        yield StepLoss(logged, loss_sum / sum(int(out.n_valid) for out in outs))


@contextmanager
def exactly_repeatable() -> Iterator[None]:
    """Use deterministic algorithms and full float32 products inside the block."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)


# ---- what came out ---------------------------------------------------------------------------


def gap(runs: Runs, name: str, kind: str) -> float:
    """The largest ``|run - full batch|`` of all steps; ``kind`` is "logged" or "true"; or NaN."""
    gaps = gaps_of(runs, name, kind)
    return next((x for x in gaps if x != x), max(gaps))


def gaps_of(runs: Runs, name: str, kind: str) -> list[float]:
    """``|run - full batch|`` per step."""
    pairs = zip(runs[name], runs[FULL], strict=True)
    return [abs(getattr(step, kind) - getattr(full, kind)) for step, full in pairs]


def problem(runs: Runs) -> str | None:
    """Why the demo failed or shows nothing; ``None`` if it succeeded.

    The comparisons are written so that a NaN is a problem too.
    """
    for kind in KINDS:
        far = gap(runs, WINDOW, kind)
        if not far <= TOLERANCE:
            return (
                f"{WINDOW} left the full batch: its {kind} loss is {far:.2g} nats off, "
                f"at most {TOLERANCE:g} is rounding. The accumulation is not equivalent."
            )
    far = gap(runs, NAIVE, "logged")
    if not far >= VISIBLE:
        return (
            f"the sequences are too similar: {NAIVE} logs at most {far:.2g} nats away from the "
            f"full batch (at least {VISIBLE:g} expected), so the demo shows nothing. Try more "
            f"--steps"
        )
    return None


def verdict(runs: Runs) -> str:
    window = max(gap(runs, WINDOW, kind) for kind in KINDS)
    return (
        f"with LossAccumulator the run stays within {window:.1e} nats of the full batch, "
        f"while the naive mean logs up to {gap(runs, NAIVE, 'logged'):.2f} and trains up to "
        f"{gap(runs, NAIVE, 'true'):.2f} nats away from it."
    )


def loss_table(runs: Runs) -> str:
    """Losses of some steps, in nats per token."""
    lines = [
        "Loss, nats per token",
        f"{'':>8}{'A full':>11}{'B naive mean':>22}{'C LossAccumulator':>24}",
        f"{'step':>8}{'log = true':>11}" + f"{'logged':>12}{'true':>11}" * 2,
    ]
    last = len(runs[FULL]) - 1
    for i in sorted({0, last // 6, last // 3, last // 2, 2 * last // 3, 5 * last // 6, last}):
        naive, window = runs[NAIVE][i], runs[WINDOW][i]
        values = "".join(f"{x.logged:12.6f}{x.true:11.6f}" for x in (naive, window))
        lines.append(f"{i + 1:8}{runs[FULL][i].true:11.6f}{values}")
    gaps = (f"{gap(runs, name, kind):.1e}" for name in (NAIVE, WINDOW) for kind in KINDS)
    return "\n".join([*lines, f"{'max gap':>8}{'':>11}" + "{:>12}{:>11}{:>12}{:>11}".format(*gaps)])


def as_data(runs: Runs, settings: dict[str, Any], wrong: str | None) -> dict[str, Any]:
    return {
        "settings": settings,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "runs": {
            name: {kind: [getattr(step, kind) for step in steps] for kind in KINDS}
            for name, steps in runs.items()
        },
        "largest_gap_to_full_batch": {
            name: {kind: gap(runs, name, kind) for kind in KINDS} for name in (NAIVE, WINDOW)
        },
        "problem": wrong,
    }


def draw(runs: Runs, path: Path) -> None:
    """The losses, and their distance from the full batch."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_losses(runs, left)
    draw_gaps(runs, right)
    for axes in (left, *left.child_axes, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25, linewidth=0.6)
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_losses(runs: Runs, axes: Any) -> None:
    # The full batch is drawn as a broad band, on which the other runs should lie.
    lines = (
        (FULL, "logged", "-", 5.0, 0.35),
        (NAIVE, "logged", "-", 1.8, 1.0),
        (NAIVE, "true", ":", 1.8, 1.0),
        (WINDOW, "logged", (0, (4, 2)), 1.8, 1.0),
    )
    x = range(1, len(runs[FULL]) + 1)
    tail = max(len(x) - max(len(x) // 3, 2), 0)
    zoom = axes.inset_axes((0.50, 0.44, 0.48, 0.52))
    for name, kind, style, width, alpha in lines:
        for target, first in ((axes, 0), (zoom, tail)):
            target.plot(
                x[first:], [getattr(step, kind) for step in runs[name][first:]],
                color=COLORS[name], linestyle=style, linewidth=width, alpha=alpha,
                label=f"{name}, {kind}",
            )  # fmt: skip
    zoom.tick_params(labelsize=7)
    zoom.set_title("the last steps", fontsize=8)
    axes.indicate_inset_zoom(zoom, edgecolor="#888888")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Same data, three ways to train", loc="left", fontsize=11)
    axes.legend(loc="lower left", frameon=False, fontsize=8)


def draw_gaps(runs: Runs, axes: Any) -> None:
    x = range(1, len(runs[FULL]) + 1)
    floor = 1e-8  # a gap of exactly 0 has no place on a log scale
    for name in (NAIVE, WINDOW):
        for kind, style in (("logged", "-"), ("true", ":")):
            axes.semilogy(
                x, [max(gap, floor) for gap in gaps_of(runs, name, kind)],
                color=COLORS[name], linestyle=style, linewidth=1.8, label=f"{name}, {kind}",
            )  # fmt: skip
    axes.axhline(TOLERANCE, color="#888888", linewidth=1, linestyle="--")
    axes.annotate(
        f"allowed for C: {TOLERANCE:g}", (len(x), TOLERANCE), xytext=(0, 4),
        textcoords="offset points", ha="right", fontsize=8, color="#666666",
    )  # fmt: skip
    axes.set_ylim(floor / 2, 1)
    axes.set_ylabel("distance to A (nats per token)")
    axes.set_title(f"Gap to the full batch (least drawn: {floor:g})", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps: under 40 s")
    parser.add_argument("--steps", type=int, help="optimizer steps (default 20, quick 5)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for PNG and JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return run(
        steps=args.steps or (5 if args.quick else 20), out=args.out, seed=args.seed,
        device=torch.device(args.device), quick=args.quick,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
