"""Registers, spills, instructions and copies of every compiled kernel, without a GPU.

    python bench/compiler_report.py                       # all architectures, with options too
    python bench/compiler_report.py --arch sm_90 --json   # one of them, for a program to read
    python bench/compiler_report.py --faults              # exit status 1 if there is one
    python bench/compiler_report.py --summary a.json b.json    # spills by architecture and Triton
    python bench/compiler_report.py --out after.json --against before.json   # status 1 if worse
    python bench/compiler_report.py --kernel forward --arch sm_90 --config 256,128,64,8,3

Registers and spills (bytes per thread) of NVIDIA targets come from ptxas, of AMD targets from the
assembly's metadata. "matrix" counts tensor-core instructions in the assembly, "async" the copies
that run beside the arithmetic, "loads" and "stores" the accesses of global memory in machine code
by the bytes a thread moves at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter would replace the compiler

import triton
from lib import compiled, tables, variants

# Numbers that count against a kernel, and those that count for it.
LESS_IS_BETTER = ("spill_bytes", "registers", "instructions", "barriers", "shared")
MORE_IS_BETTER = ("async",)


def compile_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each variant; print its name while it compiles."""
    rows = []
    for arch in args.arch:
        if not compiled.available(arch):
            print(f"{arch}: this Triton has no compiler for it", file=sys.stderr)
            continue
        row_of = compiled.TARGETS[arch].row.name
        for variant in variants.variants(
            row_of, args.kernel, args.config, candidates=args.candidates
        ):
            if not re.search(args.match, variant.label):
                continue
            row = compiled.compile_kernel(
                variant.kernel, arch, variants.types_of(variant), variant.constants,
                variants.ALIGNED - variant.unaligned,
            )  # fmt: skip
            own = {
                "kernel": variant.label, "arch": arch, "candidate": variant.candidate,
                "triton": triton.__version__,
            }  # fmt: skip
            rows.append(own | row)
            if args.out is not None:
                args.out.write_text(as_json(rows))
            print(f"{arch} {variant.label}", file=sys.stderr, flush=True)
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
            "loads": _widths(row["loads"]),
            "stores": _widths(row["stores"]),
            "barriers": row["barriers"],
            "instructions": row["instructions"],
        }
        for row in rows
    ])  # fmt: skip


def _widths(found: dict[str, int]) -> str:
    return ", ".join(f"{n} x {width} B" for width, n in found.items())


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List spilled registers and serialised wgmma of kernels that run by default.

    Candidates of tuning may spill: tuning measures them.
    """
    found = []
    for row in rows:
        name = f"{row['kernel']} {row['arch']}"
        if row.get("warnings"):
            found.append(f"{name}: ptxas warns of {' '.join(row['warnings'])}")
        if row["spill_bytes"] and not row.get("candidate"):
            found.append(f"{name}: {row['spill_bytes']} bytes of spills")
    return found


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line per architecture and version of Triton: number of kernels, and their spills.

    Where a kernel was compiled twice, the later row counts.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in {(r["arch"], r["triton"], r["kernel"]): r for r in rows}.values():
        groups.setdefault((row["arch"], row["triton"]), []).append(row)
    cells = []
    for (arch, version), mine in sorted(groups.items()):
        default = [r for r in mine if not r["candidate"]]
        others = [r for r in mine if r["candidate"] and r["spill_bytes"]]
        cells.append({
            "arch": arch,
            "triton": version,
            "kernels that run by default": len(default),
            "bytes they spill": sum(r["spill_bytes"] for r in default),
            "warnings C75xx": sum(len(r["warnings"]) for r in mine),
            "candidates that spill": ", ".join(
                f"{r['kernel']} {r['spill_bytes']} B" for r in others
            ),
        })  # fmt: skip
    return tables.markdown(cells)


def compare(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], *, whole: bool = True
) -> tuple[str, list[str]]:
    """Return a table of the numbers that changed, and the list of those that got worse.

    Kernels that only one side has are named in the table but not judged (older ones only
    where the ``whole`` set was compiled); numbers that only one side has are left out.
    """
    old = {(r["kernel"], r["arch"]): r for r in before}
    new = {(r["kernel"], r["arch"]): r for r in after}
    archs = {arch for _, arch in new}
    changed, worse = [], []
    for key in dict.fromkeys([*old, *new]):
        if key[1] not in archs or not (whole or key in new):
            continue
        cells: dict[str, object] = {"kernel": key[0], "arch": key[1]}
        a, b = old.get(key), new.get(key)
        for name in (*LESS_IS_BETTER, *MORE_IS_BETTER):
            cells[name] = ""
            if a is None or b is None or name not in a or name not in b or a[name] == b[name]:
                continue
            cells[name] = f"{a[name]} -> {b[name]}"
            if (b[name] > a[name]) == (name in LESS_IS_BETTER):
                cells[name] += " (worse)"
                worse.append(f"{key[0]} {key[1]}: {name} {a[name]} -> {b[name]}")
        cells["side"] = "" if a and b else "only before" if a else "only now"
        if any(cells[c] for c in cells if c not in ("kernel", "arch")):
            changed.append(cells)
    return tables.markdown(changed) if changed else "nothing changed", worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(compiled.TARGETS)
    parser.add_argument("--arch", nargs="+", choices=names, default=names)
    parser.add_argument("--kernel", choices=["all", *variants.KERNELS], default="all")
    parser.add_argument("--match", default="", help="regular expression that labels must match")
    parser.add_argument("--config", help="BLOCK_N,BLOCK_V,BLOCK_H,num_warps,num_stages of forward")
    parser.add_argument(
        "--candidates", action="store_true", help="include the candidates of tuning"
    )
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--out", type=Path, help="JSON to write, row by row")
    parser.add_argument("--rows", type=Path, help="rows written before, instead of compiling")
    parser.add_argument(
        "--summary", type=Path, nargs="+", help="rows of several versions of Triton, in one table"
    )
    parser.add_argument(
        "--against", type=Path, help="earlier rows; exit status 1 if a number got worse"
    )
    parser.add_argument(
        "--faults", action="store_true", help="exit status 1 for a spill or serialised wgmma"
    )
    args = parser.parse_args()
    if args.summary:
        print(summary([row for file in args.summary for row in json.loads(file.read_text())]))
        return 0
    rows = json.loads(args.rows.read_text()) if args.rows else compile_all(args)
    wrong = faults(rows) if args.faults else []
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    if args.json:
        print(as_json(rows))
        return bool(wrong)
    if args.against is None:
        print(f"triton {triton.__version__}\n\n{table(rows)}")
        return bool(wrong)
    changed, worse = compare(json.loads(args.against.read_text()), rows, whole=args.kernel == "all")
    print(changed)
    if worse:
        print(f"\n{len(worse)} numbers got worse:\n" + "\n".join(f"- {x}" for x in worse))
    return bool(worse or wrong)


if __name__ == "__main__":
    sys.exit(main())
