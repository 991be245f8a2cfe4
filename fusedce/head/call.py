"""One call of a replaced head: its inputs, kept to compute a loss or logits later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedce.contract.groups import local_of
from fusedce.head.optimizer_clock import Tick, version_of
from fusedce.head.recipe import Operands, Recipe, merged_into, no_autocast, recipe_of
from fusedce.loss.sharded_problem import is_vocabulary_shard

if TYPE_CHECKING:
    from fusedce.head.report import HeadCounts

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
    """The inputs of one forward of a replaced head, without a graph.

    Args:
        module: the head; ``recipe``: its weight, bias and adapters when it ran.
        hidden: ``(..., H)`` in the dtype in which the head multiplies; with dropout of LoRA, its
            results stand beside it (:meth:`Recipe.with_dropped`).
        report: counts losses and logits.
        tick: the time of the call, to know which optimizers have stepped since.
    """

    def __init__(
        self, module: nn.Module, recipe: Recipe, hidden: Tensor, report: HeadCounts, tick: Tick
    ) -> None:
        self.module, self.report, self.tick = module, report, tick
        self.V, self.device = recipe.weight.shape[0], hidden.device
        self.hidden = hidden.detach()
        if hidden.is_inference():  # inference tensors do not count writes
            self.hidden = self.hidden.clone()
        given = recipe.tensors()
        self.wanted = [x.requires_grad for x in given]
        # Whether a tensor is the result of a computation, such as the weight that spectral_norm
        # makes at each forward, and neither a parameter nor a view of one.
        self.computed = [not x.is_leaf and x._base is None for x in given]
        leaves = all(x.is_leaf for x in given)
        self.held = given if leaves else [x if x.is_leaf else x.detach() for x in given]
        self.recipe = recipe if leaves else recipe.of(self.held)
        self.fingerprints = self._fingerprints()

    # ---- the head's inputs -------------------------------------------------------------------

    def tensors(self, *, by_all_ranks: bool) -> list[Tensor]:
        """The parameters' values, without a graph.

        Args:
            by_all_ranks: all ranks make this call, as they do for the loss. Parameters that FSDP2
                has sharded again are then gathered; DeepSpeed's are gathered in any case.

        Raises:
            RuntimeError: the values have changed since the head ran, or are sharded.
        """
        if self.has_changed():
            raise RuntimeError(_CHANGED)
        if self.is_gone():
            return self._gathered(self.held, by_all_ranks)
        return [x.detach() for x in self.held]

    def has_changed(self) -> bool:
        """Whether the values have changed, or may have changed, since the head ran."""
        if self.recipe.merged != merged_into(self.module):
            return True
        if self._fingerprints() != self.fingerprints:
            return self.tick.next is not None or not self.is_gone()
        return self.tick.next is not None and any(
            o is None or self.may_change_in(o) for o in self.tick.steps()
        )

    def is_gone(self) -> bool:
        """Whether a parameter's memory has been freed: it is sharded now."""
        return any(x.untyped_storage().size() == 0 for x in map(local_of, self.held) if len(x))

    def needs_all_ranks(self) -> bool:
        """Whether real logits need a gather by all ranks.

        They do if the vocabulary is sharded, or if FSDP2 has sharded the parameters again.
        """
        gone = self.is_gone() and not all(hasattr(x, "ds_id") for x in self.held)
        return gone or self.recipe.has_sharded_vocabulary()

    def _fingerprints(self) -> list[Any]:
        """Versions and storages, which change when tensors are written into, replaced or freed."""
        found = []
        for x in (self.hidden, *self.held):
            storage = local_of(x).untyped_storage()
            found.append((version_of(x), x.dtype, storage._cdata, storage.size()))
        return found

    def may_change_in(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer changes the head's inputs, or may do so.

        It does if the optimizer holds one of them, or a tensor in the same memory. A parameter that
        is a view, or part of a larger memory (FSDP1, DeepSpeed, buffers of an engine), may be
        updated by any optimizer. A computed weight (spectral_norm) is not: a step changes the
        parameters behind it, and the next forward computes another tensor.
        """
        tensors = self.held
        known = {id(p) for p in self.module.parameters()}
        for x, computed, wanted in zip(tensors, self.computed, self.wanted, strict=True):
            if not computed and (
                id(x) not in known or hasattr(x, "ds_id") or (wanted and _is_part(x))
            ):
                return True
        ours = {_memory(x) for x in (self.hidden, *tensors)}
        return any(_memory(p) in ours for group in optimizer.param_groups for p in group["params"])

    def _gathered(self, tensors: list[Tensor], by_all_ranks: bool) -> list[Tensor]:
        """Gather the parameters of a head that has been sharded again since it ran.

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
            return [_gathered_like(x, before).detach().to(before.dtype) for x, before in pairs]
        raise RuntimeError(
            f"the weight of the output head {type(self.module).__name__} has been freed since the "
            f"head ran: FSDP1 (FullyShardedDataParallel) shards it as a unit of its own. Leave it "
            f"in the root's unit, use fully_shard (FSDP2), or call fusedce.restore_loss_head(model)"
        )

    # ---- logits and gradients ----------------------------------------------------------------

    def leaves(self) -> tuple[Tensor, list[Tensor]]:
        """The hidden state and the parameters as leaves of a new graph.

        Collectives: an all-gather for each parameter that has been sharded since the head ran.
        """
        pairs = zip(self.tensors(by_all_ranks=True), self.wanted, strict=True)
        return self.hidden.detach(), [x.requires_grad_(want) for x, want in pairs]

    def operands(self, hidden: Tensor, tensors: Sequence[Tensor]) -> Operands:
        """The one product that gives the logits, for these values of the inputs.

        Collectives: an all-gather for each parameter of a sharded vocabulary, on its ranks.
        """
        whole = [x.full_tensor() if is_vocabulary_shard(x) else x for x in tensors]  # type: ignore[attr-defined]
        with no_autocast(hidden.device):
            return self.recipe.of(whole).operands(hidden)

    def logits(self) -> Tensor:
        """Real logits ``(..., V)`` as the original head computes them, without a graph."""
        hidden, weight, bias = self.operands(self.hidden, self.tensors(by_all_ranks=False))
        with no_autocast(hidden.device):
            return F.linear(hidden, weight, bias)

    def gradients(
        self, grad: Tensor, needed: Sequence[bool], live: Sequence[Tensor] | None = None
    ) -> list[Tensor | None]:
        """Gradients of the hidden state and the parameters from that of the logits ``(..., V)``.

        Args:
            grad: a real gradient of the logits.
            needed: which gradients are wanted, hidden state first.
            live: the hidden state and the parameters with their graph, if the gradients are to be
                differentiated again.
        """
        if live is None:
            hidden, tensors = self.leaves()
            live = (hidden.requires_grad_(needed[0]), *tensors)
        inputs = [x for x, need in zip(live, needed, strict=True) if need]
        again = torch.is_grad_enabled()
        with torch.enable_grad(), no_autocast(self.hidden.device):
            operands = self.operands(live[0], live[1:])
        with no_autocast(self.hidden.device):
            grad = grad.to(operands.hidden.dtype)
            rows, h = grad.flatten(0, -2), operands.hidden.flatten(0, -2)
            pairs = [  # an operand, and its gradient
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


def _gathered_like(x: Any, before: Tensor) -> Tensor:
    """A parameter that FSDP2 has sharded again as it was: whole, or the same rows of it."""
    if not is_vocabulary_shard(before):
        return x.full_tensor()
    from torch.distributed.tensor import DTensor, Replicate

    like: Any = before
    vocabulary = x.device_mesh.mesh_dim_names.index(like.device_mesh.mesh_dim_names[0])
    placements: list[Any] = [Replicate()] * x.device_mesh.ndim
    placements[vocabulary] = like.placements[0]
    rows = x.detach().redistribute(placements=placements).to_local()
    shape = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(rows, like.device_mesh, like.placements, run_check=False, **shape)


def _memory(x: Tensor) -> int:
    return local_of(x).untyped_storage()._cdata


def _is_part(x: Tensor) -> bool:
    x = local_of(x)
    return x.untyped_storage().nbytes() > x.numel() * x.element_size()
