"""The life of windows: how each opens and ends, on all ranks alike, and the metrics they add to."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.checks import as_window, check_module
from fusedce.accumulate.engines import Engine
from fusedce.accumulate.exchange import CLOSE, FINISH, METRICS, WINDOW, Exchange
from fusedce.accumulate.totals import UNNAMED, Sums, Totals, add, names_of, stacked, sums_of
from fusedce.accumulate.window import Window, leaves_of
from fusedce.accumulate.window_grads import (
    FIRST_ESTIMATE,
    Guard,
    drop_gradients,
    held_by_fsdp2,
    scale_gradients,
    trained_of,
)
from fusedce.contract.groups import Ranks
from fusedce.contract.monitors import MonitoredLossSum


@dataclass
class Lifecycle:
    """Opens and ends windows, and keeps the totals of those that have ended.

    Attributes:
        tokens: the ranks whose losses are added (in a pipeline, the last stages).
        exchange: messages between all ranks that share the windows.
        engine: runs backward.
        grad_reduction, on_empty: settings that must be equal on all ranks.
        has_loss: whether this rank computes losses.
        guard: checks of what the training loop does beside the accumulator.
        totals: sums of the windows that have ended.
        window: the open window, or ``None``.
        announced: the result of ``window(...)`` until it is entered.
        should_step: whether the last window is worth an optimizer step.
        evaluated: the metrics hold batches that were added since the last reset.
        has_trained: the totals hold training windows, so reading them needs no collective.
    """

    tokens: Ranks
    exchange: Exchange
    engine: Engine
    grad_reduction: str
    on_empty: str
    has_loss: bool = True
    guard: Guard = field(default_factory=Guard)
    totals: Totals = field(default_factory=Totals)
    window: Window | None = None
    announced: object = None
    should_step: bool = True
    evaluated: bool = False
    has_trained: bool = False

    def __post_init__(self) -> None:
        self._loaded: int | None = None  # estimate of a loaded state, until all ranks compare it
        self._dropped = False  # a window was dropped whose gradients FSDP2 may hold
        self._held: set[int] = set()  # ids of FSDP2 parameters with gradients of other windows
        self._noted = self.new_faults()  # errors on a device, from windows that have ended

    def fresh(self) -> Lifecycle:
        """The same ranks and settings, before any window."""
        return Lifecycle(
            self.tokens,
            Exchange(self.exchange.ranks),
            self.engine,
            self.grad_reduction,
            self.on_empty,
            self.has_loss,
        )

    def new_faults(self) -> _faults.Faults:
        """Storage for errors found in tensors."""
        return _faults.Faults(at_once=self.exchange.ranks.group() is None)

    # ---- declared counts --------------------------------------------------------------------

    def enter(self, counts: Any, weights: Mapping[str, float] | None) -> None:
        """Open a window of declared counts: see :meth:`LossAccumulator.window`. One all-gather."""
        self.announced = None
        with self.exchange.tell_peers_on_error(WINDOW):
            self.refuse_open_window("open another")
            self._check_ready()
            losses, declared = as_window(counts, weights)
            if not declared and self.has_loss:
                raise ValueError("counts must hold one number per micro-batch, got none at all")
        none = torch.zeros(len(losses), dtype=torch.int64, device="cpu")
        local = reduce(_plus, declared, none)
        signature = self._loss_signature(len(declared), losses)
        sent = self.exchange.send(WINDOW, local, self.equal(), signature)
        if self.on_empty != "zero" or sent.work is None:
            self._decide_step(sent.wait().sum())
        else:
            self.should_step = True
        self._open(Window(losses, declared, sent, self.new_faults()))

    def leave(self, error: BaseException | None) -> None:
        """Close a window of declared counts, or drop it after ``error``. One all-gather."""
        window = self.window
        if window is None:
            if error is None:
                raise RuntimeError("the window was closed inside its own block")
            return
        if error is not None:
            self.close(dropped=True)
            self.exchange.note_wait(error)
            # Ranks that already know of the error do not come to the window's end.
            if error is not self.exchange.shared_error and not window.was_refused():
                self.exchange.fail(CLOSE, error)
            self.exchange.shared_error = None  # its traceback holds what has run out of memory
            return
        try:
            window.denominators()
            with self.exchange.tell_peers_on_error(CLOSE):
                if self.has_loss:
                    window.check_complete()
                self._check_gradients_kept(window)
                self.guard.check_reduced()
                self._check_synchronised()
            sums = stacked(window.sums, names_of(window.weights))
            sent = self.exchange.send(CLOSE, sums, self.equal(), faults=window.faults)
            sums = sent.wait()
        finally:
            self.close()
            self.exchange.shared_error = None
        self._count_window(window, sums)

    # ---- streaming --------------------------------------------------------------------------

    def start_streaming(self) -> Window:
        """Open a streaming window. No collective."""
        if self.engine.no_streaming is not None:
            raise RuntimeError(f"streaming is not possible here: {self.engine.no_streaming}")
        if not self.has_loss:
            raise RuntimeError(
                "this rank has no loss in its pipeline: the last stage computes it. Elsewhere, "
                "from_mesh(..., has_loss=True) says so"
            )
        self._check_ready()
        self._open(Window({UNNAMED: 1.0}, None, self._estimate()[None], self.new_faults()))
        self.guard.streams(True)
        assert self.window is not None
        return self.window

    def _estimate(self) -> Tensor:
        """Estimated denominator of a streaming window, equal on all ranks; ``()`` float64."""
        previous = self.totals.previous_count
        if previous is None:
            tokens = FIRST_ESTIMATE * self.tokens.size()
            previous = torch.tensor(float(tokens), dtype=torch.float64, device="cpu")
        return previous

    def finish(self, parameters: Iterable[Tensor]) -> bool:
        """Close a streaming window: see :meth:`LossAccumulator.finish`. One all-gather."""
        window = self.window
        if window is not None and window.declared is not None:
            raise RuntimeError(
                "finish is for streaming; a window with declared counts needs no correction"
            )
        with self.exchange.tell_peers_on_error(FINISH):
            self.check_entered()
            if window is not None:
                window.check_complete()
                self._check_gradients_kept(window)
            expects = not self.has_loss or (window is not None and window.n_done > 0)
            trained = trained_of(parameters, expects)
            self.guard.check_all_given(trained)
            self.guard.check_own(trained)
            self.guard.check_reduced()
        n_done = 0 if window is None else window.n_done
        sums = stacked({} if window is None else window.sums, names_of([UNNAMED]))
        faults = None if window is None else window.faults
        settings = self.equal() | {"estimate": self._loaded}
        signature = self._loss_signature(n_done, {UNNAMED: 1.0})
        sums = self.exchange.send(FINISH, sums, settings, signature, faults).wait()
        self._loaded = None
        total = sums[1]
        if n_done == 0 and self.has_loss:
            raise RuntimeError("finish: no micro-batch since the last window: nothing to finish")
        self.close()
        self.guard.mark_shared(lambda: trained)
        self._decide_step(total)
        estimate = _faults.moved(self._estimate(), total.device)
        if self.should_step:
            scale_gradients(trained, estimate / total.clamp(min=1))
        else:
            for p in trained:
                p.grad = None
        self.totals.previous_count = torch.where(total > 0, total, estimate)
        self._count_window(window, sums)
        return self.should_step

    def discard(self, module: torch.nn.Module | None) -> None:
        """Drop an open streaming window: see :meth:`LossAccumulator.discard_window`."""
        check_module(module)
        if self.window is not None and self.window.declared is not None:
            raise RuntimeError("discard_window is for streaming: leave the `with` block instead")
        self.announced = None
        self.close(dropped=True)
        if module is not None:
            drop_gradients(module)
            self._dropped = False

    # ---- between windows --------------------------------------------------------------------

    def raise_noted(self) -> None:
        """Raise the first error that devices have reported. Waits for them."""
        self.exchange.raise_unread()
        self._noted.raise_first()

    def load(self, state: Any) -> None:
        """Continue from a saved state: see :meth:`LossAccumulator.load_state_dict`."""
        self.refuse_open_window("load a state")
        self.totals.load(state)
        self.has_trained, self.evaluated = self.totals.n_windows > 0, False
        previous = self.totals.previous_count
        self._loaded = None if previous is None else int(previous)

    def refuse_open_window(self, action: str) -> None:
        """Raise ``RuntimeError`` if a window is open; ``action`` says what needs it closed."""
        self.check_entered()
        if self.window is not None:
            self.window.refuse(action)

    def check_entered(self) -> None:
        """Raise ``RuntimeError`` if ``window(...)`` was called without ``with``."""
        if self.announced is not None:
            raise RuntimeError(
                "acc.window(...) was called and not entered: write `with acc.window(counts):` "
                "around the micro-batches (discard_window() forgets it)"
            )

    def close(self, dropped: bool = False) -> None:
        """Forget the open window; ``dropped`` if its gradients are not to be used."""
        if self.window is not None:
            self.window.is_open = False
        self.window = None
        self._dropped = dropped
        self.guard.stop_watching()

    def _open(self, window: Window) -> None:
        """Make ``window`` the open one, and start the checks of the loop around it."""
        self.window = window
        self._held = {id(p) for p in held_by_fsdp2()}
        window.on_begin, window.on_end = self._on_backward, self.guard.note_gradient
        self.guard.on_open()
        self.guard.watch(self._unfinished)

    def _on_backward(self, roots: list[Any], grad: Tensor, upstream: Sequence[float]) -> None:
        """Check, as a micro-batch is differentiated, its factor and the earlier gradients."""
        if self.window is not None:
            factor = (grad.double() / upstream[0]).reshape(1).view(torch.int64)[0]
            wrong = ~self.guard.is_expected(grad, upstream)
            self.window.faults.note(_faults.multiplied, wrong, factor)
            self._check_gradients_kept(self.window)
            if self.window.declared is not None:
                self.guard.mark_shared(lambda: leaves_of(roots))

    def _check_gradients_kept(self, window: Window) -> None:
        """Raise, or note, that gradients of the window's micro-batches are gone."""
        self.guard.check_gradients_kept(window.faults, window.n_tokens)

    def _unfinished(self) -> str | None:
        """The reason why no optimizer may step now; ``None`` if one may."""
        window = self.window
        if window is None or window.is_complete():
            return None
        if window.is_in_backward():  # an optimizer in a backward hook
            ready = window.is_last() and not self.guard.reduces()
            return None if ready else f"a backward is still running, {window.progress()}"
        return window.progress() if window.n_done else None

    def _check_ready(self) -> None:
        """Raise ``RuntimeError`` where no window may open now."""
        if self.evaluated:
            raise RuntimeError(
                "the metrics hold batches that were added for evaluation since the last reset, and "
                "would mix them with training: call metrics(reset=True) first, or evaluate with a "
                "LossAccumulator of its own"
            )
        if self.exchange.ranks.size() > 1:
            self.guard.check_join()
        if self._dropped and held_by_fsdp2():
            raise RuntimeError(
                "FSDP2 still holds gradients of micro-batches that were dropped "
                "(set_requires_gradient_sync(False)), where zero_grad does not reach them, and "
                "would add them to this window: call acc.discard_window(model) first"
            )

    def _check_synchronised(self) -> None:
        """Raise if FSDP2 still holds this window's gradients inside."""
        held = [p for p in held_by_fsdp2() if id(p) not in self._held]
        if held:
            raise RuntimeError(
                f"FSDP2 still holds the gradients of {len(held)} parameters inside, and an "
                f"optimizer would step without them: call set_requires_gradient_sync(True) before "
                f"the last micro-batch of a window (and discard_window(model) to drop these)"
            )

    def equal(self) -> dict[str, object]:
        """Settings that must be equal on all ranks at every exchange."""
        return {
            "grad_reduction": self.grad_reduction,
            "on_empty": self.on_empty,
            "backward_divisor": self.engine.divisor(),
        }

    def _loss_signature(self, micro_batches: int, losses: Mapping[str, float]) -> tuple[int, int]:
        """Number of micro-batches + 1, and a hash of the losses: equal on ranks with losses."""
        names = zlib.crc32(json.dumps(losses).encode())
        return (1 + micro_batches, names) if self.has_loss else (0, 0)

    def _decide_step(self, total: Tensor) -> None:
        """Set :attr:`should_step` from the tokens ``total ()`` of all ranks, or raise."""
        self.should_step = True
        if self.on_empty == "zero" or int(total) > 0:
            return
        if self.on_empty == "raise":
            raise RuntimeError(
                "no valid token in this window on any rank (on_empty='raise'): "
                "every label is ignore_index"
            )
        self.should_step = False

    def _count_window(self, window: Window | None, sums: Tensor) -> None:
        """Add a window that has ended, ``sums (n,)`` over all ranks, to the totals."""
        weights = {UNNAMED: 1.0} if window is None else window.weights
        self.totals.add(names_of(weights), sums)
        self.totals.weights = weights
        self.totals.n_windows += 1
        self.has_trained = True
        if window is not None:
            self.keep(window.faults)

    def keep(self, faults: _faults.Faults) -> None:
        """Keep errors for the next read; on several ranks a message has carried them already."""
        if self.exchange.ranks.group() is None:
            self._noted.absorb(faults)


def _plus(a: Tensor, b: Tensor) -> Tensor:
    return _faults.moved(a, b.device) + b


class Metrics:
    """Reads, saves and loads the totals of a :class:`Lifecycle`, and adds evaluated batches.

    Batches that this rank has evaluated wait here until they are summed over ranks.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._evaluated: Sums = {}
        self._faults = lifecycle.new_faults()

    def add(self, out: MonitoredLossSum) -> None:
        """Add a batch without training: see :meth:`LossAccumulator.add`. No collective."""
        if n_windows := self._lifecycle.totals.n_windows:
            raise RuntimeError(
                f"add: the metrics hold {n_windows} training windows since the last reset, and "
                f"would mix training with evaluation. Call metrics(reset=True) first, or evaluate "
                f"with a LossAccumulator of its own"
            )
        self._lifecycle.evaluated = True
        self._faults.note(_faults.bad_label, out.n_valid < 0, out.n_valid)
        self._evaluated = add(self._evaluated, sums_of(UNNAMED, out))

    def read(self, reset: bool) -> dict[str, float]:
        """The metrics: see :meth:`LossAccumulator.metrics`."""
        lifecycle = self._lifecycle
        if self._evaluated or not lifecycle.has_trained:
            self._sum_over_ranks()
        else:
            lifecycle.refuse_open_window("read metrics")
        lifecycle.raise_noted()
        found = lifecycle.totals.metrics()
        if reset:
            lifecycle.totals.reset()
            lifecycle.evaluated = False
        return found

    def state(self) -> dict[str, Any]:
        """The state to save: see :meth:`LossAccumulator.state_dict`."""
        lifecycle = self._lifecycle
        lifecycle.refuse_open_window(
            "save the state (its gradients are in .grad, in no checkpoint)"
        )
        if self._evaluated:
            if lifecycle.exchange.ranks.size() > 1:
                raise RuntimeError(
                    "cannot save the state: batches were added on this rank that are not summed "
                    "over ranks yet. Call metrics() on all ranks first"
                )
            self._sum_over_ranks()
        lifecycle.raise_noted()
        return lifecycle.totals.state()

    def load(self, state: Any) -> None:
        """Continue from a saved state, without batches that wait to be summed."""
        self._lifecycle.load(state)
        self._evaluated, self._faults = {}, self._lifecycle.new_faults()

    def _sum_over_ranks(self) -> None:
        """Add the batches that each rank has evaluated to the totals: one all-gather."""
        lifecycle, faults = self._lifecycle, self._faults
        self._faults = lifecycle.new_faults()
        with lifecycle.exchange.tell_peers_on_error(METRICS):
            lifecycle.refuse_open_window("read metrics")
        names = names_of([UNNAMED])
        sums = stacked(self._evaluated, names)
        sent = lifecycle.exchange.send(METRICS, sums, lifecycle.equal(), faults=faults)
        lifecycle.totals.add(names, sent.wait())
        lifecycle.keep(faults)
        self._evaluated = {}
