"""Tables and plots from the JSON of `bench/loss.py`; the README's tables are made by this.

    python bench/report.py bench/results/loss-cpu.json              # Markdown to the terminal
    python bench/report.py bench/results/loss-cpu.json --plots docs # PNGs beside the README
    python bench/report.py bench/results/loss-cpu.json --readme README.md --full docs/cpu.md

``--readme`` rewrites what stands between ``<!-- time cpu -->`` and ``<!-- end -->`` (and so on for
other suites and devices), so that no number in it is typed by hand; ``--full`` writes every suite
with every column.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

MiB = 2**20
FLOOR = "bare GEMMs"
Row = dict[str, Any]


def problem(row: Row) -> tuple[Any, ...]:
    """What the rows of one comparison share."""
    return tuple(row[k] for k in ("suite", "N", "H", "V", "dtype", "mode", "ignored", "data"))


def median_ms(row: Row) -> float | None:
    return 1e3 * statistics.median(row["seconds"]) if row.get("seconds") else None


def with_ratios(rows: list[Row]) -> list[Row]:
    """Rows with ``ms`` and ``ratio``, the time over that of the bare products measured beside."""
    out, floor = [], None
    for row in rows:
        row = row | {"ms": median_ms(row)}
        if row["name"] == FLOOR:
            floor = (problem(row), row["ms"])
        timed = row["ms"] is not None and floor is not None and floor[0] == problem(row)
        row["ratio"] = row["ms"] / floor[1] if timed and floor and floor[1] else None
        out.append(row)
    return out


def ms(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def error(row: Row, name: str) -> str:
    errors = row.get("errors") or {}
    return f"{errors[name]:.1e}" if name in errors else ""


def table(suite: str, rows: list[Row], without: tuple[str, ...] = ()) -> str:
    """One suite as Markdown; columns that no row fills are left out, and those of ``without``."""
    columns = {
        "N, H, V": lambda r: f"{r['N']}, {r['H']}, {r['V']}",
        "dtype": lambda r: r["dtype"],
        "ignored": lambda r: f"{r['ignored']:.0%}" if suite in ("masked", "forward") else "",
        "logits": lambda r: r["data"] if suite == "accuracy" else "",
        "chunk": lambda r: f"{r['chunk_tokens']}" if r["chunk_tokens"] else "",
        "": lambda r: r["name"],
        "median ms": lambda r: r.get("failed") or ("" if r["ms"] is None else ms(r["ms"])),
        "range": lambda r: " to ".join(ms(1e3 * f(r["seconds"])) for f in (min, max))
        if r.get("seconds")
        else "",
        "/ bare GEMMs": lambda r: "" if r["ratio"] is None else f"{r['ratio']:.2f}",
        "TFLOP/s": lambda r: "" if r["ms"] is None else f"{r['flops'] / r['ms'] / 1e9:.3g}",
        "extra peak MiB": lambda r: f"{r['extra_peak_bytes'] / MiB:.0f}"
        if r.get("extra_peak_bytes") is not None
        else "",
        **{
            f"error of {k}": lambda r, k=k: error(r, k)
            for k in ("loss", "d_hidden", "d_weight")
        },
    }  # fmt: skip
    chosen = [r for r in with_ratios(rows) if r["suite"] == suite]
    cells = {name: [str(cell(r)) for r in chosen] for name, cell in columns.items()}
    cells = {k: column for k, column in cells.items() if any(column) and k not in without}
    lines = ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
    lines += ["| " + " | ".join(line) + " |" for line in zip(*cells.values(), strict=True)]
    return "\n".join(lines)


def exponent(points: list[tuple[float, float]]) -> float:
    """Slope of log y over log x, least squares: 1 is linear."""
    xs, ys = ([math.log(p[i]) for p in points] for i in (0, 1))
    return statistics.linear_regression(xs, ys).slope


def exponents(rows: list[Row]) -> str:
    """How time grows in the ``scaling`` suite, per implementation."""
    lines = []
    scaling = [r for r in with_ratios(rows) if r["suite"] == "scaling" and r["ms"] is not None]
    for name in dict.fromkeys(r["name"] for r in scaling):
        mine = [r for r in scaling if r["name"] == name]
        for axis, fixed in (("N", "V"), ("V", "N")):
            common = statistics.mode(r[fixed] for r in mine)
            points = {(r[axis], r["ms"]) for r in mine if r[fixed] == common}
            if len({x for x, _ in points}) > 2:
                lines.append(f"- {name}: time grows as {axis}^{exponent(sorted(points)):.2f}")
    return "\n".join(lines)


def plots(rows: list[Row], device: str, folder: Path, tag: str) -> list[Path]:
    """Time over the floor per problem, and the curve of time against memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in with_ratios(rows) if r["ratio"] is not None]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    timed = [r for r in rows if r["suite"] == "time"]
    if timed:
        problems = list(dict.fromkeys(problem(r) for r in timed))
        names = [n for n in dict.fromkeys(r["name"] for r in timed) if n != FLOOR]
        figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            found = {problem(r): r["ratio"] for r in timed if r["name"] == name}
            at = [j + (i + 0.5) * width - 0.4 for j, p in enumerate(problems) if p in found]
            bars = axes.bar(at, [found[p] for p in problems if p in found], width, label=name)
            axes.bar_label(bars, fmt="%.2f", fontsize=7)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_xticks(
            range(len(problems)), [f"N={p[1]} H={p[2]}\nV={p[3]} {p[4]}" for p in problems]
        )
        axes.set_ylabel("time / bare GEMMs")
        axes.set_title(f"Forward + backward, {device}")
        axes.legend(fontsize=8)
        written.append(folder / f"time-{tag}.png")
        figure.savefig(written[-1], dpi=120)
        plt.close(figure)
    budget = [r for r in rows if r["suite"] == "budget" and r.get("extra_peak_bytes")]
    if budget:
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        curve = [(r["extra_peak_bytes"] / MiB, r["ratio"]) for r in budget if r["chunk_tokens"]]
        axes.plot(*zip(*sorted(curve), strict=True), "o-", label="fused_ce, by chunk_tokens")
        for r in budget:
            if not r["chunk_tokens"] and r["name"] != FLOOR:
                axes.plot(r["extra_peak_bytes"] / MiB, r["ratio"], "s", label=r["name"])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("extra peak memory, MiB")
        axes.set_ylabel("time / bare GEMMs")
        axes.set_title(f"Time against memory, {device}")
        axes.legend(fontsize=8)
        written.append(folder / f"budget-{tag}.png")
        figure.savefig(written[-1], dpi=120)
        plt.close(figure)
    return written


def put(readme: Path, marker: str, body: str) -> None:
    """Replace what stands between ``<!-- marker -->`` and ``<!-- end -->``."""
    text = readme.read_text()
    marked = rf"(?<=<!-- {re.escape(marker)} -->\n).*?(?=<!-- end -->)"
    readme.write_text(re.sub(marked, lambda _: f"{body}\n", text, count=1, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--plots", type=Path, help="folder for PNGs")
    parser.add_argument("--readme", type=Path, help="file whose marked tables to rewrite")
    parser.add_argument("--full", type=Path, help="file for all tables")
    args = parser.parse_args()
    data = json.loads(args.json.read_text())
    tag = args.json.stem.removeprefix("loss-")
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items() if v != "not installed")
    rows = data["rows"]
    tables = {s: table(s, rows) for s in dict.fromkeys(r["suite"] for r in rows)}
    if "scaling" in tables:
        tables["scaling"] += "\n\n" + exponents(rows)
    where = f"{data['device']}; {versions}"
    if args.readme:
        for suite in tables:
            body = table(suite, rows, without=("range", "TFLOP/s"))
            put(args.readme, f"{suite} {tag}", f"{body}\n\n{where}")
    full = f"# Every suite of `bench/loss.py`\n\n{where}\n"
    full += "".join(f"\n## {suite}\n\n{body}\n" for suite, body in tables.items())
    if args.full:
        args.full.write_text(full)
    elif not args.readme:
        print(full)
    if args.plots:
        for path in plots(rows, data["device"], args.plots, tag):
            print(f"written: {path}")


if __name__ == "__main__":
    main()
