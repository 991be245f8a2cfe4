"""Tables and pictures of the results of `bench/loss.py`, for the terminal, README and docs.

    python bench/report.py bench/results/loss-cpu.json              # Markdown to the terminal
    python bench/report.py bench/results/loss-cpu.json --plots docs # PNGs beside the README
    python bench/report.py bench/results/loss-cpu.json --readme docs/benchmarks.md \
        --full docs/cpu.md

``--readme`` rewrites what stands between ``<!-- time cpu -->`` and ``<!-- end -->`` (and so on for
other suites and devices), so that no number in it is typed by hand; ``--full`` writes every suite
with every column. ``--overview`` draws the README's picture, which needs the data of
`bench/accumulation.py` as well.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from lib.engine import median
from lib.results import Row, caption, problem
from lib.tables import markdown, marked, mebibytes, milliseconds, put

from fusedce.tools.bench import FLOOR, NOT_INSTALLED


def with_ratios(rows: list[Row]) -> list[Row]:
    """Rows with ``median`` and ``ratio``: their time over the bare products' of the same run."""
    floors = {problem(r): median(r) for r in rows if r["name"] == FLOOR}
    out = []
    for row in rows:
        seconds, floor = median(row), floors.get(problem(row))
        ratio = seconds / floor if seconds and floor else None
        out.append(row | {"median": seconds, "ratio": ratio})
    return out


def table(suite: str, rows: list[Row], without: tuple[str, ...] = ()) -> str:
    """One suite as Markdown; a line below names the peers that are not installed."""
    mine = [r for r in with_ratios(rows) if r["suite"] == suite]
    absent = [r for r in mine if r.get("failed", "").endswith(NOT_INSTALLED)]
    cells = [_cells(suite, r) for r in mine if r not in absent]
    body = markdown(cells, without, once=("N, H, V", "dtype", "ignored", "logits"))
    if not absent:
        return body
    return f"{body}\n\nNot installed: {', '.join(dict.fromkeys(r['name'] for r in absent))}."


def _cells(suite: str, row: Row) -> dict[str, object]:
    seconds, wall = row.get("seconds"), row.get("wall_seconds")
    rate = row["flops"] / row["median"] / 1e12 if row["median"] else None
    return {
        "N, H, V": f"{row['N']}, {row['H']}, {row['V']}",
        "dtype": row["dtype"],
        "ignored": f"{row['ignored']:.0%}" if suite in ("masked", "forward") else "",
        "logits": row["data"] if suite == "accuracy" else "",
        "chunk": row["chunk_tokens"],
        "": row["name"],
        "median ms": row.get("failed") or milliseconds(row["median"]),
        "range": " to ".join(milliseconds(f(seconds)) for f in (min, max)) if seconds else "",
        "wall ms": milliseconds(statistics.median(wall)) if wall else "",
        "/ bare GEMMs": f"{row['ratio']:.2f}" if row["ratio"] else "",
        "TFLOP/s": f"{rate:.3g}" if rate else "",
        "extra peak MiB": mebibytes(row.get("extra_peak_bytes")),
        **{f"error of {k}": _error(row, k) for k in ("loss", "d_hidden", "d_weight")},
    }


def _error(row: Row, name: str) -> str:
    errors = row.get("errors") or {}
    return f"{errors[name]:.1e}" if name in errors else ""


def exponent(points: list[tuple[float, float]]) -> float:
    """Least-squares slope of log y over log x; 1 is linear growth."""
    xs, ys = ([math.log(p[i]) for p in points] for i in (0, 1))
    return statistics.linear_regression(xs, ys).slope


def exponents(rows: list[Row]) -> str:
    """Growth of time in the ``scaling`` suite, for each implementation."""
    lines = []
    scaling = [r for r in with_ratios(rows) if r["suite"] == "scaling" and r["median"]]
    for name in dict.fromkeys(r["name"] for r in scaling):
        mine = [r for r in scaling if r["name"] == name]
        for axis, fixed in (("N", "V"), ("V", "N")):
            common = statistics.mode(r[fixed] for r in mine)
            points = {(r[axis], r["median"]) for r in mine if r[fixed] == common}
            if len({x for x, _ in points}) > 2:
                lines.append(f"- {name}: time grows as {axis}^{exponent(sorted(points)):.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--plots", type=Path, help="folder for PNGs")
    parser.add_argument(
        "--overview", type=Path, metavar="ACCUMULATION.JSON", help="README's picture"
    )
    parser.add_argument("--readme", type=Path, help="file whose marked tables to rewrite")
    parser.add_argument("--full", type=Path, help="file for all tables")
    args = parser.parse_args()
    data = json.loads(args.json.read_text())
    tag = args.json.stem.removeprefix("loss-")
    rows: list[Row] = data["rows"]
    tables = {s: table(s, rows) for s in dict.fromkeys(r["suite"] for r in rows)}
    if "scaling" in tables:
        tables["scaling"] += "\n\n" + exponents(rows)
    where = caption(data)
    if args.readme:
        for suite in tables:
            if marked(args.readme, f"{suite} {tag}"):
                body = table(suite, rows, without=("range", "wall ms", "TFLOP/s"))
                put(args.readme, f"{suite} {tag}", f"{body}\n\n{where}")
    full = f"# Every suite of `bench/loss.py`\n\n{where}\n"
    full += "".join(f"\n## {suite}\n\n{body}\n" for suite, body in tables.items())
    if args.full:
        args.full.write_text(full)
    elif not args.readme:
        print(full)
    if args.plots:
        from lib import pictures

        written: list[Path] = pictures.of_losses(with_ratios(rows), where, args.plots, tag)
        if args.overview:
            gaps: dict[str, Any] = json.loads(args.overview.read_text())
            written += pictures.overview(with_ratios(rows), gaps, where, args.plots, tag)
        for path in written:
            print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
