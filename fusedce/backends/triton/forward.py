"""The forward-only pass: allocates and launches, and never waits for the GPU."""

from __future__ import annotations

import functools
import warnings

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedce.backends.triton import archs, tuning
from fusedce.backends.triton.archs import ForwardConfig
from fusedce.backends.triton.compact import compact, on, raise_on_cpu
from fusedce.contract.problem import Problem
from fusedce.kernels.forward import forward_kernel


def loss(
    problem: Problem,
    config: ForwardConfig | None = None,
    lse: Tensor | None = None,  # (N,) fp32 to fill at valid rows
) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64."""
    problem = with_unit_strides(problem)
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    for name, x in (("hidden", hidden), ("weight", weight)):
        if not _aligned(x):
            _say_once(f"rows of {name} are not aligned to 16 bytes, so loads are narrow")
    N, H = hidden.shape
    V = weight.shape[0]
    device = hidden.device
    config = _forward_config(problem) if config is None else config
    blocks = triton.cdiv(N, config.BLOCK_N)
    tiles_per_split, splits = archs.vocabulary_splits(V, config)
    weight_tiles = descriptor(weight, config)
    softcap = problem.softcap

    partials = torch.empty((2 * splits + 1) * N, dtype=torch.float32, device=device)
    block_losses = torch.empty(blocks, dtype=torch.float64, device=device)
    tickets = torch.empty(1 + blocks, dtype=torch.int32, device=device)
    with on(device):
        packed = compact(problem, tickets)
        if N:
            forward_kernel[(blocks * splits,)](
                hidden,
                weight,
                weight if weight_tiles is None else weight_tiles,
                weight if bias is None else bias,
                problem.labels,
                packed.rows,
                packed.used,
                partials,
                block_losses,
                tickets,
                packed.loss_sum,
                packed.loss_sum if lse is None else lse,
                N,
                H,
                V,
                hidden.stride(0),
                weight.stride(0),
                problem.logit_scale,
                1.0 if softcap is None else softcap,
                tiles_per_split,
                splits,
                HAS_BIAS=bias is not None,
                HAS_SCALE=problem.logit_scale != 1.0,
                HAS_SOFTCAP=softcap is not None,
                BLOCK_N=config.BLOCK_N,
                BLOCK_V=config.BLOCK_V,
                BLOCK_H=config.BLOCK_H,
                GROUP_N=config.GROUP_N,
                EVEN_H=H % config.BLOCK_H == 0,
                DESCRIPTOR=weight_tiles is not None,
                FLATTEN=config.FLATTEN,
                INPUT_PRECISION=input_precision(hidden),
                UPCAST=device.type == "cpu",
                HAS_LSE=lse is not None,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    raise_on_cpu(packed.n_valid, problem)
    return packed.loss_sum, packed.n_valid


def has_options(problem: Problem) -> bool:
    """Whether logits are more than products."""
    return problem.bias is not None or problem.logit_scale != 1.0 or problem.softcap is not None


def _forward_config(problem: Problem) -> ForwardConfig:
    device, size = problem.hidden.device, problem.hidden.element_size()
    family = archs.architecture(device)
    options = has_options(problem)
    default = archs.forward(family, size, options=options)
    if not tuning.enabled() or size != 2 or family not in archs.CANDIDATES:
        return default
    V, H = problem.weight.shape

    def milliseconds(config: ForwardConfig) -> float:
        rng = torch.Generator(device).manual_seed(0)  # the user's own is left alone
        rows = torch.randn(tuning.ROWS, H, device=device, generator=rng).to(problem.hidden.dtype)
        labels = torch.randint(V, (tuning.ROWS,), device=device, generator=rng)
        sample = problem._replace(hidden=rows, labels=labels, ignore_index=-100, token_weight=None)
        with on(device):
            return float(triton.testing.do_bench(functools.partial(loss, sample, config)))

    key = tuning.key_of(device, problem.hidden.dtype, H, V, options)
    return tuning.choose(key, (default, *archs.CANDIDATES[family]), milliseconds)


def with_unit_strides(problem: Problem) -> Problem:
    """Tensors that kernels may walk along the last dimension of."""
    bias = problem.bias
    return problem._replace(
        hidden=unit_stride("hidden", problem.hidden),
        weight=unit_stride("weight", problem.weight),
        labels=problem.labels.contiguous(),
        bias=None if bias is None else bias.contiguous(),
    )


def unit_stride(name: str, x: Tensor) -> Tensor:
    """The kernels walk along the last dimension; any other stride there is copied away."""
    if x.stride(-1) == 1:
        return x
    _say_once(f"{name} has stride {x.stride(-1)} in its last dimension: it is copied on every call")
    return x.contiguous()


def _aligned(x: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes, as wide loads need."""
    stride = x.stride(0) * x.element_size()
    return x.data_ptr() % 16 == 0 and stride > 0 and stride % 16 == 0


def descriptor(weight: Tensor, config: ForwardConfig) -> TensorDescriptor | None:
    """What TMA reads weight by, where the configuration wants it and the addresses allow it."""
    if not config.DESCRIPTOR or not _aligned(weight):
        return None
    return TensorDescriptor.from_tensor(weight, [config.BLOCK_V, config.BLOCK_H])


@functools.cache
def _say_once(what: str) -> None:
    warnings.warn(f"fusedce: {what}; this is slower, the result is the same", stacklevel=5)


def input_precision(x: Tensor) -> str:
    tf32 = x.is_cuda and torch.version.hip is None and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if x.dtype == torch.float32 and tf32 else "ieee"
