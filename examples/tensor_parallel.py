"""A head whose vocabulary is sharded over ranks: each computes its part of the loss.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Look at: `process_group=` is all that is new. The loss is the whole one on every rank, and each
rank's weight gradient is that of its own rows. Replicas of the same tokens are counted once:
`LossAccumulator` gets a mesh without the tensor-parallel dimension, here no group at all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import fusedce

V, H, N = 1000, 32, 24


def one_loss() -> tuple[float, float]:
    """Loss and the norm of the head's whole gradient, computed with the vocabulary in parts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same on every rank
    hidden, weight = torch.randn(N, H), torch.randn(V, H) / H**0.5
    labels = torch.randint(V, (N,))
    rows = weight.tensor_split(world)[rank].clone().requires_grad_()
    out = fusedce.fused_ce(hidden, rows, labels, process_group=dist.group.WORLD)
    out.mean().backward()
    assert rows.grad is not None
    squared = rows.grad.square().sum()
    dist.all_reduce(squared)
    return out.mean().item(), squared.sqrt().item()


def whole() -> tuple[float, float]:
    """The same on one rank."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H), torch.randn(V, H) / H**0.5
    weight.requires_grad_()
    out = fusedce.fused_ce(hidden, weight, torch.randint(V, (N,)))
    out.mean().backward()
    assert weight.grad is not None
    return out.mean().item(), weight.grad.norm().item()


def main() -> None:
    dist.init_process_group("gloo")
    loss, norm = one_loss()
    if dist.get_rank() == 0:
        print(f"in parts: loss {loss:.6f}, gradient {norm:.6f}")
        print("whole:    loss {:.6f}, gradient {:.6f}".format(*whole()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
