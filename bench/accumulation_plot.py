"""Table and picture of `bench/accumulation.py`, from its data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

FLOOR = 1e-8  # a gap of exactly 0 has no place on a log scale
STYLES = {  # colours that stay apart for the colour-blind
    "naive 16x2": ("#f0b37e", "-"),
    "naive 2x16": ("#e07b39", "-"),
    "naive 1x32": ("#d55e00", "-"),
    "fused 16x2": ("#8fc1e3", "--"),
    "fused 2x16": ("#3d8fc6", "--"),
    "fused 1x32": ("#0072b2", "--"),
    "floor": ("#888888", ":"),
}


def print_table(regime: str, found: dict[str, Any]) -> None:
    lengths = found["lengths"]
    print(
        f"\n{regime} ({found['sequences']} sequences, {lengths['min']} to {lengths['max']} "
        f"tokens, median {lengths['median']})\n"
        f"  {'':12} {'logged gap':>10} {'true gap':>10} {'weights':>10} {'grad norm':>10} {'s':>5}"
    )
    for name, run in found["runs"].items():
        print(
            f"  {name:12} {run['logged_gap']:10.1e} {run['true_gap']:10.1e} "
            f"{run['weights_gap']:10.1e} {run['first_grad_norm_ratio']:10.5f} "
            f"{run['seconds']:5.0f}",
            flush=True,
        )


def draw(data: dict[str, Any], path: Path) -> None:
    """One panel per regime: the logged losses above, their distance to 32x1 below."""
    regimes = data["regimes"]
    figure = Figure(figsize=(4.2 * len(regimes), 6.4), dpi=120, layout="constrained")
    axes = figure.subplots(
        2, len(regimes), sharex=True, sharey="row", height_ratios=(3, 2), squeeze=False
    )
    for (top, bottom), (regime, found) in zip(axes.T, regimes.items(), strict=True):
        runs = found["runs"]
        full = runs["32x1"]["logged"]
        x = range(1, len(full) + 1)
        top.plot(x, full, color="#222222", linewidth=5, alpha=0.3, label="32x1")
        for name, (color, style) in STYLES.items():
            run = runs[name]["logged"]
            gaps = [max(abs(a - b), FLOOR) for a, b in zip(run, full, strict=True)]
            bottom.semilogy(x, gaps, color=color, linestyle=style, linewidth=1.4, label=name)
            if name.endswith("1x32"):
                top.plot(x, run, color=color, linestyle=style, linewidth=1.8, label=name)
        top.set_title(regime, loc="left", fontsize=11)
        bottom.set_xlabel("optimizer step")
        for panel in (top, bottom):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(alpha=0.25, linewidth=0.6)
    axes[0, 0].set_ylabel("logged loss (nats per token)")
    axes[0, 0].legend(frameon=False, fontsize=9)
    axes[1, 0].set_ylabel(f"distance to 32x1 (nats)\nbelow {FLOOR:g}: drawn there")
    axes[1, -1].legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
