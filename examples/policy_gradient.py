"""A policy-gradient loop with a weight for every token, normalised by one denominator.

    python examples/policy_gradient.py

Look at: the gradient of ``-advantage * log p(token)`` (REINFORCE) is that of cross-entropy times
the advantage, so `token_weight` carries it. Tokens of the prompt are ignored; the denominator
counts the sampled tokens of the whole step, so that a token weighs the same in a long answer and in
a short one of another micro-batch. The toy reward counts one token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce

PROMPT, ANSWER, GROUP, MICRO_BATCHES = 4, 12, 16, 2
WANTED = 7
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
)


@torch.no_grad()
def sample(model: LlamaForCausalLM, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """``tokens (GROUP, PROMPT + ANSWER)`` and the number of sampled tokens that count of each."""
    tokens = torch.full((GROUP, PROMPT), 1)
    for _ in range(ANSWER):
        logits = model(tokens, logits_to_keep=1).logits[:, -1]
        new = torch.multinomial(logits.softmax(-1), 1, generator=rng)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens, torch.randint(1, ANSWER + 1, (GROUP,), generator=rng)


def train(steps: int = 15) -> tuple[list[float], list[dict[str, float]]]:
    """Mean rewards and metrics of every step."""
    torch.manual_seed(0)
    model, rng = LlamaForCausalLM(CONFIG), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acc = fusedce.LossAccumulator(model)
    rewards, history = [], []
    for _ in range(steps):
        batches = []
        for _ in range(MICRO_BATCHES):
            tokens, lengths = sample(model, rng)
            positions = torch.arange(tokens.shape[1])
            answered = (positions >= PROMPT) & (positions < PROMPT + lengths[:, None])
            hits = ((tokens == WANTED) & answered).float()
            reward = hits.sum(1) / lengths
            # Reward to come from each token on, against the group's mean reward.
            to_come = hits.flip(1).cumsum(1).flip(1) - reward.mean()
            batches.append((tokens, tokens.masked_fill(~answered, -100), to_come))
            rewards.append(reward.mean().item())
        with acc.window([fusedce.count_valid(labels) for _, labels, _ in batches]):
            for tokens, labels, advantage in batches:
                weight = torch.zeros_like(advantage)
                weight[:, :-1] = advantage[:, 1:]  # as shift_labels aligns the labels
                out = fusedce.fused_ce(
                    model.model(tokens).last_hidden_state,
                    model.lm_head.weight,
                    fusedce.shift_labels(labels),
                    token_weight=weight,
                )
                acc.backward(out)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(acc.metrics(reset=True))
    return rewards, history


def main() -> None:
    rewards, history = train()
    for i, metrics in enumerate(history):
        reward, loss = rewards[i * MICRO_BATCHES], metrics["loss"]
        print(
            f"step {i + 1:2}: reward {reward:.3f}, loss {loss:7.4f}, {metrics['n_tokens']} tokens"
        )


if __name__ == "__main__":
    main()
