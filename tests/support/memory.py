"""Functions that `lib.peaks.peak_extra_bytes` measures in its tests."""

import functools

import torch
import torch.distributed as dist

from fusedce import fused_ce, fused_kl, fused_logprobs, replace_loss_head
from fusedce.sharded import sharded_logprobs

N, H, V = 1024, 64, 16384  # fp32 logits: 64 MiB; weight and its gradient: 4 MiB each


def measured(run, dtype, grad=True):
    """``run(hidden, weight, rng)`` of these sizes, called before on some chunks and tiles."""

    def call(n, v):
        rng = torch.Generator().manual_seed(0)
        kind = getattr(torch, dtype)
        hidden = torch.randn(n, H, generator=rng).to(kind).requires_grad_(grad)
        weight = (0.1 * torch.randn(v, H, generator=rng)).to(kind).requires_grad_(grad)
        return run(hidden, weight, rng)

    call(130, 2048)()
    return call(N, V)


def step(dtype: str, grad: bool, memory_budget: int | None = None):
    chunk = 64 if memory_budget is None else None

    def made(hidden, weight, rng):
        labels = torch.randint(len(weight), hidden.shape[:1], generator=rng)

        def run():
            out = fused_ce(hidden, weight, labels, chunk_tokens=chunk, memory_budget=memory_budget)
            if grad:
                out.loss_sum.backward()
            return out

        return run

    return measured(made, dtype, grad)


def compared(dtype: str, memory_budget: int, divergence: str):
    """A step of a divergence from a teacher."""

    def made(hidden, weight, rng):
        n, v = len(hidden), len(weight)
        teacher = [torch.randn(x, 2 * H, generator=rng).to(hidden) / 10 for x in (n, v)]

        def run():
            out = fused_kl(
                hidden, weight, *teacher, divergence=divergence, memory_budget=memory_budget
            )
            out.mean().backward()

        return run

    return measured(made, dtype)


def several_classes(dtype: str, memory_budget: int, K: int | None, function=fused_logprobs):
    """A step of the log-probabilities of K classes a token."""

    def made(hidden, weight, rng):
        shape = (len(hidden), *([] if K is None else [K]))
        classes = torch.randint(len(weight), shape, generator=rng)

        def run():
            stats = function(hidden, weight, classes, memory_budget=memory_budget)
            (stats.logprob.sum() + stats.entropy.sum()).backward()

        return run

    return measured(made, dtype)


def sharded_tokens(dtype: str, memory_budget: int):
    """A step of the log-probabilities of each token, all rows of the head on the one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded = functools.partial(sharded_logprobs, process_group=dist.group.WORLD)
    return several_classes(dtype, memory_budget, None, sharded)


def tied():
    """A step of a model whose head is its embedding, of 32 MiB; a chunk of logits is 4 MiB."""
    model = torch.nn.Sequential(torch.nn.Embedding(V, 512), torch.nn.Linear(512, V, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.grad = torch.zeros(V, 512)
    replace_loss_head(model, head=model[1])
    x = torch.arange(64)
    return lambda: torch.nn.functional.cross_entropy(model(x), x).backward()


def pieces(count: int, calls: bool):
    """A loss in pieces, of logits or of ``calls`` of the head, whose weight has 32 MiB."""
    head = replace_loss_head(torch.nn.Linear(512, V, bias=False))
    head.weight.grad = torch.zeros(V, 512)
    h, y = torch.randn(128, 512, requires_grad=True), torch.arange(128)

    def call():
        parts = map(head, h.chunk(count)) if calls else head(h).chunk(count)
        losses = map(torch.nn.functional.cross_entropy, parts, y.chunk(count))
        sum(losses).backward()

    return call


def known(kept: int, freed: int):
    """Holds ``freed`` MiB for a while, then ``kept`` MiB."""

    def allocate(mib):
        return torch.ones(mib << 20, dtype=torch.uint8)

    def call():
        held = allocate(freed)
        del held
        return allocate(kept)

    allocate(1)
    return call
