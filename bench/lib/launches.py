"""What the Triton backend launches on an architecture, found by running its host code without one.

Kernels are not launched and products of torch are not computed: each launch is written down, with
what Triton would specialise it on. Block sizes are those of the architecture's row, sizes those of
models, so that what is compiled here is what runs by default.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import fusedce
from fusedce.backends import choose, triton
from fusedce.backends.devices import DEVICE_TYPES
from fusedce.backends.triton import archs, head_gradients, launch, products
from fusedce.kernels.walk import EXPONENTIALS, STATISTICS, SUMS

N, H, V, NARROW_H, ODD_V = 64, 1088, 128256, 1024, 50257
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_WALKS = {SUMS.value: "forward", STATISTICS.value: "stats", EXPONENTIALS.value: "exp_gemm"}
_MODULES = ("forward", "sum_grads", "small_sums", "divergence_chunks")


class Launch(NamedTuple):
    """What Triton would compile for a launch."""

    kernel: Any
    types: dict[str, str]  # of the arguments that are no constants
    constants: dict[str, Any]  # and of the launch: num_warps, num_stages
    aligned: frozenset[str]  # arguments that are multiples of 16

    @property
    def name(self) -> str:
        """The kernel's name; of the walk over the vocabulary, its epilogue's."""
        if "EPILOGUE" in self.constants:
            return _WALKS[self.constants["EPILOGUE"]]
        return self.kernel.__name__.removesuffix("_kernel")


def _launch(kernel: Any, given: dict[str, Any]) -> Launch:
    types, constants, aligned = {}, {}, set()
    for p in kernel.params:
        value = given.pop(p.name)
        special = not p.do_not_specialize
        if isinstance(value, Tensor):
            types[p.name] = f"*{_TYPES[value.dtype]}"
            even = value.data_ptr() % 16 == 0 and not p.do_not_specialize_on_alignment
        elif isinstance(value, TensorDescriptor):
            types[p.name] = f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}>"
            even = True
        elif p.is_constexpr or value is None or (special and value == 1):
            constants[p.name] = value
            continue
        else:
            kind = "i64" if isinstance(value, int) and abs(value) >= 2**31 else "i32"
            types[p.name] = "fp32" if isinstance(value, float) else kind
            even = isinstance(value, int) and value % 16 == 0
        if even and special:
            aligned.add(p.name)
    given.pop("enable_fp_fusion")
    return Launch(kernel, types, constants | given, frozenset(aligned))


class _Compiled:
    """Stands for a compilation: launching it does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments: None


@contextlib.contextmanager
def recorded(row: archs.Architecture) -> Iterator[list[Launch]]:
    """Inside, the backend runs as on that architecture, and its launches are in the list."""
    found: list[Launch] = []

    def run(kernel: Any, *, grid: Any, warmup: bool, **given: Any) -> _Compiled:
        if kernel.__name__ == "compact_kernel":  # the one whose result decides what is launched
            given["rows"].copy_(torch.arange(len(given["rows"])))
            given["count"].fill_(len(given["rows"]))
            given["n_valid"].fill_(len(given["rows"]))
        found.append(_launch(kernel, given))
        return _Compiled()

    nvidia = row.compiler is not None and row.compiler[0] == "cuda"
    answers: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", run),
        (choose, "why_not_triton", lambda *_: None),
        (archs, "architecture", lambda device: row),
        (archs, "processors", lambda device: 132),
        (launch, "type_of", lambda device: DEVICE_TYPES["cuda" if nvidia else "rocm"]),
        (products, "widens", lambda *_: True),
        (torch, "mm", lambda *_, out=None, **__: out),
        (torch, "addmm", lambda *_, out=None, **__: out),
        *((import_module(f"{triton.__name__}.{m}"), "raise_on_cpu", mock.Mock()) for m in _MODULES),
    ]
    with contextlib.ExitStack() as stack:
        for of, name, answer in answers:
            stack.enter_context(mock.patch.object(of, name, answer))
        head_gradients.compile_for_sums.cache_clear()
        yield found
    head_gradients.compile_for_sums.cache_clear()


# ---- the calls --------------------------------------------------------------------------------


@functools.cache
def group() -> dist.ProcessGroup:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def inputs(dtype: torch.dtype, H: int = H, V: int = V) -> tuple[Tensor, Tensor, Tensor]:
    """Memory of the weight is not touched, so it costs none."""
    hidden, weight = torch.zeros(N, H, dtype=dtype), torch.empty(V, H, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.arange(N)


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], Any]]:
    """Calls of the package: a name of the options, function, arguments, options."""
    loss, tokens, kl = fusedce.fused_ce, fusedce.fused_logprobs, fusedce.fused_kl
    bias = torch.zeros(V, dtype=dtype)
    pointwise = {"bias": bias, "logit_scale": 0.5, "softcap": 30.0}
    smoothed = {"label_smoothing": 0.1}
    terms: dict[str, Any] = {"z_loss": 1e-4, "token_weight": torch.full((N,), 0.5)}
    large = {"chunk_tokens": N}  # fewer tokens than a small call may have
    # float16's weight gradient waits in float32
    tight = {"memory_budget": 2**23 + (4 * V * H if dtype == torch.float16 else 0)}
    terms["argmax_out"] = torch.empty(N, dtype=torch.int64)
    plain, narrow, odd = inputs(dtype), inputs(dtype, H=NARROW_H), inputs(dtype, V=ODD_V)
    for option, value in pointwise.items():
        yield f"{option} alone", loss, tuple(x.detach() for x in plain), {option: value}
    for name, options in (("", {}), ("bias+scale+cap ", pointwise)):
        yield name, loss, tuple(x.detach() for x in plain), options
        yield name, loss, plain, options | large
        yield f"{name}few chunks", loss, plain, options | {"chunk_tokens": N // 4}
        yield f"{name}chunks", loss, plain, options | {"chunk_tokens": N // 8}
        yield f"{name}tiles", loss, plain, options | tight
        yield f"{name}smoothed", loss, plain, options | large | smoothed
        yield f"{name}terms", loss, plain, options | large | terms
        yield f"{name}terms smoothed", loss, plain, options | large | terms | smoothed
        yield f"{name}shard", loss, plain, options | {"process_group": group()}
        yield f"{name}tokens", tokens, plain, options
        yield f"{name}mean logit", tokens, plain, options | {"mean_logit": True}
    yield "narrow", loss, tuple(x.detach() for x in narrow), {}
    yield "narrow", loss, narrow, large
    yield "V=50257", loss, odd, large
    yield "", loss, plain, {}  # small
    numbers = {"logit_scale": 0.5, "softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4}
    yield "options", loss, plain, numbers | {"token_weight": torch.full((N,), 0.5)}
    of_both = pointwise | {"bias": bias.detach().requires_grad_(), "teacher_bias": bias}
    of_both |= {"teacher_softcap": 30.0, "teacher_logit_scale": 0.5, "ce_weight": 0.5}
    heads = (*plain[:2], *(x.detach() for x in plain))
    for name, beta in (("forward", 0.5), ("reverse", 0.5), ("jsd", 0.5), ("jsd", 0.01)):
        kind = {"divergence": name, "beta": beta}
        yield f"{name} {beta}", kl, heads, kind
        yield f"{name} {beta} options", kl, heads, kind | of_both


def launches(arch: str) -> dict[str, Launch]:
    """What the package launches on an architecture, each compilation once, by a name of its own."""
    found: dict[str, Launch] = {}
    row = archs.BY_NAME[arch]
    for kind, gemm in itertools.product((*DTYPES, "fp32 tf32"), (False, True)):
        dtype = DTYPES[kind.split()[0]]
        by_gemm = gemm and not row.walks(dtype.itemsize).gemm_up_to
        two_bytes = row.two_bytes._replace(gemm_up_to=archs.EVERY_H if gemm else 0)
        with (
            recorded(row._replace(two_bytes=two_bytes)) as made,
            mock.patch.object(launch, "tf32_allowed", lambda kind=kind: kind == "fp32 tf32"),
        ):
            triton.scaled([x.detach() for x in inputs(dtype)[:2]], torch.tensor(0.5), dtype)
            names = [("", one) for one in made]
            for options, call, arguments, given in calls(dtype):
                if gemm and call is not fusedce.fused_ce:
                    continue
                made.clear()
                out = call(*arguments, **given, backend="triton")
                total = out.logprob.sum() if hasattr(out, "logprob") else out.loss_sum
                if total.requires_grad:
                    total.backward()
                names += [(options, one) for one in made]
        for options, one in names:
            if one in found.values() or (by_gemm and one.name != "exp_gemm"):
                continue  # what the one GEMM brings along runs where the row takes it by default
            label = " ".join([one.name, kind, *options.split()])
            while label in found:
                label += "'"
            found[label] = one
    return found
