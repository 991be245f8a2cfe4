"""Pictures that commands draw: matplotlib where it is installed, and errors in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusedce.models import UserError


def can_draw(path: Path) -> None:
    """Check, before anything is measured, that a picture can be written to ``path``.

    Raises:
        UserError: matplotlib is missing, or ``path`` cannot be written.
    """
    figure(1, 1)
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as problem:
        raise UserError(f"cannot write --picture {path}: {problem}") from None
    if not existed:
        path.unlink()


def figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib, sizes in inches.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError("--picture needs matplotlib: pip install 'fusedce[bench]'") from None
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def save(drawn: Any, path: Path, caption: str) -> None:
    """Write the figure with a caption below it.

    Raises:
        UserError: ``path`` cannot be written.
    """
    drawn.supxlabel(caption, x=0.01, ha="left", fontsize=8)
    try:
        drawn.savefig(path, facecolor="white")
    except (OSError, ValueError) as problem:
        raise UserError(f"cannot write --picture {path}: {problem}") from None
