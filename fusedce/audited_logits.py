"""The logits of an audited model, wherever they are: returned, given to a loss, or its head's.

A model may return its logits alone, by name, or in a tuple beside its loss; it may return the loss
alone. While it runs, the inputs of ``F.cross_entropy`` and the outputs of its head are noted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .head.lent_input import classes_of
from .head.replace import find_head

_CASTS = ("ToCopyBackward0", "CloneBackward0")  # autograd nodes of copies of the same shape
_NEAR = 1000  # autograd nodes between a loss and the logits that it is made of, at most


class NotAuditable(ValueError):
    """A model's forward has returned neither logits nor a sum of losses."""


class _Losses(TorchFunctionMode):
    """Keeps the inputs of each ``F.cross_entropy`` while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            self.inputs.append(args[0] if args else kwargs["input"])
        return func(*args, **kwargs)


class LogitFinder:
    """Hooks on a model, which call ``found`` with its logits after each forward with gradients.

    Args:
        model: what the loop calls.
        found: called with a list, of one tensor of logits or one for each loss, each with the
            dimension of its classes, and with words for where they were; or with what else the
            model returned, if ``takes`` says so.
        takes: whether a model's output is no logits, but what ``found`` takes as it is.
    """

    def __init__(
        self, model: nn.Module, found: Callable[[Any, str], None], takes: Callable[[Any], bool]
    ) -> None:
        self.model, self.found, self.takes = model, found, takes
        self.of_head: list[Tensor] = []
        self.losses: list[_Losses] = []  # of each forward that runs now
        self.handles: list[Any] = []
        self.head: nn.Module | None = None

    def attach(self) -> None:
        """Set the hooks."""
        try:
            self.head = find_head(self.model)
        except ValueError:
            self.head = None  # the return value may tell
        self.handles = [
            self.model.register_forward_pre_hook(self.begin),
            self.model.register_forward_hook(self._end, always_call=True),
        ]
        if self.head is not None and self.head is not self.model:
            self.handles.append(self.head.register_forward_hook(self._after_head))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def begin(self, module: Any, args: Any) -> None:
        """Note what a forward gives to losses, and what its head makes."""
        self.of_head.clear()
        self.losses.append(_Losses())
        self.losses[-1].__enter__()

    def _after_head(self, module: Any, args: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.requires_grad:
            self.of_head.append(out)

    def _end(self, module: Any, args: Any, out: Any) -> None:
        if not self.losses:
            return
        losses, of_head = self.losses.pop(), list(self.of_head)
        losses.__exit__(None, None, None)
        self.of_head.clear()
        if out is None or not torch.is_grad_enabled():  # None: the forward has raised
            return
        name = type(module).__name__
        if self.takes(out):
            self.found(out, f"the sum that {name} returned")
            return
        inputs = [x for x in losses.inputs if x.requires_grad and x.dim()]
        logits = self._returned(out)
        if logits is not None and (not inputs or any(_is_made_of(x, logits) for x in inputs)):
            self.found([(logits, -1)], f"what {name} returned")
        elif inputs:
            where = f"what {name} gave to F.cross_entropy"
            self.found([(x, min(1, x.dim() - 1)) for x in inputs], where)
        elif of_head:
            self.found([(x, -1) for x in of_head], f"what the head of {name} made")
        else:
            raise NotAuditable(
                f"audit needs a model that returns logits with a gradient, or a LossSum, or makes "
                f"its loss of its head's output (audit(model.head) audits the module that makes "
                f"the logits); {name} returned {type(out).__name__}"
            )

    def _returned(self, out: Any) -> Tensor | None:
        """The logits in what the model returned; ``None`` if they are not there."""
        if isinstance(out, Tensor):
            return out if out.dim() and out.requires_grad else None
        named = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
        if isinstance(named, Tensor):
            return named if named.requires_grad else None
        found = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        found = [x for x in found if x.dim() > 1 and x.requires_grad]
        V = None if self.head is None else classes_of(self.head)
        found = found if len(found) == 1 else [x for x in found if x.shape[-1] == V]
        return found[0] if len(found) == 1 else None


def _source(x: Tensor) -> tuple[Any, int]:
    """The autograd node and its output that made ``x``, or the source of its cast.

    With mixed precision, accelerate returns fp32 copies of a model's outputs, also of the bf16
    logits that the model's loss is made of.
    """
    edge = get_gradient_edge(x)
    node, nr = edge.node, edge.output_nr
    while node.name() in _CASTS:
        source, nr = node.next_functions[0]
        assert source is not None  # a copy that needs a gradient has a source that needs one
        node = source
    return node, nr


def _is_made_of(x: Tensor, logits: Tensor) -> bool:
    """Whether ``x`` is computed from ``logits``, by few operators."""
    (goal, _), (node, _) = _source(logits), _source(x)
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < _NEAR:
        node = waiting.popleft()
        if node is goal:
            return True
        parents = {parent for parent, _ in node.next_functions if parent is not None} - seen
        waiting.extend(parents)
        seen |= parents
    return False


def when_gradient_arrives(x: Tensor, callback: Callable[[Tensor], None]) -> None:
    """Call ``callback`` with the gradient that arrives at ``x``, or at the source of its cast."""
    node, nr = _source(x)

    def hook(grads: tuple[Tensor | None, ...]) -> None:  # holds no reference to its own node
        grad = grads[nr]
        if grad is not None:
            callback(grad.detach())

    node.register_prehook(hook)
