"""Measure what an accumulator's watching costs, by the number of parameters.

    python bench/watch.py [--parameters 300 3000 10000]

CPU time of one thread, the least of many: of both looks at the gradients around a backward, for
each parameter and micro-batch, where backward adds in place and where an engine replaces gradients
(all of them are read anew); and of `finish`, for each parameter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import fusedce
from fusedce.accumulate.watch import Watch


def timed(owner: Any, name: str, spent: list[float]) -> None:
    """Add the time of each call of a method to ``spent[0]``."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any) -> Any:
        begin = time.thread_time()
        try:
            return method(*args)
        finally:
            spent[0] += time.thread_time() - begin

    setattr(owner, name, call)


def microseconds(n: int, *, in_place: bool, windows: int = 15, micro: int = 8) -> list[float]:
    """Return what watching a micro-batch takes for each parameter, and what ``finish`` takes."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(4)) for _ in range(n)])
    acc, looks, ends = fusedce.LossAccumulator(model), [0.0], [0.0]
    watch: Watch = acc._watch
    for name in ("before_backward", "after_backward"):
        timed(watch, name, looks)
    timed(acc, "finish", ends)
    least = [float("inf")] * 2
    for _ in range(windows):
        model.zero_grad()
        for i in range(micro):
            loss = acc.scale((torch.stack(list(model)).sum(), torch.tensor(4)))
            looks[0] = 0.0
            loss.backward()
            watch._in_place = watch._in_place and in_place
            if i > 1:
                least[0] = min(least[0], looks[0])
        ends[0] = 0.0
        acc.finish()
        least[1] = min(least[1], ends[0])
    return [1e6 * x / n for x in least]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=int, nargs="+", default=[300, 3000, 10000])
    torch.set_num_threads(1)
    for n in parser.parse_args().parameters:
        added, finish = microseconds(n, in_place=True)
        replaced, _ = microseconds(n, in_place=False)
        print(
            f"{n} parameters, us each: {added:.2f} a micro-batch where backward adds in place, "
            f"{replaced:.2f} where gradients are replaced; {finish:.2f} for finish",
            flush=True,
        )


if __name__ == "__main__":
    main()
