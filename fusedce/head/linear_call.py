"""The operands of lazy logits: a call of ``F.linear``, and expressions of its result.

A head's own code calls ``F.linear(hidden, weight, bias)``. A :class:`LinearCall` keeps the
operands, so that the loss, or code that reads logits, can use them later, and notices if they were
changed since. An :class:`Expr` is an operator applied to its result.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..contract.checks import no_autocast
from ..contract.groups import gathered_like, is_dtensor, local_of
from ..ranks.layout import is_vocabulary_shard

NO_TORCH_FUNCTION = torch._C.DisableTorchFunctionSubclass
Shape = tuple[int, ...]

_CHANGED = (
    "fusedce.replace_loss_head: the hidden state or a parameter of the head has changed (by an "
    "optimizer step?) since the head ran, and its lazy logits are computed when they are first "
    "read. Read them before the change, for example `logits + 0`; detach(), clone(), views and "
    "slices stay lazy"
)
_SHARDED = (
    "FSDP2 has sharded the weight of the replaced head again since it ran: to make its logits, one "
    "rank that looks alone would wait for the others. Keep the weight by "
    "set_reshard_after_forward(False) of the module that fully_shard was given, and look before "
    "backward; or first call its unshard() on all ranks; or give fully_shard the head itself, too"
)
_FREED = (
    "the weight of the output head {} has been freed since the head ran: FSDP1 "
    "(FullyShardedDataParallel) shards it as a unit of its own. Leave it in the root's unit, use "
    "fully_shard (FSDP2), or call fusedce.restore_loss_head(model)"
)


class LinearCall:
    """``hidden @ weight.T + bias``, with the values of the call, and without a graph.

    Attributes:
        head: the hook of the replaced head, with its report and memory budget.
        given: hidden state, weight and perhaps bias.
        needed: which of them get a gradient (set when the head runs).
    """

    needed: tuple[bool, ...] = ()

    def __init__(
        self, head: Any, module: nn.Module, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        self.head, self.module = head, module
        given = [hidden, weight] if bias is None else [hidden, weight, bias]
        names = {id(p): name for name, p in module.named_parameters()}
        self.names = [names.get(id(x)) for x in given]
        # An alias sees writes and freed memory. But FSDP2 frees the weight of a head that is a unit
        # of its own right after it has run, and an inference tensor counts no writes.
        is_unit = any(hasattr(m, "set_reshard_after_forward") for m in module.modules())
        self.given = [
            x if is_dtensor(x) and torch.is_inference_mode_enabled()  # detach() raises there
            else x.detach().clone() if (is_unit and name) or (x is hidden and x.is_inference())
            else x.detach()
            for x, name in zip(given, self.names, strict=True)
        ]  # fmt: skip
        self.versions = self._versions()
        self.sample = _sample(self.given)

    def _versions(self) -> list[int]:
        return [0 if x.is_inference() else x._version for x in self.given]

    def operands(self, *, by_all_ranks: bool) -> list[Tensor]:
        """Hidden state, weight and bias as they were, without a graph.

        Collectives: where ``by_all_ranks`` and FSDP2 has sharded the weight again, an all-gather a
        parameter; where DeepSpeed has, in any case.

        Raises:
            RuntimeError: they have changed since, or are sharded.
        """
        given = self.given
        if self._is_freed():
            parameters = dict(self.module.named_parameters())  # FSDP2 or DeepSpeed freed some
            given = [given[0], *(
                _gathered(parameters.get(name or ""), x, self.module, by_all_ranks)
                for name, x in zip(self.names[1:], given[1:], strict=True)
            )]  # fmt: skip
        if self._versions() != self.versions or not _is_as_before(self.sample, given):
            raise RuntimeError(_CHANGED)
        return given

    def _is_freed(self) -> bool:
        return not all(local_of(x).untyped_storage().size() for x in self.given if x.numel())

    def is_in_parts(self) -> bool:
        """Whether the ranks must come together to use the weight."""
        return self._is_freed() or is_vocabulary_shard(self.given[1])

    def materialize(self, operation: str) -> Tensor:
        """Real logits ``(..., V)``, without a graph; ``operation`` needs them.

        Collectives: an all-gather a parameter where tensor parallelism shards the vocabulary.
        """
        operands = [whole(x) for x in self.operands(by_all_ranks=False)]
        with no_autocast(operands[0].device):
            z = F.linear(*operands)
        self.head.report.count_logits(operation, tuple(z.shape), z.nbytes)
        return z


def whole(x: Any) -> Tensor:
    """All rows of an operand, gathered where each rank holds some."""
    return x.full_tensor() if is_vocabulary_shard(x) else x


def _sample(given: list[Tensor]) -> Tensor:
    """A copy of one entry of nearly every row of hidden states and weight, and of a whole bias.

    Fused optimizers, writes through ``.data`` or NumPy, CUDA graphs and compiled code change memory
    without a version counter, and FSDP2 gathers new values into the old memory.
    """
    found = []
    for x in map(local_of, given):
        if x.dim() > 1:
            x = x.flatten()[:: x.shape[-1] + 1] if x.is_contiguous() else x[..., 0].flatten()
        found.append(x)
    return torch.cat(found)


def _is_as_before(sample: Tensor, now: list[Tensor]) -> bool:
    if sample.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # to compare would wait for the device
    return torch.equal(_sample(now).view(torch.uint8), sample.view(torch.uint8))  # NaNs, too


def _gathered(now: Any, before: Tensor, module: nn.Module, by_all_ranks: bool) -> Tensor:
    """A parameter that is sharded now, gathered to what it was ``before``: whole, or its rows."""
    if hasattr(now, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([now]):
            return now.detach().clone()
    if local_of(before).untyped_storage().size():
        return before
    if not hasattr(now, "full_tensor"):
        raise RuntimeError(_FREED.format(type(module).__name__))
    if not by_all_ranks:
        raise RuntimeError(_SHARDED)
    if not is_vocabulary_shard(before):
        return now.full_tensor().detach().to(before.dtype)
    return gathered_like(now.detach(), before)


# ---- expressions ----------------------------------------------------------------------------

# Operators that change values or choose among them; beside them those that differentiate them.
_CHANGES = frozenset((
    "mul", "div", "neg", "tanh", "tanh_backward", "permute", "transpose", "t",
    "index", "index_put", "index_select", "index_add",
))  # fmt: skip


def changes_values(func: Any) -> bool:
    """Whether an operator, or the one that differentiates it, changes values or their order."""
    return getattr(func, "overloadpacket", func).__name__ in _CHANGES


class Expr:
    """How values are computed: a linear call, or an operator of expressions. Immutable.

    Attributes:
        call: the head's linear call; ``None`` for an operator.
        func, args, kwargs: the operator; the expressions among ``args`` stand for logits.
        shape: the shape of the result.
        steps: for each call in it, the number of operators that change values on the way.
        nodes: numbers of the autograd nodes that its gradient passes, but for the first.
        once: whether each call occurs once.
        memory: where values are kept while lazy logits of this expression, or their views, exist.
    """

    memory: weakref.ref[Memory] | None = None

    def __init__(
        self, call: LinearCall | None, func: Any, args: tuple[Any, ...], kwargs: Any, shape: Shape,
        nodes: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.call, self.func, self.args, self.kwargs, self.shape = call, func, args, kwargs, shape
        inputs = [a for a in args if isinstance(a, Expr)]
        passed = call is None and changes_values(func)
        steps = {c: n + passed for a in inputs for c, n in a.steps.items()}
        self.steps: dict[LinearCall, int] = steps if call is None else {call: 0}
        occurrences = sum(len(a.steps) for a in inputs)
        self.once: bool = occurrences == len(steps) and all(a.once for a in inputs)
        self.nodes: frozenset[int] = frozenset(nodes).union(*(a.nodes for a in inputs))

    def materialize(self, operation: str, written: Memory | None = None) -> Tensor:
        """The values, without a graph; ``operation`` needs them.

        After an in-place write, only views of the same memory, ``written``, see the new values.
        """
        memory = None if self.memory is None else self.memory()
        if memory is not None and (memory is written or not memory.written):
            return memory.materialize(operation)
        return self.compute(operation, written)

    def compute(self, operation: str, written: Memory | None = None) -> Tensor:
        """Apply the operator to the values of its expressions."""
        if self.call is not None:
            return self.call.materialize(operation)
        of = lambda a: a.materialize(operation, written) if isinstance(a, Expr) else a  # noqa: E731
        return self.func(*tree_map(of, self.args), **self.kwargs)


class Memory:
    """The memory that lazy logits share with all their views.

    Attributes:
        values: those of the expression ``root``; ``None`` until they are computed.
        written: whether code has written into them, or may.
    """

    def __init__(self, root: Expr) -> None:
        self.root, self.written = root, False
        self.values: Tensor | None = None
        root.memory = weakref.ref(self)

    def materialize(self, operation: str) -> Tensor:
        """The values of the root, computed once."""
        if self.values is None:
            with torch.inference_mode(False), torch.no_grad(), NO_TORCH_FUNCTION():
                self.values = self.root.compute(operation)
        return self.values
