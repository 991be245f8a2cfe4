"""The parameters that an accumulator divides, and the guards around their gradients.

A guard is here where one check holds on every engine. What any loop of torch can get wrong, a
``zero_grad`` too many or another loss's backward, stays torch's. The one exception is the likeliest
mistake: clipping a streaming window before ``finish`` has corrected it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .arguments import as_tensors
from .engines import (
    drop_held,
    is_held_by_fsdp2,
    is_of_fsdp1,
    parameters_of,
)
from .exchange import read
from .gradients import norms_of

_LEFT = (
    "the window began over gradients that were there before it: those of the last step "
    "(zero_grad() is missing after optimizer.step()), or of another backward. finish() would "
    "rescale them: add them in a window with declared counts, or after finish()"
)
_CHANGED = (
    "gradients were changed between the last micro-batch and finish(): call finish() first, then "
    "add other losses, sum over ranks, unscale and clip (acc.clip_grad_norm_ cannot come too early)"
)
_HELD = (
    "FSDP2 still holds gradients inside, {}: call set_requires_gradient_sync(True) (HSDP: "
    "set_requires_all_reduce(True)) before the last micro-batch of a window, and discard_window() "
    "to drop those of an unfinished one"
)


class Begun(NamedTuple):
    """Record of a streaming window: gradients before its first backward, and after its last."""

    norms: list[Tensor]  # () each, of gradients that should be zero
    is_held: bool  # whether FSDP2 held gradients inside
    plain: list[Tensor]  # parameters whose gradients are compared
    versions: list[int] | None = None  # of these gradients, after a backward


class Watch:
    """The parameters that an accumulator divides, and what may not happen to their gradients.

    Args:
        given: a module or parameters; ``None``: nothing is known, and nothing watched.
        watches: False: it only says which parameters there are.
        in_pipeline: stages' gradients come from other backwards than this rank's losses.
    """

    def __init__(self, given: Any, *, watches: bool, in_pipeline: bool = False) -> None:
        self.module = given if isinstance(given, torch.nn.Module) else None
        self._given: list[Tensor] = []
        if given is not None and self.module is None:
            self._given = as_tensors("model", given)
            if not self._given:
                raise ValueError("model holds no parameters (was the generator used up?)")
        self.is_given, self.in_pipeline = given is not None, in_pipeline
        self.watches = watches and self.is_given
        self._why_no_step: Callable[[], str | None] | None = None  # of the open window
        self._begun: Begun | None = None
        self._hook: Any = None  # on the steps of all optimizers, from the first window on

    def __deepcopy__(self, memo: Any) -> Watch:
        """A watch of the same parameters, or of their copies, where a model holds both."""
        now: Any = memo.get(id(self.module), self.module)
        if self.is_given and self.module is None:
            now = [memo.get(id(p), p) for p in self._given]
        return Watch(now, watches=self.watches, in_pipeline=self.in_pipeline)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hook": None}

    def _all(self) -> list[Tensor]:
        return self._given if self.module is None else parameters_of(self.module)

    def parameters(self) -> list[Tensor]:
        """The parameters to divide now: frozen ones are left out, unfrozen ones are not."""
        return [p for p in self._all() if p.requires_grad]

    def drop_gradients(self) -> None:
        """Forget all gradients, and those that wait inside FSDP2."""
        for p in self._all():
            p.grad = None
        if self.module is not None:
            drop_held(self.module)

    def _is_held(self) -> bool:
        return self.module is not None and is_held_by_fsdp2(self.module)

    # ---- a window ---------------------------------------------------------------------------

    def open(self, why_no_step: Callable[[], str | None]) -> None:
        """Start a window whose method ``why_no_step`` says if no optimizer may step now."""
        self._why_no_step = why_no_step
        if self.watches and self._hook is None:
            mine = weakref.ref(self)

            def before(optimizer: Optimizer, *_: Any) -> None:
                if (watch := mine()) is not None:
                    watch.before_step(optimizer)

            self._hook = register_optimizer_step_pre_hook(before)
            weakref.finalize(self, self._hook.remove)

    def close(self) -> None:
        """Forget the window."""
        self._why_no_step = self._begun = None

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise for a step of these parameters inside an open window."""
        why = None if self._why_no_step is None else self._why_no_step()
        if why is None:
            return
        ids = {id(p) for p in self._all()}
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside an open window: {why}. Call "
                f"finish(), or leave the `with` block, before the step"
            )

    # ---- gradients of a streaming window ----------------------------------------------------

    def begin(self) -> None:
        """Look at the gradients as the first backward of a streaming window begins."""
        if self.watches and self._begun is None:
            parameters = self.parameters()
            norms = norms_of([p for p in parameters if p.grad is not None])
            # torch notes no write into a DTensor by the functions that clip (_foreach_mul_). FSDP1
            # writes zeros beside a frozen parameter in each forward, an evaluation's too.
            writes = len(parameters) < len(self._all()) and any(map(is_of_fsdp1, parameters))
            plain = [p for p in parameters if not hasattr(p, "device_mesh")]
            unknown = self.in_pipeline or writes
            self._begun = Begun(norms, self._is_held(), [] if unknown else plain)

    def after_backward(self, *, is_nested: bool) -> None:
        """Remember what a backward has left; one inside of another is not the last to write."""
        if self._begun is not None:
            versions = None if is_nested else _versions_of(self._begun.plain)
            self._begun = self._begun._replace(versions=versions)

    def check_end(self) -> list[Tensor]:
        """The parameters to divide; raises ``RuntimeError`` for what was found."""
        if self.watches and self._is_held():
            raise RuntimeError(_HELD.format("though the window ends"))
        if (begun := self._begun) is not None:
            if begun.is_held:
                raise RuntimeError(_HELD.format("of micro-batches before this window"))
            if begun.versions not in (None, _versions_of(begun.plain)):
                raise RuntimeError(_CHANGED)
            if any(read(begun.norms)):
                raise RuntimeError(_LEFT)
        return self.parameters()


def _versions_of(parameters: list[Tensor]) -> list[int]:
    """Numbers that grow with each write into a gradient in place; -1 without one."""
    return [-1 if (grad := p.grad) is None else grad._version for p in parameters]
