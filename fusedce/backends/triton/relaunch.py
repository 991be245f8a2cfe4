"""A kernel launched again and again, of which only a few arguments change."""

from __future__ import annotations

from typing import Any


class Relaunch:
    """Launches ``kernel`` with ``common`` arguments and those of each call.

    The first call asks Triton which compilation fits, which costs the host more than a small tile's
    work; the others launch that one. So nothing may change between calls that Triton compiles anew
    for: types, and whether numbers and addresses are multiples of 16. The interpreter compiles
    nothing, and is asked every time.
    """

    def __init__(self, kernel: Any, **common: Any) -> None:
        self._kernel, self._common = kernel, common
        self._compiled: Any = None
        self._arguments: dict[str, Any] = {}  # all of them, in the kernel's order

    def __call__(self, grid: tuple[int, int, int], **changing: Any) -> None:
        if self._compiled is None:
            self._compiled = self._kernel[grid](**self._common, **changing)
            return
        if not self._arguments:  # (many are launched once)
            self._arguments = {name: self._common.get(name) for name in self._kernel.arg_names}
        self._arguments.update(changing)
        self._compiled[grid](*self._arguments.values())
