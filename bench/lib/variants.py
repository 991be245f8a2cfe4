"""What is compiled for an architecture: every kernel, with and without options.

All that the report knows of the package's kernels and of its table of architectures is in this
file: block sizes are read from :mod:`fusedce.backends.triton.archs`, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fusedce.backends.triton import archs
from fusedce.kernels.compact import compact_kernel
from fusedce.kernels.exp_gemm import exp_gemm_kernel
from fusedce.kernels.forward import forward_kernel
from fusedce.kernels.label_grad import label_grad_kernel
from fusedce.kernels.scale import scale_kernel
from fusedce.kernels.softmax_grad import exp_tile_kernel, hidden_grad_kernel, softmax_grad_kernel
from fusedce.kernels.stats import merge_stats_kernel, stats_kernel
from fusedce.kernels.token_grad import token_grad_kernel

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
KERNELS = (
    "forward",
    "stats",
    "exp_gemm",
    "softmax_grad",
    "scale",
    "compact",
)  # groups to choose from
# Types of the arguments that are not constants: by name, or the dtype of the inputs.
_TYPES = dict.fromkeys(
    ("N", "H", "V", "T", "width", "n", "begin", "first", "first_block", "blocks",
     "tiles_per_split", "splits",
     "ignore_index", "n_tickets", "C"),
    "i32",
) | {
    "labels": "*i64", "order": "*i64", "rows": "*i32", "count": "*i32", "n_valid": "*i64",
    "tickets": "*i32", "block_losses": "*fp64", "best": "*i32", "argmax": "*i64",
    "factor": "fp32", "scale": "fp32", "softcap": "fp32",
} | dict.fromkeys(
    ("partials", "lse", "loss_sum", "losses", "products", "g", "maxima", "sums", "moments", "zsums",
     "z_label", "z_labels", "residuals", "terms", "shifts", "row_factors", "token_weight",
     "class_weight", "temperature", "alpha", "beta", "gamma", "at_label", "nll", "entropy",
     "zmean", "d_bias"),
    "*fp32",
)  # fmt: skip
# Arguments that are multiples of 16 where the sizes are what models have.
ALIGNED = frozenset((
    "hidden", "weight", "weight_tiles", "bias", "partials", "N", "H", "V", "stride_hn", "stride_wv",
    "width", "exps", "grads", "stride_pc", "stride_ec", "stride_gc", "x", "labels", "rows",
    "products", "class_weight", "d_weight",
))  # fmt: skip
OPTIONS = ("bias", "scale", "softcap")


class Variant(NamedTuple):
    """One compilation."""

    label: str
    kernel: Any
    dtype: str  # of the inputs
    constants: dict[str, Any]
    unaligned: frozenset[str] = frozenset()  # arguments that are no multiples of 16 here
    wide: frozenset[str] = frozenset()  # arguments in float32 here


def types_of(variant: Variant) -> dict[str, str]:
    """Triton's types of the arguments that are no constants."""
    types = {}
    for name in variant.kernel.arg_names:
        if name == "weight_tiles":
            block = f"[{variant.constants['BLOCK_V']}, {variant.constants['BLOCK_H']}]"
            types[name] = f"tensordesc<{variant.dtype}{block}>"
        elif name in variant.wide:
            types[name] = "*fp32"
        elif name.startswith("stride_"):
            types[name] = "i32"
        elif name == "exps" and variant.constants.get("shifts", "") is not None:
            types[name] = "*fp32" if "shifts" in variant.kernel.arg_names else f"*{variant.dtype}"
        else:
            types[name] = _TYPES.get(name, f"*{variant.dtype}")
    return types


def variants(
    arch: str, group: str = "all", config: str | None = None, *, candidates: bool = False
) -> Iterator[Variant]:
    """What an architecture is given; ``config``: other blocks of the forward kernel.

    ``candidates`` adds the configurations that tuning would try, for bf16 without options.
    """
    row = archs.BY_NAME[arch]
    for dtype, size in BYTES.items():
        walks = row.walks(size)
        for option, precision in ((False, "ieee"), (True, "ieee"), (False, "tf32")):
            if precision == "tf32" and (dtype != "fp32" or arch == "gfx942"):
                continue
            none = {} if option else dict.fromkeys(OPTIONS)
            suffix = " bias+scale+cap" if option else " tf32" if precision == "tf32" else ""
            name = f"{dtype}{suffix}"
            common = {"INPUT_PRECISION": precision, "UPCAST": False}
            if group in ("all", "forward"):
                blocks = walks.forward_with_options if option else walks.forward
                if config is not None:
                    numbers = [int(x) for x in config.split(",")]
                    blocks = archs.Blocks(*numbers, DESCRIPTOR=blocks.DESCRIPTOR)
                yield from _forward(f"forward {name}", dtype, blocks, none | common)
                if candidates and name == "bf16":
                    for blocks in walks.candidates:
                        label = f"forward {name} {_named(blocks)}"
                        yield from _forward(label, dtype, blocks, none | common)
                if not option and precision == "ieee":
                    constants = _walk(walks.unaligned, size) | none | common | {"lse": None}
                    constants |= {"EVEN_H": False, "weight_tiles": None, "UNIT": 1}
                    narrow = frozenset(("H", "stride_hn", "stride_wv"))
                    label = f"forward {name} unaligned"
                    yield Variant(label, forward_kernel, dtype, constants, narrow)
            if group in ("all", "exp_gemm") and precision == "ieee":
                blocks = walks.gemm_with_options if option else walks.gemm
                constants = _walk(blocks, size) | none | common
                constants |= {"AMPLIFY": 16384.0 if dtype == "fp16" else 1.0}
                if not option:
                    constants["best"] = None
                if not blocks.DESCRIPTOR:
                    constants["weight_tiles"] = None
                yield Variant(f"exp_gemm {name}", exp_gemm_kernel, dtype, constants)
            if group in ("all", "softmax_grad") and precision == "ieee":
                yield from _softmax_grad(row, name, dtype, option, none)
            if group in ("all", "stats"):
                blocks = walks.stats_with_options if option else walks.stats
                constants = _walk(blocks, size) | none | common
                if not blocks.DESCRIPTOR:
                    constants["weight_tiles"] = None
                if not option:
                    constants |= {"zsums": None, "class_weight": None, "temperature": None}
                yield Variant(f"stats {name}", stats_kernel, dtype, constants)
        if group in ("all", "softmax_grad"):
            for extra in (False, True):
                constants = {
                    "BLOCK_H": 1024,
                    "num_warps": row.exp_warps,
                    "AMPLIFY": 16384.0 if dtype == "fp16" else 1.0,
                }
                if not extra:
                    constants["row_factors"] = None
                label = f"{dtype}{' terms' if extra else ''}"
                yield Variant(f"hidden_grad {label}", hidden_grad_kernel, dtype, constants)
                yield from _label_grad(row, label, dtype, extra)
        if group in ("all", "scale"):
            constants = {"BLOCK": row.scale_block, "num_warps": 8}
            yield Variant(f"scale {dtype}", scale_kernel, dtype, constants)
    if group in ("all", "compact"):
        for extra in (False, True):
            constants = {"BLOCK_N": row.compact_block_n}
            if not extra:
                constants["token_weight"] = None
            yield Variant(f"compact{' terms' if extra else ''}", compact_kernel, "i64", constants)
    if group in ("all", "stats"):
        constants = {"BLOCK_N": row.merge_block_n}
        yield Variant("merge_stats", merge_stats_kernel, "i64", constants)


def _walk(blocks: archs.Blocks, size: int) -> dict[str, Any]:
    more = {"EVEN_H": True, "UNIT": 16 // size}
    return _without(blocks._asdict(), "MAX_SPLITS", "DESCRIPTOR") | more


def _forward(
    label: str, dtype: str, blocks: archs.Blocks, common: dict[str, Any]
) -> Iterator[Variant]:
    """With TMA where the row asks for it, and as it runs where the addresses forbid it."""
    constants = _walk(blocks, BYTES[dtype]) | common | {"lse": None}
    if blocks.DESCRIPTOR:
        yield Variant(f"{label} TMA", forward_kernel, dtype, constants)
    yield Variant(label, forward_kernel, dtype, constants | {"weight_tiles": None})


def _softmax_grad(
    row: archs.Architecture, name: str, dtype: str, option: bool, none: dict[str, Any]
) -> Iterator[Variant]:
    constants = none | {
        "AMPLIFY": 16384.0 if dtype == "fp16" else 1.0,
        "BLOCK_V": row.exp_block_v,
        "num_warps": row.exp_warps,
    }
    # "terms": label smoothing, z-loss, token and class weights, argmax beside the loss
    for extra in (False, True) if option else (False,):
        label = f"{name}{' terms' if extra else ''}"
        more = {} if extra else {"best": None}
        yield Variant(f"exp_tile {label}", exp_tile_kernel, dtype, constants | more)
        without = _without(constants, "bias") | {"BLOCKS": 64, "EXP_BLOCK_V": row.exp_block_v}
        if not extra:
            more |= dict.fromkeys(("argmax", "rows", "terms", "lse", "row_factors"))
        # label smoothing is a shift, with no soft-cap beside it
        for shift in (False, True) if extra else (False,):
            unused = {"softcap": None} if shift else {"shifts": None, "class_weight": None}
            label_ = f"softmax_grad {label}{' smoothing' if shift else ''}"
            yield Variant(label_, softmax_grad_kernel, dtype, without | more | unused)
            if not option:
                wide = without | more | unused | {"BLOCKS": 512, "EXP_BLOCK_V": 256}
                yield Variant(f"{label_} after exp_gemm", softmax_grad_kernel, dtype, wide)
                odd = frozenset(("V",))
                label_ = f"{label_} V=50257"
                yield Variant(label_, softmax_grad_kernel, dtype, without | more | unused, odd)
        unused = {} if extra else dict.fromkeys(("beta", "gamma", "class_weight", "temperature"))
        yield Variant(f"token_grad {label}", token_grad_kernel, dtype, constants | unused)


def _label_grad(row: archs.Architecture, label: str, dtype: str, extra: bool) -> Iterator[Variant]:
    """Into a sum of float32, or into a gradient in the inputs' dtype; never for float32 inputs."""
    block_c, block_h = row.label_block
    constants: dict[str, Any] = {"BLOCK_C": block_c, "BLOCK_H": block_h, "num_warps": 4}
    if not extra:
        constants |= {"row_factors": None, "d_bias": None}
    if dtype != "fp32":
        label = f"label_grad {label}"
        yield Variant(
            f"{label} sum", label_grad_kernel, dtype, constants, wide=frozenset({"d_weight"})
        )
    if dtype == "bf16":
        yield Variant(label, label_grad_kernel, dtype, constants)


def _named(blocks: archs.Blocks) -> str:
    x = blocks
    more = f" G{x.GROUP_N}" + (" flat" if x.FLATTEN else "")
    return f"{x.BLOCK_N}x{x.BLOCK_V}x{x.BLOCK_H} w{x.num_warps} s{x.num_stages}{more}"


def _without(constants: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in constants.items() if k not in names}
