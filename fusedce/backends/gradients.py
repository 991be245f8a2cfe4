"""The buffers of the gradients: allocated, added to chunk by chunk, written out once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..contract.problem import ACC_DTYPE, Outputs, Problem, Task
from .devices import memory_of
from .plan import WALK_STEP, Plan, Sizes, choose_plan, device_budget, plan_tiles


class Dtypes(NamedTuple):
    """Dtypes of the gradients."""

    hidden: torch.dtype
    weight: torch.dtype
    bias: torch.dtype


def input_dtypes(problem: Problem) -> Dtypes:
    """Gradients in the dtypes of their inputs."""
    return Dtypes(*[problem.hidden.dtype] * 3)


def saved_grad_dtypes(problem: Problem) -> Dtypes:
    """Dtypes in which the gradients of a sum wait for their upstream factor.

    In float32 they are rounded once, whatever factor arrives. The weight's waits in its own dtype,
    to save memory: a factor that was not expected costs it a second rounding. So does that of
    hidden on a GPU where a memory budget was given. For float16 both wait in float32, since the
    gradient of a sum can overflow float16 where that of a mean does not.
    """
    dtype = problem.hidden.dtype
    acc = ACC_DTYPE[dtype]
    own = acc if dtype == torch.float16 else dtype
    limited = problem.memory_budget is not None and problem.by_triton()
    return Dtypes(own if limited else acc, own, acc)


def expected_upstream(problem: Problem, n_valid: Tensor) -> Tensor:
    """The factor ``()`` in fp32 or fp64 by which gradients are multiplied before rounding.

    It is the problem's expected upstream gradient, or the one of :meth:`LossSum.mean`, as a new
    tensor that an operator may return. Backward multiplies by the real upstream gradient over this
    factor, and skips the product where that is 1. Another upstream gradient costs the weight's
    gradient, kept in the weight's dtype, a second rounding.
    """
    if problem.expected_upstream is not None:
        return problem.expected_upstream.clone()
    dtype = ACC_DTYPE[problem.hidden.dtype]
    if n_valid.device.type == "cpu":
        return torch.full((), 1 / max(int(n_valid), 1), dtype=dtype, device="cpu")
    return n_valid.to(dtype).clamp_(min=1).reciprocal_()


def sizes_of(
    problem: Problem,
    wanted: Outputs,
    n: int,  # tokens that are computed
    dtypes: Dtypes | None = None,  # of the gradients; by default those of the inputs
    *,
    logit: int | None = None,  # bytes a chunk holds of each logit; default: those of an input
    triton: bool = False,
    **blocks: int,  # of classes: see `Sizes`
) -> Sizes:
    """Read from a problem what a plan depends on."""
    (N, H), V = problem.hidden.shape, problem.weight.shape[0]
    element = problem.hidden.element_size()
    return Sizes(
        n,
        N,
        V,
        H,
        element,
        element if logit is None else logit,
        wide_weight=dtypes is not None and dtypes.weight != problem.weight.dtype,
        wide_hidden=dtypes is None or dtypes.hidden != problem.hidden.dtype,
        hidden=wanted.hidden,
        weight=wanted.weight,
        bias=wanted.bias,
        on_cpu=problem.hidden.device.type == "cpu" and not triton,
        triton=triton,
        copies=2 if problem.softcap is None else 4,
        fp16=problem.hidden.dtype == torch.float16,
        threads=torch.get_num_threads(),
        budget=device_budget(memory_of(problem.hidden.device)),
        **blocks,
    ).with_copies(*copied_bytes(problem, V) if triton else (0, 0))


def is_row_major(x: Tensor, step: int) -> bool:
    """Whether ``x (n, H)`` has its rows in memory, and, for a ``step`` above 1, can be walked over.

    Then rows are a multiple of ``step`` long and start at multiples of 16 bytes, which are loaded
    at once.
    """
    if x.stride(1) != 1 or step == 1:
        return x.stride(1) == 1
    starts = x.storage_offset() * x.element_size(), x.stride(0) * x.element_size()
    return x.stride(0) > 0 and not any(at % 16 for at in starts) and x.shape[1] % step == 0


def copied_bytes(problem: Problem, V: int) -> tuple[int, int]:
    """Bytes of copies of hidden ``(N, H)`` and weight ``(V, H)`` that the Triton backend makes.

    Those of rows that are not in memory, and those of rows that cannot be walked over.
    """
    (N, H), element = problem.hidden.shape, problem.hidden.element_size()

    def copied(step: int) -> int:
        rows = sum(
            n for x, n in ((problem.hidden, N), (problem.weight, V)) if not is_row_major(x, step)
        )
        return rows * (-(-H // step) * step) * element

    return copied(1), copied(WALK_STEP)


def check_budget(problem: Problem, call: Sizes) -> None:
    """Raise ValueError where a pass over tokens, or its backward pass, exceeds the budget.

    ``call`` is of all tokens and of the gradients that backward will be asked for.
    """
    if problem.memory_budget is not None:
        plan_tiles(_of_backward(call), memory_budget=problem.memory_budget)


def check_divergence_budget(task: Task) -> None:
    """Raise ValueError where the losses of a divergence's tokens, or backward, exceed the budget.

    A shard's plan has room for all gradients from the start.
    """
    problem, wanted, divergence, shard = task
    if problem.memory_budget is None or divergence is None or shard is not None:
        return
    n, triton = len(problem.labels), problem.by_triton()
    call = sizes_of(problem, wanted, n, saved_grad_dtypes(problem), triton=triton)
    call = _of_backward(call).with_teacher(*divergence.teacher_sizes())
    choose_plan(call, memory_budget=problem.memory_budget)


def _of_backward(call: Sizes) -> Sizes:
    """Backward leaves out tokens whose gradient is 0; the Triton backend gathers the others."""
    gathers = call.triton and (call.hidden or call.weight or call.bias)
    return call._replace(N=max(call.N, call.n + 1)) if gathers else call


def allocate(plan: Plan, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The memory that a plan counts under ``name``, empty."""
    shape, element = plan.buffers[name]
    if element != dtype.itemsize:
        raise AssertionError(f"{name}: the plan has {element} bytes an element, not {dtype}")
    return torch.empty(shape, dtype=dtype, device=device)


class Summed(NamedTuple):
    """A loss sum (or the losses by token) and the gradients of the sum."""

    loss: Tensor  # () fp32 or fp64; or (N,), 0 at positions left out
    n_valid: Tensor  # () int64
    factor: Tensor  # () dtype of loss: what the gradients are multiplied by
    d_hidden: Tensor  # (N, H), or (0,) where not wanted; so the others
    d_weight: Tensor
    d_bias: Tensor


class Gradients:
    """Gradients of hidden, weight and bias; ``None`` where not wanted.

    The weight's is summed over the chunks in float32 (float64), or in its final dtype if there is
    but one chunk, or if the plan says so.
    """

    def __init__(
        self,
        problem: Problem,
        wanted: Outputs,
        *,
        dtypes: Dtypes,
        chunks: int,  # 0: all gradients are 0
        every_row: bool = False,  # every row of hidden will be written
        by_tiles: bool = False,  # the weight's rows are written once, and hidden's added up
        wide: bool = True,  # sum the weight's gradient of several chunks in float32
    ) -> None:
        hidden, weight, bias = problem.hidden, problem.weight, problem.bias
        device = self.device = hidden.device
        acc = ACC_DTYPE[hidden.dtype]
        self.dtypes = dtypes
        self.hidden = self.weight = self.bias = None
        if wanted.hidden:
            fill = torch.empty if every_row and chunks else torch.zeros
            dtype = acc if by_tiles else dtypes.hidden
            self.hidden = fill(hidden.shape, dtype=dtype, device=device)
        if wanted.weight:
            dtype = acc if wide and chunks > 1 and not by_tiles else dtypes.weight
            fill = torch.empty if chunks else torch.zeros
            self.weight = fill(weight.shape, dtype=dtype, device=device)
        if wanted.bias and bias is not None:
            self.bias = torch.zeros(bias.shape, dtype=acc, device=device)

    def cast_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """``d_hidden, d_weight, d_bias`` in their dtypes, (0,) where not wanted."""
        made = []
        for grad, dtype in zip((self.hidden, self.weight, self.bias), self.dtypes, strict=True):
            if grad is None:
                grad = torch.empty(0, dtype=dtype, device=self.device)
            made.append(grad if grad.dtype == dtype else grad.to(dtype))
        return made[0], made[1], made[2]
