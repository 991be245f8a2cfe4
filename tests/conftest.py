"""Without a GPU the Triton kernels are interpreted; that must be decided before triton loads."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # loops.py and ranks.py, shared by tests

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def interpreter_rounds_to_bf16():
    """Triton's interpreter cuts float32 off to bf16, which doubles the errors; hardware rounds."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return original(self, src, dst_type)
        rounded = torch.from_numpy(np.asarray(src.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = cast_impl
    yield
    interpreter.InterpreterBuilder.cast_impl = original


@pytest.fixture
def no_logits(monkeypatch):
    """Fails the test where anybody computes the real logits of a replaced head."""
    from fusedce.head.call import HeadCall
    from fusedce.head.lazy.traced import TracedLogits

    def logits(self, *_):
        raise AssertionError("real logits were computed")

    monkeypatch.setattr(HeadCall, "logits", logits)
    monkeypatch.setattr(TracedLogits, "_look", logits)


def pytest_collection_modifyitems(items):
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA, ROCm or XPU device here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
