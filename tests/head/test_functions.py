"""Lazy logits below Python's overrides: functions, module hooks, checkpoints, transforms."""

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both, same
from support.heads import V, ce
from torch import nn
from torch.utils.checkpoint import checkpoint


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.pow(2).sum()

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Doubled(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, z):
        return z * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


class WrongTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.transpose(0, 1)

    @staticmethod
    def backward(ctx, g):
        return g.reshape(g.shape[1], g.shape[0], g.shape[2])


class WrongSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.shape = z.shape
        return z[:, 1:]

    @staticmethod
    def backward(ctx, g):
        return torch.ops.aten.slice_backward(g, ctx.shape, 1, 0, ctx.shape[1] - 1, 1)


VIEWS = {
    "itself": lambda z: z,
    "flat": lambda z: z.view(-1, V),
    "last": lambda z: z[:, -1],
    "shifted": lambda z: z[:, :-1].contiguous().view(-1, V),
    "chunk": lambda z: z.chunk(3)[1],
    "transposed": lambda z: z.transpose(1, 2),
}


@pytest.mark.parametrize("view", VIEWS)
@same
def test_a_function_of_any_view_and_a_loss_of_the_same_logits(m, x, y, view):
    z = m(x)
    return ce(z, y) + Squares.apply(VIEWS[view](z)) + ce(z[:, 1:], y[:, 1:])


@pytest.mark.parametrize("function", [Doubled, WrongTurn, WrongSlice])
@same
def test_a_backward_that_is_no_derivative(m, x, y, function):
    z = function.apply(m(x))
    return F.cross_entropy(z.reshape(-1, V), y.flatten()[: z[..., 0].numel()])


@same
def test_a_backward_hook_of_the_loss_that_changes_the_gradient(m, x, y):
    loss = nn.CrossEntropyLoss()
    loss.register_full_backward_hook(lambda _, i, o: (i[0] * 3, None))
    return loss(m(x).view(-1, V), y.view(-1))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda z, y: ce(z, y),
        lambda z, y: ce(z.float() * 0.5, y),
        lambda z, y: z.logsumexp(-1).mean(),
        lambda z, y: z.log_softmax(-1).gather(-1, y[..., None]).mean(),
        lambda z, y: ce(z, y) + z.square().mean(),
        lambda z, y: Squares.apply(z[:, 1:]),
    ],
    ids=["loss", "scaled loss", "lse", "log_softmax", "both", "function"],
)
def test_a_checkpoint_of_what_follows_the_head(function, reentrant):
    both(lambda m, x, y: checkpoint(function, m(x), y, use_reentrant=reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
@same
def test_a_checkpoint_around_the_head(m, x, y, reentrant):
    return checkpoint(lambda h: ce(m[1](h), y), m[0](x), use_reentrant=reentrant)


@same
def test_a_look_without_grad_at_a_functions_output_keeps_the_graph(m, x, y):
    z = Doubled.apply(m(x))
    with torch.no_grad():
        seen = z.argmax(-1).float() + z.amax(-1)
    return ce(z, y), seen


def test_vmap():
    both(lambda m, x, y: torch.vmap(lambda z: z.softmax(-1).square().sum())(m(x)).sum())
    both(lambda m, x, y: torch.vmap(F.cross_entropy)(m(x), y).sum())


@same
def test_a_gradient_by_torch_func_of_logits(m, x, y):
    z = m(x)
    g = torch.func.grad(lambda t: ce(t, y))(z.detach())
    return ce(z, y), g


@same
def test_a_penalty_on_the_gradient_of_real_logits(m, x, y):
    h = m[0](x)
    z = m[1](h)
    (g,) = torch.autograd.grad(z.logsumexp(-1).sum(), h, create_graph=True)
    return g.square().sum() + z.square().mean()


@same
def test_a_second_derivative_of_the_loss(m, x, y):
    h = m[0](x)
    (g,) = torch.autograd.grad(ce(m[1](h), y), h, create_graph=True)
    return ce(m[1](h), y) + g.square().sum()


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


@same
def test_a_leaf_among_the_parts_gets_its_gradient(m, x, y):
    hidden = m[0](x)
    leaf = m[1](hidden * 0.5).detach().requires_grad_()
    loss = ce(m[1](hidden) + leaf, y)
    loss.backward(retain_graph=True)
    m.zero_grad()
    return loss, leaf.grad


# ---- parts of one product -------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    """Its forward computes, and its backward hands the gradient on."""

    @staticmethod
    def forward(ctx, z):
        return z * 3

    @staticmethod
    def backward(ctx, g):
        return g


class HandsOn(torch.autograd.Function):
    """As wrappers of modules do, to know when a gradient comes."""

    @staticmethod
    def forward(ctx, z):
        return z.view_as(z)

    @staticmethod
    def backward(ctx, g):
        return g


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
    "a straight-through function": lambda z, y: ce(StraightThrough.apply(z), y),
    "one and a view": lambda z, y: ce(StraightThrough.apply(z.view(z.shape)), y),
    "handed on": lambda z, y: ce(HandsOn.apply(z) * 0.5, y),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_function_that_hands_on_or_a_part_that_is_detached(name):
    report = both(lambda m, x, y: PARTS[name](m(x), y))
    if name == "handed on":
        assert (report.losses_fused, report.logits_made) == (1, 0)
