"""Evaluation and serving: behaviour is the same without gradients and in inference mode."""

import pytest
import torch
import torch.nn.functional as F
from support.attacks import alike
from support.heads import MODES, V, plain_model, tokens

from fusedce import head_report, replace_loss_head
from fusedce.head.lazy import LazyLogits

WITHOUT_GRAD = [mode for mode in MODES if mode != "grad"]


def ban_in_float(z):
    scores = z.float()
    scores[..., 3] = 50.0
    return scores.argmax(-1), z.argmax(-1)


def ban_in_rows(z):
    rows = z.reshape(-1, V)
    rows[:, 3] = 50.0
    copied = z[:, :-1].reshape(-1, V)
    copied[:, 4] = 60.0
    return rows.argmax(-1), copied.argmax(-1), z.argmax(-1)


def sample_warped(z):
    """Temperature and top-k as generation applies them."""
    scores = z[:, -1, :].to(copy=True, dtype=torch.float32, device="cpu")
    scores = scores / 0.7
    least = torch.topk(scores, 5)[0][..., -1, None]
    scores = scores.masked_fill(scores < least, -float("inf"))
    return scores.softmax(-1), z[:, -1].float()


def other_places(z):
    return z.cpu(), z.to("cpu"), z.to("cpu", torch.float64), z.type(torch.float64), z.to(z)


def chosen(z):
    y = tokens(3, 7, seed=1)
    return z[y > 10], z[[0, 2]], z[:, torch.tensor([1, 1])], torch.index_select(z, 0, y[0, :1] % 3)


USES = [
    ban_in_float, ban_in_rows, sample_warped,
    other_places, chosen,
]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", WITHOUT_GRAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_use_of_logits(use, mode, dtype):
    alike(lambda model: use(model(tokens(3, 7))), mode, dtype=dtype)


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_logits_are_as_of_the_heads_run(mode):
    """Inference tensors count no writes, so that the head keeps a copy of its input."""
    model = replace_loss_head(plain_model())
    with MODES[mode]():
        hidden = model[0](tokens(3, 7))
        expected = F.linear(hidden, model[1].weight)
        z = model[1](hidden)
        hidden.mul_(2)
        if mode == "inference_mode":
            torch.testing.assert_close(z + 0, expected)
        else:
            with pytest.raises(RuntimeError, match="has changed"):
                z.argmax(-1)


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_one_position_of_each_sequence_is_made_at_once(mode):
    model = replace_loss_head(plain_model())
    with MODES[mode]():
        assert type(model(tokens(3, 1))) is torch.Tensor
        assert type(model(tokens(3, 2))) is LazyLogits
    assert type(model(tokens(3, 1))) is LazyLogits
    assert "generation" in str(head_report(model))
