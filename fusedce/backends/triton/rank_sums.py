"""Reference and sum of a row's exponentials over all ranks: one exchange per chunk."""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from fusedce.backends.sharded.exchange import Shard, all_gather
from fusedce.backends.triton import archs
from fusedce.backends.triton.exponentials import Exponentials
from fusedce.kernels.shards import merge_shards_kernel, shard_sums_kernel


class Peers:
    """The other ranks of a shard, and the labels' logits of the rows that count."""

    def __init__(
        self,
        shard: Shard,
        y: Tensor,  # (n,) int labels among all classes
        z_label: Tensor,  # (n,) fp32 their logits, NaN for bad labels
        *,
        empty: bool,  # no class lies here
    ) -> None:
        self.shard, self.y, self.z_label, self.empty = shard, y, z_label, empty

    def merged(
        self,
        exponentials: Exponentials,  # to fill
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,) labels as rows here; -1 for those elsewhere
        first: int,  # number of the chunk's first row
        losses: Tensor,  # (C,) fp32 to fill
        lse: Tensor | None,  # (C,) fp32 to fill
        best: Tensor | None,  # scratch for argmax
        argmax: Tensor | None,  # (N,) int64 to fill at `rows`
        rows: Tensor,  # (N,) int32
    ) -> Tensor:
        """``(2, C)``: reference and sum of the rows' exponentials over all ranks.

        One all-gather of 2 float32 a row, 4 with argmax.
        """
        C = len(h)
        z_label = self.z_label[first : first + C]
        if self.empty:
            exponentials.clear()
            exponentials.z_label = z_label
            if best is not None:
                best.zero_()
        else:
            exponentials.fill(h, y, best, z_label)
        planes, block = 2 if best is None else 4, archs.architecture(h.device).merge_block_n
        mine = z_label.new_empty(planes * C)
        shard_sums_kernel[(triton.cdiv(C, block),)](
            maxima=exponentials.maxima,
            sums=exponentials.sums,
            z_label=z_label,
            best=best,
            table=mine,
            C=C,
            blocks=exponentials.blocks,
            first_class=self.shard.first,
            OWN_REFERENCES=exponentials.own_references,
            BLOCK_C=block,
            num_warps=4,
        )
        table = all_gather(mine, self.shard.group)
        return merge(table, z_label, self.y, losses, lse, argmax, rows, first, self.shard)


def merge(
    table: Tensor,  # (ranks * planes * C,) fp32
    z_label: Tensor,  # (C,) fp32
    y: Tensor,  # (n,) int labels among all classes
    losses: Tensor,  # (C,) fp32 to fill
    lse: Tensor | None,  # (C,) fp32 to fill
    argmax: Tensor | None,  # (N,) int64 to fill at rows
    rows: Tensor | None,  # (N,) int32
    first: int,
    shard: Shard,
) -> Tensor:
    """``(2, C)`` reference and sum over all ranks; the losses, the same bits on each of them."""
    C, ranks = len(z_label), dist.get_world_size(shard.group)
    merged = torch.empty(2 * C, dtype=torch.float32, device=table.device)
    block = archs.architecture(table.device).merge_block_n
    merge_shards_kernel[(triton.cdiv(C, block),)](
        table=table,
        z_label=z_label,
        labels=None if argmax is None else y[first : first + C],
        merged=merged,
        losses=losses,
        lse=lse,
        argmax=argmax,
        rows=None if argmax is None else rows,
        C=C,
        ranks=ranks,
        first=first,
        PLANES=len(table) // (ranks * C),
        BLOCK_C=block,
        num_warps=4,
    )
    return merged
