"""The factor by which backward is expected to multiply a loss, where somebody knows it beforehand.

A gradient is rounded to the inputs' dtype once it is made, and again when backward multiplies it.
If the factor is known when the gradient is made, it is multiplied in before the first rounding, and
there is no second. Who expects wrongly loses nothing but that: backward multiplies by what comes
over what was expected.
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
    """Inside, sums of losses expect ``factor`` (``()``, or a number) from upstream.

    ``None`` takes an outer expectation back. Not 0: nothing can be divided by it. A function is
    asked once a gradient is made, for a factor that other ranks are still being asked about.
    """
    token = _expected.set(factor)
    try:
        yield
    finally:
        _expected.reset(token)


def expected() -> Factor | Callable[[], Factor]:
    """What the innermost :func:`expecting` says."""
    return _expected.get()


def with_expected_upstream(problem: Problem) -> Problem:
    """The problem with what :func:`expecting` says, unless it knows better itself."""
    if problem.expected_upstream is not None or torch.compiler.is_compiling():
        return problem
    factor = expected()
    if callable(factor):
        factor = factor()
    if factor is None:
        return problem
    dtype = acc_dtype(problem.hidden.dtype)
    device = problem.hidden.device
    if not isinstance(factor, Tensor):  # (as_tensor would copy from the host)
        return problem.but(expected_upstream=torch.full((), factor, dtype=dtype, device=device))
    factor = factor.detach().to(device, dtype, non_blocking=True).reshape(())
    return problem.but(expected_upstream=factor)
