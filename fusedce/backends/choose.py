"""Interface of a backend, choice of the one that runs, and the reason why another cannot."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ..contract.objective import LogitGrad, Stats
from ..contract.problem import Outputs, Problem, Task
from .devices import capturing, generation_of, type_of
from .gradients import Dtypes, Summed

_NAMES = ("torch", "triton")
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
OLDEST = (8, 0)  # compute capability: before it the kernels spill kilobytes a thread


class Backend(Protocol):
    """A backend: a module with these functions, for checked problems, in no-grad mode.

    ``argmax (N,)`` int64, where given, is filled: with -1 at positions left out.
    """

    def loss(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """``loss_sum ()`` and ``n_valid ()`` of plain cross-entropy, in one pass."""

    def loss_and_grads(self, task: Task, argmax: Tensor | None) -> Summed:
        """The sum and its wanted gradients, without shards; label smoothing if `sums_smoothing`."""

    def sums_smoothing(self, problem: Problem, wanted: Outputs) -> bool:
        """Whether `loss_and_grads` computes the label smoothing of this problem."""

    def room_for_logits(self, problem: Problem) -> Tensor | None:
        """Memory for logits that forward fills and backward reads; ``None``: they are not kept."""

    def token_stats(
        self, problem: Problem, wanted: Outputs, argmax: Tensor | None, kept: Tensor | None = None
    ) -> Stats:
        """Statistics of every token, in one pass; with ``argmax`` the largest logit as well."""

    def token_grads(
        self,
        problem: Problem,
        wanted: Outputs,
        lse: Tensor,  # (N,)
        upstream: LogitGrad,
        dtypes: Dtypes,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients with factors of each token's own, from logits ``kept``, or computed anew."""

    def divergence_and_grads(self, task: Task) -> Summed:
        """Losses ``(N,)`` against a teacher; gradients as above."""

    def scaled(self, grads: list[Tensor], factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Each of ``grads`` times ``factor ()``, in ``dtype``; may overwrite them.

        The product is rounded once; 0 stays 0, whatever the factor.
        """


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the Triton backend cannot run there, or ``None`` if it can."""
    if not TRITON_INSTALLED:
        return "triton is not installed (pip install triton)"
    if dtype == torch.float64:
        return "the Triton kernels take float32, bfloat16 and float16, not float64"
    if not type_of(device).triton and not (device.type == "cpu" and INTERPRETED):
        return (
            f"it needs CUDA, ROCm or XPU tensors, got tensors on {device} "
            f"(TRITON_INTERPRET=1 interprets the kernels on the CPU, slowly, for debugging)"
        )
    capability = generation_of(device)
    if isinstance(capability, tuple) and capability < OLDEST:
        return (
            f"the Triton kernels need compute capability {OLDEST[0]}.{OLDEST[1]} or newer "
            f"(A100, RTX 30), and {device} has {capability[0]}.{capability[1]}"
        )
    return None


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    """Name of the backend that runs there if none is asked for.

    Raises:
        RuntimeError: the device has no float64, in which losses are summed.
    """
    kind = type_of(device)
    if not kind.float64:
        raise RuntimeError(
            f"hidden must be on a device that has float64, in which losses are summed, not on "
            f"{device}: move hidden, weight and labels to the CPU"
        )
    usable = kind.triton and why_not_triton(device, dtype) is None
    return "triton" if usable else "torch"


def resolve_backend(backend: str | None, hidden: Tensor) -> str:
    """Name of the backend for ``hidden``; an explicit request that cannot run raises.

    If none is asked for, Triton runs only if H is a multiple of 16 (it loads others one by one) and
    a small kernel has run on the device (:func:`why_no_kernels`).

    Raises:
        ValueError: unknown name.
        RuntimeError: Triton was asked for and cannot run, with the reason; see
            :func:`default_backend`.
    """
    default = default_backend(hidden.device, hidden.dtype)
    if backend is None:
        usable = default == "triton" and hidden.shape[-1] % 16 == 0
        return "triton" if usable and _kernels_run(hidden) else "torch"
    if backend not in _NAMES:
        raise ValueError(f"backend must be None, 'torch' or 'triton', got {backend!r}")
    if backend == "triton":
        reason = why_not_triton(hidden.device, hidden.dtype)
        if reason is not None:
            raise RuntimeError(f"backend='triton' cannot run: {reason}")
    return backend


_kernel_errors: dict[torch.device, str | None] = {}  # of each device that was probed


def why_no_kernels(device: torch.device) -> str | None:
    """Why Triton's kernels do not run on a device for which they are made; ``None`` if they do.

    The first question compiles and runs a small kernel, and warns if that fails: without a C
    compiler, where ptxas or LLVM refuses, with a driver too old. Later failures are errors.
    """
    if device not in _kernel_errors:
        try:
            from .triton.launch import probe

            probe(device)
            _kernel_errors[device] = None
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            _kernel_errors[device] = ": ".join([type(error).__name__, *first])
            warnings.warn(
                f"fusedce: Triton's kernels do not run on {device} ({_kernel_errors[device]}): the "
                f"torch backend computes from now on, the same results in more time. Triton needs "
                f"a C compiler (gcc, or CC) with Python's headers, a driver as new as its CUDA, "
                f"and a cache that it can write (TRITON_CACHE_DIR)",
                stacklevel=4,
            )
    return _kernel_errors[device]


def _kernels_run(hidden: Tensor) -> bool:
    """Whether the kernels run on the device of ``hidden``; not probed where nothing may run.

    That is while a compiler or a mode traces (the probe would become a part of the graph), and
    while a CUDA graph is captured (compiling is forbidden then): kernels are expected to run there.
    """
    device = hidden.device
    if device in _kernel_errors:
        return _kernel_errors[device] is None
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or is_fake(hidden)
        or capturing(device)
    ):
        return True
    return why_no_kernels(device) is None


@functools.cache
def get_backend(name: str | None) -> Backend:
    """The backend of that name, imported at its first use (triton is slow to import)."""
    if name == "triton":
        from . import triton

        return triton
    from . import torch as chunked

    return chunked
