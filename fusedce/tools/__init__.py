"""The commands behind ``fusedce.cli``: what each finds, and the text that it prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def size(count: int) -> str:
    """A number of bytes, for a reader."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def pairs(rows: Mapping[str, str]) -> Iterator[str]:
    """Lines of names and values, the values below each other."""
    width = max(map(len, rows))
    return (f"  {name:{width}}  {value}" for name, value in rows.items())
