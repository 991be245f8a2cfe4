"""Hooks of nodes, and gradients with respect to the logits; `test_programs.py` has other hooks."""

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both, same
from support.heads import V, ce


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
