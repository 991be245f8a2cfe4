"""Writes into parts, into operands after their use, and those that are refused."""

import pytest
import torch
import torch.nn.functional as F
from support.attacks import same, same_loss
from support.heads import MODES, V, ce, loss_and_grads, plain_model, tokens

from fusedce import replace_loss_head


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z.resize_(2, V),
        lambda z: z.resize_as_(torch.ones(2, 2)),
        lambda z: z.set_(torch.ones(3, 7, V)),
        lambda z: z.unsqueeze_(0),
        lambda z: (z * 0.5).swapaxes_(1, 2),
        lambda z: z.as_strided_((7, 3, V), (V, 7 * V, 1)),
        lambda z: setattr(z, "data", torch.zeros(3, 7, V)),
    ],
)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_another_shape_or_memory_in_place_is_refused_in_words(change, mode):
    with MODES[mode]():
        z = replace_loss_head(plain_model())(tokens(3, 7))
        with pytest.raises(RuntimeError, match=r"fusedce.*lazy logits.*logits \+ 0"):
            change(z)


# ---- parts, and what is written later -------------------------------------------------------

PARTS = {
    "chunk": lambda z: z.chunk(2)[0],
    "split": lambda z: torch.split(z, [2, 1])[1],
    "unbind": lambda z: z.unbind(1)[3],
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
@same
def test_arguments_of_the_loss_written_after_backward(m, x, y, weighted):
    """Labels stand in a buffer that the next batch fills: a gradient seen later is of these."""
    weight, y, kept = torch.linspace(0.5, 1.5, V) if weighted else None, y.clone(), []
    z = m(x)
    z.register_hook(kept.append)
    loss = F.cross_entropy(z.view(-1, V), y.view(-1), weight=weight)
    loss.backward()
    (y if weight is None else weight).zero_()
    return loss.detach(), kept[0]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_an_operand_written_after_its_use(mode):
    """Factor, bias and mask stand in buffers that others fill later: torch refuses gradients."""

    def loss(z, y):
        t, bias, rows = torch.tensor(0.5), torch.linspace(0, 1, V), y > 10
        chosen = ((z + bias) * t)[rows]
        labels = y[rows]
        t.add_(1), bias.mul_(2), rows.logical_not_()
        return ce(chosen, labels)

    same_loss(loss, mode)
