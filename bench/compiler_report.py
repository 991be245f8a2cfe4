"""Compile every kernel for every architecture, without a GPU, and tabulate what came out.

    python bench/compiler_report.py                       # all architectures, with options too
    python bench/compiler_report.py --arch sm_90 --json   # one of them, for a program to read
    python bench/compiler_report.py --kernel forward --arch sm_90 --config 256,128,64,8,3

Registers and spills (bytes per thread) of NVIDIA targets come from ptxas, of AMD targets from the
assembly's metadata. "matrix" counts tensor-core instructions in the assembly, "async" the copies
that run beside the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter would replace the compiler

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedce.backends.triton import archs as configs
from fusedce.kernels.compact import compact_kernel
from fusedce.kernels.forward import forward_kernel
from fusedce.kernels.scale import scale_kernel
from fusedce.kernels.softmax_grad import exp_tile_kernel, hidden_grad_kernel, softmax_grad_kernel
from fusedce.kernels.stats import merge_stats_kernel, stats_kernel
from fusedce.kernels.token_grad import token_grad_kernel

KiB = 1024


class Arch(NamedTuple):
    target: GPUTarget
    shared_limit: int  # bytes a block may use
    ptxas: str = ""


ARCHS = {
    "sm_80": Arch(GPUTarget("cuda", 80, 32), 163 * KiB, "sm_80"),
    "sm_90": Arch(GPUTarget("cuda", 90, 32), 227 * KiB, "sm_90a"),
    "sm_100": Arch(GPUTarget("cuda", 100, 32), 227 * KiB, "sm_100a"),
    "sm_120": Arch(GPUTarget("cuda", 120, 32), 99 * KiB, "sm_120a"),
    "gfx942": Arch(GPUTarget("hip", "gfx942", 64), 64 * KiB),
}
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
MATRIX = r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma"
ASYNC = r"cp\.async\.cg|cp\.async\.ca|cp\.async\.bulk\.tensor|global_load_lds|buffer_load.* lds"
# Types of the arguments that are not constants: by name, or the dtype of the inputs.
INTEGERS = ("N", "H", "V", "C", "T", "n", "begin", "first", "blocks", "tiles_per_split", "splits",
            "ignore_index", "n_tickets")  # fmt: skip
TYPES = dict.fromkeys(INTEGERS, "i32") | {
    "labels": "*i64", "rows": "*i32", "count": "*i32", "n_valid": "*i64", "tickets": "*i32",
    "block_losses": "*fp64", "partials": "*fp32", "lse": "*fp32", "loss_sum": "*fp32",
    "losses": "*fp32", "products": "*fp32", "g": "*fp32", "maxima": "*fp32", "sums": "*fp32",
    "places": "*i32", "argmax": "*i64", "z_label": "*fp32",
    "residuals": "*fp32", "factor": "fp32", "scale": "fp32", "softcap": "fp32",
} | dict.fromkeys(
    ("terms", "row_factors", "mean_row", "mean_factors", "token_weight", "class_weight", "nll",
     "entropy", "zmean", "z_labels", "alpha", "beta", "gamma", "at_label"),
    "*fp32",
)  # fmt: skip
# What triton finds to be multiples of 16 at launch, for an aligned head.
ALIGNED = ("hidden", "weight", "bias", "H", "V", "stride_hn", "stride_wv", "partials", "products",
           "exps", "stride_pc", "stride_ec", "T", "x", "labels", "rows")  # fmt: skip


def compile_one(kernel: Any, dtype: str, arch: str, constants: dict[str, Any]) -> dict[str, Any]:
    """Compile one variant; its row of the table."""
    constants = dict(constants)
    options = {k: constants.pop(k) for k in ("num_warps", "num_stages") if k in constants}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "weight_tiles" and constants["DESCRIPTOR"]:
            signature[name] = f"tensordesc<{dtype}[{constants['BLOCK_V']}, {constants['BLOCK_H']}]>"
        elif name.startswith("stride_"):
            signature[name] = "i32"
        else:
            signature[name] = TYPES.get(name, f"*{dtype}")
    place = kernel.arg_names.index
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(place(k),): v for k, v in constants.items()},
        attrs={
            (place(k),): [["tt.divisibility", 16]]
            for k in ALIGNED
            if k in kernel.arg_names and signature[k] != "constexpr"
        },
    )
    compiled = triton.compile(source, target=ARCHS[arch].target, options=options)
    shared, limit = compiled.metadata.shared, ARCHS[arch].shared_limit
    asm = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    registers, spills, instructions = (
        _ptxas(asm, ARCHS[arch].ptxas) if "ptx" in compiled.asm else _amdgcn_metadata(asm)
    )
    matrix = re.findall(MATRIX, asm)
    return {
        "registers": registers,
        "spill_bytes": spills,
        "warps": compiled.metadata.num_warps,
        "shared": shared,
        "shared_limit": limit,
        "matrix": {x: matrix.count(x) for x in sorted(set(matrix))},
        "async": len(re.findall(ASYNC, asm)),
        "exp2": len(re.findall(r"ex2\.approx|v_exp_f32", asm)),
        "instructions": instructions,
    }


def _ptxas(ptx: str, arch: str) -> tuple[int, int, int]:
    """Registers per thread, bytes spilled (stores and loads), machine instructions."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    # Blackwell has an assembler of its own beside the usual one.
    binary = folder / ("ptxas-blackwell" if arch.startswith("sm_1") else "ptxas")
    binary = binary if binary.exists() else folder / "ptxas"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "kernel.ptx"
        file.write_text(ptx)
        command = [str(binary), "-v", f"--gpu-name={arch}", str(file), "-o", f"{scratch}/out"]
        done = subprocess.run(command, capture_output=True, text=True)
        disassemble = [str(folder / "nvdisasm"), "-c", f"{scratch}/out"]
        code = subprocess.run(disassemble, capture_output=True, text=True).stdout
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    report = done.stderr + done.stdout
    spills = re.findall(r"(\d+) bytes spill", report)
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)\S", code, re.M))
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    return registers, sum(map(int, spills)), instructions


def _amdgcn_metadata(asm: str) -> tuple[int, int, int]:
    def number(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", asm)[0])

    instructions = len(re.findall(r"^\t[sv]_|^\t(?:ds|global|buffer|flat)_", asm, re.M))
    return number("vgpr_count"), 4 * number("vgpr_spill_count"), instructions


def variants(arch: str, kernel: str, config: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(label, row)`` of everything compiled for one architecture."""
    family = arch if any(a == arch for a, _ in configs.FORWARD) else "other"
    for dtype, size in DTYPES.items():
        for option, precision in ((False, "ieee"), (True, "ieee"), (False, "tf32")):
            if precision == "tf32" and (dtype != "fp32" or arch == "gfx942"):
                continue
            forward = configs.forward(family, size, options=option)
            if config is not None:
                numbers = [int(x) for x in config.split(",")]
                forward = configs.ForwardConfig(*numbers, DESCRIPTOR=forward.DESCRIPTOR)
            flags = {"HAS_BIAS": option, "HAS_SCALE": option, "HAS_SOFTCAP": option}
            suffix = " bias+scale+cap" if option else " tf32" if precision == "tf32" else ""
            if kernel in ("all", "forward"):
                constants = forward._asdict() | flags | {
                    "EVEN_H": True, "INPUT_PRECISION": precision, "UPCAST": False,
                }  # fmt: skip
                del constants["MAX_SPLITS"]
                for descriptor in sorted({False, forward.DESCRIPTOR}, reverse=True):
                    constants["DESCRIPTOR"] = descriptor
                    label = f"forward {dtype}{suffix}{' TMA' if descriptor else ''}"
                    yield label, compile_one(forward_kernel, dtype, arch, constants)
            if kernel in ("all", "softmax_grad") and precision == "ieee":
                constants = flags | {
                    "AMPLIFY": 16384.0 if dtype == "fp16" else 1.0,
                    "BLOCK_V": configs.EXP_BLOCK_V,
                    "num_warps": configs.EXP_WARPS,
                }
                # "terms": label smoothing, z-loss, token and class weights, argmax beside the loss
                for extra in (False, True) if option else (False,):
                    label = f"{dtype}{suffix}{' terms' if extra else ''}"
                    row = compile_one(
                        exp_tile_kernel, dtype, arch, constants | {"HAS_ARGMAX": extra}
                    )
                    yield f"exp_tile {label}", row
                    more = {"HAS_ARGMAX": extra, "HAS_TERMS": extra, "BLOCKS": 64}
                    without = {k: v for k, v in constants.items() if k != "HAS_BIAS"}
                    row = compile_one(softmax_grad_kernel, dtype, arch, without | more)
                    yield f"softmax_grad {label}", row
                    more = {"HAS_BETA": extra, "HAS_GAMMA": extra, "HAS_CLASS_WEIGHT": extra}
                    row = compile_one(token_grad_kernel, dtype, arch, constants | more)
                    yield f"token_grad {label}", row
            if kernel in ("all", "stats"):
                constants = configs.stats(family, size, options=option)._asdict() | flags | {
                    "HAS_ENTROPY": True, "HAS_ARGMAX": True, "HAS_ZSUM": option,
                    "HAS_CLASS_WEIGHT": option, "EVEN_H": True, "INPUT_PRECISION": precision,
                    "UPCAST": False,
                }  # fmt: skip
                del constants["MAX_SPLITS"], constants["FLATTEN"]
                yield f"stats {dtype}{suffix}", compile_one(stats_kernel, dtype, arch, constants)
        if kernel in ("all", "softmax_grad"):
            constants = {"BLOCK_H": 1024, "num_warps": configs.EXP_WARPS}
            for extra in (False, True):
                more = {"HAS_FACTORS": extra, "HAS_MEAN": extra}
                row = compile_one(hidden_grad_kernel, dtype, arch, constants | more)
                yield f"hidden_grad {dtype}{' terms' if extra else ''}", row
        if kernel in ("all", "scale"):
            constants = {"BLOCK": configs.SCALE_BLOCK, "num_warps": 8}
            yield f"scale {dtype}", compile_one(scale_kernel, dtype, arch, constants)
    if kernel in ("all", "compact"):
        for extra in (False, True):
            constants = {"BLOCK_N": configs.COMPACT_BLOCK_N, "HAS_TOKEN_WEIGHT": extra}
            label = f"compact{' terms' if extra else ''}"
            yield label, compile_one(compact_kernel, "i64", arch, constants)
    if kernel in ("all", "stats"):
        constants = {"BLOCK_N": configs.MERGE_BLOCK_N, "HAS_ENTROPY": True, "HAS_ARGMAX": True,
                     "HAS_ZSUM": True}  # fmt: skip
        yield "merge_stats", compile_one(merge_stats_kernel, "i64", arch, constants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", choices=list(ARCHS), default=list(ARCHS))
    names = ["all", "forward", "softmax_grad", "stats", "scale", "compact"]
    parser.add_argument("--kernel", choices=names, default="all")
    parser.add_argument("--config", help="BLOCK_N,BLOCK_V,BLOCK_H,num_warps,num_stages of forward")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    args = parser.parse_args()
    rows = []
    if not args.json:
        print(
            "| kernel | arch | registers | spills B | shared KiB / limit | matrix | async | exp2 "
            "| instructions |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
    for arch in args.arch:
        for label, row in variants(arch, args.kernel, args.config):
            rows.append({"kernel": label, "arch": arch} | row)
            matrix = ", ".join(f"{n} {name}" for name, n in row["matrix"].items()) or "-"
            if not args.json:
                print(
                    f"| {label} | {arch} | {row['registers']} x {row['warps']} warps "
                    f"| {row['spill_bytes']} | {row['shared'] / KiB:.0f} / "
                    f"{row['shared_limit'] // KiB} | {matrix} | {row['async']} | {row['exp2']} "
                    f"| {row['instructions']} |",
                    flush=True,
                )
    if args.json:
        json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
