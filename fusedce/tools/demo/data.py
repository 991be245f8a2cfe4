"""Data and model of the demo: real text, a tokenizer and a small Llama, without downloads.

The text ships with Python: the topics of `pydoc`, each split at its section borders (two blank
lines). A section is one training sequence of natural length, cut at ``MAX_TOKENS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SEQUENCES = 32  # per optimizer step
LEARNING_RATE = 1e-3
MAX_TOKENS = 512
VOCABULARY = 4096
HIDDEN, LAYERS, HEADS = 128, 2, 4
END = "<end>"

Batch = list[Tensor]  # one optimizer step: SEQUENCES tensors (T,) int64 of different T


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
