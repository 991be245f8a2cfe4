"""From one optimizer step to the next: how windows open and end, on all ranks alike."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.checks import as_window
from fusedce.accumulate.engines import Engine
from fusedce.accumulate.graph import leaves_of
from fusedce.accumulate.guard import Guard
from fusedce.accumulate.leftovers import drop, leftovers
from fusedce.accumulate.ranks import CLOSE, FINISH, WINDOW, Meeting
from fusedce.accumulate.streaming import UNKNOWN, scale_gradients, trained_of
from fusedce.accumulate.totals import ONLY, Totals, names_of, stacked
from fusedce.accumulate.window import Window
from fusedce.contract.groups import Ranks


@dataclass
class Steps:
    """The open window, and the totals of those that have ended.

    Attributes:
        meeting: all ranks that share the windows; ``tokens``: those of them whose losses are added
            (in a pipeline, the last stages).
        engine: who runs backward.
        grad_reduction, on_empty: settings, which all ranks must share.
        has_loss: whether this rank computes losses.
    """

    tokens: Ranks
    meeting: Meeting
    engine: Engine
    grad_reduction: str
    on_empty: str
    has_loss: bool = True
    guard: Guard = field(default_factory=Guard)
    totals: Totals = field(default_factory=Totals)
    window: Window | None = None
    announced: object = None  # what window(...) returned, until it is entered
    should_step: bool = True
    evaluated: bool = False  # the metrics hold batches that were added since the last reset
    has_trained: bool = False  # what was trained needs no collective to be read

    def __post_init__(self) -> None:
        self._loaded: int | None = None  # the estimate of a state, until all ranks have compared it
        self._dropped = False  # a window was, whose gradients FSDP2 may hold
        self._held: set[int] = set()  # FSDP2's parameters with gradients of other windows
        self._noted = self.new_faults()  # on a device, of windows that have ended

    def settings(self) -> Steps:
        """New ones of the same ranks, before any window."""
        meeting = Meeting(self.meeting.ranks)
        return replace(
            self,
            meeting=meeting,
            guard=Guard(),
            totals=Totals(),
            window=None,
            announced=None,
            should_step=True,
            evaluated=False,
            has_trained=False,
        )

    def new_faults(self) -> _faults.Faults:
        return _faults.Faults(at_once=self.meeting.ranks.group() is None)

    # ---- declared counts --------------------------------------------------------------------

    def enter(self, counts: Any, weights: Mapping[str, float] | None) -> None:
        self.announced = None
        with self.meeting.on_the_way(WINDOW):
            self.refuse_open_window("open another")
            self._check_ready()
            losses, declared = as_window(counts, weights)
            if not declared and self.has_loss:
                raise ValueError("counts must hold one number per micro-batch, got none at all")
        local = reduce(_plus, declared, torch.zeros(len(losses), dtype=torch.int64))
        told = self._of_losses(len(declared), losses)
        sent = self.meeting.send(WINDOW, local, self.equal(), told)
        if self.on_empty != "zero" or sent.work is None:
            self._decide_step(sent.wait().sum())
        else:
            self.should_step = True
        self._opens(Window(losses, declared, sent, self.new_faults()))

    def leave(self, error: BaseException | None) -> None:
        window = self.window
        if window is None:
            if error is None:
                raise RuntimeError("the window was closed inside its own block")
            return
        if error is not None:
            self.ends(dropped=True)
            self.meeting.note_wait(error)
            # Others that are told as well will not come to the window's end.
            if error is not self.meeting.told and not window.was_refused():
                self.meeting.fail(CLOSE, error)
            self.meeting.told = None  # its traceback holds what has run out of memory
            return
        try:
            window.denominators()
            with self.meeting.on_the_way(CLOSE):
                if self.has_loss:
                    window.check_complete()
                self.guard.check_kept()
                self.guard.check_reduced()
                self._check_synchronised()
            sums = stacked(window.sums, names_of(window.weights))
            sent = self.meeting.send(CLOSE, sums, self.equal(), faults=window.faults)
            sums = sent.wait()
        finally:
            self.ends()
            self.meeting.told = None
        self._count_window(window, sums)

    # ---- streaming --------------------------------------------------------------------------

    def start_streaming(self) -> Window:
        if self.engine.no_streaming is not None:
            raise RuntimeError(f"streaming is not possible here: {self.engine.no_streaming}")
        if not self.has_loss:
            raise RuntimeError(
                "this rank has no loss in its pipeline: the last stage computes it. Elsewhere, "
                "from_mesh(..., has_loss=True) says so"
            )
        self._check_ready()
        self._opens(Window({ONLY: 1.0}, None, self._estimate()[None], self.new_faults()))
        self.guard.streams(True)
        assert self.window is not None
        return self.window

    def _estimate(self) -> Tensor:
        """A streaming denominator, equal on all ranks without asking them; ``()`` float64."""
        previous = self.totals.previous_count
        if previous is None:
            previous = torch.tensor(float(UNKNOWN * self.tokens.size()), dtype=torch.float64)
        return previous

    def finish(self, parameters: Iterable[Tensor]) -> bool:
        window = self.window
        if window is not None and window.declared is not None:
            raise RuntimeError(
                "finish is for streaming; a window with declared counts needs no correction"
            )
        with self.meeting.on_the_way(FINISH):
            self.check_entered()
            if window is not None:
                window.check_complete()
            expects = not self.has_loss or (window is not None and window.seen > 0)
            self.guard.check_kept()
            trained = trained_of(parameters, expects)
            self.guard.check_all_given(trained)
            self.guard.check_own(trained)
            self.guard.check_reduced()
        seen = 0 if window is None else window.seen
        sums = stacked({} if window is None else window.sums, names_of([ONLY]))
        faults = None if window is None else window.faults
        settings = self.equal() | {"estimate": self._loaded}
        told = self._of_losses(seen, {ONLY: 1.0})
        sums = self.meeting.send(FINISH, sums, settings, told, faults).wait()
        self._loaded = None
        total = sums[1]
        if seen == 0 and self.has_loss:
            raise RuntimeError("finish: no micro-batch since the last window: nothing to finish")
        self.ends()
        self.guard.touch_others(lambda: trained)
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
        if self.window is not None and self.window.declared is not None:
            raise RuntimeError("discard_window is for streaming: leave the `with` block instead")
        self.announced = None
        self.ends(dropped=True)
        if module is not None:
            drop(module)
            self._dropped = False

    # ---- between windows --------------------------------------------------------------------

    def raise_noted(self) -> None:
        """Raise what devices have reported since somebody looked. Waits for them."""
        self.meeting.raise_unread()
        self._noted.raise_first()

    def load(self, state: Any) -> None:
        self.refuse_open_window("load a state")
        self.totals.load(state)
        self.has_trained, self.evaluated = self.totals.n_windows > 0, False
        previous = self.totals.previous_count
        self._loaded = None if previous is None else int(previous)

    def refuse_open_window(self, action: str) -> None:
        self.check_entered()
        if self.window is not None:
            self.window.refuse(action)

    def check_entered(self) -> None:
        if self.announced is not None:
            raise RuntimeError(
                "acc.window(...) was called and not entered: write `with acc.window(counts):` "
                "around the micro-batches (discard_window() forgets it)"
            )

    def ends(self, dropped: bool = False) -> None:
        if self.window is not None:
            self.window.is_open = False
        self.window = None
        self._dropped = dropped
        self.guard.rest()

    def _opens(self, window: Window) -> None:
        self.window = window
        self._held = {id(p) for p in leftovers()}
        window.on_begin, window.on_end = self._begins, self.guard.keep
        self.guard.opens()
        self.guard.watch(self._unfinished)

    def _begins(self, roots: list[Any], grad: Tensor, upstream: Sequence[float]) -> None:
        """A micro-batch is differentiated: is its factor ours, are earlier gradients there?"""
        if self.window is not None:
            factor = (grad.double() / upstream[0]).reshape(1).view(torch.int64)[0]
            wrong = ~self.guard.is_expected(grad, upstream)
            self.window.faults.note(_faults.multiplied, wrong, factor)
        self.guard.check_kept(between=True)
        if self.window is not None and self.window.declared is not None:
            self.guard.touch_others(lambda: leaves_of(roots))

    def _unfinished(self) -> str | None:
        """Why no optimizer may step now."""
        window = self.window
        if window is None or window.is_complete():
            return None
        if window.is_in_backward():  # an optimizer that steps inside it
            ready = window.is_last() and not self.guard.reduces()
            return None if ready else f"a backward is still running, {window.progress()}"
        return window.progress() if window.seen else None

    def _check_ready(self) -> None:
        if self.evaluated:
            raise RuntimeError(
                "the metrics hold batches that were added for evaluation since the last reset, and "
                "would mix them with training: call metrics(reset=True) first, or evaluate with a "
                "LossAccumulator of its own"
            )
        if self.meeting.ranks.size() > 1:
            self.guard.check_join()
        if self._dropped and leftovers():
            raise RuntimeError(
                "FSDP2 still holds gradients of micro-batches that were dropped "
                "(set_requires_gradient_sync(False)), where zero_grad does not reach them, and "
                "would add them to this window: call acc.discard_window(model) first"
            )

    def _check_synchronised(self) -> None:
        """Raise if FSDP2 still holds this window's gradients inside."""
        held = [p for p in leftovers() if id(p) not in self._held]
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

    def _of_losses(self, micro_batches: int, losses: Mapping[str, float]) -> tuple[int, int]:
        """Settings that must be equal on all ranks that compute losses."""
        names = zlib.crc32(json.dumps(losses).encode())
        return (1 + micro_batches, names) if self.has_loss else (0, 0)

    def _decide_step(self, total: Tensor) -> None:
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
        weights = {ONLY: 1.0} if window is None else window.weights
        self.totals.add(names_of(weights), sums)
        self.totals.weights = weights
        self.totals.n_windows += 1
        self.has_trained = True
        if window is not None:
            self.keep(window.faults)

    def keep(self, faults: _faults.Faults) -> None:
        """On several ranks a message has carried them."""
        if self.meeting.ranks.group() is None:
            self._noted.absorb(faults)


def _plus(a: Tensor, b: Tensor) -> Tensor:
    return _faults.moved(a, b.device) + b
