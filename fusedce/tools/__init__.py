"""The commands behind ``fusedce.cli``: what each finds, and the text that it prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping


class Countdown:
    """Says which of ``n`` steps of a long command begins, and how long the rest takes.

    Attributes:
        seconds: how long each of the steps so far took.
    """

    def __init__(self, n: int, say: Callable[[str], None]) -> None:
        self.n, self.say = n, say
        self.seconds: list[float] = []
        self._began: float | None = None

    def last(self) -> float:
        """Seconds since the last step began."""
        return time.monotonic() - (self._began or time.monotonic())

    def step(self, text: str, left: float | None = None) -> None:
        """Begin the next step; ``left``: estimated seconds until the end, this step included."""
        now = time.monotonic()
        if self._began is not None:
            self.seconds.append(now - self._began)
        self._began = now
        rest = "" if left is None else f", about {max(left, 1):.0f} s left"
        self.say(f"{len(self.seconds) + 1} of {self.n}: {text}{rest}")


def size(count: int) -> str:
    """A number of bytes, for a reader."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def pairs(rows: Mapping[str, str]) -> Iterator[str]:
    """Lines of names and values, the values below each other."""
    width = max(map(len, rows))
    return (f"  {name:{width}}  {value}" for name, value in rows.items())
