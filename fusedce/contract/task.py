"""The records that an operator takes: a problem, what is wanted of it, and two optional ones.

The arguments of every operator are those of a `Task`, flattened: a problem and what is wanted
first, an operator's own records next, and at the end the fields of the two optional ones, which
are None where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch.distributed as dist
from torch import Tensor

from fusedce.contract.divergence import Divergence
from fusedce.contract.groups import group_named
from fusedce.contract.problem import Problem, Wanted


class Shard(NamedTuple):
    """The rows of the vocabulary on this rank, and the ranks that hold the others."""

    name: str  # of the group
    first: int  # the class of the first row here
    V: int  # classes, over all ranks
    largest: int  # rows of the largest shard: chunks must be the same on all ranks
    gathered: int = 0  # bytes of hidden states that were gathered from all ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return group_named(self.name)


_OPTIONAL = (Divergence, Shard)


class Task(NamedTuple):
    """The records of one call of an operator."""

    problem: Problem
    wanted: Wanted = Wanted()
    divergence: Divergence | None = None
    shard: Shard | None = None

    def but(self, **changes: Any) -> Task:
        """The task with other records."""
        return Task(**{**dict(zip(Task._fields, self, strict=True)), **changes})

    def flat(self, *own: Any) -> tuple[Any, ...]:
        """Arguments of an operator, ``own`` among them."""
        divergence = self.divergence or [None] * len(Divergence._fields)
        shard = self.shard or [None] * len(Shard._fields)
        return (*self.problem, *self.wanted, *own, *divergence, *shard)

    @classmethod
    def of(cls, flat: Sequence[Any], *own: Any) -> tuple[Any, ...]:
        """The task of an operator's arguments, and the operator's own records."""
        records = []
        for record in (Problem, Wanted, *own, *_OPTIONAL):
            records.append(record(*flat[: len(record._fields)]))
            flat = flat[len(record._fields) :]
        problem, wanted, *made, divergence, shard = records
        divergence = None if divergence.kind is None else divergence
        return cls(problem, wanted, divergence, None if shard.name is None else shard), *made


_KINDS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "int",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    str: "str",
    str | None: "str?",
}


def arguments_of(*records: type[Any]) -> dict[str, str]:
    """Kind of each argument of an operator, by name, as a schema says it: the records' fields."""
    found = {}
    for record in records:
        prefix = "" if record is Problem else record.__name__.lower() + "_"
        for name, hint in get_type_hints(record).items():
            kind = _KINDS[hint]
            found[prefix + name] = kind.rstrip("?") + "?" if record in _OPTIONAL else kind
    return found


def of_task(*own: type[Any]) -> dict[str, str]:
    """:func:`arguments_of` an operator that takes a task and the records ``own``."""
    return arguments_of(Problem, Wanted, *own, *_OPTIONAL)


def schema_of(arguments: dict[str, str], returns: str) -> str:
    """Schema of an operator."""
    return f"({', '.join(f'{kind} {name}' for name, kind in arguments.items())}) -> {returns}"
