"""DPO: a policy prefers the chosen of two answers, more than its reference does.

    python examples/dpo.py

Look at: one call of `model_logprobs` for chosen and rejected answers together, one under
`torch.no_grad()` for the reference, and no logits in either. The loss begins at log 2, where policy
and reference are the same, and `LossAccumulator` divides by the pairs of the whole step, so that
every pair weighs the same in micro-batches of 3 and of 1. The chosen answers count up.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce
from fusedce.recipes import dpo_loss

PROMPT, ANSWER, BETA = 16, 32, 0.5
MICRO_BATCHES = (3, 1, 4)  # pairs
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


def pairs() -> Tensor:
    """``(8, 2, T)``: after the same prompt, chosen answers count up and rejected ones down."""
    chosen = (torch.arange(8)[:, None] + torch.arange(PROMPT + ANSWER)) % CONFIG.vocab_size
    rejected = torch.cat([chosen[:, :PROMPT], chosen[:, PROMPT:].flip(1)], dim=1)
    return torch.stack([chosen, rejected], dim=1)


def answer_logprob(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """``(B, T)`` tokens to ``(B,)`` log-probabilities of their answers: prompts are ignored."""
    labels = tokens.clone()
    labels[:, :PROMPT] = -100
    batch = {"input_ids": tokens, "labels": labels}
    return fusedce.model_logprobs(model, batch).logprob.sum(-1)


def train(steps: int = 10) -> list[float]:
    """The loss of each step, nats per pair."""
    torch.manual_seed(0)
    policy = LlamaForCausalLM(CONFIG)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    acc = fusedce.LossAccumulator(policy)
    history = []
    for _ in range(steps):
        for batch in pairs().split(MICRO_BATCHES):
            tokens = torch.cat([batch[:, 0], batch[:, 1]])  # chosen, then rejected
            with torch.no_grad():
                before = answer_logprob(reference, tokens)
            acc.backward(dpo_loss(answer_logprob(policy, tokens), before, beta=BETA))
        acc.finish()
        optimizer.step()
        optimizer.zero_grad()
        history.append(acc.metrics(reset=True)["loss"])
    return history


def main() -> None:
    print(f"log 2 is {math.log(2):.4f}")
    for step, loss in enumerate(train()):
        print(f"step {step + 1:2}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
