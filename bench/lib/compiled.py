"""Compile a kernel for an architecture without a GPU, and read registers and instructions.

Triton compiles for any target; its `ptxas` reports registers and spills, and `nvdisasm` prints the
machine code. On AMD targets both come from the assembly and its metadata.
"""

from __future__ import annotations

import collections
import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedce.backends.triton.archs import ARCHITECTURES, Architecture

from .launches import Launch

_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


class Target(NamedTuple):
    """An architecture to compile for."""

    gpu: GPUTarget
    shared_limit: int  # bytes a block may use
    row: Architecture  # its blocks


def _targets(row: Architecture) -> Iterator[tuple[str, Target]]:
    """Compile targets of a row by name; an AMD row has one for each of its devices."""
    if row.compiler is not None:
        backend, arch, warp = row.compiler
        for name in row.generations if backend == "hip" else (row.name,):
            gpu = GPUTarget(backend, name if backend == "hip" else arch, warp)
            yield name, Target(gpu, row.shared_limit, row)


TARGETS = {name: target for row in ARCHITECTURES for name, target in _targets(row)}
_MATRIX = r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma"
_ASYNC = r"cp\.async\.c[ga]\.|cp\.async\.bulk\.tensor|global_load_lds|buffer_load.* lds"
_BITS = {"": 4, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # bytes of a SASS access


def available(target: str) -> bool:
    """Whether this Triton has a compiler, and for AMD a linker, for the architecture."""
    name = "nvidia" if TARGETS[target].gpu.backend == "cuda" else "amd"
    if name not in backends:
        return False
    # Older ones look for ROCm's linker in the system; newer ones bring theirs.
    find = getattr(backends[name].compiler, "path_to_rocm_lld", None)
    if find is None:
        return True
    try:
        return bool(find())
    except Exception:  # no narrower one is raised there
        return False


def compile_kernel(launch: Launch, target: str, *, sass: bool = True) -> dict[str, Any]:
    """Compile what is launched; one row of the report, whose keys stand at the end.

    Without ``sass`` NVIDIA's machine code is not read, which takes half of the time.
    """
    kernel, constants = launch.kernel, dict(launch.constants)
    options = {k: constants.pop(k) for k in ("num_warps", "num_stages") if k in constants}
    options["enable_fp_fusion"] = True  # as in every launch
    place = kernel.arg_names.index
    source = ASTSource(
        fn=kernel,
        signature={n: launch.types.get(n, "constexpr") for n in kernel.arg_names},
        constexprs={(place(k),): v for k, v in constants.items()},
        attrs={(place(k),): [["tt.divisibility", 16]] for k in launch.aligned},
    )
    gpu, limit, _ = TARGETS[target]
    said = io.StringIO()  # what ptxas says, which it does not of a kernel from the cache
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=gpu, options=options)
    if gpu.backend == "cuda":
        asm = compiled.asm["ptx"]
        found = _nvidia(said.getvalue(), compiled.asm["cubin"], sass=sass)
    else:
        asm = compiled.asm["amdgcn"]
        found = _amd(asm)
    matrix = collections.Counter(re.findall(_MATRIX, asm))
    return {
        **found,
        "warps": compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,  # bytes
        "shared_limit": limit,
        "matrix": dict(sorted(matrix.items())),  # tensor-core instructions
        "async": len(re.findall(_ASYNC, asm)),  # copies that run beside the arithmetic
        "exp2": len(re.findall(r"ex2\.approx|v_exp_f32", asm)),
    }


# ---- NVIDIA -----------------------------------------------------------------------------------


def _nvidia(said: str, cubin: bytes, *, sass: bool) -> dict[str, Any]:
    used = re.findall(r"Used (\d+) registers", said)  # (Triton 3.4 does not tell what ptxas says)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    found = {
        "registers": int(used[0]) if used else None,  # of a thread
        "spill_bytes": spills if used else None,  # of a thread, stored and loaded again
        # of wgmma, which ptxas then serialises: C7510 to C7519
        "warnings": sorted(set(re.findall(r"\b(C75\d\d)\b", said))),
    }
    if not sass:
        return found
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        read = [str(_BIN / "nvdisasm"), "-c", file.name]
        code = subprocess.run(read, capture_output=True, text=True, check=True).stdout
    return found | machine_code(code)


def machine_code(sass: str) -> dict[str, Any]:
    """Counts of instructions in the output of ``nvdisasm -c``."""
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)", sass, re.M)
    names = [name.rstrip(";") for name in lines if not name.startswith("NOP")]
    return {
        "instructions": len(names),
        "barriers": sum(name.startswith("BAR.") for name in names),
        "loads": _widths(names, "LDG"),  # bytes of an access of a thread: how many
        "stores": _widths(names, "STG"),
    }


def _widths(names: list[str], kind: str) -> dict[str, int]:
    found: collections.Counter[int] = collections.Counter()
    for name in names:
        operation, *suffixes = name.split(".")
        if operation == kind:
            found[next((_BITS[s] for s in suffixes if s in _BITS), 4)] += 1
    return {str(width): found[width] for width in sorted(found, reverse=True)}


# ---- AMD --------------------------------------------------------------------------------------

_DWORDS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2,
           "sshort": 2, "byte": 1, "ubyte": 1, "sbyte": 1}  # fmt: skip


def _amd(asm: str) -> dict[str, Any]:
    def number(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", asm)[0])

    names = re.findall(r"^\t((?:[sv]|ds|global|buffer|flat)_\w+)", asm, re.M)
    widths = {}
    for kind in ("load", "store"):
        found: collections.Counter[int] = collections.Counter()
        for name in names:
            access = re.fullmatch(rf"(?:global|buffer|flat)_{kind}_(\w+?)(?:_d16\w*)?", name)
            if access is not None and access[1] in _DWORDS:
                found[_DWORDS[access[1]]] += 1
        widths[f"{kind}s"] = {str(w): found[w] for w in sorted(found, reverse=True)}
    return {
        "warnings": [],
        "registers": number("vgpr_count"),
        "spill_bytes": 4 * number("vgpr_spill_count"),
        "instructions": len(names),
        "barriers": names.count("s_barrier"),
        **widths,
    }
