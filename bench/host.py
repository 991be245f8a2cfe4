"""Python's share of a call: launches and microseconds on a stub device.

    python bench/host.py
    python bench/host.py --json     # how often each kernel and product is launched, nothing timed

Kernels are bound and keyed as for an H100 and are not launched, products are 16 x 16, 16 labels are
sorted, and the allocator keeps freed memory, as a GPU's does. The rest is the host's work, which a
GPU waits for if the tiles are small. "operators" adds the other parts of a user's call: checks,
dispatch, torch.library and autograd. The figure is the processor time of this thread, the least of
many calls, since other processes can only add to it.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
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

import fusedce
import fusedce.backends.triton as backend
from fusedce.backends import choose
from fusedce.backends.triton import archs, products
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.task import Task

SHAPES = ((2048, 896, 151936), (8192, 4096, 128256), (32768, 4096, 128256))
launched: Counter[str] = Counter()
_backend = make_backend(GPUTarget("cuda", 90, 32))
_binders: dict[Any, Any] = {}
_known: dict[Any, Any] = {}


class Compiled:
    """The result of a kernel's first launch, which is launched like a ``CompiledKernel``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def runner(*args: Any) -> None:
            launched[self.name] += 1

        return runner


def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
    """The work of ``JITFunction.run`` up to the launch of a compiled kernel."""
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
    return Compiled(name)


def keep_freed_memory() -> None:
    """Set glibc's allocator to neither map nor trim, so that large buffers cost no system call."""
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, -1)


def least(call: Callable[[], Any], times: int = 400) -> float:
    """Processor time of a call in microseconds, the least of many."""
    found = []
    for _ in range(times):
        begin = time.thread_time()
        call()
        found.append(time.thread_time() - begin)
    return 1e6 * min(found)


def operators(problem: Problem) -> None:
    """A call as a user makes it."""
    fusedce.fused_ce(problem.hidden, problem.weight, problem.labels, backend="triton").mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="launches by name, instead of times")
    args = parser.parse_args()
    keep_freed_memory()
    choose.why_not_triton = lambda *_: None
    small = torch.zeros(16, 16, dtype=torch.bfloat16)
    out = torch.zeros(16, 16, dtype=torch.bfloat16)
    labels, sort, mm = torch.zeros(16, dtype=torch.int64), torch.Tensor.sort, torch.mm

    def product(*args: Any, **kwargs: Any) -> None:
        launched["product"] += 1
        mm(small, small, out=out)

    jit.JITFunction.run = run
    torch.mm = torch.addmm = product
    products.widens = functools.cache(lambda *_: True)  # as on a GPU
    torch.Tensor.sort = lambda _, stable: sort(labels, stable=stable)  # type: ignore[method-assign]
    archs.architecture = lambda device: archs.BY_NAME["sm_90"]
    rows, counts = [], []
    for N, H, V in SHAPES:
        hidden = torch.empty(N, H, dtype=torch.bfloat16)
        weight = torch.empty(V, H, dtype=torch.bfloat16)
        problem = Problem(hidden, weight, torch.zeros(N, dtype=torch.int64))
        trained = problem.but(
            hidden=hidden.detach().requires_grad_(), weight=weight.detach().requires_grad_()
        )
        for name, call in (
            ("forward", lambda p=problem: backend.loss(p)),
            (
                "training",
                lambda p=problem: backend.loss_and_grads(
                    Task(p, Wanted(hidden=True, weight=True)), None
                ),
            ),
            ("training, operators", lambda p=trained: operators(p)),
        ):
            call()  # the first one compiles
            launched.clear()
            call()
            counts.append({"shape": [N, H, V], "pass": name, "launches": dict(launched)})
            if args.json:
                continue
            count, tiles = sum(launched.values()), launched["exp_tile_kernel"]
            rows.append({
                "N, H, V": f"{N}, {H}, {V}",
                "pass": name,
                "launches": count,
                "tiles": tiles,
                "host us": f"{least(call):.0f}",
            })  # fmt: skip
    print(json.dumps(counts) if args.json else tables.markdown(rows))


if __name__ == "__main__":
    main()
