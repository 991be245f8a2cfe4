"""The Triton backend on a simulated GPU: unchanged host code, compiled kernels, tensors of the CPU.

Only questions about the device have other answers: the architecture's row, the number of
multiprocessors, whether kernels are interpreted, and whether a bad label raises at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from unittest import mock

import pytest
import torch
from ptx import Breakage, breakages, on_device

from support.device import no_small_calls
from support.params import slow

_BACKEND = "fusedce.backends.triton"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TWO_BYTES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
ARCHS = pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
FIRST_ARCH = pytest.mark.parametrize("arch", ["sm_90", slow("sm_80")])
OPTIONS = {"softcap": 5.0, "logit_scale": 0.7}


@contextlib.contextmanager
def backend_on(name: str):
    """Inside, the backend runs as on architecture ``name`` of `archs.py`; see :class:`Device`.

    The device given has three attributes more: ``row``, to be replaced where a test wants other
    blocks (training goes by tiles there, whatever H is); ``tf32``, whether fp32 products are in
    TF32; and ``small_calls``, a switch: few tokens are computed by chunks until it is closed.
    """
    from fusedce.backends import choose
    from fusedce.backends.devices import DEVICE_TYPES
    from fusedce.backends.triton import archs, head_gradients, launch

    row = archs.BY_NAME[name]
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(on_device(row.compiler[1]))
        device.row = row._replace(
            two_bytes=row.two_bytes._replace(gemm_up_to=0),
        )
        device.tf32, device.shared_limit = False, row.shared_limit
        device.small_calls = stack.enter_context(contextlib.ExitStack())
        device.small_calls.enter_context(no_small_calls())
        for of, attribute, value in (
            (choose, "why_not_triton", lambda *_: None),
            (archs, "architecture", lambda _: device.row),
            (archs, "processors", lambda _: 3),
            (launch, "type_of", lambda _: DEVICE_TYPES["cuda"]),
            (launch, "tf32_allowed", lambda: device.tf32),
        ):
            stack.enter_context(mock.patch.object(of, attribute, value))
        for module in ("forward", "small_sums", "sum_grads", "divergence_chunks"):
            module = import_module(f"{_BACKEND}.{module}")
            stack.enter_context(mock.patch.object(module, "raise_on_cpu"))
        head_gradients.compile_for_sums.cache_clear()
        # torch.empty gives NaN and the largest integers here: no launch may count on zeros.
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield device
        finally:
            torch.use_deterministic_algorithms(before)
            head_gradients.compile_for_sums.cache_clear()


def assert_same_bits_in_every_order(device, compute, timing="random") -> None:
    """Of CTAs, and of copies that land early or late."""
    first = compute()
    device.timing = timing
    for device.order in (1, 2):
        torch.testing.assert_close(compute(), first, rtol=0, atol=0)


class Broken:
    """The forward kernel with one place of its compiled code broken."""

    def __init__(self, device) -> None:
        from fusedce.testing import Case

        blocks = device.row.two_bytes.forward._replace(MAX_SPLITS=2)
        self.device, self.blocks = device, blocks
        V = 3 * blocks.BLOCK_V + 1  # two tiles in one split, one and a column in the other
        # H of several steps of the pipeline, and of one; rows of a second block.
        sizes = ((blocks.BLOCK_N + 12, 320, V), (20, 64, V))
        self.inputs = [Case((N,), H, V, torch.bfloat16).tensors()[:3] for N, H, V in sizes]
        for _, _, labels in self.inputs:
            labels[5] = -100
        self.right = self._run()
        self.text = device.texts["walk_kernel"]

    def all(self) -> Iterator[Breakage]:
        return breakages(self.text)

    def noticed(self, breakage: Breakage) -> str | None:
        """The failure that the breakage causes; ``None`` if there is none."""
        self.device.edit = lambda name, text: breakage.text if name == "walk_kernel" else text
        try:
            for a, b in zip(self._run(), self.right, strict=True):
                if not a.equal(b):
                    return "other numbers"
            return None
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            self.device.edit = None

    def _run(self) -> list[torch.Tensor]:
        from fusedce.backends.triton.forward import loss
        from fusedce.contract.problem import Problem

        found = []
        for inputs in self.inputs:
            lse = torch.zeros(len(inputs[2]))
            found += [*loss(Problem(*inputs), blocks=self.blocks, lse=lse), lse]
        return found
