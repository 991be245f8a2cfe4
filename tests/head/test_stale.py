"""Logits that outlive the parameters they were made of are refused, in words."""

import copy

import pytest
import torch
from support.heads import V, ce, compiled, plain_model, tokens
from torch import nn

from fusedce import replace_loss_head


def stepped(make, fused_loss=False, model=None, run=None):
    """Logits of a model after one step of an optimizer, and what they were."""
    model = replace_loss_head(plain_model()) if model is None else model
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    optimizer = make(model.parameters())
    z = (run or model)(x)
    before = copy.deepcopy(model)
    ce(model(x), y).backward()
    optimizer.step()
    return z, before(x), model


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
    z, *_ = stepped(OPTIMIZERS[name])
    with pytest.raises(
        RuntimeError, match=r"changed \(by an optimizer step\?\) since the head ran"
    ):
        look(z.detach())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_logits_of_a_compiled_model_read_after_a_step_are_refused(name):
    model = replace_loss_head(plain_model())
    run = compiled(model, fullgraph=True)
    for _ in range(3):  # later runs are of the same code
        z, *_ = stepped(OPTIMIZERS[name], model=model, run=run)
        with pytest.raises(RuntimeError, match="has changed"):
            z.argmax(-1)
        assert run(tokens(3, 7)).argmax(-1).shape == (3, 7)


def test_running_a_compiled_model_compiles_once_whatever_optimizers_do():
    model = replace_loss_head(plain_model())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(4):
        stepped(OPTIMIZERS["fused adamw"], model=model, run=run)
    assert counter.frame_count == 1


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


def test_the_step_of_an_optimizer_that_is_gone_may_have_been_any():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    z = model(x)
    ce(model(x), x).backward()
    torch.optim.SGD(model.parameters(), 0.1, fused=True).step()
    with pytest.raises(RuntimeError, match="has changed"):
        z.argmax(-1)


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
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
