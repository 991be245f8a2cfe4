"""The device whose kernels `tests/gpu` runs: a GPU, or Triton's interpreter in its place."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import torch

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def hide_gpus() -> None:
    """No GPU is seen from here on, neither by this process nor by those it starts.

    An environment variable is read when a driver starts; what asks torch itself gets "no" as well,
    also where something else has answered for it.
    """
    os.environ.update(dict.fromkeys(HIDING, ""))
    for module in (torch.cuda, torch.xpu):
        module.is_available = lambda: False
        module.device_count = lambda: 0


def current() -> torch.device:
    """The GPU if this process runs compiled kernels on one, else the CPU, which interprets them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def no_small_calls():
    """Inside, few tokens are computed as many are, by chunks: see `plan.is_small`."""
    from fusedce.backends import plan

    return mock.patch.object(plan, "SMALL_TOKENS", 0)


@contextlib.contextmanager
def exponentials_by(one_gemm: bool):
    """Inside, training makes exponentials by one GEMM of ours, or by tiles of cuBLAS's."""
    from fusedce.backends.triton import archs

    row = archs.architecture(current())
    of_way = {"gemm_up_to": archs.EVERY_H if one_gemm else 0}
    row = row._replace(two_bytes=row.two_bytes._replace(**of_way))
    with mock.patch.object(archs, "architecture", return_value=row):
        yield
