"""One GRPO-style policy update on a small model, without the logits, against the eager one.

    python examples/grpo.py

Look at: the two policies give the same loss and gradients, and the fused one builds neither logits
nor their log-softmax. Group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300): a group
of completions of one prompt is sampled, each is rewarded, and the advantage of a completion is its
reward against the group's. The clipped ratio, the divergence from a reference and the entropy bonus
are functions of what `fused_logprobs` returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedce
from fusedce.recipes import grpo_loss

V, H, GROUP, PROMPT, COMPLETION = 1031, 64, 8, 6, 20
TEMPERATURE, CLIP, KL, ENTROPY = 0.8, 0.2, 0.04, 0.01
IGNORE = -100

# (hidden (B, T, H), weight (V, H), labels (B, T)) -> log-probability and entropy, (B, T) each
Policy = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class SmallModel(nn.Module):
    """An embedding, a recurrent layer and a head: enough to sample from."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.body = nn.GRU(H, H, batch_first=True)
        self.head = nn.Linear(H, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(B, T)`` tokens to ``(B, T, H)`` hidden states."""
        return self.body(self.embed(tokens))[0]


def fused_policy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    stats = fusedce.fused_logprobs(
        hidden, weight, labels, ignore_index=IGNORE, temperature=TEMPERATURE
    )
    return stats.logprob, stats.entropy


def eager_policy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (F.linear(hidden, weight) / TEMPERATURE).float().log_softmax(-1)
    used = labels != IGNORE
    logprob = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return logprob.where(used, 0), entropy.where(used, 0)


@torch.no_grad()
def sample(model: SmallModel, prompt: Tensor) -> Tensor:
    """A group of completions of one prompt: ``(GROUP, PROMPT + COMPLETION)`` tokens."""
    tokens = prompt.expand(GROUP, -1)
    for _ in range(COMPLETION):
        z = model.head(model(tokens)[:, -1]) / TEMPERATURE
        tokens = torch.cat([tokens, torch.multinomial(z.softmax(-1), 1)], dim=1)
    return tokens


def completion_labels(tokens: Tensor) -> Tensor:
    """Next tokens, where they are part of a completion."""
    labels = fusedce.shift_labels(tokens, ignore_index=IGNORE)
    labels[:, : PROMPT - 1] = IGNORE
    return labels


def one_update(policy: Policy) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step; only ``policy`` differs between calls."""
    torch.manual_seed(0)
    model, old = SmallModel(), SmallModel()
    old.load_state_dict(model.state_dict())
    tokens = sample(old, torch.randint(V, (1, PROMPT)))
    reward = (tokens[:, PROMPT:] % 2 == 0).float().mean(1)  # even tokens are good ones
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    with torch.no_grad():
        for p in model.parameters():  # some steps later: ratios of 1 would clip nothing
            p.add_(0.03 * torch.randn_like(p))
        labels = completion_labels(tokens)
        sampled, _ = eager_policy(old(tokens), old.head.weight, labels)
        reference = sampled + 0.05 * torch.randn_like(sampled) * (labels != IGNORE)
    logprob, entropy = policy(model(tokens), model.head.weight, labels)
    loss = grpo_loss(
        logprob, sampled, advantage, labels != IGNORE, clip=(CLIP, CLIP), reference=reference,
        kl=KL, entropy=entropy, entropy_bonus=ENTROPY,
    ).mean()  # fmt: skip
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    (fused, d_fused), (eager, d_eager) = one_update(fused_policy), one_update(eager_policy)
    print(f"loss: fused {fused:.7f}, eager {eager:.7f}")
    for name, grad in d_eager.items():
        difference = (d_fused[name] - grad).norm() / grad.norm()
        print(f"{name:20s} |gradient| {grad.norm():.3e}, relative difference {difference:.1e}")


if __name__ == "__main__":
    main()
