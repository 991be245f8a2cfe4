"""Which training stacks still weigh tokens wrongly: logged loss and gradient beside the token mean.

    python bench/stacks.py                   # bench/results/stacks.json, and the table of the docs
    python bench/stacks.py --stacks torchtitan "torchtitan, FusedCELoss"    # rewrites these rows

One optimizer step of a small random model of each class, by each stack, over the same 8 sequences
of English text with 3 to 60 tokens that count, as one micro-batch and as 4; some stacks also on two
ranks over gloo. The truth is the mean over all tokens of the step, in one batch. "gradient" is the
factor by which a gradient is too large (its projection on the right one), "direction" how far it
points elsewhere (the sine of the angle): 1 and 0 are right. A router's loss, a mean over
micro-batches by nature, is switched off. "packed" gives the sequences of a micro-batch as one row
without padding, as `DataCollatorWithFlattening` makes it; the truth stays the padded batch.

A stack whose package is not installed keeps its rows: torchtitan, with a Llama of its own, needs a
newer torch than the others.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from lib import pictures
from lib.results import FOLDER, ROOT, stamp, write
from lib.tables import markdown, put
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fusedce

LENGTHS = (60, 3, 25, 7, 48, 5, 12, 33)
V, T = 256, 64
Batch = dict[str, Tensor]


# ---- models and data ------------------------------------------------------------------------


def _decoder(name: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = transformers.AutoConfig.for_model(
            name, vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False, **more,
        )  # fmt: skip
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    return make


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=64, n_layer=2, n_head=4, n_positions=T, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=V, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": _decoder("llama"),
    "Gemma 2": _decoder("gemma2", head_dim=16),
    "Mixtral": _decoder("mixtral", num_local_experts=4, output_router_logits=True),
    "GPT-2": _gpt2,
    "T5": _t5,
    "BERT": _bert,
}


def sequences() -> list[Batch]:
    """Text by bytes; all after a sequence's own length is padding whose label is ignored."""
    text = "".join(pydoc_data.topics.topics.values()).encode()
    rows = []
    for i, n in enumerate(LENGTHS):
        ids = torch.tensor(list(text[1000 * i : 1000 * i + T]))
        mask = torch.arange(T) < n
        rows.append({
            "input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100),
        })  # fmt: skip
    return rows


def stacked(rows: list[Batch]) -> Batch:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# ---- stacks: each makes one step and returns the logged loss; the gradient is in `.grad` ------


def _trainer(
    kind: type, model: Any, rows: list[Batch], steps: int,
    arguments: Callable[..., Any] = transformers.TrainingArguments,
    collator: Callable[..., Any] = transformers.default_data_collator, **options: Any,
) -> float:  # fmt: skip
    import datasets

    class KeepsGradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            grads.extend(None if p.grad is None else p.grad.clone() for p in model.parameters())

    grads: list[Tensor | None] = []
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            folder, per_device_train_batch_size=len(rows) // steps // _ranks(), max_steps=1,
            gradient_accumulation_steps=steps, learning_rate=0.0, logging_steps=1, report_to=[],
            max_grad_norm=0.0, save_strategy="no", use_cpu=True, disable_tqdm=True,
            remove_unused_columns=False,
        )  # fmt: skip
        trainer = kind(
            model, args, train_dataset=datasets.Dataset.from_list(rows).with_format("torch"),
            data_collator=collator, callbacks=[KeepsGradients()],
            **options,
        )  # fmt: skip
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
        trainer.train()
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    return next(row["loss"] for row in trainer.state.log_history if "loss" in row)


def by_trainer(model: Any, rows: list[Batch], steps: int) -> float:
    return _trainer(transformers.Trainer, model, rows, steps)


def by_sft(model: Any, rows: list[Batch], steps: int) -> float:
    import tokenizers
    import trl

    arguments = functools.partial(
        trl.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False, bf16=False,
    )  # fmt: skip
    unused = transformers.PreTrainedTokenizerFast(  # the rows are tokens already
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip
    return _trainer(trl.SFTTrainer, model, rows, steps, arguments, processing_class=unused)


def by_seq2seq(model: Any, rows: list[Batch], steps: int) -> float:
    arguments = transformers.Seq2SeqTrainingArguments
    return _trainer(transformers.Seq2SeqTrainer, model, rows, steps, arguments)


class FusedTrainer(fusedce.FusedTrainerMixin, transformers.Trainer):
    pass


def by_mixin(model: Any, rows: list[Batch], steps: int) -> float:
    return _trainer(FusedTrainer, model, rows, steps)


def by_packed(
    model: Any, rows: list[Batch], steps: int, kind: type = transformers.Trainer
) -> float:
    """Sequences without their padding, all of a micro-batch in one row."""
    bare = [
        {name: row[name][: row["attention_mask"].sum()] for name in ("input_ids", "labels")}
        for row in rows
    ]
    return _trainer(kind, model, bare, steps, collator=transformers.DataCollatorWithFlattening())


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _micro_batches(rows: list[Batch], steps: int) -> list[Batch]:
    """Return this rank's part of each micro-batch; all ranks have equally many rows of it."""
    size, ranks = len(rows) // steps, _ranks()
    rank = dist.get_rank() if ranks > 1 else 0
    return [stacked(rows[i + rank : i + size : ranks]) for i in range(0, len(rows), size)]


def by_plain_loop(model: Any, rows: list[Batch], steps: int) -> float:
    """Average the means of the micro-batches, as nanoGPT and most tutorials do; DDP on ranks."""
    ranks, logged = _ranks(), torch.zeros(())
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    for batch in _micro_batches(rows, steps):
        loss = wrapped(**batch).loss / steps
        loss.backward()
        logged += loss.detach() / ranks
    if ranks > 1:
        dist.all_reduce(logged)
    return logged.item()


def by_accelerate(model: Any, rows: list[Batch], steps: int) -> float:
    """accelerate's own example of gradient accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    prepared, logged = accelerator.prepare(model), 0.0
    for batch in _micro_batches(rows, steps):
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            logged += loss.item() / steps
    return logged


class Stack(NamedTuple):
    step: Callable[[Any, list[Batch], int], float] | str  # a loss of torchtitan's Trainer
    models: tuple[str, ...] = tuple(MODELS)
    ranks: int = 1

    @property
    def is_installed(self) -> bool:
        package = "torchtitan" if isinstance(self.step, str) else "accelerate"
        return importlib.util.find_spec(package) is not None


DECODERS = ("Llama", "Gemma 2", "Mixtral", "GPT-2")
STACKS = {
    "Trainer": Stack(by_trainer),
    "Trainer, 2 ranks": Stack(by_trainer, ranks=2),
    "Trainer, packed": Stack(by_packed, DECODERS),
    "SFTTrainer": Stack(by_sft, DECODERS),
    "Seq2SeqTrainer": Stack(by_seq2seq, ("T5",)),
    "accelerate's example": Stack(by_accelerate),
    "plain loop": Stack(by_plain_loop),
    "DDP loop, 2 ranks": Stack(by_plain_loop, ranks=2),
    "torchtitan": Stack("chunked", ("Llama",)),
    "torchtitan, FusedCELoss": Stack("fused", ("Llama",)),
    "FusedTrainerMixin": Stack(by_mixin),
    "FusedTrainerMixin, 2 ranks": Stack(by_mixin, ranks=2),
    "FusedTrainerMixin, packed": Stack(functools.partial(by_packed, kind=FusedTrainer), DECODERS),
}


# ---- the truth, and the comparison ----------------------------------------------------------


def truth(model: Any, rows: list[Batch]) -> float:
    """The token mean of the step in one batch, by the untouched model; its gradient as well."""
    batch = stacked(rows)
    labels = batch["labels"]
    logits = model(
        **{k: v for k, v in batch.items() if k != "labels"}, **_decoder_inputs(model, labels)
    ).logits
    if not model.config.is_encoder_decoder and not isinstance(model, transformers.BertForMaskedLM):
        labels = fusedce.shift_labels(labels)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    loss.backward()
    return loss.item()


def _decoder_inputs(model: Any, labels: Tensor) -> Batch:
    if not model.config.is_encoder_decoder:
        return {}
    return {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}


def gradient(model: Any) -> Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.detach().double().flatten() for g in grads])


def measure(name: str, stack: str, steps: int) -> dict[str, Any]:
    step, rows = STACKS[stack].step, sequences()
    if isinstance(step, str):
        loss, exact, logged, found = launched(1, by_titan, step, rows, steps)
    else:
        reference, tried = seeded(name), seeded(name)
        loss, logged = truth(reference, rows), step(tried, rows, steps)
        exact, found = gradient(reference), gradient(tried)
    cosine = float(found @ exact / (found.norm() * exact.norm()))
    return {
        "stack": stack, "model": name, "micro-batches": steps, "token mean": loss, "logged": logged,
        "loss": logged / loss, "gradient": float(found @ exact / (exact @ exact)),
        "direction": math.sqrt(max(1 - cosine**2, 0.0)),
    }  # fmt: skip


def seeded(name: str) -> Any:
    torch.manual_seed(0)
    made = MODELS[name]().train()
    if name == "Mixtral":
        made.router_aux_loss_coef = made.config.router_aux_loss_coef = 0.0
    return made


def by_titan(loss: str, rows: list[Batch], steps: int) -> tuple[float, Tensor, float, Tensor]:
    from lib import titan

    batch = stacked(rows)
    return titan.step(loss, batch["input_ids"], fusedce.shift_labels(batch["labels"]), steps)


def measure_all(stack: str) -> list[dict[str, Any]]:
    """Rows of every model and number of micro-batches; those of several ranks under torchrun."""
    ranks = STACKS[stack].ranks
    return _measure_all(stack) if ranks == 1 else launched(ranks, _on_a_rank, stack)


def launched(ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on several ranks, and return what the first one returns."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=0, run_id="stacks",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    return elastic_launch(config, function)(*args)[0]


def _on_a_rank(stack: str) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    rows = _measure_all(stack)
    dist.destroy_process_group()
    return rows


def _measure_all(stack: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [measure(model, stack, n) for model in STACKS[stack].models for n in (1, 4)]


def table(rows: list[dict[str, Any]]) -> str:
    """A stack a row, a model a column: the gradient's size and direction, and the logged loss."""
    found = {(row["stack"], row["model"]): row for row in rows if row["micro-batches"] > 1}
    columns = {
        "gradient": lambda row: f"{row['gradient']:.3f}, {row['direction']:.2f}",
        "logged loss": lambda row: f"{row['loss']:.3f}",
    }
    return "\n\n".join(
        markdown([
            {name: stack}
            | {m: text(found[stack, m]) if (stack, m) in found else "" for m in MODELS}
            for stack in STACKS
        ])
        for name, text in columns.items()
    )  # fmt: skip


def packages() -> str:
    """Versions of what the rows of this run depend on, the date and the commit."""
    named = ("torch", "transformers", "accelerate", "trl", "torchtitan")
    known = [f"{name} {version(name)}" for name in named if importlib.util.find_spec(name)]
    now = stamp()
    return f"{', '.join(known)}; {now['date']}, commit {now['commit']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    installed = [name for name, stack in STACKS.items() if stack.is_installed]
    parser.add_argument("--stacks", nargs="+", choices=STACKS, default=installed)
    parser.add_argument("--out", type=Path, default=FOLDER / "stacks.json")
    parser.add_argument("--page", type=Path, help="page whose table to rewrite")
    args = parser.parse_args()
    data = json.loads(args.out.read_text()) if args.out.exists() else {"packages": {}, "rows": []}
    for stack in args.stacks:
        kept = [row for row in data["rows"] if row["stack"] != stack]
        data["rows"] = kept + measure_all(stack)
        data["packages"][stack] = packages()
        print(stack, flush=True)
    data["rows"].sort(key=lambda row: list(STACKS).index(row["stack"]))
    write(args.out, data)
    pictures.stacks(data["rows"], ROOT / "docs" / "stacks.png")
    print(table(data["rows"]))
    if args.page:
        known = ". ".join(dict.fromkeys(data["packages"].values()))
        put(args.page, "stacks", f"{table(data['rows'])}\n\n{known}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
