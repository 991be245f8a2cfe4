"""Without a GPU the Triton kernels are interpreted; that must be decided before triton loads."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA, ROCm or XPU device here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
