"""The records of a loss's inputs and options, from the public functions down to the kernels.

Their fields, in order, are the arguments of the ``torch.library`` operators, which take a flattened
:class:`Task`: first the fields of `Problem` and `Outputs`, then those of an operator's own records,
and last those of the optional `Divergence` and `Shard`, all None if there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import group_named, local_of

ACC_DTYPE = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}
"""Dtype of logits, losses and sums for inputs of each dtype."""


class Problem(NamedTuple):
    """Inputs and options of a loss.

    Public functions fill it with their arguments; :func:`fusedce.contract.checks.flattened` turns
    these into what every other layer relies on: flattened, cast, in range. Methods stand in for
    properties and ``_replace``, which torch.compile before 2.9 cannot trace.
    """

    hidden: Tensor  # (N, H) fp32, bf16, fp16 or fp64
    weight: Tensor  # (V, H)
    labels: Tensor  # (N,) int64 or int32
    bias: Tensor | None = None  # (V,)
    token_weight: Tensor | None = None  # (N,) fp32 or fp64
    class_weight: Tensor | None = None  # (V,) fp32 or fp64
    temperature: Tensor | None = None  # (N,) fp32 or fp64: divisor of the logits
    expected_upstream: Tensor | None = None  # () fp32 or fp64: factor that backward will bring
    ignore_index: int | None = -100  # None: no label is ignored; an int once checked
    softcap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None
    memory_budget: int | None = None  # bytes beside inputs and gradients
    backend: str | None = None  # "torch" or "triton" once one is chosen
    reduce_over: str | None = None  # group of the ranks whose parts of d_hidden are added up

    def replace(self, **changes: Any) -> Problem:
        """The problem with other values in some fields."""
        return Problem(**{**dict(zip(Problem._fields, self, strict=True)), **changes})

    def valid(self) -> Tensor:
        """``(N,)`` bool: tokens with a label to predict."""
        return self.labels.ne(cast(int, self.ignore_index))

    def is_plain_ce(self) -> bool:
        """Whether the loss is unweighted cross-entropy without further terms."""
        unweighted = self.token_weight is None and self.class_weight is None
        return self.is_nll_only() and unweighted

    def is_nll_only(self) -> bool:
        """Whether a token's loss is its label's ``nll``, times weights: no other statistic."""
        return not (self.label_smoothing or self.z_loss)

    def by_triton(self) -> bool:
        """Whether Triton's kernels compute, once a backend has been chosen."""
        return self.backend == "triton"

    def rows(self, chosen: Tensor | slice) -> Problem:
        """The problem with the weights of the tokens ``chosen``, for their part of the loss."""
        if self.token_weight is None:
            return self
        return self.replace(token_weight=self.token_weight[chosen])


NUMBERS = tuple(
    name for name, hint in get_type_hints(Problem).items() if hint in (float, float | None)
)
"""Names of numeric options, which are checked, cast and compared between ranks by this list."""
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
FINITE = (-_HUGE, _HUGE, "finite and in the range of float32")
RANGES = {
    "softcap": (_TINY, _HUGE, "None (no cap), or positive and in the range of float32"),
    "label_smoothing": (0, 1, "in [0, 1]"),
    "beta": (0, 1, "in [0, 1]"),
    "temperature": (1e-30, _HUGE, "positive, at least 1e-30 and finite in float32"),
    "denominator": (0, _HUGE, "at least 0 and finite"),
}
"""Least and largest value of numeric arguments, and the words for messages; others: `FINITE`."""


class Outputs(NamedTuple):
    """Results to compute beside the loss: gradients of the inputs, statistics of the tokens."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lse: bool = False
    entropy: bool = False
    zmean: bool = False
    argmax: bool = False

    def replace(self, **changes: bool) -> Outputs:
        """The record with other values in some fields."""
        return Outputs(**{**dict(zip(Outputs._fields, self, strict=True)), **changes})

    def gradients(self) -> tuple[bool, bool, bool]:
        """Whether the gradients of hidden, weight and bias are wanted."""
        return self.hidden, self.weight, self.bias

    @classmethod
    def of(cls, problem: Problem) -> Outputs:
        """Gradients of those inputs that require one now."""
        if not torch.is_grad_enabled():
            return cls()
        hidden, weight, bias = problem.hidden, problem.weight, problem.bias
        bias_too = bias is not None and bias.requires_grad
        return cls(hidden.requires_grad, weight.requires_grad, bias_too)


class Projection(NamedTuple):
    """Logits ``z = scale * (hidden @ weight.T + bias)``, capped to ``softcap * tanh(z / softcap)``.

    Products of the inputs are exact, and are summed in ``acc``.
    """

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, problem: Problem) -> Projection:
        """The projection of a problem."""
        return cls(problem.weight, problem.bias, problem.logit_scale, problem.softcap)

    @property
    def acc(self) -> torch.dtype:
        """Dtype of logits and sums."""
        return ACC_DTYPE[self.weight.dtype]

    def slope(self, z: Tensor) -> Tensor | None:
        """Derivative of capped logits ``z`` by those before the cap; ``None`` without a cap."""
        return None if self.softcap is None else 1 - (z / self.softcap).square_()

    def finished(self, z: Tensor, classes: Tensor | slice) -> Tensor:
        """Logits of products ``z`` with rows of the weight, in their place."""
        if self.bias is not None:
            bias = self.bias[classes].to(z.dtype)
            z.add_(bias[:, None] if isinstance(classes, slice) else bias)
        if self.scale != 1.0:
            z.mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z


# ---- beside a problem ---------------------------------------------------------------------------

FORWARD, REVERSE, JSD = KINDS = ("forward", "reverse", "jsd")
INFINITE = 1e15
"""A token's divergence of so many nats or more is infinite, since it comes from a `NEVER`."""
NEVER = 1e30
"""A logit of -inf counts as minus this: differences of two such logits are 0 and not NaN."""


class Divergence(NamedTuple):
    """The teacher and the divergence: arguments of the operators after a `Problem`."""

    teacher_hidden: Tensor  # (N, H of the teacher)
    teacher_weight: Tensor  # (V, H of the teacher)
    teacher_bias: Tensor | None  # (V,)
    teacher_softcap: float | None
    teacher_logit_scale: float
    kind: str  # one of KINDS
    beta: float  # of "jsd", in (0, 1)
    temperature: float
    ce_weight: float  # of the student's cross-entropy at temperature 1, beside the divergence

    def replace(self, **changes: Any) -> Divergence:
        """The record with other values in some fields."""
        return Divergence(**{**dict(zip(Divergence._fields, self, strict=True)), **changes})

    def local(self) -> Divergence:
        """The record with this rank's part of every DTensor."""
        return self.replace(**{name: local_of(x) for name, x in self._asdict().items()})

    def settings(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks of a sharded vocabulary."""
        given: dict[str, Any] = dict(zip(Divergence._fields, self, strict=True))
        found = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
        found["divergence"] = found.pop("kind")
        for name in ("teacher_hidden", "teacher_bias"):
            found[f"{name}.dtype"] = None if given[name] is None else str(given[name].dtype)[6:]
        return found | {"H of the teacher": self.teacher_weight.shape[1]}

    def student(self, problem: Problem) -> Projection:
        """The student's projection; its logits are divided by the temperature."""
        return self._over_temperature(Projection.of(problem))

    def teacher(self) -> Projection:
        """The teacher's projection, whose logits are divided by the temperature too."""
        scale, softcap = self.teacher_logit_scale, self.teacher_softcap
        given = Projection(self.teacher_weight, self.teacher_bias, scale, softcap)
        return self._over_temperature(given)

    def _over_temperature(self, head: Projection) -> Projection:
        weight, bias, scale, softcap = head
        if bias is not None:
            bias = bias.detach().to(ACC_DTYPE[bias.dtype])
            # With a scale below 0, -inf becomes a logit of +inf, whose loss must stay NaN.
            bias = bias.clamp(min=-NEVER) if scale > 0 else bias
        t = self.temperature
        return Projection(weight, bias, scale / t, None if softcap is None else softcap / t)

    def teacher_sizes(self) -> tuple[int, int]:
        """The teacher's H, and bytes of an element of its weight."""
        return self.teacher_weight.shape[1], self.teacher_weight.element_size()

    def is_uneven(self) -> bool:
        """Whether "jsd" mixes in very little of one of the distributions."""
        return self.kind == JSD and not 0.1 <= self.beta <= 0.9


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
    wanted: Outputs = Outputs()
    divergence: Divergence | None = None
    shard: Shard | None = None

    def replace(self, **changes: Any) -> Task:
        """The task with other records."""
        return Task(**{**dict(zip(Task._fields, self, strict=True)), **changes})

    def flat(self, *own: Any) -> tuple[Any, ...]:
        """All records flattened into one argument list; ``own`` are an operator's extra records."""
        divergence = self.divergence or [None] * len(Divergence._fields)
        shard = self.shard or [None] * len(Shard._fields)
        return (*self.problem, *self.wanted, *own, *divergence, *shard)

    @staticmethod
    def records(*own: type[Any]) -> tuple[type[Any], ...]:
        """The records whose fields are the arguments of an operator, ``own`` among them."""
        return Problem, Outputs, *own, *_OPTIONAL

    @classmethod
    def of(cls, flat: Sequence[Any], *own: Any) -> tuple[Any, ...]:
        """The task of an operator's arguments, and the operator's own records."""
        records = []
        for record in cls.records(*own):
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


def schema_of(returns: str, *records: type[Any]) -> str:
    """Schema of an operator whose arguments are the fields of ``records``."""
    arguments = []
    for record in records:
        prefix = "" if record is Problem else record.__name__.lower() + "_"
        for name, hint in get_type_hints(record).items():
            kind = _KINDS[hint]
            kind = kind.rstrip("?") + "?" if record in _OPTIONAL else kind
            arguments.append(f"{kind} {prefix}{name}")
    return f"({', '.join(arguments)}) -> {returns}"
