"""The records that an operator takes: a problem, what is wanted of it, and two optional ones.

The arguments of every operator are those of a `Task`, flattened: a problem and what is wanted
first, an operator's own arguments next, and at the end the fields of the optional records, each
with a default of None, so that a call that has no use for them passes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch.distributed as dist

from fusedce.contract.divergence import Divergence
from fusedce.contract.groups import group_named
from fusedce.contract.problem import SCHEMA, Problem, Wanted, arguments_of


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
        flat = (*self.problem, *self.wanted, *own)
        if self.shard is not None:
            return (*flat, *(self.divergence or [None] * _OF_DIVERGENCE), *self.shard)
        return flat if self.divergence is None else (*flat, *self.divergence)

    @classmethod
    def of(cls, flat: Sequence[Any], *records: Any) -> tuple[Any, ...]:
        """The task of an operator's arguments, and its own as ``records`` of their fields."""
        made = []
        for record in (Problem, Wanted, *records):
            made.append(record(*flat[: len(record._fields)]))
            flat = flat[len(record._fields) :]
        problem, wanted, *own = made
        of_divergence, of_shard = flat[:_OF_DIVERGENCE], flat[_OF_DIVERGENCE:]
        named = dict(zip(Divergence._fields, of_divergence, strict=False))
        divergence = None if named.get("kind") is None else Divergence(*of_divergence)
        shard = Shard(*of_shard) if of_shard and of_shard[0] is not None else None
        return cls(problem, wanted, divergence, shard), *own


_OF_DIVERGENCE = len(Divergence._fields)


def fields(*own: Any) -> list[str]:
    """Names of an operator's arguments."""
    return [
        name if record is Problem else f"{record.__name__.lower()}_{name}"
        for record in (Problem, Wanted, *own, Divergence, Shard)
        for name in record._fields
    ]


def _of_default(kind: str) -> str:
    """The kind of an argument that has a default, for which symbolic sizes cannot be given."""
    return kind.replace("SymInt", "int").rstrip("?")


def schema_of(*own: type[Any], returns: str) -> str:
    """Schema of an operator: a task's arguments, with the fields of ``own`` in their place."""
    plain = arguments_of(Problem, Wanted, *own)
    optional = [
        f"{_of_default(SCHEMA[hint])}? {record.__name__.lower()}_{name}=None"
        for record in (Divergence, Shard)
        for name, hint in get_type_hints(record).items()
    ]
    return f"({', '.join([*plain, *optional])}) -> {returns}"
