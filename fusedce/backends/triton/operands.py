"""What the kernels that walk over the vocabulary read, and how: derived here and nowhere else."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedce.backends.triton.archs import Blocks, vocabulary_splits
from fusedce.contract.problem import Problem


def operands(problem: Problem, blocks: Blocks, unit: int) -> dict[str, Any]:
    """Arguments that ``forward_kernel`` and ``stats_kernel`` share, launch options included.

    ``unit`` is the problem's :func:`alignment`.
    """
    hidden, weight = problem.hidden, problem.weight
    V, H = weight.shape
    tiles_per_split, splits = vocabulary_splits(V, blocks)
    tma = blocks.DESCRIPTOR and (unit > 1 or _aligned(weight))
    return {
        "hidden": hidden,
        "weight": weight,
        "weight_tiles": TensorDescriptor.from_tensor(weight, [blocks.BLOCK_V, blocks.BLOCK_H])
        if tma
        else None,
        "labels": problem.labels,
        "N": len(hidden),
        "H": H // unit,
        "V": V,
        "stride_hn": hidden.stride(0) // unit,
        "stride_wv": weight.stride(0) // unit,
        "tiles_per_split": tiles_per_split,
        "splits": splits,
        **pointwise(problem),
        "BLOCK_N": blocks.BLOCK_N,
        "BLOCK_V": blocks.BLOCK_V,
        "BLOCK_H": blocks.BLOCK_H,
        "GROUP_N": blocks.GROUP_N,
        "UNIT": unit,
        "EVEN_H": H % blocks.BLOCK_H == 0,
        "FLATTEN": blocks.FLATTEN,
        "INPUT_PRECISION": input_precision(hidden),
        "UPCAST": interpreted(hidden.device),
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def pointwise(problem: Problem) -> dict[str, Any]:
    """What follows the product; ``None`` for what is not asked for."""
    return {
        "bias": problem.bias,
        "scale": None if problem.logit_scale == 1.0 else problem.logit_scale,
        "softcap": problem.softcap,
    }


def has_options(problem: Problem) -> bool:
    """Whether logits are more than products."""
    return any(x is not None for x in pointwise(problem).values())


def alignment(problem: Problem) -> int:
    """How many elements can be moved at once: 16 bytes' worth, or 1 where rows are not aligned.

    Triton finds out for itself whether a number is a multiple of 16, not of 8; so sizes and strides
    are handed over in this unit.
    """
    hidden, weight = problem.hidden, problem.weight
    unit = 16 // hidden.element_size()
    aligned = _aligned(hidden) and _aligned(weight) and hidden.shape[1] % unit == 0
    return unit if aligned else 1


def power_of_2(n: int) -> int:
    """The least that is not below ``n``. (Triton's own costs the host as much as a view.)"""
    return 1 << (n - 1).bit_length()


def multiple(n: int) -> int:
    """``n`` rounded up to a multiple of 16, as the kernels' masks are."""
    return -(-n // 16) * 16


def span(x: Tensor, begin: int, end: int, dim: int = 0) -> Tensor:
    """``x[begin:end]`` along ``dim``, and ``x`` itself where that is all of it: no view to make."""
    return x if end - begin == x.shape[dim] else x.narrow(dim, begin, end - begin)


def padded(x: Tensor) -> Tensor:
    """``x (V,)`` with zeros up to a :func:`multiple`."""
    return pad(x, (0, multiple(len(x)) - len(x)))


def with_unit_strides(problem: Problem) -> Problem:
    """Tensors that kernels may walk along the last dimension of."""
    bias = problem.bias
    problem = problem._replace(
        hidden=_unit_stride("hidden", problem.hidden),
        weight=_unit_stride("weight", problem.weight),
        labels=problem.labels.contiguous(),
        bias=None if bias is None else bias.contiguous(),
    )
    for name, x in (("hidden", problem.hidden), ("weight", problem.weight)):
        if not _aligned(x):
            _say_once(f"rows of {name} are not aligned to 16 bytes, so loads are narrow")
    return problem


def _unit_stride(name: str, x: Tensor) -> Tensor:
    if x.stride(-1) == 1:
        return x
    _say_once(f"{name} has stride {x.stride(-1)} in its last dimension: it is copied on every call")
    return x.contiguous()


def _aligned(x: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes, as wide loads need."""
    stride = x.stride(0) * x.element_size()
    return x.data_ptr() % 16 == 0 and stride > 0 and stride % 16 == 0


@functools.cache
def _say_once(what: str) -> None:
    warnings.warn(f"fusedce: {what}; this is slower, the result is the same", stacklevel=5)


def interpreted(device: torch.device) -> bool:
    """Whether Triton's interpreter runs the kernels there: its products of bf16 are wrong."""
    return device.type == "cpu"


def input_precision(x: Tensor) -> str:
    """How the kernels multiply: TF32 for float32 where torch's own products use it."""
    return "tf32" if x.dtype == torch.float32 and _cuda(x.device) and tf32_allowed() else "ieee"


def _cuda(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def tf32_allowed() -> bool:
    """Torch's setting. Once the newer interface was used, asking the older one raises."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # torch 2.9
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
