"""Markdown tables, and the marked places of pages into which they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate


def markdown(
    rows: Sequence[Mapping[str, object]], without: Sequence[str] = (), once: Sequence[str] = ()
) -> str:
    """Format rows as a Markdown table.

    Columns that no row fills are left out, and those of ``without``. In the leading columns named
    in ``once``, a value is printed in the first of the rows that share it. Numbers come as text
    already: whoever measured them knows their digits.
    """
    columns = [c for c in (rows[0] if rows else {}) if c not in without]
    filled = [c for c in columns if any(row[c] not in ("", None) for row in rows)]
    cells = [[_cell(row[c]) for c in filled] for row in rows]
    leading = next((i for i, c in enumerate(filled) if c not in once), len(filled))
    printed: list[str] = []
    for row in cells:
        group = row[:leading]
        same = next((i for i in range(len(printed)) if group[i] != printed[i]), len(printed))
        row[:same] = [""] * same
        printed = group
    return tabulate(cells, headers=filled, tablefmt="github", disable_numparse=True)


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|")


def milliseconds(seconds: float | None) -> str:
    """Milliseconds with three digits, and no decimals from 100 ms on."""
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def mebibytes(count: float | None) -> str:
    return "" if count is None else f"{count / 2**20:.0f}"


def marked(file: Path, marker: str) -> bool:
    """Whether ``file`` has a place for ``marker``."""
    return f"<!-- {marker} -->\n" in file.read_text()


def put(file: Path, marker: str, body: str) -> None:
    """Replace what stands between ``<!-- marker -->`` and ``<!-- end -->``.

    Raises:
        ValueError: the file has no such place.
    """
    text = file.read_text()
    place = rf"(?<=<!-- {re.escape(marker)} -->\n).*?(?=<!-- end -->)"
    text, found = re.subn(place, lambda _: f"{body}\n", text, count=1, flags=re.DOTALL)
    if not found:
        raise ValueError(f"{file} has no place '<!-- {marker} -->' ... '<!-- end -->'")
    file.write_text(text)
