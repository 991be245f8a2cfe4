"""Perplexity of a document that is longer than the model's context, by a sliding window.

    python examples/long_document.py

Look at: the labels of a window's context are -100, so no token is counted twice and none of them
costs time; one accumulator holds the sums of all windows, so their number does not matter.
"""

from __future__ import annotations

import torch
from tiny import MAX_TOKENS, TinyLM, documents
from torch import Tensor

import fusedce


@torch.no_grad()
def perplexity(model: TinyLM, document: Tensor, *, stride: int) -> dict[str, float]:
    """``document (T,)``; each window sees at least ``MAX_TOKENS - stride`` tokens of context."""
    evaluation = fusedce.LossAccumulator()
    scored = 1  # the first token is predicted from nothing
    for begin in range(0, max(len(document) - MAX_TOKENS, 0) + stride, stride):
        window = document[begin : begin + MAX_TOKENS]
        labels = window.clone()
        labels[: scored - begin] = -100  # scored in an earlier window
        scored = begin + len(window)
        evaluation.add(model(input_ids=window[None], labels=labels[None]))
        if scored == len(document):
            break
    return evaluation.metrics()


def main() -> None:
    document = torch.cat(documents(12))
    model = TinyLM()
    for stride in (MAX_TOKENS, MAX_TOKENS // 2, MAX_TOKENS // 4):
        print(f"stride {stride:3}: {perplexity(model, document, stride=stride)}")


if __name__ == "__main__":
    main()
