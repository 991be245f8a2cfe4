"""A tiny model, uneven micro-batches for 4 ranks, and the single process they must equal."""

import torch

from fusedce import fused_ce
from support.bounds import SAME_SUMS, STATISTIC
from support.loops import H, V, distance

# Valid tokens per micro-batch, [window][rank]. Rank 1 is fully ignored in window 1, and the last
# window is short (one micro-batch).
WINDOWS = [
    [[5, 1, 0], [20, 3, 9], [2, 2, 2], [0, 0, 1]],
    [[4, 7, 3], [0, 0, 0], [2, 2, 11], [6, 0, 5]],
    [[9], [1], [0], [30]],
]
LEARNING_RATE = 0.5


class Model(torch.nn.Module):
    """``forward`` returns ``(loss_sum, n_valid)``, as data-parallel wrappers need it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = torch.nn.Linear(H, H)
        self.head = torch.nn.Linear(H, V, bias=False)

    def forward(self, hidden, labels):
        return fused_ce(torch.tanh(self.body(hidden)), self.head.weight, labels)


def micro_batches(window, rank):
    """``(hidden (n + 2, H), aligned labels (n + 2,))``; two positions of each are ignored."""
    rng = torch.Generator().manual_seed(100 * window + rank)
    found = []
    for n in WINDOWS[window][rank]:
        labels = torch.randint(0, V, (n + 2,), generator=rng)
        labels[n:] = -100
        found.append((torch.randn(n + 2, H, generator=rng), labels))
    return found


def single_process(ranks, rate=LEARNING_RATE):
    """Gradients of each window, parameters after it, and ``(loss per token, tokens)``."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    grads, total, tokens = [], 0.0, 0
    for window in range(len(WINDOWS)):
        optimizer.zero_grad()
        parts = [part for rank in range(ranks) for part in micro_batches(window, rank)]
        out = model(*(torch.cat(x) for x in zip(*parts, strict=True)))
        out.mean().backward()
        optimizer.step()
        grads.append([p.grad.clone() for p in model.parameters()])
        total, tokens = total + out.loss_sum.item(), tokens + int(out.n_valid)
    return grads, [p.detach().clone() for p in model.parameters()], (total / tokens, tokens)


def whole(x):
    """A plain copy of a tensor or DTensor (a collective for the latter)."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def assert_equal_to_single_process(found, ranks):
    """``found``: ``(grads, parameters, metrics)`` of one rank."""
    grads, parameters, metrics = found
    exact_grads, exact_parameters, (loss, tokens) = single_process(ranks)
    for window, (ours, exact) in enumerate(zip(grads, exact_grads, strict=True)):
        for a, b in zip(ours, exact, strict=True):
            assert distance(a, b) <= SAME_SUMS, f"gradients of window {window}"
    for a, b in zip(parameters, exact_parameters, strict=True):
        assert distance(a, b) <= SAME_SUMS, "parameters"
    assert metrics["n_tokens"] == tokens
    assert abs(metrics["loss"] - loss) <= STATISTIC * loss
    assert metrics["n_windows"] == len(WINDOWS)
