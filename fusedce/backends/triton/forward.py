"""The forward-only pass: allocates and launches, and never waits for the GPU."""

from __future__ import annotations

import functools
import warnings

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedce.backends.triton import archs as configs
from fusedce.backends.triton import compact as common
from fusedce.backends.triton import tuning
from fusedce.backends.triton.archs import ForwardConfig
from fusedce.kernels.forward import forward_kernel


def loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    config: ForwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``loss_sum ()``, ``n_valid ()`` int64, ``lse (N,)`` fp32 (0 at ignored positions)."""
    hidden, weight = unit_stride("hidden", hidden), unit_stride("weight", weight)
    labels = labels.contiguous()
    for name, x in (("hidden", hidden), ("weight", weight)):
        if not _aligned(x):
            _say_once(f"rows of {name} are not aligned to 16 bytes, so loads are narrow")
    N, H = hidden.shape
    V = weight.shape[0]
    device = hidden.device
    if config is None:
        options = bias is not None or logit_scale != 1.0 or softcap is not None
        config = _forward_config(hidden, weight, bias, softcap, logit_scale, options)
    blocks = triton.cdiv(N, config.BLOCK_N)
    tiles_per_split, splits = configs.vocabulary_splits(V, config)
    weight_tiles = descriptor(weight, config)

    lse = torch.zeros(N, dtype=torch.float32, device=device)
    partials = torch.empty((2 * splits + 1) * N, dtype=torch.float32, device=device)
    block_losses = torch.empty(blocks, dtype=torch.float64, device=device)
    tickets = torch.empty(1 + blocks, dtype=torch.int32, device=device)
    with common.on(device):
        rows, count, n_valid, loss_sum = common.compact(labels, V, ignore_index, tickets)
        if N:
            forward_kernel[(blocks * splits,)](
                hidden,
                weight,
                weight if weight_tiles is None else weight_tiles,
                weight if bias is None else bias.contiguous(),
                labels,
                rows,
                count,
                partials,
                block_losses,
                tickets,
                lse,
                loss_sum,
                N,
                H,
                V,
                hidden.stride(0),
                weight.stride(0),
                logit_scale,
                1.0 if softcap is None else softcap,
                tiles_per_split,
                splits,
                HAS_BIAS=bias is not None,
                HAS_SCALE=logit_scale != 1.0,
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
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    common.raise_on_cpu(n_valid, V, ignore_index)
    return loss_sum, n_valid, lse


def _forward_config(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    options: bool,
) -> ForwardConfig:
    family = configs.architecture(hidden.device)
    size = hidden.element_size()
    default = configs.forward(family, size, options=options)
    if not tuning.enabled() or size != 2 or family not in configs.CANDIDATES:
        return default
    V, H = weight.shape

    def milliseconds(config: ForwardConfig) -> float:
        rng = torch.Generator(hidden.device).manual_seed(0)  # the user's own is left alone
        rows = torch.randn(tuning.ROWS, H, device=hidden.device, generator=rng).to(hidden.dtype)
        labels = torch.randint(V, (tuning.ROWS,), device=hidden.device, generator=rng)
        call = functools.partial(
            loss, rows, weight, labels, bias, -100, softcap, logit_scale, config
        )
        with common.on(hidden.device):
            return float(triton.testing.do_bench(call))

    key = tuning.key_of(hidden.device, hidden.dtype, H, V, options)
    return tuning.choose(key, (default, *configs.CANDIDATES[family]), milliseconds)


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
