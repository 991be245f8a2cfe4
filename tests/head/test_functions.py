"""Functions of users, checkpoints, transforms and derivatives around the logits and their loss."""

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both, same
from support.heads import V, ce, plain_model, tokens
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fusedce import replace_loss_head


def function(forward, backward):
    """An ``autograd.Function`` of a formula and of a backward that need not be its derivative."""
    methods = {
        "forward": staticmethod(lambda ctx, z: forward(z)),
        "backward": staticmethod(lambda ctx, g: backward(g)),
    }
    return type("Function", (torch.autograd.Function,), methods).apply


FUNCTIONS = {
    "doubled": function(lambda z: z * 2, lambda g: g * 5),
    "reshaped": function(
        lambda z: z.transpose(0, 1), lambda g: g.reshape(g.shape[1], g.shape[0], g.shape[2])
    ),
    "sliced": function(
        lambda z: z[:, 1:], lambda g: torch.ops.aten.slice_backward(g, (3, 7, V), 1, 0, 6, 1)
    ),
    "straight through": function(lambda z: z * 3, lambda g: g),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@same
def test_a_backward_that_is_no_derivative(m, x, y, name):
    z = FUNCTIONS[name](m(x))
    with torch.no_grad():
        seen = z.argmax(-1).float() + z.amax(-1)
    return F.cross_entropy(z.reshape(-1, V), y.flatten()[: z[..., 0].numel()]), seen


@same
def test_a_backward_hook_of_the_loss_that_changes_the_gradient(m, x, y):
    loss = nn.CrossEntropyLoss()
    loss.register_full_backward_hook(lambda _, i, o: (i[0] * 3, None))
    return loss(m(x).view(-1, V), y.view(-1))


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


# ---- parts of one product -------------------------------------------------------------------


@same
def test_a_leaf_among_the_parts_gets_its_gradient(m, x, y):
    hidden = m[0](x)
    leaf = m[1](hidden * 0.5).detach().requires_grad_()
    loss = ce(m[1](hidden) + leaf, y)
    loss.backward(retain_graph=True)
    m.zero_grad()
    return loss, leaf.grad


# As wrappers of modules do, to know when a gradient comes.
hands_on = function(lambda z: z.view_as(z), lambda g: g)
PARTS = {
    "a detached part": lambda z, y: ce(z + 0.1 * z.detach(), y),
    "a detached part first": lambda z, y: ce(z.detach() * 0.5 + z, y),
    "summed twice": lambda z, y: ce(z + z, y),
    "a sum of a sum": lambda z, y: ce((z * 0.5 + z) + z, y),
    "another part without grad": lambda z, y: ce(z + z.detach().requires_grad_(), y),
    "rows put together": lambda z, y: ce(torch.cat([z[:, :2].detach(), z[:, 2:]], 1), y),
    "two losses": lambda z, y: ce(z, y) + ce(z * 0.5, y) + ce(z.detach(), y),
    "one loss used twice": lambda z, y: (lambda loss: loss * loss.detach() + loss)(ce(z, y)),
    "scaled by itself": lambda z, y: ce(z * ce(z, y).detach(), y),
    "a function of a view": lambda z, y: ce(FUNCTIONS["straight through"](z.view(z.shape)), y),
    "handed on": lambda z, y: ce(hands_on(z) * 0.5, y),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_function_that_hands_on_or_a_part_that_is_detached(name):
    report = both(lambda m, x, y: PARTS[name](m(x), y))
    if name == "handed on":
        assert (report.losses_fused, report.logits_made) == (1, 0)
