"""Micro-batches of given sizes, the two ways to run them, and a loss that fails in backward."""

import torch

from fusedce import LossAccumulator, count_valid, fused_ce
from fusedce.accumulate.gradients import scale_gradients

V, H = 31, 8


def batches(sizes, seed=0):
    """``(hidden, labels)`` with the given numbers of valid tokens, and ignored ones beside."""
    rng = torch.Generator().manual_seed(seed)
    out = []
    for n in sizes:
        hidden = torch.randn(n + 3, H, generator=rng)
        labels = torch.randint(0, V, (n + 3,), generator=rng)
        labels[n:] = -100
        out.append((hidden, labels))
    return out


def new_weight():
    return torch.randn(V, H, generator=torch.Generator().manual_seed(9)).requires_grad_()


def a_loss(n, weight=None):
    hidden, labels = batches([n])[0]
    return fused_ce(hidden, new_weight() if weight is None else weight, labels)


def check_correction(dtype, device):
    """The correction of streamed gradients rounds each product once, and its factor never."""
    factor = 1.00589
    tensors = [torch.randn(n, device=device).to(dtype) for n in (7, 1000, 2**20)]
    for x in tensors:
        x.grad = x.clone()
    sparse = torch.randn(300, 4, device=device).to(dtype)
    sparse.grad = sparse.to_sparse(1).coalesce()
    scale_gradients([*tensors, sparse], factor)
    for x in (*tensors, sparse):
        wide = torch.promote_types(dtype, torch.float32)
        exact = (x.to(wide) * factor).to(dtype)
        torch.testing.assert_close(x.grad.to_dense(), exact, rtol=0, atol=0)


class Raising(torch.autograd.Function):
    """Raises in backward, after the part of the graph above it has run."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in backward")


def raising(out):
    return out._replace(loss_sum=Raising.apply(out.loss_sum))


def weight_and_grad(micro):
    """A fresh weight, its gradient from one big batch, and that batch's loss."""
    weight = new_weight()
    hidden, labels = (torch.cat(x) for x in zip(*micro, strict=True))
    loss = fused_ce(hidden, weight, labels).mean()
    return weight, torch.autograd.grad(loss, weight)[0], loss.item()


def run_window(acc, weight, micro):
    weight.grad = None
    with acc.window([count_valid(y, offset=0) for _, y in micro]):
        for hidden, labels in micro:
            acc.backward(fused_ce(hidden, weight, labels))


def run_streaming(acc, weight, micro):
    weight.grad = None
    for hidden, labels in micro:
        acc.backward(fused_ce(hidden, weight, labels))
    acc.finish([weight])


def warm_up(rank):
    """Run imports and gloo's first connections, which take seconds."""
    run_streaming(LossAccumulator(), new_weight(), batches([2]))


def distance(a, b):
    """Norm of the difference over the norm of ``b``; 0 where both are 0."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def out_of(weight, one, fails=False):
    hidden, labels = one
    return fused_ce(Raising.apply(hidden * weight.mean()) if fails else hidden, weight, labels)


def windowed(acc, streaming, trained, sizes, loop):
    """A window of micro-batches of ``sizes`` tokens, in which ``loop`` trains these tensors.

    ``None``: those that the accumulator was given.
    """
    if streaming:
        loop()
        acc.finish([trained] if isinstance(trained, torch.Tensor) else trained)
    else:
        with acc.window(sizes):
            loop()
