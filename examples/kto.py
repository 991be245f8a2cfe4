"""KTO: answers that are good or bad, each on its own, without a partner to compare with.

    python examples/kto.py

Look at: the divergence that every answer is compared with is estimated from answers that belong to
other prompts, without gradient, and the loss is divided by the answers of the whole step. The loss
begins at one half. The reward of good answers rises, that of bad ones falls.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce
from fusedce.recipes import kto_loss

PROMPT, ANSWER, BETA, MICRO_BATCH = 16, 32, 0.1, 4
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


def answers() -> Tensor:
    """``(16, T)``: after the same prompt, good answers count up and bad ones down."""
    good = (torch.arange(8)[:, None] + torch.arange(PROMPT + ANSWER)) % CONFIG.vocab_size
    bad = torch.cat([good[:, :PROMPT], good[:, PROMPT:].flip(1)], dim=1)
    return torch.stack([good, bad], dim=1).flatten(0, 1)  # by turns


def answer_logprob(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """``(B, T)`` tokens to ``(B,)`` log-probabilities of their answers: prompts are ignored."""
    labels = tokens.clone()
    labels[:, :PROMPT] = -100
    batch = {"input_ids": tokens, "labels": labels}
    return fusedce.model_logprobs(model, batch).logprob.sum(-1)


def train(steps: int = 10) -> list[tuple[float, float]]:
    """The loss of each step, and how much higher good answers are rewarded than bad ones."""
    torch.manual_seed(0)
    policy = LlamaForCausalLM(CONFIG)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    acc = fusedce.LossAccumulator(policy)
    tokens = answers()
    desirable = torch.arange(len(tokens)) % 2 == 0
    history = []
    for _ in range(steps):
        rewards = []
        micro = zip(tokens.split(MICRO_BATCH), desirable.split(MICRO_BATCH), strict=True)
        for batch, good in micro:
            # Each prompt with the answer of another one.
            strange = torch.cat([batch[:, :PROMPT], batch.roll(2, 0)[:, PROMPT:]], dim=1)
            with torch.no_grad():
                before = answer_logprob(reference, batch)
                gap = answer_logprob(policy, strange) - answer_logprob(reference, strange)
            after = answer_logprob(policy, batch)
            acc.backward(kto_loss(after, before, good, gap.mean(), beta=BETA))
            reward = BETA * (after.detach() - before)
            rewards.append(reward[good].mean() - reward[~good].mean())
        acc.finish()
        optimizer.step()
        optimizer.zero_grad()
        history.append((acc.metrics(reset=True)["loss"], torch.stack(rewards).mean().item()))
    return history


def main() -> None:
    for step, (loss, margin) in enumerate(train()):
        print(f"step {step + 1:2}: loss {loss:.4f}, good above bad by {margin:.3f}")


if __name__ == "__main__":
    main()
