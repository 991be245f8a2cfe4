"""What is compiled for an architecture: every kernel, with and without options.

All that the report knows of the package's kernels and of its table of architectures is in this
file: block sizes are read from :mod:`fusedce.backends.triton.archs`, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fusedce.backends.triton import archs
from fusedce.kernels.compact import compact_kernel
from fusedce.kernels.forward import forward_kernel
from fusedce.kernels.scale import scale_kernel
from fusedce.kernels.softmax_grad import exp_tile_kernel, hidden_grad_kernel, softmax_grad_kernel
from fusedce.kernels.stats import merge_stats_kernel, stats_kernel
from fusedce.kernels.token_grad import token_grad_kernel

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
KERNELS = ("forward", "stats", "softmax_grad", "scale", "compact")  # groups to choose from
# Types of the arguments that are not constants: by name, or the dtype of the inputs.
_TYPES = dict.fromkeys(
    ("N", "H", "V", "C", "T", "n", "begin", "first", "blocks", "tiles_per_split", "splits",
     "ignore_index", "n_tickets"),
    "i32",
) | {
    "labels": "*i64", "rows": "*i32", "count": "*i32", "n_valid": "*i64", "tickets": "*i32",
    "block_losses": "*fp64", "places": "*i32", "argmax": "*i64",
    "factor": "fp32", "amplify": "fp32", "scale": "fp32", "softcap": "fp32",
} | dict.fromkeys(
    ("partials", "lse", "loss_sum", "losses", "products", "g", "maxima", "sums", "z_label",
     "residuals", "terms", "row_factors", "token_weight",
     "class_weight", "nll", "entropy", "zmean", "z_labels", "alpha", "beta", "gamma", "at_label"),
    "*fp32",
)  # fmt: skip
# What Triton finds to be multiples of 16 at launch, for an aligned head.
ALIGNED = frozenset((
    "hidden", "weight", "bias", "H", "V", "stride_hn", "stride_wv", "partials", "products",
    "exps", "grads", "stride_pc", "stride_ec", "stride_gc", "T", "x", "labels", "rows",
))  # fmt: skip


class Variant(NamedTuple):
    """One compilation."""

    label: str
    kernel: Any
    dtype: str  # of the inputs
    constants: dict[str, Any]


def types_of(variant: Variant) -> dict[str, str]:
    """Triton's types of the arguments that are no constants."""
    types = {}
    for name in variant.kernel.arg_names:
        if name == "weight_tiles" and variant.constants["DESCRIPTOR"]:
            block = f"[{variant.constants['BLOCK_V']}, {variant.constants['BLOCK_H']}]"
            types[name] = f"tensordesc<{variant.dtype}{block}>"
        elif name.startswith("stride_"):
            types[name] = "i32"
        elif name == "exps" and variant.constants.get("HAS_SHIFT"):
            types[name] = "*fp32"
        else:
            types[name] = _TYPES.get(name, f"*{variant.dtype}")
    return types


def variants(
    arch: str, group: str = "all", config: str | None = None, *, candidates: bool = False
) -> Iterator[Variant]:
    """What an architecture is given; ``config``: other blocks of the forward kernel.

    ``candidates`` adds the configurations that tuning would try, for bf16 without options.
    """
    family = arch if (arch, 2) in archs.FORWARD else "other"
    for dtype, size in BYTES.items():
        for option, precision in ((False, "ieee"), (True, "ieee"), (False, "tf32")):
            if precision == "tf32" and (dtype != "fp32" or arch == "gfx942"):
                continue
            flags = {"HAS_BIAS": option, "HAS_SCALE": option, "HAS_SOFTCAP": option}
            suffix = " bias+scale+cap" if option else " tf32" if precision == "tf32" else ""
            name = f"{dtype}{suffix}"
            common = flags | {"EVEN_H": True, "INPUT_PRECISION": precision, "UPCAST": False}
            if group in ("all", "forward"):
                blocks = archs.forward(family, size, options=option)
                if config is not None:
                    numbers = [int(x) for x in config.split(",")]
                    blocks = archs.ForwardConfig(*numbers, DESCRIPTOR=blocks.DESCRIPTOR)
                yield from _forward(f"forward {name}", dtype, blocks, common)
                if candidates and name == "bf16":
                    for blocks in archs.CANDIDATES[family]:
                        yield from _forward(
                            f"forward {name} {_named(blocks)}", dtype, blocks, common
                        )
            if group in ("all", "softmax_grad") and precision == "ieee":
                yield from _softmax_grad(name, dtype, option, flags)
            if group in ("all", "stats"):
                blocks = archs.stats(family, size, options=option)
                constants = _without(blocks._asdict(), "MAX_SPLITS", "FLATTEN") | common | {
                    "HAS_ENTROPY": True, "HAS_ARGMAX": True, "HAS_ZSUM": option,
                    "HAS_CLASS_WEIGHT": option,
                }  # fmt: skip
                yield Variant(f"stats {name}", stats_kernel, dtype, constants)
        if group in ("all", "softmax_grad"):
            for extra in (False, True):
                constants = {"BLOCK_H": 1024, "num_warps": archs.EXP_WARPS}
                constants |= {"HAS_FACTORS": extra}
                label = f"hidden_grad {dtype}{' terms' if extra else ''}"
                yield Variant(label, hidden_grad_kernel, dtype, constants)
        if group in ("all", "scale"):
            constants = {"BLOCK": archs.SCALE_BLOCK, "num_warps": 8}
            yield Variant(f"scale {dtype}", scale_kernel, dtype, constants)
    if group in ("all", "compact"):
        for extra in (False, True):
            constants = {"BLOCK_N": archs.COMPACT_BLOCK_N, "HAS_TOKEN_WEIGHT": extra}
            yield Variant(f"compact{' terms' if extra else ''}", compact_kernel, "i64", constants)
    if group in ("all", "stats"):
        constants = {"BLOCK_N": archs.MERGE_BLOCK_N, "HAS_ENTROPY": True, "HAS_ARGMAX": True,
                     "HAS_ZSUM": True, "HAS_LSE": True}  # fmt: skip
        yield Variant("merge_stats", merge_stats_kernel, "i64", constants)


def _forward(
    label: str, dtype: str, blocks: archs.ForwardConfig, common: dict[str, Any]
) -> Iterator[Variant]:
    """With TMA where the row asks for it, and as it runs where the addresses forbid it."""
    constants = _without(blocks._asdict(), "MAX_SPLITS") | common | {"HAS_LSE": False}
    for descriptor in sorted({False, blocks.DESCRIPTOR}, reverse=True):
        tma = " TMA" if descriptor else ""
        yield Variant(
            label + tma, forward_kernel, dtype, constants | {"DESCRIPTOR": descriptor}
        )  # fmt: skip


def _softmax_grad(
    name: str, dtype: str, option: bool, flags: dict[str, Any]
) -> Iterator[Variant]:  # fmt: skip
    constants = flags | {
        "AMPLIFY": 16384.0 if dtype == "fp16" else 1.0,
        "BLOCK_V": archs.EXP_BLOCK_V,
        "num_warps": archs.EXP_WARPS,
    }
    # "terms": label smoothing, z-loss, token and class weights, argmax beside the loss
    for extra in (False, True) if option else (False,):
        label = f"{name}{' terms' if extra else ''}"
        more = {"HAS_ARGMAX": extra}
        yield Variant(f"exp_tile {label}", exp_tile_kernel, dtype, constants | more)
        without = _without(constants, "HAS_BIAS")
        # label smoothing is a shift, with no soft-cap beside it
        for shift in (False, True) if extra else (False,):
            more = {"HAS_ARGMAX": extra, "HAS_TERMS": extra, "BLOCKS": 64, "HAS_SHIFT": shift,
                    "HAS_CLASS_WEIGHT": shift, "HAS_SOFTCAP": option and not shift}  # fmt: skip
            smoothed = f"{label}{' smoothing' if shift else ''}"
            yield Variant(f"softmax_grad {smoothed}", softmax_grad_kernel, dtype, without | more)
        more = {"HAS_BETA": extra, "HAS_GAMMA": extra, "HAS_CLASS_WEIGHT": extra}
        yield Variant(f"token_grad {label}", token_grad_kernel, dtype, constants | more)


def _named(blocks: archs.ForwardConfig) -> str:
    x = blocks
    more = f" G{x.GROUP_N}" + (" flat" if x.FLATTEN else "")
    return f"{x.BLOCK_N}x{x.BLOCK_V}x{x.BLOCK_H} w{x.num_warps} s{x.num_stages}{more}"


def _without(constants: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in constants.items() if k not in names}
