"""TRL's SFTTrainer with the mixin: the model's own loss, fused, instead of TRL's head.

    python examples/sft_trainer.py

Look at: the mixin comes first in the bases, and SFTTrainer's own arguments stay as they are.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tiny import V, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fusedce


class FusedSFTTrainer(fusedce.FusedTrainerMixin, SFTTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and one for padding: SFTTrainer asks for a tokenizer though the data have ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<pad>"])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<pad>")


def train(steps: int = 2) -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps,
            logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
            disable_tqdm=True, max_length=64, learning_rate=1e-2,
            loss_type="nll",  # (the default since TRL 1.16)
        )  # fmt: skip
        trainer = FusedSFTTrainer(
            model=LlamaForCausalLM(config), args=arguments, processing_class=tokenizer(),
            train_dataset=Dataset.from_list([{"input_ids": d.tolist()} for d in documents(8)]),
        )  # fmt: skip
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(train())
