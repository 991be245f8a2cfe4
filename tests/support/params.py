"""Parameters of tests, by what they cost."""

import pytest


def slow(*values):
    """A parameter that `make test` leaves to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


QUICK_ON_TORCH = ["torch", slow("triton")]  # the interpreter takes seconds where torch takes none
