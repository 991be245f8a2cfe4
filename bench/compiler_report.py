"""Registers, spills, instructions and copies of every compiled kernel, without a GPU.

    python bench/compiler_report.py                       # all architectures, with options too
    python bench/compiler_report.py --arch sm_90 --json   # one of them, for a program to read
    python bench/compiler_report.py --faults              # exit status 1 if there is one
    python bench/compiler_report.py --match "^forward" --json > before.json     # one line a kernel

Registers and spills (bytes per thread) of NVIDIA targets come from ptxas, of AMD targets from the
assembly's metadata. "matrix" counts tensor-core instructions in the assembly, "async" the copies
that run beside the arithmetic, "loads" and "stores" the accesses of global memory in machine code
by the bytes a thread moves at once. Other blocks are tried in the architecture's row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter would replace the compiler

import triton
from lib import compiled, launches, tables

# Launches with rare options that may spill a little, by the architecture's row (LOG.md).
_FP16_FORWARD = r"divergence_rows fp16 forward \S+ options"
# 16 bytes a thread; a narrower block costs the forward pass 13% of its time on an H200.
_FORWARD = rf"{_FP16_FORWARD}|forward \S+ softcap alone|divergence_rows fp16 jsd 0.01 options"
_ADA = r"stats (fp32 .*mean logit|\S+ terms smoothed)"
MAY_SPILL = {
    "sm_80": _FP16_FORWARD, "sm_90": _FORWARD,
    "sm_100": r"divergence_rows \S+ jsd|stats bf16 smoothed|softmax_rows bf16 terms'",
    "sm_86": _ADA, "sm_89": _ADA,
    "sm_120": r"stats fp32 .*(tokens|mean logit)",
}  # fmt: skip
# Triton 3.6 brings another ptxas: 16 to 72 bytes a thread.
MAY_SPILL_3_6 = {
    "sm_90": r"divergence_rows fp16 jsd 0.5 options",
    "sm_100": r"stats \S+ bias\S+ terms smoothed|divergence_rows \S+ (forward|reverse) 0.5$",
    "sm_120": r"stats bf16 bias\S+ mean logit",
}


def compile_all(archs: Sequence[str], match: str, sass: str) -> list[dict[str, Any]]:
    """Return a row for each launch; print its name while it compiles."""
    rows = []
    for arch in archs:
        if not compiled.available(arch):
            print(f"{arch}: this Triton has no compiler for it", file=sys.stderr)
            continue
        for name, launch in launches.launches(compiled.TARGETS[arch].row.name).items():
            if re.search(match, name):
                print(f"{arch} {name}", file=sys.stderr, flush=True)
                own = {"kernel": name, "arch": arch, "triton": triton.__version__}
                read = bool(re.search(sass, name))
                rows.append(own | compiled.compile_kernel(launch, arch, sass=read))
    return rows


def as_json(rows: Sequence[dict[str, Any]]) -> str:
    """JSON with one line per row, so that diffs are readable."""
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def table(rows: Sequence[dict[str, Any]]) -> str:
    return tables.markdown([
        {
            "kernel": row["kernel"],
            "arch": row["arch"],
            "registers": f"{row['registers']} x {row['warps']} warps",
            "spills B": row["spill_bytes"],
            "warnings": " ".join(row.get("warnings", ())),
            "shared KiB / limit": f"{row['shared'] / 1024:.0f} / {row['shared_limit'] // 1024}",
            "matrix": ", ".join(f"{n} {name}" for name, n in row["matrix"].items()),
            "async": row["async"],
            "exp2": row["exp2"],
            "loads": _widths(row.get("loads", {})),
            "stores": _widths(row.get("stores", {})),
            "barriers": row.get("barriers", ""),
            "instructions": row.get("instructions", ""),
        }
        for row in rows
    ])  # fmt: skip


def _widths(found: dict[str, int]) -> str:
    return ", ".join(f"{n} x {width} B" for width, n in found.items())


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List serialised wgmma, and spilled registers where the architecture expects none."""
    found = []
    for row in rows:
        name = f"{row['kernel']} {row['arch']}"
        if row.get("warnings"):
            found.append(f"{name}: ptxas warns of {' '.join(row['warnings'])}")
        arch = compiled.TARGETS[row["arch"]].row.name
        of_3_6 = MAY_SPILL_3_6 if triton.__version__.startswith("3.6.") else {}
        expected = [may[arch] for may in (MAY_SPILL, of_3_6) if arch in may]
        if row["spill_bytes"] and not any(re.match(x, row["kernel"]) for x in expected):
            found.append(f"{name}: {row['spill_bytes']} bytes of spills")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(compiled.TARGETS)
    parser.add_argument("--arch", nargs="+", choices=names, default=names)
    parser.add_argument("--match", default="", help="regular expression that names must match")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument(
        "--faults", action="store_true", help="status 1 for spills, serialised wgmma"
    )
    parser.add_argument(
        "--sass", default="", help="read NVIDIA's machine code of names that match; default all"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = compile_all(args.arch, args.match, args.sass)
    wrong = faults(rows) if args.faults else []
    print(*wrong, sep="\n", file=sys.stderr)
    print(as_json(rows) if args.json else f"triton {triton.__version__}\n\n{table(rows)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
