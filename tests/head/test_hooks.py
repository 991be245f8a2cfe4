"""Hooks, kept gradients, and gradients with respect to the logits, before and after the loss."""

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both, same
from support.heads import V, ce


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "change", [None, lambda g: 2 * g, lambda g: g.clamp(max=0), lambda g: g.flip(0)]
)
@same
def test_a_hook_on_logits(m, x, y, when, change):
    z, seen = m(x), []

    def hook(g):
        seen.append(g.detach().clone())
        return None if change is None else change(g)

    if when == "before":
        z.register_hook(hook)
    loss = ce(z, y)
    if when == "after":
        z.register_hook(hook)
    loss.backward(retain_graph=True)
    m.zero_grad()
    return loss, seen[0]


def first_row(g):
    g[0] = 0


def views_of_views(g):
    a, b = g.view(-1, V), g.detach()
    a.view(-1)[::2] = 1
    b.add_(0.5)
    return a.view(g.shape) * 2


@pytest.mark.parametrize("write", [first_row, views_of_views])
@same
def test_a_hook_that_writes_into_the_gradient(m, x, y, write):
    z = m(x)
    z.register_hook(write)
    return ce(z, y)


@pytest.mark.parametrize("divisor", [0.0, float("inf"), float("nan")])
def test_a_hook_that_divides_by_zero_gives_what_torch_gives(divisor):
    def program(m, x, y):
        z = m(x)
        z.register_hook(lambda g: g / divisor)
        return ce(z, y)

    both(program, equal_nan=True)


@pytest.mark.parametrize("bias", [False, True])
def test_a_hook_before_and_after_a_write_in_place(bias):
    """A head with a bias gives a view of a matrix, whose hooks a write replaces."""

    def program(m, x, y):
        z = m(x)
        z.register_hook(lambda g: g * 2)
        z.mul_(0.5)
        z.register_hook(lambda g: g * 3)
        return ce(z, y) + z.square().mean()

    both(program, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
def test_a_hook_that_reads_the_gradient_of_transposed_logits(bias):
    """The gradient has the strides that views behind the hook expect."""

    def program(m, x, y):
        z = m(x)
        z.register_hook(lambda g: None if g.abs().sum() >= 0 else g)
        return F.cross_entropy(z.mT, y)

    both(program, bias=bias)


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


@same
def test_a_gradient_kept_by_a_hook_and_read_later(m, x, y):
    kept, z = [], m(x)
    z.register_hook(kept.append)
    loss = ce(z * 0.5, y)
    loss.backward()
    assert kept[0].shape == z.shape
    return loss.detach(), torch.tensor(kept[0].tolist()), kept[0]


# ---- gradients that are asked for -----------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@same
def test_a_kept_gradient(m, x, y, when):
    z = m(x)
    flat = z.view(-1, V)
    if when == "before":
        z.retain_grad(), flat.retain_grad()
    loss = F.cross_entropy(flat * 0.5, y.view(-1)) + z.square().mean()
    if when == "after":
        z.retain_grad(), flat.retain_grad()
    loss.backward(retain_graph=True)
    grads = z.grad.clone(), flat.grad.clone()
    m.zero_grad()
    return (loss, *grads)


OF = {
    "view": lambda z: (z[:, 1:], {}),
    "cast": lambda z: (z.double(), {"ignore_index": 3}),
    "capped": lambda z: ((z / 3).tanh() * 3, {}),
    "smoothed sum": lambda z: (z, {"reduction": "sum", "label_smoothing": 0.1}),
    "weights": lambda z: (z, {"weight": torch.linspace(0, 1, V), "label_smoothing": 0.2}),
    "weights of tokens": lambda z: (z, {"reduction": "none", "weight": torch.linspace(0, 1, V)}),
}


@pytest.mark.parametrize("of", OF)
@same
def test_the_gradient_with_respect_to_logits(m, x, y, of):
    t, options = OF[of](m(x))
    loss = F.cross_entropy(t.transpose(1, 2), y[:, -t.shape[1] :], **options)
    (g,) = torch.autograd.grad(loss.sum(), t, retain_graph=True)
    weights = torch.arange(loss.numel()).view(loss.shape) / 7.0 + 1
    (h,) = torch.autograd.grad((loss * weights).sum(), t, retain_graph=True)
    return loss.sum(), g, h


@same
def test_a_gradient_handed_on_by_hand(m, x, y):
    """Pipelines call the backward of the logits with the gradient of a leaf."""
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
