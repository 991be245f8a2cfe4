"""One launch: its CTAs, one after the other in an order that is drawn."""

from __future__ import annotations

import collections
import itertools

import numpy as np

from ptx import arithmetic, data, matrices  # noqa: F401  their forms of instructions
from ptx.cta import Cta
from ptx.decode import Kernel
from ptx.global_memory import GlobalMemory
from ptx.tensor_map import TensorMap

TIMINGS = ("late", "early", "random")  # of asynchronous copies and of wgmma's reads


class Grid:
    def __init__(
        self,
        kernel: Kernel,
        shape: tuple[int, int, int],
        arguments: dict[str, int | float],  # by parameter; addresses and handles of maps, too
        memory: GlobalMemory,
        *,
        shared_bytes: int = 0,
        maps: dict[int, TensorMap] | None = None,
        timing: str = "late",
        order: int = 0,
        fences: bool = True,  # wgmma after ordinary writes without a fence is a fault
    ) -> None:
        if timing not in TIMINGS:
            raise ValueError(f"timing must be one of {TIMINGS}, got {timing!r}")
        self.kernel, self.shape, self.arguments, self.memory = kernel, shape, arguments, memory
        self.shared_bytes = -(-max(shared_bytes, 16) // 16) * 16
        self.maps, self.timing = maps or {}, timing
        self.fences = fences
        self.remarks: collections.Counter[str] = collections.Counter()  # questionable, no fault
        self.epoch = 0  # where the next CTA's begin
        self._rng = np.random.default_rng(order)

    def run(self) -> int:
        """All CTAs; returns how many steps they took.

        Raises:
            Fault: a hazard.
        """
        x, y, z = self.shape
        indices = [(i, j, k) for k, j, i in itertools.product(range(z), range(y), range(x))]
        steps = 0
        for number, at in enumerate(self._rng.permutation(len(indices))):
            cta = Cta(self.kernel, self, number, indices[at])
            with np.errstate(all="ignore"):  # inf and NaN are numbers like others
                cta.run()
            self.epoch = cta.epoch + 1
            steps += cta.clock
        return steps

    def chance(self, share: float) -> bool:
        """Whether something happens now that may: never but where the timing is random."""
        return self.timing == "random" and self._rng.random() < share
