"""Divergence from a teacher: products by cuBLAS, and one kernel.

A chunk's logits are float32; the kernel writes the gradient of the student's logits over the
student's logits (:mod:`fusedce.kernels.divergence_rows`). The number of tokens is read once, since
the host sets the sizes of the products; inside a CUDA graph, which nothing may wait for, all rows
are computed, ignored ones as zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract.problem import KINDS, Divergence, Outputs, Problem
from ...kernels.divergence_rows import EDGE, divergence_rows_kernel
from ..devices import capturing
from ..gradients import Gradients, Summed, allocate, saved_grad_dtypes, sizes_of
from ..plan import FEW_CHUNKS, Plan, choose_plan, multiple_of_16, power_of_2
from . import archs
from .head_gradients import add_to_bias
from .launch import (
    compact,
    device_guard,
    launch_grid,
    pointwise,
    raise_on_cpu,
)
from .products import add_product, product, scaled_by
from .sum_grads import rows_and_factor

_GRAD_SCALE = 2.0**13  # of float16, whose probabilities would underflow


def divergence_and_grads(problem: Problem, divergence: Divergence, wanted: Outputs) -> Summed:
    """Each token's loss, and the wanted gradients of their sum; holds a chunk of both logits."""
    hidden, labels = problem.hidden, problem.labels.contiguous()
    problem = problem.replace(labels=labels)
    (N, H), device, dtype = hidden.shape, hidden.device, hidden.dtype
    with device_guard(device):
        packed, dtypes = compact(problem), saved_grad_dtypes(problem)
        raise_on_cpu(packed.n_valid, problem)
        n, outer, factor = rows_and_factor(problem, packed)
        plan = choose_plan(
            sizes_of(problem, wanted, n, dtypes, triton=True).with_teacher(
                *divergence.teacher_sizes()
            ),
            chunk_tokens=problem.chunk_tokens,
            memory_budget=problem.memory_budget,
        )
        C = min(plan.tokens, n)
        grads = Gradients(
            problem, wanted, dtypes=dtypes, chunks=-(-n // C) if n else 0,
            wide=plan.name != FEW_CHUNKS,
        )  # fmt: skip
        losses = torch.zeros(N, dtype=torch.float32, device=device)
        if n == 0:
            return Summed(losses, packed.n_valid, factor, *grads.cast_out())
        V, y, w = len(problem.weight), problem.labels, problem.token_weight
        weights = torch.ones_like(y, dtype=torch.float32) if w is None else w.float()
        # A token with a bad label must be computed, so that its NaN is reported.
        weights = weights.masked_fill(problem.valid() & ((y < 0) | (y >= V)), 1)
        rows = packed.rows[:n].long()
        left_out = None
        if capturing(device):  # all rows take part, and those that do not count as zeros
            left_out = torch.arange(n, device=device) >= packed.used
            weights[rows] = weights[rows].masked_fill(left_out, 0)
        chunk = _Chunk(problem, divergence, plan, wanted)
        scratch = chunk.of_teacher.view(-1)  # once a chunk's bias is summed
        outer *= problem.logit_scale / divergence.temperature
        for begin in range(0, n, C):
            some = rows[begin : begin + C]
            h = hidden[some]
            if left_out is not None:
                h = h.masked_fill(left_out[begin : begin + C, None], 0)
            lost, g, grads_fp32, factors = chunk.gradient(h, some, labels[some], weights[some])
            losses[some] = lost
            if g is None:
                continue
            alpha = outer / chunk.grad_scale
            if grads.hidden is not None:
                dh = torch.empty(len(h), H, dtype=torch.float32, device=device)
                product(device, dtype)(g, chunk.weight, out=dh)
                if factors is not None:
                    dh.mul_(factors[:, None])
                grads.hidden[some] = dh.mul_(alpha).to(grads.hidden.dtype)
            if grads.bias is not None:
                add_to_bias(grads.bias, grads_fp32, factors, alpha, scratch)
            if grads.weight is not None:
                h, largest = scaled_by(h, factors)
                add_product(
                    grads.weight, g.t(), h, alpha, largest, first=begin == 0, scratch=scratch
                )
        return Summed(losses, packed.n_valid, factor, *grads.cast_out())


class _Chunk:
    """The heads' logits of one chunk after another, in the same buffers."""

    def __init__(
        self, problem: Problem, divergence: Divergence, plan: Plan, wanted: Outputs
    ) -> None:
        weight, device = problem.weight, problem.weight.device
        self.weight, self.divergence, self.bias = weight, divergence, wanted.bias
        self.train = any(wanted.gradients())
        arch, V = archs.architecture(device), len(weight)
        width = multiple_of_16(V)
        self.scale_rows = weight.dtype == torch.float16 and self.train
        self.grad_scale = _GRAD_SCALE if self.scale_rows else 1.0
        student, teacher = divergence.student(problem), divergence.teacher()
        self.common: dict[str, Any] = {
            **pointwise(student),
            **{f"teacher_{name}": x for name, x in pointwise(teacher).items()},
            "V": V,
            "width": width,
            "SCALE_ROWS": self.scale_rows,
            "GRAD_SCALE": self.grad_scale,
            # 4 classes a thread: with 8, float16's jsd with every option spills on every device.
            "BLOCK_V": min(power_of_2(V), arch.divergence_block_v),
            "num_warps": 8,
            "beta": divergence.beta,
            "one_minus_beta": 1.0 - divergence.beta,
            "of_ce": divergence.ce_weight,
            "temperature": divergence.temperature,
            "KIND": EDGE.value if divergence.is_uneven() else KINDS.index(divergence.kind),
            "HAS_CE": divergence.ce_weight != 0,
        }
        logits = allocate(plan, "logits of a chunk", torch.float32, device)
        self.of_student, self.of_teacher = logits.unbind()

    def gradient(
        self,
        h: Tensor,  # (C, H)
        some: Tensor,  # (C,) positions
        y: Tensor,  # (C,)
        weights: Tensor,  # (C,) fp32
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Losses ``(C,)``; gradient ``(C, V)`` of the logits, ``grad_scale`` times; the same in
        float32, where a bias sums it; rows' factors."""
        C, V, device = len(h), len(self.weight), h.device
        s = self.of_student[:C]
        product(device, h.dtype)(h, self.weight.t(), out=s[:, :V])
        g = s if h.element_size() == 4 else s.view(h.dtype)  # (C, 2 * width)
        losses = torch.empty(C, dtype=torch.float32, device=device)
        factors = torch.empty_like(losses) if self.scale_rows else None
        hidden, weight = self.divergence[:2]
        there, t = hidden[some], self.of_teacher[:C]
        product(device, there.dtype)(there, weight.t(), out=t[:, :V])
        launch_grid(
            divergence_rows_kernel,
            (C,),
            student=s,
            teacher=t,
            grads=g if self.train else None,
            grads_fp32=t if self.bias and g is not s else None,
            labels=y,
            token_weight=weights,
            losses=losses,
            row_factors=factors,
            stride_g=g.stride(0),
            **self.common,
        )
        grads_fp32 = s if g is s else t
        return losses, g[:, :V] if self.train else None, grads_fp32[:, :V], factors
