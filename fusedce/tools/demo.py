"""`fusedce demo`: one small model trained three ways on real text; two of them must agree.

The same 32 sequences make one optimizer step:

* A: as one padded batch with the mean over its tokens, the reference;
* B: as 32 micro-batches of one sequence, each loss its own mean, averaged: the well-known bug of
  gradient accumulation, which weighs a token of a short sequence more than one of a long one
  (https://github.com/huggingface/transformers/issues/34242);
* C: as 32 micro-batches again, through :class:`fusedce.LossAccumulator`.

Initial weights, samples, order and optimizer are the same; float32, no dropout, deterministic
algorithms.

Nothing is downloaded. The text ships with Python: the topics of `pydoc`, each split at its section
borders (two blank lines). A section is one training sequence of natural length, cut at
``MAX_TOKENS``.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from fusedce import LossAccumulator, LossSum, count_valid, fused_ce, shift_labels
from fusedce.tools.demo_results import (
    FULL,
    LOSSES,
    NAIVE,
    WINDOW,
    DemoReport,
    Run,
    StepLoss,
    measure_cost,
)

SEQUENCES, QUICK_SEQUENCES = 32, 16  # per optimizer step
REPEATS, QUICK_REPEATS = 5, 2
LEARNING_RATE = 1e-3
MAX_TOKENS = 512
VOCABULARY = 4096
HIDDEN, LAYERS, HEADS = 128, 2, 4
END = "<end>"

Batch = list[Tensor]  # one optimizer step: SEQUENCES tensors (T,) int64 of different T
MicroBatches = list[tuple[Tensor, Tensor]]  # input_ids and labels, (rows, T) int64 each
Losses = list[LossSum]  # of the micro-batches of a step
# Runs backward; returns the loss to log and the micro-batches' losses.
TrainStep = Callable[[nn.Module, MicroBatches], tuple[float, Losses]]


def run(
    *, steps: int, out: Path, seed: int, device: torch.device, quick: bool = False,
    to_stderr: bool = False,
) -> int:  # fmt: skip
    """Train, compare, write ``out/demo.png`` and ``out/demo.json``; return the exit status.

    ``quick`` takes half the sequences for a step, and fewer repeats of the loss alone;
    ``to_stderr`` prints to standard error.
    """
    begin = time.perf_counter()
    console = Console(stderr=to_stderr)
    texts = sections()
    tokenize = train_tokenizer(texts)
    sequences = [torch.tensor(tokenize(text), device=device) for text in texts]
    size = QUICK_SEQUENCES if quick else SEQUENCES
    batches = draw_batches(sequences, steps, seed, size)
    model = build_model(seed).to(device)
    lengths = sorted(len(sequence) for sequence in sequences)
    median, parameters = statistics.median(lengths), sum(p.numel() for p in model.parameters())
    intro = (
        f"[bold]One model, trained three ways on the same data[/bold] ({device}, float32)",
        f"  text   {len(texts)} sections of Python's own documentation",
        f"         {lengths[0]} to {lengths[-1]} tokens, median {median:.0f}; longer ones are cut",
        f"  model  Llama, {LAYERS} layers, H={HIDDEN}, V={VOCABULARY}, "
        f"{parameters / 1e6:.1f} M parameters, random weights",
        f"  step   {size} sequences, AdamW at {LEARNING_RATE:g}; {steps} steps per run",
        f"  {FULL:18} one padded batch: the reference",
        f"  {NAIVE:18} {size} micro-batches of one sequence, mean of their means",
        f"  {WINDOW:18} the same micro-batches, one denominator: should equal A",
        "",
    )
    console.print("\n".join(intro), highlight=False)
    seconds = estimate(model, batches, time.perf_counter() - begin)
    console.print(f"about {seconds:.0f} s in all, from one step timed here\n", highlight=False)

    with exactly_repeatable():
        runs = train_all(model, batches, console)
    console.print("\nmeasuring the loss alone, forward and backward ...", highlight=False)
    cost = measure_cost(*inputs_of_loss(model, batches[0]), QUICK_REPEATS if quick else REPEATS)
    report = DemoReport(
        runs=runs,
        cost=cost,
        settings={
            "steps": steps,
            "seed": seed,
            "device": str(device),
            "sequences_per_step": size,
            "max_tokens": MAX_TOKENS,
            "V": VOCABULARY,
            "H": HIDDEN,
            "layers": LAYERS,
            "learning_rate": LEARNING_RATE,
            "sequence_lengths": lengths,
        },
    )
    return report.publish(console, out, begin)


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


def inputs_of_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """``hidden (N, H)``, ``weight (V, H)`` and shifted ``labels (N,)`` of one padded batch."""
    with torch.no_grad():
        hidden = hidden_states(model, pad(batch, 0))
    weight = model.lm_head.weight.detach().clone()
    return hidden.flatten(0, 1), weight, shift_labels(pad(batch, -100)).flatten()


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


def one_denominator(
    accumulator: LossAccumulator, model: nn.Module, micro: MicroBatches
) -> tuple[float, Losses]:
    """C: the micro-batches through a :class:`LossAccumulator`."""
    outs = []
    with accumulator.window([count_valid(labels) for _, labels in micro]):
        for input_ids, labels in micro:
            outs.append(loss_of(model, input_ids, labels))
            accumulator.backward(outs[-1])
    return accumulator.metrics(reset=True)["loss"], outs


def train_all(model: nn.Module, batches: list[Batch], console: Console) -> list[Run]:
    """Train the model three times from the same weights."""
    train_steps: dict[str, tuple[int, TrainStep]] = {
        FULL: (len(batches[0]), mean_of_means),
        NAIVE: (1, mean_of_means),
        WINDOW: (1, partial(one_denominator, LossAccumulator())),
    }
    start = {name: value.clone() for name, value in model.state_dict().items()}
    columns = (
        TextColumn("{task.description:18}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        for name, (rows, train_step) in train_steps.items():
            task = progress.add_task(name, total=len(batches), loss="")
            model.load_state_dict(start)
            history = []
            for step in train(model, batches, rows, train_step):
                history.append(step)
                progress.update(task, advance=1, loss=f"{step.logged:.4f}")
            runs.append(Run(name, history))
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


def estimate(model: nn.Module, batches: list[Batch], start: float) -> float:
    """Estimated seconds of the whole demo, from one step of B; ``start`` seconds are spent already.

    Each process that measures memory imports torch, which takes about ``start`` seconds.
    """
    begin = time.perf_counter()
    mean_of_means(model, split(batches[0], 1))
    step = time.perf_counter() - begin
    model.zero_grad()
    return start + step * (3 * len(batches) + len(LOSSES)) + len(LOSSES) * (1 + start)


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
