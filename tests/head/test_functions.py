"""Functions of users, checkpoints, transforms and derivatives around the logits and their loss."""

import pytest
import torch
import torch.nn.functional as F
from support.attacks import function, same
from support.heads import V, ce, plain_model, tokens
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fusedce import replace_loss_head


@same
def test_a_function_before_the_head_that_writes_into_its_gradient(m, x, y):
    """As the norms of other libraries do."""
    scaled = function(lambda h: h * 2, lambda g: g.mul_(2))
    return ce(m[1](scaled(m[0](x))), y)


@pytest.mark.parametrize("reentrant", [True, False])
@same
def test_a_checkpoint_around_the_head(m, x, y, reentrant):
    return checkpoint(lambda h: ce(m[1](h), y), m[0](x), use_reentrant=reentrant)


@same
def test_derivatives_of_derivatives(m, x, y):
    h = m[0](x)
    z = m[1](h)
    by_func = torch.func.grad(lambda t: ce(t, y))(z.detach())
    (g,) = torch.autograd.grad(ce(m[1](h), y), h, create_graph=True)
    (of_real,) = torch.autograd.grad(z.logsumexp(-1).sum(), h, create_graph=True)
    return ce(m[1](h), y) + g.square().sum() + of_real.square().sum() + z.square().mean(), by_func


@pytest.mark.parametrize("of", ["hidden", "weight", "logits"])
def test_forward_mode(of):
    def dual(t, name):
        if of != name:
            return t
        return forward_ad.make_dual(t, torch.linspace(0, 1, t.numel()).view(t.shape))

    def tangent(m):
        with forward_ad.dual_level():
            h, w = m[0](tokens(3, 7)).detach(), dual(m[1].weight.detach(), "weight")
            z = m[1](dual(h, "hidden"))
            if of == "weight":
                z = torch.func.functional_call(m[1], {"weight": w}, h)
            z = dual(z.detach(), "logits") if of == "logits" else z
            return forward_ad.unpack_dual(ce(z, tokens(3, 7, seed=1))).tangent

    expected = tangent(plain_model())
    torch.testing.assert_close(tangent(replace_loss_head(plain_model())), expected)


LOSSES = {
    "plain": ce,
    "shifted": lambda z, y: ce(z[:, :-1], y[:, 1:]),
    "weighted": lambda z, y: F.cross_entropy(z.mT, y, torch.linspace(0, 1, V)),
}


@pytest.mark.parametrize("loss", LOSSES)
@same
def test_a_second_backward_is_the_same_with_retain_graph_and_an_error_without(m, x, y, loss):
    loss = LOSSES[loss](m(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return loss.detach()


@pytest.mark.parametrize("loss", [ce, lambda z, y: z.square().mean()])
def test_many_gradients_at_once_are_refused_in_words(loss):
    model = replace_loss_head(plain_model())
    h = model[0](tokens(3, 7))
    z = model[1](h)
    value = loss(z, tokens(3, 7, seed=1))
    for of in (h, z) if loss is ce else (h,):
        with pytest.raises(RuntimeError, match=r"one gradient at a time.*restore_loss_head.*lazy"):
            torch.autograd.grad(value, of, torch.ones(2), is_grads_batched=True, retain_graph=True)


@same
def test_a_leaf_among_the_parts_gets_its_gradient(m, x, y):
    hidden = m[0](x)
    leaf = m[1](hidden * 0.5).detach().requires_grad_()
    loss = ce(m[1](hidden) + leaf, y)
    loss.backward(retain_graph=True)
    m.zero_grad()
    return loss, leaf.grad
