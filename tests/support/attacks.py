"""Programs on a model with a replaced head, against the untouched one."""

import copy

import torch

from fusedce import head_report, replace_loss_head
from support.heads import plain_model, tokens


def both(program, model=None, *, rtol=1e-5, atol=1e-6, equal_nan=False, **kwargs):
    """Run ``program(model, x, y)`` on an untouched and on a replaced model; they must agree.

    The program returns a loss, or a loss and other tensors. The result is the head's report.
    """
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    native = plain_model(**kwargs) if model is None else model
    replaced = replace_loss_head(copy.deepcopy(native))
    results = []
    for m in (native, replaced):
        out = program(m, x, y)
        loss, *others = out if isinstance(out, tuple) else (out,)
        if loss.requires_grad:
            loss.backward()
        grads = {n: p.grad for n, p in m.named_parameters()}
        results.append((loss.detach(), [o.detach() + 0 for o in others], grads))
    torch.testing.assert_close(results[1], results[0], rtol=rtol, atol=atol, equal_nan=equal_nan)
    assert any(g is not None for g in results[0][2].values()), "the program trains nothing"
    return head_report(replaced)
