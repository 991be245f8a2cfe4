"""The operands of lazy logits: the head's product, and expressions of it.

A head's own code calls ``F.linear(hidden, weight, bias)``. A :class:`Product` keeps the operands,
so that the loss, or code that reads logits, can use them later, and notices if they were changed
since. An :class:`Expr` is an operator applied to it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from fusedce.contract.checks import no_autocast
from fusedce.contract.groups import gathered_like, is_dtensor, local_of
from fusedce.head.observe import HeadCounts
from fusedce.loss.sharded_problem import is_vocabulary_shard

NO_TORCH_FUNCTION = torch._C.DisableTorchFunctionSubclass
Shape = tuple[int, ...]

_CHANGED = (
    "the hidden state or a parameter of the head has changed (by an optimizer step?) since the "
    "head ran, and its lazy logits are computed when they are first read. Read them before "
    "optimizer.step(), for example `logits + 0`; detach(), clone(), views and slices stay lazy"
)
_SHARDED = (
    "FSDP2 has sharded the weight of the replaced head again since it ran: to make its logits, one "
    "rank that looks alone would wait for the others. Look before backward; or keep the weight by "
    "model.lm_head.set_reshard_after_forward(False); or first call unshard() on all ranks, of the "
    "module that fully_shard was given"
)
_FREED = (
    "the weight of the output head {} has been freed since the head ran: FSDP1 "
    "(FullyShardedDataParallel) shards it as a unit of its own. Leave it in the root's unit, use "
    "fully_shard (FSDP2), or call fusedce.restore_loss_head(model)"
)


class Product:
    """``hidden @ weight.T + bias``, with the values of the call, and without a graph.

    Attributes:
        given: hidden state, weight and perhaps bias.
        needed: which of them get a gradient (set when the head runs).
        stale: whether an optimizer's step has changed the operands, or may have.
    """

    stale = False
    needed: tuple[bool, ...] = ()

    def __init__(
        self, report: HeadCounts, memory_budget: int | None, module: nn.Module,
        hidden: Tensor, weight: Tensor, bias: Tensor | None,
    ) -> None:  # fmt: skip
        self.report, self.memory_budget, self.module = report, memory_budget, module
        given = [hidden, weight] if bias is None else [hidden, weight, bias]
        # An alias sees writes and freed memory; an inference tensor counts no writes.
        self.given = [
            x if is_dtensor(x) and torch.is_inference_mode_enabled()  # detach() raises there
            else x.clone() if x is hidden and x.is_inference() else x.detach()
            for x in given
        ]  # fmt: skip
        self.before = self._state()
        self.of_engine = any(_is_part(x) for x in given[1:])
        _live[id(self)] = self

    def _state(self) -> list[Any]:
        merged = tuple(vars(self.module).get("merged_adapters", ()))  # PEFT writes weight.data
        return [merged, *(0 if x.is_inference() else x._version for x in self.given)]

    def values(self, *, by_all_ranks: bool) -> list[Tensor]:
        """Hidden state, weight and bias as they were, without a graph.

        Collectives: where ``by_all_ranks`` and FSDP2 has sharded the weight again, an all-gather a
        parameter; where DeepSpeed has, in any case.

        Raises:
            RuntimeError: they have changed since, or are sharded.
        """
        if self.stale or self._state() != self.before:
            raise RuntimeError(_CHANGED)
        if all(local_of(x).untyped_storage().size() for x in self.given if x.numel()):
            return self.given  # none was freed, as FSDP2 and DeepSpeed do
        parameters = dict(self.module.named_parameters(recurse=False))
        return [self.given[0], *(
            _gathered(parameters.get(name), x, self.module, by_all_ranks)
            for name, x in zip(("weight", "bias"), self.given[1:], strict=False)
        )]  # fmt: skip

    def logits(self, operation: str) -> Tensor:
        """Real logits ``(..., V)``, without a graph; ``operation`` needs them.

        Collectives: an all-gather a parameter where tensor parallelism shards the vocabulary.
        """
        values = [whole(x) for x in self.values(by_all_ranks=False)]
        with no_autocast(values[0].device):
            z = F.linear(*values)
        self.report.made(operation, tuple(z.shape), z.nbytes)
        return z

    def may_change_in(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer changes the operands, or may do so."""
        memory = {local_of(x).untyped_storage()._cdata for x in self.given}
        ours = {id(p) for p in self.module.parameters()}  # FSDP2 steps shards, not whole weights
        return self.of_engine or any(
            id(p) in ours or local_of(p).untyped_storage()._cdata in memory
            for group in optimizer.param_groups
            for p in group["params"]
        )


def whole(x: Any) -> Tensor:
    """All rows of an operand, gathered where each rank holds some."""
    return x.full_tensor() if is_vocabulary_shard(x) else x


def _is_part(x: Tensor) -> bool:
    """Whether an engine trains this operand as part of a larger memory (FSDP1, DeepSpeed)."""
    part = x.requires_grad and local_of(x).untyped_storage().nbytes() > local_of(x).nbytes
    return part or hasattr(x, "ds_id")


def _gathered(now: Any, before: Tensor, module: nn.Module, by_all_ranks: bool) -> Tensor:
    """A parameter that is sharded now, gathered to what it was ``before``: whole, or its rows."""
    if hasattr(now, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([now]):
            return now.detach().clone()
    if not hasattr(now, "full_tensor"):
        raise RuntimeError(_FREED.format(type(module).__name__))
    if not by_all_ranks:
        raise RuntimeError(_SHARDED)
    if not is_vocabulary_shard(before):
        return now.full_tensor().detach().to(before.dtype)
    return gathered_like(now.detach(), before)


# Fused optimizers change parameters without a version counter, and FSDP2 gathers new values into
# the old memory: so steps are noted.
_live: weakref.WeakValueDictionary[int, Product] = weakref.WeakValueDictionary()


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for ref in _live.valuerefs():  # other threads add theirs meanwhile
        if (product := ref()) is not None:
            product.stale = product.stale or product.may_change_in(optimizer)


register_optimizer_step_post_hook(_after_step)


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
    """How values are computed: a product, or an operator applied to expressions. Immutable.

    Attributes:
        product: the head's product; ``None`` for an operator.
        func, args, kwargs: the operator; the expressions among ``args`` stand for logits.
        after: the shape of the result.
        steps: for each product in it, the number of operators that change values on the way.
        once: whether each product occurs once.
        memory: where values are kept while lazy logits of this expression, or their views, exist.
    """

    memory: weakref.ref[Memory] | None = None
    steps: dict[Product, int]
    once: bool

    def __init__(
        self, product: Product | None, func: Any, args: tuple[Any, ...], kwargs: Any, after: Shape
    ) -> None:
        self.product, self.func, self.args, self.kwargs = product, func, args, kwargs
        self.after = after
        below = [a for a in args if isinstance(a, Expr)]
        more = 0 if product else changes_values(func)
        self.steps = {p: n + more for a in below for p, n in a.steps.items()}
        self.once = all(a.once for a in below) and sum(len(a.steps) for a in below) == len(
            self.steps
        )
        if product:
            self.steps, self.once = {product: 0}, True

    def values(self, operation: str, written: Memory | None = None) -> Tensor:
        """The values, without a graph; ``operation`` needs them.

        Values that were written into are used if they are in the memory ``written``, else not.
        """
        memory = None if self.memory is None else self.memory()
        if memory is not None and (memory is written or not memory.written):
            return memory.values(operation)
        return self.compute(operation, written)

    def compute(self, operation: str, written: Memory | None = None) -> Tensor:
        """Apply the operator to the values of its expressions."""
        if self.product is not None:
            return self.product.logits(operation)
        of = lambda a: a.values(operation, written) if isinstance(a, Expr) else a  # noqa: E731
        return self.func(*tree_map(of, self.args), **self.kwargs)


class Memory:
    """The memory that lazy logits share with all their views: the root's values, once ``made``."""

    def __init__(self, root: Expr) -> None:
        self.root, self.written = root, False
        self.made: Tensor | None = None
        root.memory = weakref.ref(self)

    def values(self, operation: str) -> Tensor:
        """The values of the root."""
        if self.made is None:
            with torch.inference_mode(False), torch.no_grad(), NO_TORCH_FUNCTION():
                self.made = self.root.compute(operation)
        return self.made
