"""Reading logits whose parameters have changed is an error that says so."""

import copy

import pytest
import torch
from support.bounds import SAME_MODEL
from support.heads import ce, plain_model, tokens
from torch import nn

from fusedce import replace_loss_head


def stepped(make):
    """Logits of a model after one step of an optimizer."""
    model = replace_loss_head(plain_model())
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    optimizer = make(model.parameters())
    z = model(x)
    ce(model(x), y).backward()
    optimizer.step()
    return z


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "look",
    [
        lambda z: z.argmax(-1),
        lambda z: ce(z, tokens(3, 7)),
        lambda z: z[:, -1].float().sum(),
        lambda z: z.numpy(),
    ],
)
def test_logits_read_after_a_step_are_refused(name, look):
    z = stepped(OPTIMIZERS[name])
    with pytest.raises(
        RuntimeError, match=r"changed \(by an optimizer step\?\) since the head ran"
    ):
        look(z.detach())


def test_logits_that_were_looked_at_before_stay_what_they_were():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    z = model(x)
    half = z / 2
    seen = z + 0
    half.argmax(-1)
    ce(model(x), x).backward()
    torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()
    torch.testing.assert_close(z * 1.0 + 0, seen)
    torch.testing.assert_close(half + 0, seen / 2)


@pytest.mark.parametrize("trained", ["another model", "the body", "all but the frozen head"])
def test_the_step_of_an_unrelated_optimizer_changes_nothing(trained):
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    parameters = list(model[0].parameters())  # the hidden state was computed before
    if trained == "another model":
        parameters = list(nn.Linear(3, 3).parameters())
    if trained == "all but the frozen head":
        model[1].weight.requires_grad_(False)
    z, real = model(x), (model(x) + 0).detach()
    ce(model(x), x).backward()
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(parameters, fused=True).step()
    torch.testing.assert_close(z.detach() + 0, real)


def test_lbfgs_may_run_the_model_inside_its_step():
    def trained(model):
        optimizer, x = torch.optim.LBFGS(model.parameters(), max_iter=5), tokens(3, 7)

        def closure():
            optimizer.zero_grad()
            loss = ce(model(x), x.roll(1, 0))
            loss.backward()
            return loss

        optimizer.step(closure)
        return closure().detach()

    expected, got = trained(plain_model()), trained(replace_loss_head(plain_model()))
    # its line search divides differences of losses and of gradients by each other
    torch.testing.assert_close(got, expected, rtol=64 * SAME_MODEL, atol=0)


def test_a_head_that_is_a_part_of_a_larger_memory_may_be_changed_by_any_step():
    """An engine holds all parameters in one buffer, and the optimizer has copies of it."""
    model = plain_model()
    buffer = torch.zeros(2 * model[1].weight.numel())
    part = buffer[: model[1].weight.numel()].view_as(model[1].weight)
    replaced = copy.deepcopy(model)
    replaced[1].weight.data = part.copy_(model[1].weight.detach())
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    z, unread = replace_loss_head(replaced)(x), replaced(x)
    z.retain_grad()
    ce(z, y).backward()
    copies = buffer.clone().requires_grad_()
    copies.grad = torch.ones_like(copies)
    torch.optim.SGD([copies], 0.1).step()
    buffer.copy_(copies.detach())  # no version counter of the parameter sees that
    native = model(x)
    native.retain_grad()
    ce(native, y).backward()
    torch.testing.assert_close(z.grad + 0, native.grad)
    with pytest.raises(RuntimeError, match="has changed"):
        unread.argmax(-1)
