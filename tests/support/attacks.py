"""Programs on a model with a replaced head, against the untouched one."""

import copy
import functools
import inspect

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from fusedce import head_report, replace_loss_head
from support.bounds import SAME_MODEL, SAME_SUMS
from support.heads import MODES, loss_and_grads, plain_model, tokens


def both(program, model=None, head=None, **kwargs):
    """Run ``program(model, x, y)`` on an untouched and on a replaced model; they must agree.

    The program returns a loss, or a loss and other tensors. The result is the head's report.
    """
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    native = plain_model(**kwargs) if model is None else model
    replaced = copy.deepcopy(native)
    replace_loss_head(replaced, head=head and replaced.get_submodule(head))
    results = []
    for m in (native, replaced):
        out = program(m, x, y)
        loss, *others = out if isinstance(out, tuple) else (out,)
        if loss.requires_grad:
            loss.backward()
        grads = {n: p.grad for n, p in m.named_parameters()}
        results.append((loss.detach(), [o.detach() + 0 for o in others], grads))
    expected, structure = tree_flatten(results[0])
    got, other = tree_flatten(results[1])
    assert structure == other
    for x, y in zip(got, expected, strict=True):
        if y is None:
            assert x is None
            continue
        # An entry near zero is a sum of terms of the size of others.
        size = float(y.double().nan_to_num(0, 0, 0).abs().max()) if y.numel() else 0
        torch.testing.assert_close(x, y, rtol=SAME_MODEL, atol=SAME_SUMS * size)
    assert any(g is not None for g in results[0][2].values()), "the program trains nothing"
    return head_report(replaced)


def alike(use, mode="grad", bias=False, dtype=None):
    """``use(model)`` gives the same tensors of an untouched and of a replaced model."""
    results = []
    for model in (plain_model(bias), replace_loss_head(plain_model(bias))):
        with MODES[mode]():
            found = use(model.to(dtype))
            results.append(tree_map_only(torch.Tensor, lambda t: t.detach() + 0, found))
    torch.testing.assert_close(results[1], results[0])


def same_loss(loss, mode="grad", bias=False):
    """``loss(z, y)`` and its gradients are the same of an untouched and of a replaced model."""
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    alike(lambda model: loss_and_grads(model, x, y, loss, mode), mode, bias)


def same(program):
    """A test that runs ``program(m, x, y, ...)`` on :func:`both`, with its further parameters."""

    @functools.wraps(program)
    def test(**parameters):
        both(lambda m, x, y: program(m, x, y, **parameters))

    own = inspect.signature(program).parameters.values()
    test.__signature__ = inspect.Signature([p for p in own if p.name not in ("m", "x", "y")])
    return test


def function(forward, backward):
    """An ``autograd.Function`` of a formula and of a backward that need not be its derivative."""
    methods = {
        "forward": staticmethod(lambda ctx, z: forward(z)),
        "backward": staticmethod(lambda ctx, g: backward(g)),
    }
    return type("Function", (torch.autograd.Function,), methods).apply


# As wrappers of modules do, to know when a gradient comes.
hands_on = function(lambda z: z.view_as(z), lambda g: g)
