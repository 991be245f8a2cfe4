"""Functions of users, checkpoints, transforms and derivatives around the logits and their loss."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both, function, same
from support.heads import V, ce, plain_model, tokens
from torch.utils.checkpoint import checkpoint

from fusedce import head_report, replace_loss_head


@same
def test_a_function_before_the_head_that_writes_into_its_gradient(m, x, y):
    """As the norms of other libraries do."""
    scaled = function(lambda h: h * 2, lambda g: g.mul_(2))
    return ce(m[1](scaled(m[0](x))), y)


@pytest.mark.parametrize("reentrant", [True, False])
@same
def test_a_checkpoint_around_the_head(m, x, y, reentrant):
    return checkpoint(lambda h: ce(m[1](h), y), m[0](x), use_reentrant=reentrant)


PACKS = {
    "numpy": (lambda t: t.detach().numpy(), torch.from_numpy),
    "save": (lambda t: pickle.dumps(t.detach()), pickle.loads),
}


@pytest.mark.parametrize("name", PACKS)
@same
def test_hooks_on_saved_tensors_that_read_memory(m, x, y, name):
    with torch.autograd.graph.saved_tensors_hooks(*PACKS[name]):
        z = m(x)
        loss = ce(z, y) + (z * torch.linspace(0, 1, V)).sum()
        return loss + z.square().mean() + z.exp().mean()


@same
def test_derivatives_of_derivatives(m, x, y):
    h = m[0](x)
    z = m[1](h)
    by_func = torch.func.grad(lambda t: ce(t, y))(z.detach())
    (g,) = torch.autograd.grad(ce(m[1](h), y), h, create_graph=True)
    (of_real,) = torch.autograd.grad(z.logsumexp(-1).sum(), h, create_graph=True)
    return ce(m[1](h), y) + g.square().sum() + of_real.square().sum() + z.square().mean(), by_func


@pytest.mark.parametrize("first", ["row", "whole", "number"])
@same
def test_a_sum_that_scales_its_second_operand(m, x, y, first):
    z = m(x)
    firsts = {"row": torch.linspace(0, 1, V), "whole": torch.ones(z.shape)}
    b = firsts.get(first, torch.tensor(2.0))
    return ce(torch.add(b, z, alpha=2), y), b.add(z, alpha=-0.5)


def test_a_head_of_one_class():
    model = torch.nn.Sequential(torch.nn.Embedding(9, 16), torch.nn.Linear(16, 1))
    both(lambda m, x, y: m(x % 9).square().mean(), model)


def test_a_head_that_raises_takes_its_input_back():
    model, kept = replace_loss_head(plain_model()), []

    def fail(h):
        kept.append(h)
        raise ZeroDivisionError

    model[1].forward = fail
    with pytest.raises(ZeroDivisionError):
        model(tokens(3, 7))
    assert type(kept[0]) is torch.Tensor


def test_a_model_without_values():
    replaced = replace_loss_head(plain_model()).to("meta")
    logits = replaced(tokens(3, 7).to("meta"))
    assert (logits + 0).is_meta
    assert "no values" in str(head_report(replaced))


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


# ---- functions whose value and gradient come from different places ----------------------------


def takes_from(value, gradient):
    """``value``, whose gradient goes to ``gradient``."""

    class Takes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, gradient):
            return value.clone()

        @staticmethod
        def backward(ctx, g):
            return None, g

    return Takes.apply(value, gradient)


def times_three(g):
    with torch.enable_grad():
        leaf = torch.zeros(g.shape, requires_grad=True)
        torch.autograd.backward([leaf * 3], [g])
    return leaf.grad


ORDER = torch.arange(6, -1, -1)
STRAIGHT = {
    "factor": lambda z: takes_from(z * 2, z * 3),
    "detached": lambda z: takes_from((z * 2).detach(), z * 3),
    "nothing": lambda z: takes_from(z * 2, z),
    "slice": lambda z: takes_from(z[:, :6], z[:, 1:]),
    "order": lambda z: takes_from(z[:, ORDER], z[:, ORDER.flip(0)]),
    "a graph inside": lambda z: function(lambda t: t * 2, times_three)(z),
    "a graph inside, of a view": lambda z: function(lambda t: t.view_as(t), times_three)(z),
}


@pytest.mark.parametrize("name", STRAIGHT)
@same
def test_a_straight_through_function_of_equal_length(m, x, y, name):
    z = STRAIGHT[name](m(x))
    return ce(z, y[:, : z.shape[1]])


@same
def test_a_prehook_of_the_logits_node_reached_from_the_loss(m, x, y):
    loss = F.cross_entropy(m(x).view(-1, V), y.view(-1))
    node = loss.grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: tuple(g * 3 for g in grads))
    return loss


@same
def test_a_leaf_among_the_parts_gets_its_gradient(m, x, y):
    hidden = m[0](x)
    leaf = m[1](hidden * 0.5).detach().requires_grad_()
    loss = ce(m[1](hidden) + leaf, y)
    loss.backward(retain_graph=True)
    m.zero_grad()
    return loss, leaf.grad


# ---- hooks of nodes, and gradients handed on by hand ------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
def test_a_weight_that_also_made_the_hidden_state_gets_both_gradients(hooked):
    def program(m, x, y):
        m[1].weight = m[0].weight
        z = m(x)
        if hooked:
            z.register_hook(lambda g: None)
        return ce(z, y)

    assert both(program).logits_made == 0


@same
def test_hooks_of_nodes_see_the_gradient(m, x, y):
    seen = []
    z = m(x)
    z.grad_fn.register_prehook(lambda grads: seen.append(grads[0] + 0))
    z.grad_fn.register_hook(lambda inputs, outputs: seen.append(outputs[0] * 2))
    loss = ce(z, y)
    loss.backward(retain_graph=True)
    m.zero_grad()
    return loss, *seen[:2]


@pytest.mark.parametrize("frozen", [(), (0,), (1,)])
@same
def test_a_gradient_handed_on_by_hand(m, x, y, frozen):
    """Pipelines call the backward of the logits with the gradient of a leaf."""
    for i in frozen:
        m[i].requires_grad_(False)
    z = m(x)
    leaf = z.detach().requires_grad_()
    loss = ce(leaf, y)
    loss.backward()
    z.backward(leaf.grad)
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("inputs", ["logits", "parameters", "both"])
def test_backward_of_some_inputs(inputs):
    def program(m, x, y):
        z = m(x)
        parameters = list(m.parameters())
        wanted = {"logits": [z], "parameters": parameters, "both": [z, *parameters]}[inputs]
        loss = ce(z * 0.5, y)
        loss.backward(inputs=wanted, retain_graph=True)
        found = [t.grad + 0 for t in wanted]
        m.zero_grad()
        return loss, *found

    both(program)
