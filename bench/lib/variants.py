"""Compilations of every kernel for an architecture, with and without options.

No other file of the report refers to the package's kernels or to its table of architectures, from
which block sizes are read row by row (:mod:`fusedce.backends.triton.archs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fusedce.backends.triton import archs
from fusedce.backends.triton.launch import power_of_2
from fusedce.kernels.compact import compact_kernel
from fusedce.kernels.divergence import divergence_rows_kernel
from fusedce.kernels.input_grads import hidden_grad_kernel, label_grad_kernel, scale_kernel
from fusedce.kernels.softmax_grad import (
    exp_tile_kernel,
    label_logit_kernel,
    softmax_rows_kernel,
)
from fusedce.kernels.stats import merge_stats_kernel
from fusedce.kernels.token_grad import token_grad_kernel
from fusedce.kernels.walk import EXPONENTIALS, STATISTICS, SUMS, walk_kernel

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
KERNELS = (
    "forward",
    "stats",
    "exp_gemm",
    "softmax_grad",
    "divergence",
    "scale",
    "compact",
)  # groups to choose from
# Types of the arguments that are not constants: by name, or the dtype of the inputs.
_TYPES = dict.fromkeys(
    ("N", "H", "V", "T", "most", "width", "n", "begin", "first", "first_block", "blocks",
     "tiles_per_split", "splits",
     "ignore_index", "n_tickets", "C"),
    "i32",
) | {
    "labels": "*i64", "columns": "*i64", "order": "*i64", "rows": "*i32", "count": "*i32",
    "n_valid": "*i64",
    "tickets": "*i32", "block_losses": "*fp64", "best": "*i32", "argmax": "*i64",
    "factor": "fp32", "scale": "fp32", "softcap": "fp32",
    "teacher_scale": "fp32", "teacher_softcap": "fp32", "of_ce": "fp32", "share": "fp32",
    "rest": "fp32",
    "to_plain": "fp32", "largest": "*i64", "smoothing": "fp32", "z_loss": "fp32",
} | dict.fromkeys(
    ("lse", "loss_sum", "losses", "products", "g", "maxima", "sums", "moments", "zsums",
     "z_label", "z_labels", "entries", "terms", "shifts", "row_factors", "token_weight",
     "class_weight", "temperature", "alpha", "beta", "gamma", "at_label", "nll", "entropy",
     "zmean", "d_bias", "merged"),
    "*fp32",
)  # fmt: skip
# Arguments that are multiples of 16 where the sizes are what models have.
ALIGNED = frozenset((
    "hidden", "weight", "weight_tiles", "bias", "N", "n", "H", "V", "stride_hn",
    "stride_wv", "most", "width", "exps", "grads", "stride_pc", "stride_ec", "stride_gc", "x",
    "labels", "rows", "products", "class_weight", "d_weight", "student", "teacher",
    "teacher_bias", "stride_g",
))  # fmt: skip
OPTIONS = ("bias", "scale", "softcap")
# Blocks of the forward kernel to measure beside the default, in bf16.
_SMALL = (archs.Blocks(64, 128, 32, 4, 2), archs.Blocks(128, 64, 32, 4, 2))
_HOPPER = archs.BY_NAME["sm_90"].two_bytes
CANDIDATES: dict[str, tuple[archs.Blocks, ...]] = {
    "sm_80": (
        archs.Blocks(256, 128, 32, 8, 3),
        archs.Blocks(128, 128, 32, 8, 4),
        archs.Blocks(128, 128, 64, 8, 3, GROUP_N=8),
        archs.Blocks(64, 128, 64, 4, 3),
    ),
    "sm_90": (
        _HOPPER.forward._replace(GROUP_N=8),
        _HOPPER.forward._replace(num_stages=4),
        _HOPPER.forward._replace(DESCRIPTOR=False),
        archs.Blocks(256, 128, 64, 8, 4, GROUP_N=8, DESCRIPTOR=True),
        _HOPPER.stats,
        archs.Blocks(128, 128, 64, 4, 3, DESCRIPTOR=True),
    ),
    "sm_100": (
        _HOPPER.forward._replace(num_stages=4),
        archs.Blocks(256, 128, 64, 8, 3, GROUP_N=8, DESCRIPTOR=True),
        _HOPPER.stats,
        archs.Blocks(128, 128, 64, 4, 3, DESCRIPTOR=True),
    ),
    "sm_86": (archs.Blocks(64, 64, 64, 4, 2), *_SMALL),
    "sm_89": (archs.Blocks(64, 64, 64, 4, 2), *_SMALL),
    "sm_120": (archs.Blocks(64, 64, 64, 4, 2), *_SMALL),
    "gfx942": _SMALL,
}


class Variant(NamedTuple):
    """One compilation."""

    label: str
    kernel: Any
    dtype: str  # of the inputs
    constants: dict[str, Any]
    unaligned: frozenset[str] = frozenset()  # arguments that are no multiples of 16 here
    wide: frozenset[str] = frozenset()  # arguments in float32 here
    candidate: bool = False  # not what runs by default


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
        else:
            types[name] = _TYPES.get(name, f"*{variant.dtype}")
    return types


def variants(
    arch: str, group: str = "all", config: str | None = None, *, candidates: bool = False
) -> Iterator[Variant]:
    """Yield the compilations for ``arch``; ``config`` gives other blocks of the forward kernel.

    ``candidates`` adds those of :data:`CANDIDATES`, for bf16 without options.
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
                if walks.forward_narrow is not None and not option and config is None:
                    label = f"forward {name} narrow"
                    yield from _forward(label, dtype, walks.forward_narrow, none | common)
                if candidates and name == "bf16":
                    for blocks in CANDIDATES.get(arch, ()):
                        label = f"forward {name} {_named(blocks)}"
                        for variant in _forward(label, dtype, blocks, none | common):
                            yield variant._replace(candidate=True)
            gemm = walks.gemm_with_options if option else walks.gemm
            if group in ("all", "exp_gemm") and gemm is not None:
                constants = none | common
                constants |= {"AMPLIFY": 16384.0 if dtype == "fp16" else 1.0}
                if not option:
                    constants["best"] = None
                constants |= dict.fromkeys(("rows", "count", *_OF_SUMS, *_OF_STATISTICS))
                yield _walk(f"exp_gemm {name}", dtype, gemm, EXPONENTIALS, constants)
            if group in ("all", "softmax_grad") and precision == "ieee":
                yield from _softmax_grad(row, name, dtype, option, none)
            if group in ("all", "stats"):
                blocks = walks.stats_with_options if option else walks.stats
                constants = none | common | dict.fromkeys((*_OF_SUMS, *_OF_EXPONENTIALS))
                if not option:
                    constants |= {"zsums": None, "class_weight": None, "temperature": None}
                yield _walk(f"stats {name}", dtype, blocks, STATISTICS, constants)
        if group in ("all", "softmax_grad"):
            for extra in (False, True):
                # "terms": gradients of a loss without a sum, token by token
                constants = {
                    "BLOCK_H": 1024,
                    "num_warps": row.exp_warps,
                    "AMPLIFY": 16384.0 if dtype == "fp16" else 1.0,
                    "ENTRIES": 2 if extra else 1,
                }
                if dtype == "fp16" and not extra:
                    constants["row_factors"] = None
                label = f"{dtype}{' terms' if extra else ''}"
                yield Variant(f"hidden_grad {label}", hidden_grad_kernel, dtype, constants)
            yield from _label_grad(row, dtype)
        if group in ("all", "divergence"):
            yield from _divergence(row, dtype)
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


_OF_SUMS = ("block_losses", "tickets", "loss_sum", "lse")
_OF_STATISTICS = ("class_weight", "temperature", "moments", "zsums")
_OF_EXPONENTIALS = ("exps", "width", "stride_ec")


def _walk(
    label: str, dtype: str, blocks: archs.Blocks, epilogue: Any, constants: dict[str, Any]
) -> Variant:
    walk = _without(blocks._asdict(), "MAX_SPLITS", "DESCRIPTOR") | {"EPILOGUE": epilogue.value}
    if not blocks.DESCRIPTOR:
        walk["weight_tiles"] = None
    return Variant(label, walk_kernel, dtype, {"AMPLIFY": 1.0} | constants | walk)


def _forward(
    label: str, dtype: str, blocks: archs.Blocks, common: dict[str, Any]
) -> Iterator[Variant]:
    constants = common | dict.fromkeys(("lse", "best", *_OF_STATISTICS, *_OF_EXPONENTIALS))
    label = f"{label} TMA" if blocks.DESCRIPTOR else label
    yield _walk(label, dtype, blocks, SUMS, constants)


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
        for normalised in (False, True) if dtype != "fp16" else (True,):
            own = {"z_label": None} if normalised else {}
            label_ = f"{label}{' normalised' if normalised and dtype != 'fp16' else ''}"
            yield Variant(f"exp_tile {label_}", exp_tile_kernel, dtype, constants | more | own)
            yield from _softmax_rows(row, label_, dtype, option, extra, normalised, constants)
        unused = {} if extra else dict.fromkeys(("beta", "gamma", "class_weight", "temperature"))
        unused |= {"num_warps": row.token_warps}
        yield Variant(f"token_grad {label}", token_grad_kernel, dtype, constants | unused)


def _softmax_rows(
    row: archs.Architecture,
    label: str,
    dtype: str,
    option: bool,
    extra: bool,
    normalised: bool,
    constants: dict[str, Any],
) -> Iterator[Variant]:
    """``normalised``: label smoothing, whose exponentials wait in float32, and float16."""
    constants = _without(constants, "bias") | {
        "NORMALISE": normalised, "BLOCKS": 64, "BLOCK_H": 1024,
    }  # fmt: skip
    wide: frozenset[str] = frozenset()
    if normalised:
        constants["scaled"] = None
    smoothing = normalised and dtype != "fp16"
    if smoothing:
        constants["softcap"] = None
        wide = frozenset({"exps"})
    else:
        constants |= {"shifts": None, "class_weight": None}
    if not extra:
        constants |= dict.fromkeys(("argmax", "rows", "best", "terms", "lse"))
        constants |= {"shifts": None, "class_weight": None}
        if normalised:
            constants["row_factors"] = None
    of_shard = constants | dict.fromkeys(("best", "argmax", "rows"))
    yield Variant(f"softmax_rows {label} shard", softmax_rows_kernel, dtype, of_shard, wide=wide)
    constants["merged"] = None
    yield Variant(f"softmax_rows {label}", softmax_rows_kernel, dtype, constants, wide=wide)
    walks = row.walks(BYTES[dtype])
    if not option and walks.gemm is not None:
        block = walks.gemm.BLOCK_V
        many = constants | {"BLOCKS": power_of_2(-(-128256 // block)), "BLOCK_V": block}
        label_ = f"softmax_rows {label} after exp_gemm"
        yield Variant(
            label_, softmax_rows_kernel, dtype, many, wide=wide, candidate=not walks.gemm_up_to
        )
        odd = frozenset(("V",))
        label_ = f"softmax_rows {label} V=50257"
        yield Variant(label_, softmax_rows_kernel, dtype, constants, odd, wide)


def _divergence(row: archs.Architecture, dtype: str) -> Iterator[Variant]:
    """Each kind plain, and all options of both kinds of JSD; the biases come in float32."""
    wide = frozenset(("student", "teacher", "bias", "teacher_bias"))
    for kind, name in enumerate(("forward", "reverse", "jsd", "jsd edge")):
        for option in (False, True) if name.startswith("jsd") else (False,):
            constants: dict[str, Any] = {
                "KIND": kind,
                "HAS_CE": option,
                "NORMALISE": dtype == "fp16",
                "AMPLIFY": 8192.0 if dtype == "fp16" else 1.0,
                "BLOCK_V": row.divergence_block_v,
                "num_warps": row.divergence_warps,
            }
            if not option:
                none = (*OPTIONS, "teacher_bias", "teacher_scale", "teacher_softcap")
                constants |= dict.fromkeys(none)
            if dtype != "fp16":
                constants["row_factors"] = None
            label = f"divergence_rows {dtype} {name}{' bias+scale+cap+ce' if option else ''}"
            yield Variant(label, divergence_rows_kernel, dtype, constants, wide=wide)


def _label_grad(row: archs.Architecture, dtype: str) -> Iterator[Variant]:
    """Into a sum of float32, or into a gradient in the inputs' dtype."""
    block_c, block_h = row.label_block
    constants: dict[str, Any] = {"BLOCK_C": block_c, "BLOCK_H": block_h, "num_warps": 4}
    for option in (False, True):
        none = {} if option else dict.fromkeys(OPTIONS)
        label = f"label_logit {dtype}{' bias+scale+cap' if option else ''}"
        yield Variant(label, label_logit_kernel, dtype, constants | none | {"rows": None})
        yield Variant(f"{label} shard", label_logit_kernel, dtype, constants | none)
        more = {} if option else {"d_bias": None}
        label = f"label_grad {dtype}{' bias' if option else ''}"
        sums = frozenset({"d_weight"})
        yield Variant(f"{label} sum", label_grad_kernel, dtype, constants | more, wide=sums)
        if dtype == "bf16":
            yield Variant(label, label_grad_kernel, dtype, constants | more)


def _named(blocks: archs.Blocks) -> str:
    x = blocks
    return f"{x.BLOCK_N}x{x.BLOCK_V}x{x.BLOCK_H} w{x.num_warps} s{x.num_stages} G{x.GROUP_N}"


def _without(constants: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in constants.items() if k not in names}
