"""The Triton backend, token by token: statistics in one pass, gradients from logits made anew."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fusedce.backends.plan import chunk_size
from fusedce.backends.triton import archs as configs
from fusedce.backends.triton import compact as common
from fusedce.backends.triton import forward as one_pass
from fusedce.backends.triton import training as launch_training
from fusedce.backends.triton.chunks import Chunks
from fusedce.contract.objective import Stats, Upstream
from fusedce.kernels.stats import merge_stats_kernel, stats_kernel


def token_stats(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    class_weight: Tensor | None,  # (V,) of zmean
    token_weight: Tensor | None,  # (N,): tokens of weight 0 are left out
    want_entropy: bool,
    want_argmax: bool,
    want_zmean: bool,
) -> Stats:
    """One pass over the logits, which stay in registers; never waits for the GPU."""
    hidden = one_pass.unit_stride("hidden", hidden)
    weight = one_pass.unit_stride("weight", weight)
    labels = labels.contiguous()
    N, H = hidden.shape
    V = weight.shape[0]
    device = hidden.device
    options = bias is not None or logit_scale != 1.0 or softcap is not None or want_zmean
    family = configs.architecture(device)
    config = configs.stats(family, hidden.element_size(), options=options)
    blocks = triton.cdiv(N, config.BLOCK_N)
    tiles_per_split, splits = configs.vocabulary_splits(V, config)
    weight_tiles = one_pass.descriptor(weight, config)
    flags = {"HAS_ENTROPY": want_entropy, "HAS_ARGMAX": want_argmax, "HAS_ZSUM": want_zmean}

    def zeros(wanted: bool) -> Tensor:
        return torch.zeros(N if wanted else 0, dtype=torch.float32, device=device)

    nll, lse, entropy, zmean = (zeros(x) for x in (True, True, want_entropy, want_zmean))
    argmax = torch.full((N if want_argmax else 0,), -1, dtype=torch.int64, device=device)
    partials = torch.empty(4 if want_zmean else 3, splits, N, dtype=torch.float32, device=device)
    places = torch.empty(splits, N if want_argmax else 0, dtype=torch.int32, device=device)
    z_labels = torch.empty(N, dtype=torch.float32, device=device)
    tickets = torch.empty(0, dtype=torch.int32, device=device)
    with common.on(device):
        rows, count, n_valid, _ = common.compact(labels, V, ignore_index, tickets, token_weight)
        if N:
            stats_kernel[(blocks * splits,)](
                hidden,
                weight,
                weight if weight_tiles is None else weight_tiles,
                weight if bias is None else bias.contiguous(),
                nll if class_weight is None else class_weight.float().contiguous(),
                labels,
                rows,
                count,
                partials,
                places,
                z_labels,
                N,
                H,
                V,
                hidden.stride(0),
                weight.stride(0),
                logit_scale,
                1.0 if softcap is None else softcap,
                tiles_per_split,
                splits,
                HAS_BIAS=bias is not None,
                HAS_SCALE=logit_scale != 1.0,
                HAS_SOFTCAP=softcap is not None,
                HAS_CLASS_WEIGHT=class_weight is not None,
                BLOCK_N=config.BLOCK_N,
                BLOCK_V=config.BLOCK_V,
                BLOCK_H=config.BLOCK_H,
                GROUP_N=config.GROUP_N,
                EVEN_H=H % config.BLOCK_H == 0,
                DESCRIPTOR=weight_tiles is not None,
                INPUT_PRECISION=one_pass.input_precision(hidden),
                UPCAST=device.type == "cpu",
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                **flags,
            )
            merge_stats_kernel[(triton.cdiv(N, configs.MERGE_BLOCK_N),)](
                partials,
                places,
                z_labels,
                labels,
                rows,
                count,
                nll,
                lse,
                entropy,
                zmean,
                argmax,
                N,
                V,
                splits,
                BLOCK_N=configs.MERGE_BLOCK_N,
                num_warps=4,
                **flags,
            )
    common.raise_on_cpu(n_valid, V, ignore_index)
    return Stats(nll, lse, entropy, zmean, argmax, n_valid)


def token_grads(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    class_weight: Tensor | None,  # (V,)
    chunk_tokens: int | None,
    lse: Tensor,  # (N,)
    upstream: Upstream,
    d_hidden: Tensor | None,  # (N, H) to fill
    d_weight: Tensor | None,  # (V, H) to fill
    d_bias: Tensor | None,  # (V,) to fill
) -> None:
    """Fill the gradients; reads the number of used tokens once, since cuBLAS needs it."""
    V, H = weight.shape
    device, dtype = hidden.device, hidden.dtype
    labels = labels.contiguous()
    c = None if class_weight is None else class_weight.float().contiguous()
    with common.on(device):
        tickets = torch.empty(0, dtype=torch.int32, device=device)
        rows, count, *_ = common.compact(labels, V, ignore_index, tickets, upstream.used.float())
        capturing = launch_training._capturing(device)
        n = len(labels) if capturing else int(count)
        for grad in (d_hidden, d_weight, d_bias):
            if grad is not None and (n == 0 or grad is d_hidden):
                grad.zero_()
        if n == 0:
            return
        narrow = d_weight is not None and d_weight.dtype != torch.float32
        C = chunk_size(
            n, V, H,
            logit_bytes=dtype.itemsize, accumulator=narrow, on_cpu=False, chunk_tokens=chunk_tokens,
        )  # fmt: skip
        C = min(C, n)
        d_weight_sum = d_weight
        # In float16 the factors of the rows would not fit the gradient before they are in.
        if d_weight is not None and narrow and (n > C or dtype == torch.float16):
            d_weight_sum = torch.empty(V, H, dtype=torch.float32, device=device)
        d_bias_sum = None if d_bias is None else torch.zeros(V, device=device)
        chunks = Chunks(weight, bias, softcap, logit_scale, C)
        for begin in range(0, n, C):
            chosen = rows[begin : min(begin + C, n)].long()
            h, y = hidden[chosen], labels[chosen]
            if capturing:  # unused rows take part, as zeros
                padding = torch.arange(begin, begin + len(y), device=device) >= count
                h = h.masked_fill(padding[:, None], 0)
            size, alpha, beta, gamma, at_label = _factors(upstream, chosen, c)
            if capturing:
                size.masked_fill_(padding, 0)
            g = chunks.known_gradient(
                h, y, lse[chosen], alpha, beta, gamma, at_label, c, count, begin
            )
            if d_hidden is not None:
                chunks.hidden_gradient(g, y, rows, begin, d_hidden, size)
            chunks.add_head_gradients(g, h, d_weight_sum, d_bias_sum, size, first=begin == 0)
        if d_weight is not None and d_weight_sum is not None and d_weight_sum is not d_weight:
            d_weight.copy_(d_weight_sum)
        if d_bias is not None and d_bias_sum is not None:
            d_bias.copy_(d_bias_sum)


def _factors(
    upstream: Upstream, rows: Tensor, class_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """``size, alpha, beta, gamma, at_label`` of the rows, fp32; the last four divided by the first.

    So what the kernel stores is at most about 1 times the scale of the logits, whatever comes from
    upstream, as the range of float16 asks for.
    """
    alpha, at_label = upstream.alpha[rows], upstream.at_label[rows]
    beta = None if upstream.beta is None else upstream.beta[rows].double()
    gamma = None if upstream.gamma is None else upstream.gamma[rows].double()
    size = alpha.abs() + at_label.abs()
    if beta is not None:
        size += beta.abs()
    if gamma is not None:
        size += gamma.abs() * (1.0 if class_weight is None else class_weight.abs().amax())
    size.masked_fill_(size == 0, 1)
    return (
        size.float(),
        (alpha / size).float(),
        None if beta is None else (beta / size).float(),
        None if gamma is None else (gamma / size).float(),
        (at_label / size).float(),
    )
