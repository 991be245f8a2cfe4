"""Reading logits whose parameters have changed is an error that says so."""

import copy
import gc

import pytest
import torch
from support.bounds import SAME_MODEL
from support.heads import V, ce, plain_model, tokens
from torch import nn

from fusedce import replace_loss_head
from fusedce.head.lazy import LazyLogits
from fusedce.head.loss import Passenger


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


def test_the_step_of_an_unrelated_optimizer_changes_nothing():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    other = nn.Linear(3, 3)
    other(torch.ones(3)).sum().backward()
    body = torch.optim.SGD(model[0].parameters(), 0.1)
    z = model(x)
    real = (model(x) + 0).detach()
    others = torch.optim.AdamW(other.parameters(), fused=True)
    others.step()
    ce(model(x), x).backward()
    body.step()  # the hidden state was computed before
    torch.testing.assert_close(z.detach() + 0, real)


def test_a_frozen_heads_logits_may_be_read_at_any_time():
    model, x = plain_model(), tokens(3, 7)
    model[1].weight.requires_grad_(False)
    replace_loss_head(model)
    z, y = model(x), tokens(3, 7, seed=1)
    real = (model(x) + 0).detach()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    ce(model(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(z.detach() + 0, real)
    assert z.shape[-1] == V


def test_lbfgs_may_run_the_model_inside_its_step():
    losses = []
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    for model in (plain_model(), replace_loss_head(plain_model())):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = ce(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        losses.append(ce(model(x), y).detach())
    # its line search divides differences of losses and of gradients by each other
    torch.testing.assert_close(losses[1], losses[0], rtol=64 * SAME_MODEL, atol=0)


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


STEPS_OF_TRAINING = {
    "plain": lambda m, z, loss: loss.backward(),
    "hook": lambda m, z, loss: (z.register_hook(lambda g: g * 2), loss.backward()),
    "a hook that looks": lambda m, z, loss: (z.register_hook(lambda g: g + 0), loss.backward()),
    "kept": lambda m, z, loss: (z.retain_grad(), loss.backward()),
    "a view's": lambda m, z, loss: (z.view(-1).retain_grad(), loss.backward()),
    "clipped": lambda m, z, loss: (
        loss.backward(), nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    ),
    "twice": lambda m, z, loss: (loss.backward(retain_graph=True), loss.backward()),
    "written in place": lambda m, z, loss: (
        z.register_hook(lambda g: g * 2), z.mul_(0.5),
        z.register_hook(lambda g: g * 3), ce(z, tokens(3, 7)).backward(),
    ),
    "looked at": lambda m, z, loss: (z.argmax(-1), loss.backward(), z.detach() + 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS_OF_TRAINING)
def test_a_step_leaves_nothing_for_the_garbage_collector(name):
    model, x, y = replace_loss_head(plain_model(bias=True)), tokens(3, 7), tokens(3, 7, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    gc.collect()
    before = lazy_tensors()
    gc.disable()
    try:
        z = model(x)
        loss = ce(z * 0.5, y) + ce(z, y)
        STEPS_OF_TRAINING[name](model, z, loss)
        assert len(lazy_tensors()) > len(before)
        del z, loss
        optimizer.step()
        optimizer.zero_grad()
        assert lazy_tensors() == before
    finally:
        gc.enable()


def lazy_tensors():
    return {id(x) for x in gc.get_objects() if type(x) in (LazyLogits, Passenger)}
