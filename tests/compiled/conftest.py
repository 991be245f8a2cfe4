"""Compiled kernels: Triton must compile here, in a process that does not interpret kernels."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def missing():
    """Why compiled kernels cannot run here; None where they can."""
    if sys.platform != "linux":
        return "Triton is for Linux"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted in this process: run `make compiled`"
    import triton

    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        return "this Triton came without ptxas"
    return None


def pytest_collection_modifyitems(items):
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    why = missing() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.compiled)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def on():
    """``on("sm_90")``: the backend on that architecture, for the rest of the test."""
    from support.compiled import backend_on

    with contextlib.ExitStack() as stack:
        yield lambda arch: stack.enter_context(backend_on(arch))
