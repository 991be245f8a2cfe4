"""The Triton backend, token by token: statistics in one pass, gradients from logits made anew."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fusedce.backends.gradients import Gradients
from fusedce.backends.plan import chunk_size
from fusedce.backends.triton import archs
from fusedce.backends.triton.chunks import Chunks
from fusedce.backends.triton.compact import capturing, compact, on, raise_on_cpu
from fusedce.backends.triton.forward import (
    descriptor,
    has_options,
    input_precision,
    with_unit_strides,
)
from fusedce.contract.objective import Stats, Upstream
from fusedce.contract.problem import Problem, Wanted
from fusedce.kernels.stats import merge_stats_kernel, stats_kernel


def token_stats(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Stats:
    """One pass over the logits, which stay in registers; never waits for the GPU."""
    problem = with_unit_strides(problem)
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    labels, softcap = problem.labels, problem.softcap
    class_weight = problem.class_weight if wanted.zmean else None
    N, H = hidden.shape
    V = weight.shape[0]
    device = hidden.device
    family = archs.architecture(device)
    options = has_options(problem) or wanted.zmean
    config = archs.stats(family, hidden.element_size(), options=options)
    blocks = triton.cdiv(N, config.BLOCK_N)
    tiles_per_split, splits = archs.vocabulary_splits(V, config)
    weight_tiles = descriptor(weight, config)
    flags = {
        "HAS_ENTROPY": wanted.entropy,
        "HAS_ARGMAX": argmax is not None,
        "HAS_ZSUM": wanted.zmean,
    }

    def zeros(wanted: bool) -> Tensor:
        return torch.zeros(N if wanted else 0, dtype=torch.float32, device=device)

    nll, lse, entropy, zmean = (zeros(x) for x in (True, wanted.lse, wanted.entropy, wanted.zmean))
    if argmax is not None:
        argmax.fill_(-1)
    partials = torch.empty(4 if wanted.zmean else 3, splits, N, dtype=torch.float32, device=device)
    places = torch.empty(splits, 0 if argmax is None else N, dtype=torch.int32, device=device)
    z_labels = torch.empty(N, dtype=torch.float32, device=device)
    with on(device):
        packed = compact(problem)
        if N:
            stats_kernel[(blocks * splits,)](
                hidden,
                weight,
                weight if weight_tiles is None else weight_tiles,
                weight if bias is None else bias,
                nll if class_weight is None else class_weight.float().contiguous(),
                labels,
                packed.rows,
                packed.used,
                partials,
                places,
                z_labels,
                N,
                H,
                V,
                hidden.stride(0),
                weight.stride(0),
                problem.logit_scale,
                1.0 if softcap is None else softcap,
                tiles_per_split,
                splits,
                HAS_BIAS=bias is not None,
                HAS_SCALE=problem.logit_scale != 1.0,
                HAS_SOFTCAP=softcap is not None,
                HAS_CLASS_WEIGHT=class_weight is not None,
                BLOCK_N=config.BLOCK_N,
                BLOCK_V=config.BLOCK_V,
                BLOCK_H=config.BLOCK_H,
                GROUP_N=config.GROUP_N,
                EVEN_H=H % config.BLOCK_H == 0,
                DESCRIPTOR=weight_tiles is not None,
                INPUT_PRECISION=input_precision(hidden),
                UPCAST=device.type == "cpu",
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                **flags,
            )
            merge_stats_kernel[(triton.cdiv(N, archs.MERGE_BLOCK_N),)](
                partials,
                places,
                z_labels,
                labels,
                packed.rows,
                packed.used,
                nll,
                lse,
                entropy,
                zmean,
                places if argmax is None else argmax,
                N,
                V,
                splits,
                HAS_LSE=wanted.lse,
                BLOCK_N=archs.MERGE_BLOCK_N,
                num_warps=4,
                **flags,
            )
    raise_on_cpu(packed.n_valid, problem)
    return Stats(nll, lse, entropy, zmean, packed.n_valid)


def token_grads(
    problem: Problem,
    wanted: Wanted,
    lse: Tensor,  # (N,)
    upstream: Upstream,
) -> tuple[Tensor, Tensor, Tensor]:
    """The wanted gradients; reads the number of used tokens once, since cuBLAS needs it."""
    V, H = problem.weight.shape
    device, dtype = problem.hidden.device, problem.hidden.dtype
    problem = problem._replace(labels=problem.labels.contiguous())
    c = None if problem.class_weight is None else problem.class_weight.float().contiguous()
    with on(device):
        rows, count, *_ = compact(problem, used=upstream.used.float())
        graph = capturing(device)
        n = len(problem.labels) if graph else int(count)
        size = chunk_size(
            n,
            V,
            H,
            logit_bytes=dtype.itemsize,
            accumulator=wanted.weight and dtype != torch.float32,
            on_cpu=False,
            chunk_tokens=problem.chunk_tokens,
        )
        C = min(size, n)
        grads = Gradients(
            problem,
            wanted,
            dtype=dtype,
            chunks=-(-n // C) if n else 0,
            # In float16 the factors of the rows would not fit the gradient before they are in.
            accumulate=dtype == torch.float16,
        )
        if n == 0:
            return grads.written()
        chunks = Chunks(problem._replace(label_smoothing=0.0), C)
        for begin in range(0, n, C):
            chosen = rows[begin : min(begin + C, n)].long()
            h, y = problem.hidden[chosen], problem.labels[chosen]
            size_of_row, alpha, beta, gamma, at_label = _factors(upstream, chosen, c)
            if graph:  # unused rows take part, as zeros
                padding = torch.arange(begin, begin + len(y), device=device) >= count
                h = h.masked_fill(padding[:, None], 0)
                size_of_row.masked_fill_(padding, 0)
            g = chunks.known_gradient(
                h, y, lse[chosen], alpha, beta, gamma, at_label, c, count, begin
            )
            if grads.hidden is not None:
                chunks.hidden_gradient(g, y, rows, begin, grads.hidden, size_of_row, 1.0)
            chunks.add_head_gradients(g, h, grads, size_of_row, 1.0, first=begin == 0)
        return grads.written()


def _factors(
    upstream: Upstream, rows: Tensor, class_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """``size, alpha, beta, gamma, at_label`` of the rows, fp32; the last four divided by the first.

    So what the kernel stores is at most about 2 times the scale of the logits, whatever comes from
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
    # A power of two: the products' other operand takes it in without being rounded again.
    size = size.masked_fill_(size == 0, 1).log2_().floor_().exp2_()
    return (
        size.float(),
        (alpha / size).float(),
        None if beta is None else (beta / size).float(),
        None if gamma is None else (gamma / size).float(),
        (at_label / size).float(),
    )
