"""Logits are real once they have been read: writes, views, and gradients of other uses."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.heads import MODES, V, ce, loss_and_grads, plain_model, tokens

from fusedce import replace_loss_head


def masked_after_a_look(z, y):
    """Some models mask classes in place before the loss; metrics may have looked before that."""
    with torch.no_grad():
        z.argmax(-1)
    z[..., :5] = torch.finfo(z.dtype).min
    return ce(z, y.clamp(min=5))


def view_written(z, y):
    z.view(-1, V)[:, 3] = 1.0
    return ce(z, y)


def root_written_after_a_view(z, y):
    flat = z.view(-1, V)
    z[..., 3] = 1.0
    return ce(flat, y)


def root_written_after_a_copy(z, y):
    shifted = z[:, :-1].contiguous()
    z[..., 3] = 1.0
    return ce(shifted, y[:, 1:])


def reshape_that_copies(z, y):
    rows = z[:, :-1].reshape(-1, V)
    rows[:, 3] = 1.0
    return ce(z, y) + ce(rows, y[:, 1:])


def real_view_written(z, y):
    z.select(-1, 3).fill_(1.0)
    return ce(z, y)


def data_written(z, y):
    z.data[..., 3] = 1.0
    z.detach().view(-1, V)[:, 4] = 2.0
    return ce(z, y)


def scaled_after_a_view(z, y):
    flat = z.view(-1, V)
    z.mul_(0.5)
    return ce(flat, y)


def scaled_before(z, y):
    other = z * 2
    z.mul_(0.5)
    return ce(z, y) + ce(other, y)


def copies_written(z, y):
    for twin in (z.clone(), z.to(z.dtype, copy=True), z[y > 10], z[[0, 1]], z * 1):
        twin.fill_(1.0)
    return ce(z, y)


def own_type_is_no_copy(z, y):
    z.to(z.dtype).contiguous().float()[..., 3] = 1.0
    return ce(z, y)


def out_argument(z, y):
    with torch.no_grad():
        torch.clamp(z.detach(), min=0, out=z.detach())
    return ce(z, y)


def many_at_once(z, y):
    with torch.no_grad():
        torch._foreach_mul_([z], 2.0)
    return ce(z, y)


def after_a_cap(z, y):
    capped = z.tanh().clone()
    capped.clamp_(-0.5, 0.5)
    return ce(capped, y)


def cast_then_biased(z, y):
    sum_ = z.to(torch.bfloat16) + torch.linspace(-1, 1, V)
    assert sum_.dtype == torch.float32
    return ce(sum_, y)


def odd_shapes(z, y):
    assert z[:1].squeeze((0,)).shape == (7, V)
    first = z[np.int64(0)]
    first.mul_(2)
    return ce(z, y)


WRITES = [
    masked_after_a_look, view_written, root_written_after_a_view, root_written_after_a_copy,
    reshape_that_copies, real_view_written, data_written, scaled_after_a_view, scaled_before,
    copies_written, own_type_is_no_copy, out_argument, many_at_once, after_a_cap,
    cast_then_biased, odd_shapes,
]  # fmt: skip


@pytest.mark.parametrize("loss", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_a_write_counts(loss, mode):
    model, x, y = plain_model(True), tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(model, x, y, loss, mode)
    replace_loss_head(model)
    torch.testing.assert_close(loss_and_grads(model, x, y, loss, mode), native)


PARTS = {
    "chunk": lambda z: z.chunk(2)[0],
    "split": lambda z: torch.split(z, [2, 1])[1],
    "unbind": lambda z: z.unbind(1)[3],
    "iteration": lambda z: next(iter(z)),
    "tensor_split": lambda z: z.tensor_split(2)[1],
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", MODES)
def test_writing_into_a_part_is_right_or_refused_where_torch_refuses_it(part, mode):
    def loss(z, y):
        PARTS[part](z).mul_(2)
        return ce(z, y)

    results = []
    for model in (plain_model(), replace_loss_head(plain_model())):
        try:
            found = loss_and_grads(model, tokens(3, 7), tokens(3, 7, seed=1), loss, mode)
        except RuntimeError as e:
            found = "returns multiple views" in str(e)
        results.append(found)
    torch.testing.assert_close(results[1], results[0])
    assert (results[0] is True) == (mode == "grad" and part != "tensor_split")


@pytest.mark.parametrize("weighted", [False, True])
def test_arguments_of_the_loss_written_after_backward(weighted):
    """Labels stand in a buffer that the next batch fills: a gradient seen later is of these."""
    grads = []
    for replaced in (False, True):
        model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
        if replaced:
            replace_loss_head(model)
        weight = torch.linspace(0.5, 1.5, V) if weighted else None
        z, kept = model(x), []
        z.register_hook(kept.append)
        loss = F.cross_entropy(z.view(-1, V), y.view(-1), weight=weight)
        written = y if weight is None else weight
        loss.backward()
        written.zero_()
        grads.append(kept[0] + 0)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_an_operand_written_after_its_use(mode):
    """Factor, bias and mask stand in buffers that others fill later: torch refuses gradients."""

    def loss(z, y):
        t, bias, rows = torch.tensor(0.5), torch.linspace(0, 1, V), y > 10
        chosen = ((z + bias) * t)[rows]
        labels = y[rows]
        t.add_(1), bias.mul_(2), rows.logical_not_()
        return ce(chosen, labels)

    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(plain_model(), x, y, loss, mode)
    torch.testing.assert_close(
        loss_and_grads(replace_loss_head(plain_model()), x, y, loss, mode), native
    )
