"""Counts of the random examples that property tests have run: functions, dtypes, options.

`make fuzz` sums them over its processes, each of which appends one line of JSON to the file that
FUSEDCE_COVERAGE names.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

import fusedce

COUNTS: Counter[str] = Counter()
_NOT_COMPUTED = {"LossSum", "TokenStats", "audit", "head_report", "FusedTrainerMixin"}
"""Names of the package that are results, or say something about a run; no example is of them."""
REFERENCES = {"reference_ce", "reference_kl"}
SHARDED = ("sharded_ce", "sharded_cross_entropy", "sharded_logprobs")
FUNCTIONS = (*sorted(set(fusedce.__all__) - _NOT_COMPUTED - REFERENCES), *SHARDED)
"""What random examples must cover."""
_INPUTS = {"hidden", "weight", "labels", "process_group"}


def covered(function: str, *facts: str, examples: int = 1) -> None:
    """Count examples of a function, with their dtypes and options."""
    assert function in FUNCTIONS, function
    COUNTS[function] += examples
    COUNTS.update({f"{function}: {fact}": examples for fact in facts})


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; each call counts as an example, with its dtype and the options it is given."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        dtype = next(x.dtype for x in (*args, *options.values()) if isinstance(x, Tensor))
        covered(function.__name__, str(dtype).removeprefix("torch."), *_given(options))
        return function(*args, **options)

    return call


def _given(options: dict[str, Any]) -> list[str]:
    return [
        f"{name}={value}" if isinstance(value, str) else name
        for name, value in options.items()
        if value is not None and name not in _INPUTS
    ]


def write() -> None:
    """Append the counts of this process to the file of the run, if there is one."""
    path = os.environ.get("FUSEDCE_COVERAGE")
    if path and COUNTS:
        with Path(path).open("a") as f:
            f.write(json.dumps(COUNTS) + "\n")


def table(path: Path) -> str:
    """The sum of a file's counts as text, and the functions that no example has called."""
    total: Counter[str] = Counter()
    for line in path.read_text().splitlines() if path.exists() else []:
        total.update(json.loads(line))
    lines = [f"examples: {sum(total[function] for function in FUNCTIONS)}"]
    for function in FUNCTIONS:
        facts = sorted(
            (name.removeprefix(f"{function}: "), n)
            for name, n in total.items()
            if name.startswith(f"{function}: ")
        )
        lines.append(f"  {function}: {total[function]}")
        if facts:
            lines.append("    " + ", ".join(f"{name} {n}" for name, n in facts))
    missed = [function for function in FUNCTIONS if not total[function]]
    lines.append(f"not called: {', '.join(missed) or 'none'}")
    return "\n".join(lines)
