"""The Triton backend, token by token: statistics in one pass, gradients from logits made anew."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends.gradients import Dtypes, Gradients
from fusedce.backends.plan import chunk_size
from fusedce.backends.triton import archs
from fusedce.backends.triton.chunks import Chunks
from fusedce.backends.triton.compact import capturing, compact, on, raise_on_cpu
from fusedce.backends.triton.head_gradients import add_head_gradients
from fusedce.backends.triton.operands import (
    alignment,
    has_options,
    operands,
    padded,
    with_unit_strides,
)
from fusedce.contract.objective import Stats, Upstream
from fusedce.contract.problem import Problem, Wanted
from fusedce.kernels.stats import merge_stats_kernel, stats_kernel


def token_stats(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Stats:
    """One pass over the logits, which stay in registers; never waits for the GPU."""
    problem = with_unit_strides(problem)
    N, device = len(problem.hidden), problem.hidden.device
    arch = archs.architecture(device)
    walks = arch.walks(problem.hidden.element_size())
    blocks = walks.stats_with_options if has_options(problem) or wanted.zmean else walks.stats
    unit = alignment(problem)
    if unit == 1:
        blocks = walks.unaligned
    shared = operands(problem, blocks, unit)
    splits = shared["splits"]
    class_weight = problem.class_weight
    if class_weight is not None:
        class_weight = class_weight.float().contiguous() if wanted.zmean else None

    temperature = problem.temperature
    if temperature is not None:
        temperature = temperature.float().contiguous()

    def zeros(wanted: bool) -> Tensor:
        return torch.zeros(N if wanted else 0, dtype=torch.float32, device=device)

    nll, lse, entropy, zmean = (zeros(x) for x in (True, wanted.lse, wanted.entropy, wanted.zmean))
    if argmax is not None:
        argmax.fill_(-1)
    best = top = None
    if argmax is not None:
        top = zeros(True)
        best = torch.empty(splits, N, dtype=torch.int32, device=device)
    planes = iter(torch.empty(2 + wanted.entropy + wanted.zmean, splits, N, device=device).unbind())
    partials = {
        "maxima": next(planes),
        "sums": next(planes),
        "moments": next(planes) if wanted.entropy else None,
        "zsums": next(planes) if wanted.zmean else None,
        "best": best,
        "z_labels": torch.empty(N, dtype=torch.float32, device=device),
    }
    with on(device):
        packed = compact(problem)
        if N:
            stats_kernel[(-(-N // blocks.BLOCK_N) * splits,)](
                class_weight=class_weight,
                temperature=temperature,
                rows=packed.rows,
                count=packed.used,
                **partials,
                **shared,
            )
            merge_stats_kernel[(-(-N // arch.merge_block_n),)](
                labels=problem.labels,
                rows=packed.rows,
                count=packed.used,
                nll=nll,
                lse=lse if wanted.lse else None,
                entropy=entropy,
                zmean=zmean,
                argmax=argmax,
                highest=top,
                N=N,
                V=shared["V"],
                splits=splits,
                BLOCK_N=arch.merge_block_n,
                num_warps=4,
                **partials,
            )
    raise_on_cpu(packed.n_valid, problem)
    return Stats(nll, lse, entropy, zmean, packed.n_valid, top=top)


def token_grads(
    problem: Problem,
    wanted: Wanted,
    lse: Tensor,  # (N,)
    upstream: Upstream,
    dtypes: Dtypes,
) -> tuple[Tensor, Tensor, Tensor]:
    """The wanted gradients; reads the number of used tokens once, since cuBLAS needs it."""
    V, H = problem.weight.shape
    device, dtype = problem.hidden.device, problem.hidden.dtype
    problem = problem.but(labels=problem.labels.contiguous())
    c = None if problem.class_weight is None else padded(problem.class_weight.float())
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
            dtypes=dtypes,
            chunks=-(-n // C) if n else 0,
            # In float16 the factors of the rows would not fit the gradient before they are in.
            accumulate=dtype == torch.float16,
        )
        if n == 0:
            return grads.written()
        chunks = Chunks(problem.but(label_smoothing=0.0), C)
        for begin in range(0, n, C):
            chosen = rows[begin : min(begin + C, n)].long()
            h, y = problem.hidden[chosen], problem.labels[chosen]
            size_of_row, alpha, beta, gamma, at_label = _factors(upstream, chosen, c)
            temperature = None
            if problem.temperature is not None:
                temperature = problem.temperature[chosen].float()
            if graph:  # unused rows take part, as zeros
                padding = torch.arange(begin, begin + len(y), device=device) >= count
                h = h.masked_fill(padding[:, None], 0)
                size_of_row.masked_fill_(padding, 0)
            gradient = chunks.known_gradient(
                h, y, lse[chosen], temperature, alpha, beta, gamma, at_label, c, size_of_row,
                count, begin,
            )  # fmt: skip
            if grads.hidden is not None:
                chunks.hidden_gradient(gradient, rows, begin, grads.hidden, 1.0)
            add_head_gradients(chunks, grads, gradient, h, 1.0, first=begin == 0)
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
