"""The training pass: chunks of logits by cuBLAS, their gradient in place, two more products.

A chunk holds its exponentials in the inputs' dtype; float32 logits exist for one tile of the
vocabulary at a time. The number of valid tokens is read once, since the host sets the sizes of
cuBLAS's products; inside a CUDA graph, which nothing may wait for, all rows are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends.plan import chunk_size
from fusedce.backends.triton import compact as common
from fusedce.backends.triton.chunks import Chunks
from fusedce.backends.triton.row_factors import Terms
from fusedce.contract.objective import PLAIN, Objective


def loss_and_grads(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    d_hidden: Tensor | None,  # (N, H) to fill
    d_weight: Tensor | None,  # (V, H) to fill
    d_bias: Tensor | None,  # (V,) to fill
    objective: Objective = PLAIN,  # with a soft-cap: no label smoothing
    argmax: Tensor | None = None,  # (N,) int64 to fill at valid rows
) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()``; the gradients of the sum go to the given buffers."""
    V, H = weight.shape
    device, dtype = hidden.device, hidden.dtype
    labels = labels.contiguous()
    with common.on(device):
        tickets = torch.empty(0, dtype=torch.int32, device=device)
        rows, count, n_valid, loss_sum = common.compact(
            labels, V, ignore_index, tickets, objective.token_weight
        )
        common.raise_on_cpu(n_valid, V, ignore_index)
        capturing = _capturing(device)
        n = len(labels) if capturing else int(count)  # the one host synchronisation
        if n == 0:
            for grad in (d_hidden, d_weight, d_bias):
                if grad is not None:
                    grad.zero_()
            return loss_sum, n_valid

        narrow = d_weight is not None and d_weight.dtype != torch.float32
        C = chunk_size(
            n,
            V,
            H,
            logit_bytes=dtype.itemsize,
            accumulator=narrow,
            on_cpu=False,
            chunk_tokens=chunk_tokens,
        )
        C = min(C, n)
        every_row = n == len(labels) and not capturing
        if d_hidden is not None and not every_row:
            d_hidden.zero_()
        d_weight_sum = d_weight
        if n > C and narrow:
            d_weight_sum = torch.empty(V, H, dtype=torch.float32, device=device)
        d_bias_sum = None if d_bias is None else torch.zeros(V, device=device)
        losses = torch.empty(n, dtype=torch.float32, device=device)
        chunks = Chunks(weight, bias, softcap, logit_scale, C)
        terms = None if objective.plain else Terms(objective, weight, bias, logit_scale)

        for begin in range(0, n, C):
            end = min(begin + C, n)
            chunk = slice(begin, end) if every_row else rows[begin:end].long()
            h, y = hidden[chunk], labels[chunk]  # (C, H), (C,)
            if capturing:  # ignored rows take part, as zeros
                padding = torch.arange(begin, end, device=device) >= count
                h = h.masked_fill(padding[:, None], 0)
            else:
                padding = None
            part = None if terms is None else terms.chunk(chunk, h, y, padding)
            best = None if argmax is None else argmax.new_empty(len(y))
            g = chunks.gradient(h, y, losses[begin:end], count, begin, part, best)  # (C, V)
            if argmax is not None and best is not None:
                argmax[chunk] = best if padding is None else best.masked_fill_(padding, -1)
            if part is not None:
                losses[begin:end] = part.losses(losses[begin:end])
            factors = None if part is None else part.rows
            if d_hidden is not None:
                mean = (None, None) if part is None else (part.mean_row, part.mean_factors)
                chunks.hidden_gradient(g, y, rows, begin, d_hidden, factors, *mean)
            chunks.add_head_gradients(g, h, d_weight_sum, d_bias_sum, factors, first=begin == 0)
        if terms is not None and terms.mean is not None:
            terms.mean.add_head_gradients(d_weight_sum, d_bias_sum)

        if d_weight is not None and d_weight_sum is not None and d_weight_sum is not d_weight:
            d_weight.copy_(d_weight_sum)
        if d_bias is not None and d_bias_sum is not None:
            d_bias.copy_(d_bias_sum)
        return losses.sum(dtype=torch.float64).float(), n_valid


def _capturing(device: torch.device) -> bool:
    """Inside a CUDA graph nothing may wait: then all rows are computed, the ignored ones as 0."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
