"""The product of an output head that is not computed yet, and what may happen to its operands.

A head's own code calls ``F.linear(hidden, weight, bias)``; a :class:`Product` keeps the operands, so
that a loss or a reader can use them later, and knows when they are no longer those of the call.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fusedce.contract.checks import autocast_dtype
from fusedce.contract.groups import local_of

if TYPE_CHECKING:
    from fusedce.head.hidden import Head

_CHANGED = (
    "the hidden state or a parameter of the head has changed (by an optimizer step?) since the "
    "head ran, and its logits are asked for only now: a replaced head computes them when they are "
    "first used. Use them before the change; detach, clone, views, slices and changes of dtype do "
    "not yet, but numpy(), + 0 or argmax do"
)
_SHARDED = (
    "the logits of the head that fusedce has replaced are asked for only now, when its weight is "
    "sharded again: all ranks would have to gather it, and one that looks alone would wait for the "
    "others. Look before backward; or keep the weight: set_reshard_after_forward(False) of the "
    "head (FSDP2), or no FSDP1 unit of its own for it"
)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off: it has cast the operands when the head ran."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class Product:
    """``hidden @ weight.T + bias``, with the values of the call, and without a graph.

    Attributes:
        watched: whether code asks for the gradient of the logits, which must then be computed.
        stale: whether an optimizer's step has changed the operands, or may have.
    """

    watched = stale = False

    def __init__(
        self, head: Head, module: nn.Module, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        self.head, self.module, self.V, self.device = head, module, weight.shape[0], hidden.device
        given = [hidden, weight] if bias is None else [hidden, weight, bias]
        # An alias sees writes and freed memory; an inference tensor counts no writes.
        self.given = [x.clone() if x.is_inference() and x is hidden else x.detach() for x in given]
        self.before = self._state()
        parameters = {id(p): name for name, p in module.named_parameters()}
        self.names = [parameters.get(id(x)) for x in given]
        # FSDP1 and DeepSpeed train flat parameters, of which `weight` is a part.
        self.of_engine = weight._base is not None or any(
            hasattr(x, "ds_id") or x.untyped_storage().nbytes() > x.nbytes for x in given[1:]
        )
        if self.of_engine or (any(self.names) and any(x.requires_grad for x in given[1:])):
            _live.add(self)  # a weight that the head computes (a cast, a norm) is its own memory

    def _state(self) -> list[Any]:
        merged = tuple(getattr(self.module, "merged_adapters", ()))  # PEFT writes into weight.data
        return [merged, *(0 if x.is_inference() else x._version for x in self.given)]

    def is_gone(self) -> bool:
        """Whether the memory of an operand was freed: it is sharded now."""
        return any(x.untyped_storage().size() == 0 for x in self.given if x.numel())

    def values(self, *, by_all_ranks: bool) -> list[Tensor]:
        """Hidden state, weight and bias as they were, without a graph.

        Collectives: where ``by_all_ranks`` and the weight is sharded, one all-gather a parameter.

        Raises:
            RuntimeError: they have changed since, or are sharded.
        """
        if self.stale or self._state() != self.before:
            raise RuntimeError(_CHANGED)
        if not self.is_gone():
            return self.given
        found = [self.given[0]]
        for x, name in zip(self.given[1:], self.names[1:], strict=True):
            now: Any = x if name is None else self.module.get_parameter(name)
            if hasattr(now, "ds_id"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([now]):
                    now = now.detach().clone()
            elif not hasattr(now, "full_tensor") or not by_all_ranks:
                raise RuntimeError(_SHARDED)
            else:
                now = now.full_tensor().detach().to(x.dtype)
            found.append(now)
        return found

    def logits(self, operation: str) -> Tensor:
        """Real logits ``(..., V)``, without a graph; ``operation`` needs them."""
        values = self.values(by_all_ranks=False)
        with no_autocast(self.device):
            z = F.linear(*values)
        self.head.report.made(operation, tuple(z.shape), z.nbytes)
        return z

    def may_change_in(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer changes the operands, or may do so."""
        ours = {id(p) for p in self.module.parameters()}
        memory = {local_of(x).untyped_storage()._cdata for x in self.given}
        return self.of_engine or any(
            id(p) in ours or local_of(p).untyped_storage()._cdata in memory
            for group in optimizer.param_groups
            for p in group["params"]
        )


# Fused optimizers change parameters without a version counter, and FSDP2 gathers new values into
# the old memory: so steps are noted.
_live: weakref.WeakSet[Product] = weakref.WeakSet()


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for product in list(_live):
        product.stale = product.stale or product.may_change_in(optimizer)


register_optimizer_step_post_hook(_after_step)
