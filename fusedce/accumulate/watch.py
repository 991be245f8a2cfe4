"""Watches the gradients that an accumulator divides: who writes into them, and when.

Between two backwards of a window nothing else may write into ``.grad``. So each backward of ours
leaves the gradients and their versions here, and the next one, or the window's end, compares. A
tensor's version grows with each write in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from operator import eq, is_not
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fusedce.accumulate.arguments import as_tensors
from fusedce.accumulate.engines import (
    adds_in_place,
    drop_held,
    has_fsdp1,
    is_held_by_fsdp2,
    parameters_of,
    version_of,
)
from fusedce.accumulate.exchange import read
from fusedce.accumulate.gradients import norms_of

_GONE = (
    "zero_grad() was called inside a window: the gradients of its earlier micro-batches are gone, "
    "though their tokens count. Call it once a window, after optimizer.step() (to drop the window, "
    "call discard_window() as well, or leave the `with` block by raising)"
)
_LEFT = (
    "the window began over gradients that were there before it: those of the last step "
    "(zero_grad() is missing after optimizer.step()), or of another backward, which finish() would "
    "rescale (add it in a window with declared counts, or after finish())"
)
_WRITTEN = (
    "gradients were changed inside a window by something else than its losses: zero_grad(), "
    "clipping, unscaling or another loss's backward. Clip and unscale after finish() or the last "
    "micro-batch; another loss (a regulariser, a value head) needs a window with declared counts, "
    "or comes after finish()"
)
_BEFORE_FINISH = (
    "gradients were changed between the last micro-batch and finish(): call finish() first, then "
    "add other losses, sum over ranks, unscale and clip"
)
_HELD = (
    "FSDP2 still holds gradients inside, {}: call set_requires_gradient_sync(True) (HSDP: "
    "set_requires_all_reduce(True)) before the last micro-batch of a window, and discard_window() "
    "to drop those of an unfinished one"
)
_OTHER_PARAMETERS = (
    "parameters were frozen, unfrozen, added or removed inside a window: do that between windows"
)
_NOT_GIVEN = (
    "the backward of a micro-batch has changed gradients of parameters that LossAccumulator was "
    "not given, and that the same optimizer steps: finish() cannot divide them. Give it every "
    "model that its losses train (LossAccumulator([*a.parameters(), *b.parameters()]))"
)
UNREACHED = (
    "the backward of a micro-batch has changed no gradient of the parameters that LossAccumulator "
    "was given, so that finish() cannot divide them: give it every model that its losses train "
    "(LossAccumulator([*a.parameters(), *b.parameters()])), with FSDP2 the module and not its "
    "parameters, or watch=False if something takes the gradients away, or if the losses end at "
    "detached hidden states whose own backward comes later"
)


Change = tuple[list[int], list[int]]  # versions of the gradients before and after a backward


class Watch:
    """The parameters that an accumulator divides, and what its last backward left in them.

    Args:
        given: a module or parameters; ``None``: nothing is known, and nothing watched.
        watches: False: it only says which parameters there are.

    Attributes:
        last_change: what the last backward has changed.
        in_pipeline: stages' gradients come from other backwards than this rank's losses, so
            nothing is compared between these.
    """

    def __init__(self, given: Any, *, watches: bool, in_pipeline: bool = False) -> None:
        self._module = given if isinstance(given, torch.nn.Module) else None
        self._given: list[Tensor] = []
        if given is not None and self._module is None:
            self._given = as_tensors("model", given)
        self.is_given, self.in_pipeline = given is not None, in_pipeline
        self.watches = watches and self.is_given
        self._neighbours: list[Tensor] = []  # not given, stepped by the same optimizer
        self._handles: list[Any] = []
        self._why_no_step: Callable[[], str | None] = _anytime
        self.close()
        if self.is_given and self._module is None and not self._given:
            raise ValueError("model holds no parameters (was the generator used up?)")

    def __deepcopy__(self, memo: Any) -> Watch:
        """A watch of the same parameters, or of their copies, where a model holds both."""
        now: Any = memo.get(id(self._module), self._module)
        if self.is_given and self._module is None:
            now = [memo.get(id(p), p) for p in self._given]
        return Watch(now, watches=self.watches, in_pipeline=self.in_pipeline)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}

    def _all(self) -> list[Tensor]:
        return self._given if self._module is None else parameters_of(self._module)

    def parameters(self) -> list[Tensor]:
        """The parameters to divide now: frozen ones are left out, unfrozen ones are not."""
        return [p for p in self._all() if p.requires_grad]

    def drop_gradients(self) -> None:
        """Forget all gradients, and those that wait inside FSDP2."""
        for p in self._all():
            p.grad = None
        if self._module is not None:
            drop_held(self._module)

    # ---- a window ---------------------------------------------------------------------------

    def open(self, why_no_step: Callable[[], str | None], streams: bool) -> None:
        """Start a window whose method ``why_no_step`` says if no optimizer may step now."""
        self.close()
        self._why_no_step, self._streams = why_no_step, streams
        if self.watches and not self._handles:
            self._handles = _watch_steps(self)

    def close(self) -> None:
        """Forget the window."""
        self._why_no_step, self._streams = _anytime, False
        self._parameters: list[Tensor] | None = None  # None before the first backward
        self._grads: list[Tensor | None] = []  # as the last backward left them
        self._versions: list[int] = []
        self._without: list[int] = []  # indices of parameters without a gradient
        self._in_place = False  # whether backward adds to the gradients that are there
        self._has_read = False  # since the first backward
        self._norms_before: list[Tensor] = []  # norms () of gradients that should be zero
        self._backward = -1  # id of the last one
        self._has_stepped = False
        self.last_change: Change = ([], [])
        self._found: str | None = None  # the first error

    def begin(self) -> None:
        """Read the parameters and what their gradients hold, as the first backward begins."""
        self._parameters = self.parameters()
        self._sharded = any(hasattr(p, "device_mesh") for p in self._parameters)  # DTensors
        if self._module is not None and is_held_by_fsdp2(self._module):
            self._note(_HELD.format("of micro-batches before this window"))
        # In each forward FSDP1 zeroes the part of a flat gradient that is a frozen parameter's.
        self._zeroes_frozen = (
            self._module is not None
            and has_fsdp1(self._module)
            and not all(p.requires_grad for p in self._all())
        )
        replaces = any(p._post_accumulate_grad_hooks for p in self._parameters)  # perhaps
        self._in_place = not (self._sharded or self.in_pipeline or replaces) and adds_in_place(
            self._module
        )
        self._read_gradients()
        pairs = zip(self._parameters, self._grads, strict=True)
        left = [p for p, g in pairs if g is not None and (self._streams or _is_spent(g))]
        self._norms_before = norms_of(left)

    def before_backward(self, backward: int) -> None:
        """Compare as the backward with this id begins."""
        if not self.watches:
            return
        if self._parameters is None:
            self.begin()
        elif backward != self._backward and not self.in_pipeline and not self._is_untouched():
            self._compare(backward)
        self._of_neighbours = self._versions_of([p.grad for p in self._neighbours])
        self._replaces = torch.is_grad_enabled()  # create_graph: .grad is a new tensor each time
        self._backward = backward

    def after_backward(self) -> bool:
        """Remember what a backward has left; whether it has changed any gradient."""
        if not self.watches:
            return True
        grads, versions = self._grads, self._versions
        if self._in_place and self._has_read and not self._replaces:
            changed = self._read_changed_gradients()
        else:
            self._read_gradients()
            self._has_read = True
            changed = versions != self._versions or any(map(is_not, grads, self._grads))
        self.last_change = versions, self._versions
        now = self._versions_of([p.grad for p in self._neighbours])
        if self._streams and now != self._of_neighbours:
            self._note(_NOT_GIVEN)
        return changed or self._has_stepped or self._may_be_held()

    def overlaps(self, earlier: Change) -> bool:
        """Whether the last backward has changed a gradient that an earlier one has changed."""
        return any(
            a != b and c != d for a, b, c, d in zip(*earlier, *self.last_change, strict=False)
        )

    def check_end(self) -> list[Tensor]:
        """The parameters to divide; raises ``RuntimeError`` for what was found."""
        now = self.parameters()
        if not self.watches or self._parameters is None:
            return now
        if self._streams and not self.in_pipeline and self._differing():
            self._note(_BEFORE_FINISH)
        pairs = zip(self._parameters, self._grads, strict=True)
        may_zero = self._streams or self._has_stepped
        if not may_zero and any(g is not None and p.grad is None for p, g in pairs):
            self._note(_GONE)
        if self._module is not None and is_held_by_fsdp2(self._module):
            self._note(_HELD.format("though the window ends"))
        if len(now) != len(self._parameters) or any(map(is_not, now, self._parameters)):
            self._note(_OTHER_PARAMETERS)
        if self._norms_before and any(read(self._norms_before)):
            self._note(_LEFT)
        if self._found is not None:
            raise RuntimeError(self._found)
        return now

    # ---- comparing gradients ----------------------------------------------------------------

    # Reading p.grad costs three times as much as the version of a tensor in a list. Where backward
    # adds in place, versions of the gradients that we hold show all but a replaced one, which keeps
    # its version over the next backward. Engines that replace gradients need the full walk.

    def _read_gradients(self) -> None:
        """Read all gradients and their versions."""
        assert self._parameters is not None
        self._grads = [p.grad for p in self._parameters]
        self._versions = self._versions_of(self._grads)
        self._without = [i for i, g in enumerate(self._grads) if g is None]

    def _versions_of(self, grads: list[Tensor | None]) -> list[int]:
        if self._sharded:
            return [version_of(g) for g in grads]
        return [-1 if g is None else g._version for g in grads]

    def _is_untouched(self) -> bool:
        """Whether nobody wrote into the gradients, or made the first ones of a parameter."""
        if not self._in_place or self._versions_of(self._grads) != self._versions:
            return False
        assert self._parameters is not None
        return all(self._parameters[i].grad is None for i in self._without)

    def _read_changed_gradients(self) -> bool:
        """As :meth:`_read_gradients`, but reads anew only those that this backward left alone."""
        assert self._parameters is not None
        old = self._versions
        self._versions = new = self._versions_of(self._grads)
        if not any(map(eq, old, new)):
            return True
        changed = old != new
        for i in [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a == b]:
            grad, was = self._parameters[i].grad, self._grads[i]
            if grad is not was:
                changed = True
                if was is not None and not (was.is_sparse or self._has_stepped):
                    self._note(_GONE)
                self._grads[i], new[i] = grad, version_of(grad)
        self._without = [i for i in self._without if self._grads[i] is None]
        return changed

    def _differing(self) -> list[int]:
        """Indices of the gradients that are not what the last backward left."""
        assert self._parameters is not None
        now = [p.grad for p in self._parameters]
        versions = self._versions_of(now)
        if versions == self._versions and not any(map(is_not, now, self._grads)):
            return []
        return [
            i
            for i, (new, old) in enumerate(zip(now, self._grads, strict=True))
            if (new is not old or versions[i] != self._versions[i]) and not self._is_moved(i, new)
        ]

    def _is_moved(self, i: int, new: Tensor | None) -> bool:
        """Whether a gradient is another view of the same numbers: DDP makes new buckets, once.

        FSDP1 makes new views of a flat gradient in each forward.
        """
        old = self._grads[i]
        if new is None or old is None or new._base is None or old._base is None:
            return False
        if new._base is old._base:
            return self._zeroes_frozen or new._version == self._versions[i]
        return old._version == self._versions[i] and torch.equal(new, old)

    def _compare(self, backward: int) -> None:
        """Note what was done to the gradients since the last backward of ours."""
        if not (differing := self._differing()):
            return
        assert self._parameters is not None
        if self._streams:
            self._note(_WRITTEN)
        elif any(
            (was := self._grads[i]) is not None and self._parameters[i].grad is not was
            for i in differing
        ):
            self._note(_GONE)
        elif backward == self._backward + 1:  # ids count backwards: there was none between
            self._note(_WRITTEN)

    def _note(self, words: str) -> None:
        self._found = self._found or words

    def _may_be_held(self) -> bool:
        """Whether the gradients of a backward may be inside FSDP."""
        if self._module is None:
            return False
        return is_held_by_fsdp2(self._module) or has_fsdp1(self._module)

    # ---- steps ------------------------------------------------------------------------------

    def _owns(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps given parameters; notes which others it steps."""
        ids = {id(p) for p in self._all()}
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        others = [p for p in stepped if id(p) not in ids]
        if len(others) == len(stepped):
            return False
        self._neighbours = others
        return True

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise for a step of these parameters inside an open window."""
        if self._parameters is None or not self._owns(optimizer):
            return
        if (why := self._why_no_step()) is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside an open window: {why}. Call "
                f"finish(), or leave the `with` block, before the step"
            )
        self._has_stepped = True

    def after_step(self, optimizer: Optimizer) -> None:
        """Mark the gradients that a step has used, to know them if they stay."""
        if not self._owns(optimizer):
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._mark([p for p in self._parameters or self.parameters() if id(p) in stepped])

    def drop(self) -> None:
        """Mark what a dropped window has left in ``.grad``: the next one must not add to it."""
        if self.watches and self._parameters is not None:
            self._mark(self._parameters)

    @staticmethod
    def _mark(parameters: Iterable[Tensor]) -> None:
        # A mark on the gradient itself dies with it, and keeps nothing alive; weak references to
        # gradients cost the garbage collector 18 us each. A bucket's views share mark and version.
        for p in parameters:
            if (grad := p.grad) is not None:
                _root(grad)._fusedce_spent = version_of(grad)  # type: ignore[attr-defined]


def _is_spent(grad: Tensor) -> bool:
    """Whether a step has used a gradient, and nobody has written into it since."""
    return getattr(_root(grad), "_fusedce_spent", None) == version_of(grad)


def _root(grad: Tensor) -> Tensor:
    return grad if grad._base is None else grad._base


def _anytime() -> None:
    """No window is open: a step may be made."""


def _watch_steps(watch: Watch) -> list[Any]:
    """Tell ``watch`` the steps of all optimizers, as long as it lives."""
    mine = weakref.ref(watch)

    def before(optimizer: Optimizer, *_: Any) -> None:
        if (one := mine()) is not None:
            one.before_step(optimizer)

    def after(optimizer: Optimizer, *_: Any) -> None:
        if (one := mine()) is not None:
            one.after_step(optimizer)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    for handle in handles:
        weakref.finalize(watch, handle.remove)
    return handles
