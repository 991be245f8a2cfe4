"""One run of a replaced head: what it computed with, kept for a loss or for logits later on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedce.head.recipe import plain_weight, recipe_of, terms_of, with_dropped


class Loss(NamedTuple):
    """What the head's forward is asked for when it is entered again for the loss."""

    function: Callable[..., Any]
    labels: Tensor
    vocabulary: slice
    bias: Tensor | None  # beside the head's own
    options: dict[str, Any]


class Run:
    """Implements :class:`fusedce.head.lazy.state.Head`."""

    def __init__(self, module: nn.Module, hidden: Tensor) -> None:
        self.module, self.recipe = module, recipe_of(module)
        self.V = len(self.recipe.weight)
        self.hidden = with_dropped(self.recipe, hidden) if self.recipe.dropouts() else hidden
        self.seen: list[tuple[Tensor, Any]] = []
        if not torch.compiler.is_compiling():
            self.seen = [(x, _fingerprint(x)) for x in (self.hidden, *self.recipe.tensors())]

    def trainable(self) -> list[Tensor]:
        return [x for x in self.recipe.tensors() if x.requires_grad]

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._enter(hidden, None)
        return logits

    def loss(
        self,
        function: Callable[..., Any],
        hidden: Tensor,
        labels: Tensor,
        *,
        vocabulary: slice,
        bias: Tensor | None,
        options: dict[str, Any],
    ) -> Any:
        return self._enter(hidden, Loss(function, labels, vocabulary, bias, options))

    def _enter(self, hidden: Tensor, request: Loss | None) -> Any:
        """Run here, or through the module's hooks where those bring its parameters (FSDP2).

        A head that is a unit of its own is sharded again by the time of the loss.
        """
        if is_fsdp_unit(self.module):
            return self.module(hidden, _fusedce=(self, request))
        return self.run(hidden, request)

    def run(self, hidden: Tensor, request: Loss | None) -> Any:
        recipe = self.recipe
        if is_fsdp_unit(self.module) or hasattr(plain_weight(self.module), "full_tensor"):
            recipe = recipe_of(self.module)  # FSDP2 has freed what there was
        elif recipe.merged != recipe_of(self.module).merged or any(
            _fingerprint(x) != before for x, before in self.seen
        ):
            raise RuntimeError(
                "the hidden state or a parameter of the head has changed (by an optimizer step?) "
                "since the head ran, and its logits are asked for only now: a replaced head "
                "computes them when they are first used. Use them before the change; detach, "
                "views, slices and changes of dtype do not yet, but .cpu(), + 0 or argmax do"
            )
        # Autocast has cast what it wanted when the head ran.
        with torch.autocast(hidden.device.type, enabled=False):
            terms = terms_of(recipe, hidden)
            weight = terms.weight.to(hidden.dtype)
            bias = None if terms.bias is None else terms.bias.to(hidden.dtype)
            if request is None:
                return F.linear(terms.hidden, weight, bias)
            if request.bias is not None:
                bias = request.bias if bias is None else bias + request.bias
            if request.vocabulary != slice(0, self.V):
                weight = weight[request.vocabulary]
                bias = None if bias is None else bias[request.vocabulary]
            out = request.function(
                terms.hidden, weight, request.labels, bias=bias, **request.options
            )
        return out if isinstance(out, Tensor) else tuple(out)


def _fingerprint(x: Tensor) -> Any:
    """What tells that a tensor was written into, or given other data."""
    version = 0 if x.is_inference() else x._version
    return version, x.dtype, x.untyped_storage()._cdata


def is_fsdp_unit(module: nn.Module) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)
