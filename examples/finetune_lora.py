"""Fine-tune a causal language model with LoRA: train, save, resume, load the adapter.

    python examples/finetune_lora.py                          # a tiny model, offline, a minute
    python examples/finetune_lora.py --model HuggingFaceTB/SmolLM2-135M --data notes.jsonl --out sft
    python examples/finetune_lora.py --model ... --data ... --out sft --steps 200 --resume

Look at: `FusedTrainerMixin` is the only line that TRL's own script does not have. The loss is fused
(the report says how often), and one batch of 8 or 8 micro-batches of 1 train alike.

Needs: pip install 'fusedce[transformers]' trl peft datasets
"""

from __future__ import annotations

import argparse
import re
import tempfile

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import fusedce


class FusedSFTTrainer(fusedce.FusedTrainerMixin, SFTTrainer):  # the mixin comes first
    pass


def texts(file: str | None) -> Dataset:
    """Lines ``{"text": ...}`` of a JSON file; without one, sections of Python's documentation."""
    if file is not None:
        return load_dataset("json", data_files=file, split="train")
    from pydoc_data.topics import topics

    sections = [s for _, t in sorted(topics.items()) for s in re.split(r"\n{3,}", t.strip())]
    return Dataset.from_list([{"text": section} for section in sections[:80]])


def fine_tune(
    model: str, data: Dataset, out: str, *, steps: int, micro_batch: int = 1, resume: bool = False
) -> FusedSFTTrainer:
    """Train on 8 sequences a step; ``out`` then holds the adapter, and checkpoints to resume."""
    torch.manual_seed(0)
    parts = data.train_test_split(8, seed=0)
    trainer = FusedSFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        peft_config=LoraConfig(target_modules="all-linear", lora_dropout=0.0),
        args=SFTConfig(
            out,
            loss_type="nll",  # the default from TRL 1.16 on
            max_steps=steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=8 // micro_batch,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_length=256,
            logging_steps=1,
            save_steps=50,
            eval_strategy="steps",
            eval_steps=50,
            report_to=[],
            bf16=torch.cuda.is_available(),
        ),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def tiny_model(folder: str) -> str:
    """A small Llama with random weights and a tokenizer of bytes, saved as a hub's folder is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<end>", eos_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=len(alphabet) - 1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name on the hub or a folder (default: a tiny model)")
    parser.add_argument("--data", help='a file of JSON lines {"text": ...}')
    parser.add_argument("--out", help="for checkpoints and adapter (default: temporary)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model, out = given.model or tiny_model(f"{scratch}/model"), given.out or f"{scratch}/out"
        trainer = fine_tune(model, texts(given.data), out, steps=given.steps, resume=given.resume)
        print(fusedce.head_report(trainer.model))
        print(f"evaluation: {trainer.evaluate()['eval_loss']:.4f} nats per token")
        # Later, or elsewhere: the weights with their adapter.
        tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), out)
        tokenizer = AutoTokenizer.from_pretrained(out)
        prompt = tokenizer("The", return_tensors="pt")
        print(tokenizer.decode(tuned.generate(**prompt, max_new_tokens=20)[0]))


if __name__ == "__main__":
    main()
