"""The inputs, values and claims by which Megatron-LM tests its vocabulary-parallel cross-entropy.

The logits are given there; here the hidden states are those logits and the weight is the identity,
so that the product is exact and the gradient of the hidden states is that of the logits.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks

from fusedce.sharded import sharded_ce, sharded_cross_entropy, sharded_logprobs

BACKENDS = ("torch", "triton")


def own_logits(logits, rank):
    """Hidden states that require grad, this rank's rows of the identity, and their classes."""
    V, world = logits.shape[-1], dist.get_world_size()
    own = slice(rank * V // world, (rank + 1) * V // world)
    return logits.clone().requires_grad_(), torch.eye(V, dtype=logits.dtype)[own], own


def counted_up(backend, rank):
    """Every rank has the logits 0 to 7, four times; all labels lie on the first rank."""
    logits = torch.arange(8.0).repeat(16, 4 * dist.get_world_size())
    hidden, rows, _ = own_logits(logits, rank)
    losses = sharded_cross_entropy(
        hidden, rows, torch.arange(0, 32, 2), process_group=dist.group.WORLD, reduction="none",
        backend=backend,
    )  # fmt: skip
    expected = torch.tensor([10.2309, 8.2309, 6.2309, 4.2309]).repeat(4)
    torch.testing.assert_close(losses, expected, rtol=0, atol=5e-5)  # known to 4 digits
    return losses.tolist()


def small_z_loss(backend, rank):
    """A z-loss below half a unit of bfloat16 beside the cross-entropy is not lost in bfloat16."""
    factor = 1e-4
    rng = torch.Generator().manual_seed(1234)
    n = 16 * 8 if backend == "torch" else 16  # the interpreter takes its time
    logits = (2 * torch.randn(n, 64, generator=rng)).bfloat16()
    target = torch.randint(64, (n,), generator=rng)
    assert 2 * factor * logits.float().logsumexp(-1).mean() < 2**-9
    grads = {}
    for z in (0.0, factor):
        hidden, rows, _ = own_logits(logits, rank)
        out = sharded_ce(
            hidden, rows, target, z_loss=z, process_group=dist.group.WORLD, backend=backend
        )
        out.loss_sum.backward()
        grads[z] = hidden.grad
    assert (grads[factor] != grads[0.0]).float().mean() > 0.01
    whole = logits.double().requires_grad_()
    lse = whole.logsumexp(-1)
    (F.cross_entropy(whole, target, reduction="sum") + factor * (lse**2).sum()).backward()
    error, lost = ((grads[x].double() - whole.grad).abs().sum() for x in (factor, 0.0))
    rounding = (whole.grad.bfloat16().double() - whole.grad).abs().sum()
    assert error < 2 * rounding
    assert error < lost


def logged(backend, rank):
    """A log-sum-exp that is only read changes no bit of the gradient."""
    rng = torch.Generator().manual_seed(7)
    n = 16 * 8 if backend == "torch" else 16  # the interpreter takes its time
    logits = (2 * torch.randn(n, 64, generator=rng)).bfloat16()
    target = torch.randint(64, (n,), generator=rng)
    grads = []
    for read in (False, True):
        hidden, rows, _ = own_logits(logits, rank)
        stats = sharded_logprobs(
            hidden, rows, target, process_group=dist.group.WORLD, backend=backend
        )
        if read:
            assert (stats.lse.detach() ** 2).mean().isfinite()
        (-stats.logprob).sum().backward()
        grads.append(hidden.grad)
    assert torch.equal(*grads)


def explicit_group(backend, rank):
    """Each rank alone in a group of its own has the loss of its two rows of logits."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.5, -0.5, 1.0]])
    target = torch.tensor([2, 0])
    losses = sharded_cross_entropy(
        logits, torch.eye(3), target, process_group=groups[rank], reduction="none", backend=backend
    )
    torch.testing.assert_close(losses, F.cross_entropy(logits, target, reduction="none"))


CASES = {
    f"{case.__name__}, {backend}": functools.partial(case, backend)
    for case in (counted_up, small_z_loss, logged, explicit_group)
    for backend in BACKENDS
}


@functools.cache
def results():
    return ranks.run(CASES, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_on_four_ranks(name):
    found = ranks.of(results(), name)
    assert all(x == found[0] for x in found)
