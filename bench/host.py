"""Python's share of a call: launches and microseconds on a stub device.

    python bench/host.py

Kernels are bound and keyed as for an H100 and then not launched, products are 16 x 16: what is left
is the host's work, which a GPU waits for where the tiles are small. The least of many calls, since
other processes can only add to it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter would replace the compiler

import torch
from lib import tables
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

import fusedce.backends.triton as backend
from fusedce.backends.triton import archs, chunks
from fusedce.contract.problem import Problem, Wanted

SHAPES = ((2048, 896, 151936), (8192, 4096, 128256))
launched: Counter[str] = Counter()
_backend = make_backend(GPUTarget("cuda", 90, 32))
_binders: dict[Any, Any] = {}
_known: dict[Any, Any] = {}


def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """What ``JITFunction.run`` does up to the launch of a kernel that is compiled already."""
    binder = _binders.get(self)
    if binder is None:
        binder = jit.create_function_from_signature(self.signature, self.params, _backend)
        _binders[self] = binder
    kwargs["debug"] = False
    kwargs["instrumentation_mode"] = ""
    _, specialization, options = binder(*args, **kwargs)
    jit.compute_cache_key(_known, specialization, options)
    name = self.fn.__name__
    launched[name] += 1
    if name == "compact_kernel":
        kwargs["count"].fill_(kwargs["N"])
        kwargs["n_valid"].fill_(kwargs["N"])


def least(call: Callable[[], Any], times: int = 40) -> float:
    """Microseconds."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return 1e6 * min(found)


def main() -> None:
    small = torch.zeros(16, 16, dtype=torch.bfloat16)
    out = torch.zeros(16, 16, dtype=torch.bfloat16)

    def product(*args: Any, **kwargs: Any) -> None:
        torch.mm(small, small, out=out)

    jit.JITFunction.run = run
    chunks.mm = chunks.add_product = product
    archs.architecture = lambda device: archs.BY_NAME["sm_90"]
    rows = []
    for N, H, V in SHAPES:
        hidden = torch.empty(N, H, dtype=torch.bfloat16)
        weight = torch.empty(V, H, dtype=torch.bfloat16)
        problem = Problem(hidden, weight, torch.zeros(N, dtype=torch.int64))
        for name, call in (
            ("forward", lambda p=problem: backend.loss(p)),
            (
                "training",
                lambda p=problem: backend.loss_and_grads(p, Wanted(hidden=True, weight=True), None),
            ),
        ):
            launched.clear()
            call()
            count, tiles = sum(launched.values()), launched["exp_tile_kernel"]
            rows.append({
                "N, H, V": f"{N}, {H}, {V}",
                "pass": name,
                "launches": count,
                "tiles": tiles,
                "host us": f"{least(call):.0f}",
            })  # fmt: skip
    print(tables.markdown(rows))


if __name__ == "__main__":
    main()
