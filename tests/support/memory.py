"""Functions that `fusedce.measure.peak_extra_bytes` measures in its tests."""

import mmap

import torch
import torch.distributed as dist

from fusedce import fused_ce, fused_cross_entropy, fused_kl, fused_logprobs
from fusedce.sharded import sharded_logprobs

N, H, V = 1024, 64, 16384  # fp32 logits: 64 MiB; weight and its gradient: 4 MiB each


def step(dtype: str, grad: bool, memory_budget: int | None = None):
    chunk = 64 if memory_budget is None else None

    def inputs(n, v):
        rng = torch.Generator().manual_seed(0)
        kind = getattr(torch, dtype)
        hidden = torch.randn(n, H, generator=rng).to(kind).requires_grad_(grad)
        weight = (0.1 * torch.randn(v, H, generator=rng)).to(kind).requires_grad_(grad)
        return hidden, weight, torch.randint(0, v, (n,), generator=rng)

    def run(hidden, weight, labels):
        out = fused_ce(hidden, weight, labels, chunk_tokens=chunk, memory_budget=memory_budget)
        if grad:
            out.loss_sum.backward()
        return out

    run(*inputs(130, 2048))  # several chunks and tiles
    given = inputs(N, V)
    return lambda: run(*given)


def compared(dtype: str, memory_budget: int, divergence: str | None):
    """A step of a divergence from a teacher; of given probabilities where it is ``None``."""

    def inputs(n, v):
        rng = torch.Generator().manual_seed(0)
        kind = getattr(torch, dtype)
        heads = []
        for width in (H, 2 * H):
            hidden = torch.randn(n, width, generator=rng).to(kind)
            heads += [hidden, (0.1 * torch.randn(v, width, generator=rng)).to(kind)]
        given = torch.rand(n, v, generator=rng).to(kind) if divergence is None else None
        return [heads[0].requires_grad_(), heads[1].requires_grad_(), *heads[2:]], given

    def run(heads, given):
        if given is not None:
            loss = fused_cross_entropy(*heads[:2], given, memory_budget=memory_budget)
        else:
            loss = fused_kl(*heads, divergence=divergence, memory_budget=memory_budget).mean()
        loss.backward()

    run(*inputs(130, 2048))
    given = inputs(N, V)
    return lambda: run(*given)


def several_classes(dtype: str, memory_budget: int, K: int):
    """A step of the log-probabilities of K classes a token."""

    def inputs(n, v):
        rng = torch.Generator().manual_seed(0)
        kind = getattr(torch, dtype)
        hidden = torch.randn(n, H, generator=rng).to(kind).requires_grad_()
        weight = (0.1 * torch.randn(v, H, generator=rng)).to(kind).requires_grad_()
        return hidden, weight, torch.randint(0, v, (n, K), generator=rng)

    def run(hidden, weight, classes):
        stats = fused_logprobs(hidden, weight, classes, memory_budget=memory_budget)
        (stats.logprob.sum() + stats.entropy.sum()).backward()

    run(*inputs(130, 2048))
    given = inputs(N, V)
    return lambda: run(*given)


def sharded_tokens(dtype: str, memory_budget: int | None):
    """A step of the log-probabilities of each token, all rows of the head on the one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def inputs(n, v):
        rng = torch.Generator().manual_seed(0)
        kind = getattr(torch, dtype)
        hidden = torch.randn(n, H, generator=rng).to(kind).requires_grad_()
        weight = (0.1 * torch.randn(v, H, generator=rng)).to(kind).requires_grad_()
        return hidden, weight, torch.randint(0, v, (n,), generator=rng)

    def run(hidden, weight, labels):
        stats = sharded_logprobs(
            hidden, weight, labels, process_group=dist.group.WORLD, memory_budget=memory_budget
        )
        (stats.logprob.sum() + stats.entropy.sum()).backward()

    run(*inputs(130, 2048))
    given = inputs(N, V)
    return lambda: run(*given)


def eager_forward():
    hidden, weight = torch.ones(N, H), torch.ones(V, H)
    torch.nn.functional.linear(hidden[:64], weight[:2048])
    return lambda: torch.nn.functional.linear(hidden, weight)


def known(kept: int, freed: int, read: str | None = None):
    """Holds ``freed`` MiB for a while, then ``kept`` MiB; reads a file through pages of its own."""

    def allocate(mib):
        return torch.ones(mib << 20, dtype=torch.uint8)

    def call():
        pages = None
        if read is not None:
            with open(read, "rb") as file:
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            assert sum(pages[:: mmap.PAGESIZE]) == 0
        held = allocate(freed)
        del held
        return allocate(kept), pages

    allocate(1)
    return call
