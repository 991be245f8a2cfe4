"""One call of a replaced head: what it computed with, kept for a loss or for logits later on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedce.head.clock import Tick, version_of
from fusedce.head.recipe import Operands, Recipe, as_they_are, merged_into, recipe_of

if TYPE_CHECKING:
    from fusedce.head.report import Report

_CHANGED = (
    "the hidden state or a parameter of the head has changed (by an optimizer step?) since the "
    "head ran, and its logits are asked for only now: a replaced head computes them when they are "
    "first used. Use them before the change; detach, clone, views, slices and changes of dtype do "
    "not yet, but numpy(), + 0 or argmax do"
)

_SHARDED = (
    "the logits of the head that fusedce has replaced are asked for only now, when FSDP2 has "
    "sharded its weight again: all ranks would have to gather it, and one that looks alone would "
    "wait for the others. Look before backward; where the head is a unit of its own, keep its "
    "weight with model.lm_head.set_reshard_after_forward(False); or call unshard() of the module "
    "that fully_shard was given, on all ranks, before one of them looks"
)


class HeadCall:
    """Holds no graph: of what is no parameter, the values alone."""

    def __init__(
        self, module: nn.Module, recipe: Recipe, hidden: Tensor, report: Report, tick: Tick
    ) -> None:
        self.module, self.report, self.tick = module, report, tick
        self.V, self.device = recipe.weight.shape[0], hidden.device
        self.hidden = hidden.detach()  # (..., H), with what LoRA's dropouts made of it
        if hidden.is_inference():  # writes into it could not be seen
            self.hidden = self.hidden.clone()
        given = recipe.tensors()
        self.wanted = [x.requires_grad for x in given]
        self.made = [not x.is_leaf and x._base is None for x in given]  # no parameters
        leaves = all(x.is_leaf for x in given)
        self.held = given if leaves else [x if x.is_leaf else x.detach() for x in given]
        self.recipe = recipe if leaves else recipe.of(self.held)
        self.seen = self._fingerprints()

    # ---- what it computed with ---------------------------------------------------------------

    def tensors(self, *, by_all_ranks: bool) -> list[Tensor]:
        """The parameters' values, without a graph.

        ``by_all_ranks`` says that all ranks are here, as for the loss: those that FSDP2 has
        sharded again are gathered. DeepSpeed's are in any case.

        Raises:
            RuntimeError: they are no longer those that the head ran with, or sharded.
        """
        if self.has_changed():
            raise RuntimeError(_CHANGED)
        if self.is_gone():
            return self._gathered(self.held, by_all_ranks)
        return [x.detach() for x in self.held]

    def has_changed(self) -> bool:
        """Whether the values are, or may be, no longer those that the head ran with."""
        if self.recipe.merged != merged_into(self.module):
            return True
        if self._fingerprints() != self.seen:
            return self.tick.next is not None or not self.is_gone()
        return self.tick.next is not None and any(
            o is None or self.changes_with(o) for o in self.tick.steps()
        )

    def is_gone(self) -> bool:
        """Whether a parameter is held in parts by now."""
        return any(x.untyped_storage().size() == 0 for x in self.held)

    def needs_all_ranks(self) -> bool:
        """Whether a look is refused, for the parameters are sharded by FSDP2."""
        return self.is_gone() and not all(hasattr(x, "ds_id") for x in self.held)

    def _fingerprints(self) -> list[Any]:
        """What tells that tensors were written into, given other data, or freed."""
        found = []
        for x in (self.hidden, *self.held):
            storage = x.untyped_storage()
            found.append((version_of(x), x.dtype, storage._cdata, storage.size()))
        return found

    def changes_with(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer changes what the head ran with, or may do so.

        It does where it holds a parameter, or memory of one. Of a parameter that is a view, or
        trained as a part of a larger memory (FSDP1, DeepSpeed, buffers of an engine), nobody knows
        which optimizer's step is copied into it.
        """
        tensors = self.held
        known = {id(p) for p in self.module.parameters()}
        for x, made, wanted in zip(tensors, self.made, self.wanted, strict=True):
            if not made and (id(x) not in known or hasattr(x, "ds_id") or (wanted and _is_part(x))):
                return True
        ours = {_memory(x) for x in (self.hidden, *tensors)}
        return any(_memory(p) in ours for group in optimizer.param_groups for p in group["params"])

    def _gathered(self, tensors: list[Tensor], by_all_ranks: bool) -> list[Tensor]:
        """Whole parameters of a head that has been sharded again since it ran.

        Collectives: an all-gather for each parameter, on all ranks of its group.
        """
        if all(hasattr(x, "ds_id") for x in tensors):
            import deepspeed

            with deepspeed.zero.GatheredParameters(tensors):
                return [x.detach() for x in tensors]
        now = recipe_of(self.module).tensors()
        if len(now) == len(tensors) and all(hasattr(x, "full_tensor") for x in now):
            if not by_all_ranks:
                raise RuntimeError(_SHARDED)
            pairs = zip(now, tensors, strict=True)
            return [x.full_tensor().detach().to(before.dtype) for x, before in pairs]  # type: ignore[attr-defined]
        raise RuntimeError(
            f"the weight of the output head {type(self.module).__name__} has been freed since the "
            f"head ran: FSDP1 (FullyShardedDataParallel) shards it as a unit of its own. Leave it "
            f"in the root's unit, use fully_shard (FSDP2), or call fusedce.restore_loss_head(model)"
        )

    # ---- what comes of it --------------------------------------------------------------------

    def leaves(self) -> tuple[Tensor, list[Tensor]]:
        """The hidden state and the parameters as the beginning of a graph of their own.

        Collectives: an all-gather for each parameter that has been sharded since the head ran.
        """
        pairs = zip(self.tensors(by_all_ranks=True), self.wanted, strict=True)
        return self.hidden.detach(), [x.requires_grad_(want) for x, want in pairs]

    def operands(self, hidden: Tensor, tensors: Sequence[Tensor]) -> Operands:
        with as_they_are(hidden.device):
            return self.recipe.of(list(tensors)).operands(hidden)

    def logits(self) -> Tensor:
        """Real logits ``(..., V)``, as the original head makes them; without a graph."""
        hidden, weight, bias = self.operands(self.hidden, self.tensors(by_all_ranks=False))
        with as_they_are(hidden.device):
            return F.linear(hidden, weight, bias)

    def gradients(
        self, grad: Tensor, needed: Sequence[bool], live: Sequence[Tensor] | None = None
    ) -> list[Tensor | None]:
        """What a real gradient ``(..., V)`` of the logits comes to, hidden state first.

        ``live``: the hidden state and the parameters with their graph, where the gradients are to
        be differentiated again.
        """
        if live is None:
            hidden, tensors = self.leaves()
            live = (hidden.requires_grad_(needed[0]), *tensors)
        inputs = [x for x, need in zip(live, needed, strict=True) if need]
        again = torch.is_grad_enabled()
        with torch.enable_grad(), as_they_are(self.hidden.device):
            operands = self.operands(live[0], live[1:])
        with as_they_are(self.hidden.device):
            grad = grad.to(operands.hidden.dtype)
            rows, h = grad.flatten(0, -2), operands.hidden.flatten(0, -2)
            pairs = [  # an operand, and what the gradient comes to there
                (operands.hidden, lambda: grad @ operands.weight),
                (operands.weight, lambda: rows.T @ h),
                (operands.bias, lambda: rows.sum(0)),
            ]
            pairs = [(x, make) for x, make in pairs if x is not None and x.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [x for x, _ in pairs if x is not None],
                    inputs,
                    [make() for _, make in pairs],
                    create_graph=again,
                    allow_unused=True,
                )
            )
        return [next(found) if need else None for need in needed]


def _memory(x: Tensor) -> int:
    return getattr(x, "_local_tensor", x).untyped_storage()._cdata


def _is_part(x: Tensor) -> bool:
    return x.untyped_storage().nbytes() > x.numel() * x.element_size()
