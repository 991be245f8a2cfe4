"""The worked examples do what they say."""

import importlib.util
from pathlib import Path

import torch


def load(name):
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_grpo_has_the_eager_gradients():
    grpo = load("grpo")
    loss, grads = grpo.one_update(grpo.fused_policy)
    eager_loss, eager_grads = grpo.one_update(grpo.eager_policy)
    assert abs(loss - eager_loss) < 1e-6
    assert grads.keys() == eager_grads.keys()
    assert "head.weight" in grads
    for name, grad in eager_grads.items():
        assert grad.norm() > 1e-3, name
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_the_grpo_example_uses_every_term():
    """The clip is reached on some tokens, or the example would show less than it says."""
    grpo = load("grpo")
    seen = {}

    def policy(hidden, weight, labels):
        logprob, entropy = grpo.fused_policy(hidden, weight, labels)
        seen.update(logprob=logprob.detach(), entropy=entropy.detach(), used=labels != grpo.IGNORE)
        return logprob, entropy

    clipped = []
    original = torch.minimum

    def minimum(a, b):
        clipped.append(int((a != b)[seen["used"]].sum()))
        return original(a, b)

    torch.minimum = minimum
    try:
        grpo.one_update(policy)
    finally:
        torch.minimum = original
    assert 0 < clipped[0] < seen["used"].sum()
    assert (seen["entropy"][seen["used"]] > 1).all()
