"""Gradients of a window: corrected once by ``finish``, dropped, and guarded.

:class:`Guard` checks what a training loop does to them beside the accumulator: optimizer steps,
``zero_grad``, a second accumulator.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _composable_state
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.checks import check_module
from fusedce.contract.groups import local_of

FIRST_ESTIMATE = 1024  # tokens per rank, the denominator of a first streaming window
_TOLERANCE = 1e-4  # of factors: 1/3 in float32 is not 1/3
_PART = 2**24  # elements copied to float32 at a time


def trained_of(parameters: Any, some: bool) -> list[Tensor]:
    """The tensors of ``parameters`` that have a gradient, each once.

    Raises:
        TypeError: not an iterable of tensors.
        RuntimeError: none has a gradient although ``some`` is set.
    """
    advice = "pass an iterable of tensors, such as model.parameters()"
    if isinstance(parameters, (torch.nn.Module, Tensor)) or not isinstance(parameters, Iterable):
        raise TypeError(f"parameters: {advice}, got {type(parameters).__name__}")
    found: dict[int, Tensor] = {}
    for p in parameters:
        if not isinstance(p, Tensor):
            kinds: dict[Any, str] = {
                tuple: "named_parameters() gives pairs",
                dict: "an optimizer's param_groups are dicts, whose 'params' are tensors",
                str: "names are no tensors",
            }
            why = kinds.get(type(p), f"it holds {type(p).__name__}")
            raise TypeError(f"parameters: {advice} ({why})")
        if p.grad is not None:
            found[id(p)] = p
    if some and not found:
        raise RuntimeError(
            "parameters: no parameter given has a .grad to correct (was the generator used up, or "
            "zero_grad called before finish?)"
        )
    return list(found.values())


_LISTENERS: dict[int, Callable[[float], None]] = {}


class OnCorrection:
    """Calls ``listener(factor)`` for each correction of gradients, until :meth:`remove`.

    Tools use it to follow the factors of a gradient. Reading the factor waits for its device.
    """

    def __init__(self, listener: Callable[[float], None]) -> None:
        _LISTENERS[id(self)] = listener

    def remove(self) -> None:
        """Stop the calls."""
        _LISTENERS.pop(id(self), None)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """``p.grad *= factor``, ``()`` float64; rounds each product once, and never the factor."""
    for listener in _LISTENERS.values():
        listener(float(factor))
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in parameters:
        grad = local_of(p.grad)
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), grads in groups.items():
        if _faults.readable(device) and _faults.readable(factor.device):
            torch._foreach_mul_(grads, float(factor))
            continue
        there = _faults.moved(factor, device).to(torch.promote_types(dtype, torch.float32))
        if there.dtype == dtype:
            torch._foreach_mul_(grads, there)
            continue
        # A 0-d tensor on a device is rounded to the dtype of what it multiplies: up to 0.4% in
        # bf16, the same on every element.
        for part in _parts(grads):
            wide = [x.to(there.dtype) for x in part]
            torch._foreach_mul_(wide, there)
            torch._foreach_copy_(part, wide)


def _parts(grads: list[Tensor]) -> Iterable[list[Tensor]]:
    """Split the tensors into lists of at most ``_PART`` elements; large ones come in pieces."""
    part: list[Tensor] = []
    size = 0
    for grad in grads:
        pieces = grad.view(-1).split(_PART) if grad.is_contiguous() else (grad,)
        for piece in pieces:
            if part and size + piece.numel() > _PART:
                yield part
                part, size = [], 0
            part.append(piece)
            size += piece.numel()
    if part:
        yield part


# ---- gradients inside FSDP2 -------------------------------------------------------------------

# With set_requires_gradient_sync(False) FSDP2 keeps the unsharded gradients of a micro-batch
# inside, where zero_grad does not reach them, until the last micro-batch of the window. If that one
# never comes, they would be added to the next window.


def held_by_fsdp2(module: torch.nn.Module | None = None) -> list[Any]:
    """FSDP2 parameters of ``module`` (default: of this process) whose gradients wait inside."""
    return [p for p in _fsdp2_parameters(module) if _held(p)]


def drop_gradients(module: torch.nn.Module) -> None:
    """Forget all gradients of ``module``, including those that wait inside FSDP2."""
    module.zero_grad()
    for p in held_by_fsdp2(module):
        if p._unsharded_param is not None:
            p._unsharded_param.grad = None
        if p.unsharded_accumulated_grad is not None:  # before torch 2.15 a buffer of its own
            p.unsharded_accumulated_grad = None


def _held(p: Any) -> bool:
    """Whether an FSDP2 parameter keeps an unsharded gradient inside."""
    inside = getattr(p, "_unsharded_param", None)
    return p.unsharded_accumulated_grad is not None or getattr(inside, "grad", None) is not None


def _fsdp2_parameters(module: torch.nn.Module | None) -> Iterator[Any]:
    """Yield the FSDP2 parameters of ``module``, or of all modules of this process."""
    states = _composable_state._module_state_mapping
    modules: Iterable[Any] = list(states) if module is None else module.modules()
    for one in modules:
        reference = states.get(one)
        state: Any = None if reference is None else reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 there was one
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            yield from getattr(group, "fsdp_params", ())


# ---- checks of the training loop --------------------------------------------------------------


class Guard:
    """Watches optimizers while a window is open, and whose gradients the window adds to."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._replicas: weakref.WeakSet[torch.nn.Module] | None = None  # DDP modules, found once
        self._scalers: weakref.WeakSet[torch.amp.GradScaler] | None = None  # found once
        self._handle: weakref.finalize[Any, Any] | None = None  # of the hook before steps
        self._warned = False
        # These describe the open window.
        self._shared: dict[int, weakref.ref[Tensor]] = {}  # tensors other accumulators add to
        self._reduced: dict[int, Any] = {}  # statistics of DDP's last reduced backward before it
        # One parameter with a gradient, and the gradient's version after the last backward.
        self._kept: tuple[weakref.ref[Tensor], int] | None = None

    def __reduce__(self) -> Any:
        return Guard, ()  # a copy of an accumulator guards nothing yet

    def add(self, optimizer: Any, module: Any) -> None:
        """Watch an optimizer and, if given, a module; ``TypeError`` for anything else."""
        while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # accelerate's wrapper
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        check_module(module)
        self._optimizers.add(optimizer)
        if module is not None:
            self._modules.add(module)

    # ---- steps ------------------------------------------------------------------------------

    def watch(self, incomplete: Callable[[], str | None]) -> None:
        """Report optimizer steps while the method ``incomplete`` gives a reason, until stopped."""
        if self._handle is not None:
            return
        asked, me = weakref.WeakMethod(incomplete), weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            ask, guard = asked(), me()
            if ask is None or guard is None:
                return
            if (why := ask()) is not None:
                guard._stepped(optimizer, why)
            elif optimizer in guard._optimizers:
                guard._kept = None  # the step uses the gradients, so zero_grad may follow it

        hook = register_optimizer_step_pre_hook(before_step)
        self._handle = weakref.finalize(self, hook.remove)  # a call removes the hook, too

    def on_open(self) -> None:
        """Start the checks of a new window."""
        self._reduced = {id(ddp): _backward_stats(ddp) for ddp in self._ddp()}
        self._kept = None

    def stop_watching(self) -> None:
        """End the checks of the window."""
        if self._handle is not None:
            self._handle()
            self._handle = None
        self._shared = {}
        self.streams(False)

    def note_gradient(self) -> None:
        """Remember, after a backward, one parameter with a gradient and the gradient's version."""
        p = None if self._kept is None else self._kept[0]()
        if p is None:
            p = next((p for p in self._parameters() if p.grad is not None), None)
        if p is not None and p.grad is not None:
            self._kept = weakref.ref(p), local_of(p.grad)._version

    def check_gradients_kept(self, faults: _faults.Faults, n_tokens: Callable[[], Tensor]) -> None:
        """Raise, or note in ``faults``, that gradients of this window's micro-batches are gone.

        A gradient's version is compared on the host. Only if it was written into since the last
        backward, all gradients are compared with zero, on their device.

        Args:
            faults: the errors of the window.
            n_tokens: gives the number ``()`` of valid tokens so far; without any, zeros are right.
        """
        p, version = (None, 0) if self._kept is None else (self._kept[0](), self._kept[1])
        if p is None:
            return
        if p.grad is None:
            raise _faults.gradients_gone()
        if local_of(p.grad)._version != version:
            of_window = n_tokens()
            grads = {id(x): local_of(x.grad) for x in self._parameters() if x.grad is not None}
            left = [_faults.moved(grad.any(), of_window.device) for grad in grads.values()]
            faults.note(_faults.gradients_gone, ~torch.stack(left).any() & (of_window > 0))

    def check_reduced(self) -> None:
        """Raise ``RuntimeError`` if DDP has reduced nothing since the window was opened."""
        for ddp in self._ddp():
            before = self._reduced.get(id(ddp))
            grads = any(p.grad is not None for p in ddp.parameters())
            if grads and before is not None and before == _backward_stats(ddp):
                raise RuntimeError(
                    f"DDP has not reduced the gradients of this window over its ranks, each has "
                    f"its own: call the {type(ddp).__name__} module itself in the last "
                    f"micro-batch, not its .module or a method of it, and not inside no_sync()"
                )

    def reduces(self) -> bool:
        """Whether a guarded DDP adds gradients of other ranks at the end of a backward."""
        return bool(self._ddp())

    def _ddp(self) -> list[DistributedDataParallel]:
        """The DDP modules, of several ranks, inside the guarded modules."""
        found = (x for module in self._modules for x in module.modules())
        several = (x for x in found if isinstance(x, DistributedDataParallel))
        return [x for x in several if torch.distributed.get_world_size(x.process_group) > 1]

    def _parameters(self) -> Iterator[Tensor]:
        """Yield the parameters of guarded optimizers and modules; some come twice."""
        yield from (p for x in self._optimizers for g in x.param_groups for p in g["params"])
        yield from (p for module in self._modules for p in module.parameters())

    def _stepped(self, optimizer: Optimizer, why: str) -> None:
        """Raise for a step inside an open window, or warn once if the optimizer is not guarded."""
        text = (
            f"{type(optimizer).__name__}.step() inside an open window: {why}, and its gradients "
            f"are not divided by the tokens of the whole window yet. Call finish(parameters), or "
            f"leave the `with` block, before the step"
        )
        if optimizer in self._optimizers:
            raise RuntimeError(text)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{text}. (acc.guard(optimizer) makes this an error; ignore it for an "
                f"optimizer of other parameters.)",
                stacklevel=5,
            )

    def check_join(self) -> None:
        """Raise under DDP's ``Join``, whose ranks run out of micro-batches by design.

        A loss does not know its DDP module, so the process is searched for such modules, once.
        """
        if self._replicas is None:
            self._replicas = weakref.WeakSet(_instances(DistributedDataParallel))
        for module in (*self._modules, *self._replicas):
            if getattr(getattr(module, "_join_config", None), "enable", False):
                raise RuntimeError(
                    "Join lets a rank leave while others train on; a LossAccumulator needs each "
                    "rank in every window, the others would wait for it. Without Join, give the "
                    "rank that has run out micro-batches whose labels are all ignore_index. (A "
                    "Join that is over leaves its mark on the model until it is told otherwise: "
                    "Join([model], enable=False))"
                )

    # ---- factors ----------------------------------------------------------------------------

    def is_expected(self, grad: Tensor, upstream: Sequence[float]) -> Tensor:
        """``()`` bool: whether a loss's gradient ``()`` is one of ``upstream``, times a loss scale.

        Loss scales are those of ``GradScaler`` objects in this process. Without any, on a device
        whose values cannot be read here and with DeepSpeed, a power of two is accepted too: the
        loss scalers of other libraries use these.
        """
        factors = torch.stack([grad.detach().double() / x for x in upstream])
        readable = _faults.readable(grad.device)
        if readable and ((factors - 1).abs() <= _TOLERANCE).any():
            return torch.tensor(True, device=grad.device)
        if readable or self._scalers is None:
            self._scalers = weakref.WeakSet(_instances(torch.amp.GradScaler))
        scales = (x._scale for x in self._scalers if x._scale is not None)
        known = [_faults.moved(x, grad.device).double() for x in scales]
        loss_scales = torch.stack([torch.ones_like(factors[0]), *known])
        fits = ((factors / loss_scales[:, None] - 1).abs() <= _TOLERANCE) | factors.isnan()
        if not known and (not readable or "deepspeed" in sys.modules):
            mantissa, exponent = torch.frexp(factors)
            fits = fits | ((mantissa == 0.5) & (exponent > 1))
        return fits.any()

    # ---- gradients --------------------------------------------------------------------------

    def check_all_given(self, given: Iterable[Tensor]) -> None:
        """Raise if a guarded optimizer or module has a gradient that ``finish`` was not given."""
        known = {id(p) for p in given}
        names = {id(p): name for m in self._modules for name, p in m.named_parameters()}
        missing = {
            id(p): names.get(id(p), f"a tensor of shape {tuple(p.shape)}")
            for p in self._parameters()
            if p.grad is not None and id(p) not in known
        }
        if missing:
            raise RuntimeError(
                f"parameters: {len(missing)} that have a .grad were not given to finish, and would "
                f"be trained with the gradients of an estimate: "
                f"{', '.join(list(missing.values())[:3])}"
            )

    def streams(self, now: bool) -> None:
        """Declare whether the open window corrects its gradients at the end (streaming)."""
        (_STREAMING.add if now else _STREAMING.discard)(self)

    def mark_shared(self, gradients_of: Callable[[], Iterable[Tensor]]) -> None:
        """Tell other streaming accumulators which gradients this one adds to as well."""
        others = [guard for guard in _STREAMING if guard is not self]
        if others:
            tensors = list(gradients_of())
            for guard in others:
                guard._shared |= {id(p): weakref.ref(p) for p in tensors}

    def check_own(self, trained: Iterable[Tensor]) -> None:
        """Raise if another accumulator has added to these gradients, or corrected them."""
        if any((ref := self._shared.get(id(p))) is not None and ref() is p for p in trained):
            raise RuntimeError(
                "two accumulators share gradients while one of them streams: its finish() would "
                "multiply those of the other one too. Use one accumulator, whose window has "
                'several losses: `with acc.window({"next": [...], "second": [...]}):`'
            )


def _instances(kind: type) -> list[Any]:
    """Find all objects of a class and its subclasses in this process."""
    kinds = [kind]
    for one in kinds:
        kinds += one.__subclasses__()
    return [x for x in gc.get_referrers(*kinds) if isinstance(x, kind)]


def _backward_stats(ddp: DistributedDataParallel) -> Any:
    """DDP's times of its last reduced backward, by parameter; ``None`` if torch keeps none."""
    stats = getattr(getattr(ddp, "reducer", None), "get_backward_stats", None)
    return None if stats is None else stats()


_STREAMING: weakref.WeakSet[Guard] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # the open windows belong to the parent process
    os.register_at_fork(after_in_child=_STREAMING.clear)
