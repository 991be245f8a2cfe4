"""Perplexity of a document that is longer than the model's context, by a sliding window.

    python examples/long_document.py

Look at: the labels of a window's context are -100, so no token is counted twice and none of them
costs time; one accumulator holds the sums of all windows, so their number does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce

CONTEXT = 64  # tokens
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, document: Tensor, *, stride: int) -> dict[str, float]:
    """``document (T,)``; each window sees at least ``CONTEXT - stride`` tokens of context."""
    evaluation = fusedce.LossMeter()
    scored = 1  # the first token is predicted from nothing
    for begin in range(0, max(len(document) - CONTEXT, 0) + stride, stride):
        window = document[begin : begin + CONTEXT]
        labels = window.clone()
        labels[: scored - begin] = -100  # scored in an earlier window
        scored = begin + len(window)
        batch = {"input_ids": window[None], "labels": labels[None]}
        evaluation.update(fusedce.model_loss(model, batch))
        if scored == len(document):
            break
    return evaluation.compute()


def main() -> None:
    torch.manual_seed(0)
    model = fusedce.replace_loss_head(LlamaForCausalLM(CONFIG))
    document = torch.randint(CONFIG.vocab_size, (1000,))
    for stride in (CONTEXT, CONTEXT // 2, CONTEXT // 4):
        metrics = perplexity(model, document, stride=stride)
        print(f"stride {stride:3}:", {name: round(x, 4) for name, x in metrics.items()})


if __name__ == "__main__":
    main()
