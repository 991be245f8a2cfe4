"""Tables and pictures of the results of `bench/loss.py`, for the terminal, README and docs.

    python bench/report.py bench/results/loss-cpu.json              # Markdown to the terminal
    python bench/report.py bench/results/loss-cpu.json --plots docs # PNGs beside the README
    python bench/report.py bench/results/loss-*.json --readme docs/benchmarks.md

``--readme`` rewrites what stands between ``<!-- time cpu -->`` and ``<!-- end -->`` (and so on for
other suites and files), so that no number in it is typed by hand. ``--overview`` adds data of
`bench/accumulation.py`: it draws the README's picture and every split of a batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from lib.engine import median
from lib.losses import FLOOR
from lib.results import Row, caption, of_commit, problem
from lib.tables import markdown, marked, mebibytes, milliseconds, put


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
    absent = [r for r in mine if r.get("failed", "").startswith("ModuleNotFoundError")]
    cells = [_cells(suite, r) for r in mine if r not in absent]
    body = markdown(cells, without, once=("N, H, V", "dtype", "ignored", "pass"))
    if not absent:
        return body
    return f"{body}\n\nNot installed: {', '.join(dict.fromkeys(r['name'] for r in absent))}."


def beside(rows: list[Row]) -> str:
    """Suites "time" and "forward" in one table: each loss over the bare products, and errors."""
    by_problem: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in with_ratios([r for r in rows if r["suite"] in ("time", "forward")]):
        by_problem.setdefault(problem(row)[1:], {})[row["name"]] = row
    names = list(dict.fromkeys(name for by in by_problem.values() for name in by))
    cells = [
        {
            "N, H, V": "{N}, {H}, {V}".format(**by[FLOOR]),
            "dtype": by[FLOOR]["dtype"],
            "": {"train": "training", "forward": "evaluation"}[by[FLOOR]["mode"]],
            "bare GEMMs, ms": milliseconds(by[FLOOR]["median"]),
            **{
                n: f"{by[n]['ratio']:.2f}" if n in by and by[n]["ratio"] else ""
                for n in names if n != FLOOR
            },
            "error": _largest(by["fused_ce"]),
            "eager's": _largest(by["eager"]),
        }
        for _, by in sorted(by_problem.items(), key=lambda item: item[0][:4])
    ]  # fmt: skip
    return markdown(cells, once=("N, H, V", "dtype"))


def over_eager(rows: list[Row]) -> str:
    """Suite "eager": the least time of each function and option over that of its eager code.

    What takes longer than eager is bold.
    """
    cells: dict[tuple[str, str], dict[str, str]] = {}
    of_problem = {(problem(r), r["name"]): r for r in rows if r["suite"] == "eager"}
    for (key, name), row in of_problem.items():
        eager = of_problem.get((key, name.replace("ours: ", "eager: ", 1)), {})
        if name.startswith("ours: ") and row.get("rounds") and eager.get("rounds"):
            ratio = f"{min(row['rounds']) / min(eager['rounds']):.2f}"
            line = cells.setdefault(
                ("{N}, {H}, {V}".format(**row), name.removeprefix("ours: ")), {}
            )
            line[_column(row)] = f"**{ratio}**" if float(ratio) > 1 else ratio
    columns = list(dict.fromkeys(c for line in cells.values() for c in line))
    table = [
        {"N, H, V": sizes, "": name, **{c: line.get(c, "") for c in columns}}
        for (sizes, name), line in cells.items()
    ]
    return markdown(table, once=("N, H, V",))


def _column(row: Row) -> str:
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[row["dtype"]]
    mode = {"train": "training", "forward": "evaluation"}[row["mode"]]
    return f"{dtype} {mode}" + (f", {row['ignored']:.0%} ignored" if row["ignored"] else "")


def without_twins(rows: list[Row]) -> list[Row]:
    """Rows but "eager, plain" in float32, where it is the same computation as "eager"."""
    return [r for r in rows if (r["name"], r["dtype"]) != ("eager, plain", "float32")]


def _largest(row: Row) -> str:
    return f"{max(row['errors'].values()):.0e}" if row.get("errors") else ""


def _cells(suite: str, row: Row) -> dict[str, object]:
    seconds, wall = row.get("seconds"), row.get("wall_seconds")
    rate = row["flops"] / row["median"] / 1e12 if row["median"] else None
    return {
        "N, H, V": f"{row['N']}, {row['H']}, {row['V']}",
        "dtype": row["dtype"],
        "ignored": f"{row['ignored']:.0%}" if suite == "masked" else "",
        "pass": row["mode"] if suite == "options" else "",
        "budget, MiB": row.get("budget"),
        "": row["name"],
        "median ms": row.get("failed") or milliseconds(row["median"]),
        "range": " to ".join(milliseconds(f(seconds)) for f in (min, max)) if seconds else "",
        "wall ms": milliseconds(statistics.median(wall)) if wall else "",
        "/ bare GEMMs": f"{row['ratio']:.2f}" if row["ratio"] else "",
        "TFLOP/s": f"{rate:.3g}" if rate else "",
        "extra peak MiB": mebibytes(row.get("extra_peak_bytes")),
        **{f"error of {k}": _error(row, k) for k in _ERRORS},
    }


_ERRORS = ("loss", "d_hidden", "d_weight")


def _error(row: Row, name: str) -> str:
    errors = row.get("errors") or {}
    return f"{errors[name]:.1e}" if name in errors else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="+")
    parser.add_argument("--plots", type=Path, help="folder for PNGs")
    parser.add_argument("--overview", type=Path, metavar="ACCUMULATION.JSON")
    parser.add_argument("--readme", type=Path, help="file whose marked tables to rewrite")
    args = parser.parse_args()
    for file in args.json:
        data = json.loads(file.read_text())
        tag = file.stem.removeprefix("loss-").removeprefix("eager-")
        rows: list[Row] = without_twins(data["rows"])
        where = caption(data)
        tables = {s: table(s, rows) for s in dict.fromkeys(r["suite"] for r in rows)}
        if args.readme:
            write_tables(args.readme, tag, rows, caption(data, of_commit))
        else:
            print(f"{where}\n" + "".join(f"\n## {s}\n\n{body}\n" for s, body in tables.items()))
        if args.plots:
            from lib import pictures

            drawn: list[Path] = pictures.budget(with_ratios(rows), where, args.plots, tag)
            if args.overview:
                gaps: dict[str, Any] = json.loads(args.overview.read_text())
                drawn += pictures.overview(with_ratios(rows), gaps, where, args.plots, tag)
                drawn += [pictures.accumulation(gaps, args.plots / f"{args.overview.stem}.png")]
            for path in drawn:
                print(f"written: {path}")
    return 0


def write_tables(page: Path, tag: str, rows: list[Row], where: str) -> None:
    """Rewrite each table that ``page`` has a place for; "time" has both passes."""
    for suite in dict.fromkeys(r["suite"] for r in rows):
        if marked(page, f"{suite} {tag}"):
            errors = tuple(f"error of {k}" for k in _ERRORS)  # those of "time" are shown
            without = ("range", "wall ms", "TFLOP/s", "flops", *errors)
            own = {"time": beside, "eager": over_eager}.get(suite)
            body = own(rows) if own else table(suite, rows, without)
            put(page, f"{suite} {tag}", f"{body}\n\n{where}")


if __name__ == "__main__":
    sys.exit(main())
