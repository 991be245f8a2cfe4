"""The results of `fusedce demo`: the cost of its loss, tables, a picture, JSON and a verdict."""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # draws to files, needs no display

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fusedce.measure import median_seconds, memory_method, peak_extra_bytes
from fusedce.tools.bench import eager, fused_ce

FULL, NAIVE, WINDOW = "A full batch", "B naive mean", "C LossAccumulator"
COLORS = {FULL: "#222222", NAIVE: "#d55e00", WINDOW: "#0072b2"}  # safe for the colour-blind
TOLERANCE = 1e-5  # nats, the largest allowed distance of C from A, in float32
VISIBLE = 1e-2  # nats, the least distance of B from A for the comparison to mean anything


class Cost(NamedTuple):
    """The loss alone, forward and backward, at one shape."""

    seconds: dict[str, list[float]]  # of each repeat, sorted
    extra_bytes: dict[str, int]
    memory_method: str
    shape: dict[str, int]
    n_valid: int


def measure_cost(hidden: Tensor, weight: Tensor, labels: Tensor, repeats: int) -> Cost:
    """Time and memory of the loss of one real batch, fused and eager, forward and backward.

    Args:
        hidden, weight, labels: ``(N, H)``, ``(V, H)`` and ``(N,)``, shifted.
        repeats: timed calls of each loss.
    """
    inputs, device = (hidden, weight, labels), str(hidden.device)
    calls = {name: partial(forward_backward, loss, inputs) for name, loss in LOSSES.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "inputs.pt")
        torch.save(tuple(x.cpu() for x in inputs), path)
        extra = {
            name: peak_extra_bytes(
                "fusedce.tools.demo_results:prepare_loss",
                {"name": name, "path": path, "device": device},
                device=device,
            )
            for name in LOSSES
        }
    (N, H), V = hidden.shape, len(weight)
    return Cost(
        seconds=median_seconds(calls, repeats),
        extra_bytes=extra,
        memory_method=memory_method(device),
        shape={"N": N, "H": H, "V": V},
        n_valid=int((labels != -100).sum()),
    )


def prepare_loss(name: str, path: str, device: str) -> Callable[[], object]:
    """Load the inputs, warm up and return the call to measure; a fresh process runs this."""
    hidden, weight, labels = (x.to(device) for x in torch.load(path, weights_only=True))
    forward_backward(LOSSES[name], (hidden[:64], weight, labels[:64]))
    return partial(forward_backward, LOSSES[name], (hidden, weight, labels))


def unpadded(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean loss by plain torch on the valid rows, so that padding costs nothing."""
    valid = labels != -100
    return eager(hidden[valid], weight, labels[valid])


def forward_backward(
    loss_of: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor]
) -> list[Tensor]:
    """The loss, and its gradients of hidden state and weight."""
    wanted = [x.requires_grad_() for x in inputs[:2]]
    loss = loss_of(*inputs)
    return [loss, *torch.autograd.grad(loss, wanted)]


LOSSES = {"fused_ce": fused_ce, "eager": eager, "eager, padding removed": unpadded}


class StepLoss(NamedTuple):
    """The losses of one optimizer step, in nats per token."""

    logged: float  # the loss that the run reports for the step
    true: float  # sum over the step's tokens / their number, at the same weights


class Run(NamedTuple):
    """One training run."""

    name: str
    steps: list[StepLoss]


@dataclass
class DemoReport:
    """The three runs and the cost of the loss."""

    runs: list[Run]  # FULL, NAIVE, WINDOW
    cost: Cost
    settings: dict[str, Any]

    def publish(self, console: Console, out: Path, begin: float) -> int:
        """Print everything, write the files, and return the exit status."""
        picture, data = out / "demo.png", out / "demo.json"
        self._draw(picture)
        problem = self.problem()
        data.write_text(json.dumps(self._data(problem), indent=1) + "\n")
        console.print(self._loss_table())
        console.print(self._cost_table())
        console.print(
            f"Memory: {self.cost.memory_method}.\n"
            f"Times: median (fastest to slowest) of {len(self.cost.seconds['fused_ce'])} "
            f"interleaved calls.\n",
            highlight=False,
        )
        console.print(f"Picture  {picture}\nData     {data}", highlight=False, soft_wrap=True)
        console.print(f"Took     {time.perf_counter() - begin:.0f} s\n", highlight=False)
        if problem is not None:
            console.print(f"[bold red]FAILED:[/bold red] {problem}", highlight=False)
            return 1
        console.print(f"[bold green]OK:[/bold green] {self._verdict()}", highlight=False)
        return 0

    def gaps(self, name: str, kind: str) -> list[float]:
        """``|run - full batch|`` per step; ``kind`` is "logged" or "true"."""
        return [
            abs(getattr(step, kind) - getattr(full, kind))
            for step, full in zip(self._run(name).steps, self._run(FULL).steps, strict=True)
        ]

    def problem(self) -> str | None:
        """Why the demo failed or shows nothing; ``None`` if it succeeded.

        The comparisons are written so that a NaN is a problem too.
        """
        for kind in ("logged", "true"):
            gap = _worst(self.gaps(WINDOW, kind))
            if not gap <= TOLERANCE:
                return (
                    f"{WINDOW} left the full batch: its {kind} loss is {gap:.2g} nats off, "
                    f"at most {TOLERANCE:g} is rounding. The accumulation is not equivalent."
                )
        gap = _worst(self.gaps(NAIVE, "logged"))
        if not gap >= VISIBLE:
            return (
                f"the sequences are too similar: {NAIVE} logs at most {gap:.2g} nats away from the "
                f"full batch (at least {VISIBLE:g} expected), so the demo shows nothing. Try more "
                f"--steps"
            )
        return None

    def _run(self, name: str) -> Run:
        return next(run for run in self.runs if run.name == name)

    def _verdict(self) -> str:
        window = max(_worst(self.gaps(WINDOW, kind)) for kind in ("logged", "true"))
        return (
            f"with LossAccumulator the run stays within {window:.1e} nats of the full batch, "
            f"while the naive mean logs up to {_worst(self.gaps(NAIVE, 'logged')):.2f} and trains "
            f"up to {_worst(self.gaps(NAIVE, 'true')):.2f} nats away from it; the loss takes "
            f"{self._ratios('eager')} of eager ({self._ratios('eager, padding removed')} where "
            f"padding is removed first)."
        )

    def _ratios(self, other: str) -> str:
        seconds, extra = self.cost.seconds, self.cost.extra_bytes
        time_ratio = statistics.median(seconds["fused_ce"]) / statistics.median(seconds[other])
        memory_ratio = extra["fused_ce"] / max(extra[other], 1)
        return f"{time_ratio:.2f}x the time and {memory_ratio:.2f}x the memory"

    def _loss_table(self) -> Table:
        full, naive, window = (self._run(name).steps for name in (FULL, NAIVE, WINDOW))
        table = Table(title="Loss, nats per token", title_justify="left")
        table.add_column("step", justify="right")
        heads = [name.replace(" ", "\n", 1) for name in (FULL, NAIVE, WINDOW)]
        table.add_column(f"{heads[0]}\nlog = true", justify="right", style="bold")
        for head in heads[1:]:
            table.add_column(f"{head}\nlogged", justify="right")
            table.add_column("\n\ntrue", justify="right")
        last = len(full) - 1
        for i in sorted({0, last // 6, last // 3, last // 2, 2 * last // 3, 5 * last // 6, last}):
            values = (full[i].true, *naive[i], *window[i])
            table.add_row(str(i + 1), *(f"{value:.6f}" for value in values))
        table.add_section()
        gaps = [
            f"{_worst(self.gaps(name, kind)):.1e}"
            for name in (NAIVE, WINDOW)
            for kind in ("logged", "true")
        ]
        table.add_row("max gap", "", *gaps, style="bold")
        return table

    def _cost_table(self) -> Table:
        shape = ", ".join(f"{key}={value}" for key, value in self.cost.shape.items())
        table = Table(
            title=f"The loss alone, forward + backward: {shape}, {self.cost.n_valid} valid tokens",
            title_justify="left",
        )
        for heading in ("", "time", "extra memory"):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, seconds in self.cost.seconds.items():
            table.add_row(
                name,
                f"{statistics.median(seconds) * 1e3:.0f} ms "
                f"({seconds[0] * 1e3:.0f} to {seconds[-1] * 1e3:.0f})",
                f"{self.cost.extra_bytes[name] / 2**20:.0f} MiB",
            )
        return table

    def _data(self, problem: str | None) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "runs": {
                run.name: {
                    "logged": [step.logged for step in run.steps],
                    "true": [step.true for step in run.steps],
                }
                for run in self.runs
            },
            "largest_gap_to_full_batch": {
                name: {kind: _worst(self.gaps(name, kind)) for kind in ("logged", "true")}
                for name in (NAIVE, WINDOW)
            },
            "cost": self.cost._asdict(),
            "problem": problem,
        }

    def _draw(self, path: Path) -> None:
        figure = Figure(figsize=(12, 4.8), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2)
        self._draw_losses(left)
        self._draw_gaps(right)
        for axes in (left, right):
            axes.set_xlabel("optimizer step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, linewidth=0.6)
        figure.savefig(path)

    def _draw_losses(self, axes: Axes) -> None:
        # The full batch is drawn as a broad band, on which the other runs should lie.
        full, naive, window = self.runs
        lines = (
            (full, "logged", "-", 5.0, 0.35),
            (naive, "logged", "-", 1.8, 1.0),
            (naive, "true", ":", 1.8, 1.0),
            (window, "logged", (0, (4, 2)), 1.8, 1.0),
        )
        x = range(1, len(full.steps) + 1)
        tail = max(len(x) - max(len(x) // 3, 2), 0)
        zoom = axes.inset_axes((0.50, 0.44, 0.48, 0.52))
        for run, kind, style, width, alpha in lines:
            for target, first in ((axes, 0), (zoom, tail)):
                target.plot(
                    x[first:],
                    [getattr(step, kind) for step in run.steps[first:]],
                    color=COLORS[run.name],
                    linestyle=style,
                    linewidth=width,
                    alpha=alpha,
                    label=f"{run.name}, {kind} loss",
                )
        zoom.tick_params(labelsize=7)
        zoom.xaxis.set_major_locator(MaxNLocator(integer=True))
        zoom.grid(alpha=0.25, linewidth=0.5)
        zoom.set_title("the last steps", fontsize=8)
        axes.indicate_inset_zoom(zoom, edgecolor="#888888")
        axes.set_ylabel("loss (nats per token)")
        axes.set_title("Same weights, same data, three ways to train", loc="left", fontsize=11)
        axes.legend(loc="lower left", frameon=False, fontsize=8)

    def _draw_gaps(self, axes: Axes) -> None:
        x = range(1, len(self.runs[0].steps) + 1)
        floor = 1e-8  # a gap of exactly 0 has no place on a log scale
        for name in (NAIVE, WINDOW):
            for kind, style in (("logged", "-"), ("true", ":")):
                axes.semilogy(
                    x,
                    [max(gap, floor) for gap in self.gaps(name, kind)],
                    color=COLORS[name],
                    linestyle=style,
                    linewidth=1.8,
                    label=f"{name}, {kind} loss",
                )
        axes.axhline(TOLERANCE, color="#888888", linewidth=1, linestyle="--")
        axes.annotate(
            f"allowed for C: {TOLERANCE:g}",
            (len(x), TOLERANCE),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="#666666",
        )
        axes.set_ylim(floor / 2, 1)
        axes.set_ylabel("distance to A (nats per token)")
        axes.set_title(
            f"Gap to the full batch (below {floor:g}: drawn there)", loc="left", fontsize=11
        )
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def _worst(gaps: list[float]) -> float:
    """The largest gap, NaN if any is NaN (`max` alone would depend on the order)."""
    return next((gap for gap in gaps if gap != gap), max(gaps))
