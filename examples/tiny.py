"""Shared by the examples: a small causal language model over bytes, and text to train it on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn

import fusedce

V, H, MAX_TOKENS = 256, 32, 128
SEQUENCES_PER_STEP, SEQUENCES_PER_MICRO_BATCH = 8, 2

Batch = dict[str, Tensor]


class TinyLM(nn.Module):
    """A model that returns its loss, since data-parallel wrappers need it inside ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, H)
        self.positions = nn.Embedding(MAX_TOKENS, H)
        self.layer = nn.TransformerEncoderLayer(H, 4, 2 * H, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(H, V, bias=False)

    def hidden(self, input_ids: Tensor) -> Tensor:  # (B, T) -> (B, T, H)
        T = input_ids.shape[1]
        x = self.embed(input_ids) + self.positions.weight[:T]
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=x.device)
        return self.layer(x, src_mask=mask, is_causal=True)

    def forward(self, input_ids: Tensor, labels: Tensor) -> fusedce.LossSum:
        aligned = fusedce.shift_labels(labels)
        return fusedce.fused_ce(self.hidden(input_ids), self.lm_head.weight, aligned)


def documents(n: int = 24) -> list[Tensor]:
    """``n`` sections of Python's own documentation as bytes, at their natural lengths."""
    from pydoc_data.topics import topics

    sections = (s for _, t in sorted(topics.items()) for s in re.split(r"\n{3,}", t.strip()))
    return [torch.tensor(list(s.encode()[:MAX_TOKENS])) for s in islice(sections, n)]


def collate(sequences: list[Tensor]) -> Batch:
    """Padded on the right: under causal attention no token sees padding, and none is trained."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(sequences, batch_first=True, padding_value=0),
        "labels": pad(sequences, batch_first=True, padding_value=-100),
    }


def micro_batches(sequences: list[Tensor]) -> list[Batch]:
    size = SEQUENCES_PER_MICRO_BATCH
    return [collate(sequences[i : i + size]) for i in range(0, len(sequences), size)]


def windows(stream: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """The micro-batches of one optimizer step at a time; the last window may be shorter."""
    iterator = iter(stream)
    while window := list(islice(iterator, size)):
        yield window
