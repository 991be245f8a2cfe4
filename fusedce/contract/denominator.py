"""The factor by which backward will multiply a loss, where it is known before the backward pass.

A gradient is rounded to the inputs' dtype once it is made, and again when backward multiplies it.
If the factor is known when the gradient is made, it is multiplied in before the first rounding, and
there is no second rounding. A wrong expectation costs a rounding and no more: backward multiplies
by the real factor over the expected one.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusedce.contract.problem import Problem
from fusedce.contract.rounding import acc_dtype

Factor = Tensor | float | None
_expected: contextvars.ContextVar[Factor | Callable[[], Factor]] = contextvars.ContextVar(
    "fusedce_expected_upstream", default=None
)


@contextlib.contextmanager
def expecting(factor: Factor | Callable[[], Factor]) -> Iterator[None]:
    """Inside the block, sums of losses expect ``factor`` as their upstream gradient.

    Args:
        factor: ``()``, or a number other than 0; ``None`` cancels an outer expectation. A function
            is called when a gradient is made, for a factor whose all-reduce is still running.
    """
    token = _expected.set(factor)
    try:
        yield
    finally:
        _expected.reset(token)


def expected() -> Factor | Callable[[], Factor]:
    """The factor of the innermost :func:`expecting` block; ``None`` outside of any."""
    return _expected.get()


def with_expected_upstream(problem: Problem) -> Problem:
    """The problem with the expected factor, unless it holds one already or is compiled."""
    if problem.expected_upstream is not None or torch.compiler.is_compiling():
        return problem
    factor = expected()
    if callable(factor):
        factor = factor()
    if factor is None:
        return problem
    dtype = acc_dtype(problem.hidden.dtype)
    device = problem.hidden.device
    if not isinstance(factor, Tensor):  # as_tensor would copy from the host
        return problem.but(expected_upstream=torch.full((), factor, dtype=dtype, device=device))
    factor = factor.detach().to(device, dtype, non_blocking=True).reshape(())
    return problem.but(expected_upstream=factor)
