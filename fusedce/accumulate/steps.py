"""From one optimizer step to the next: how windows open and end, on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.checks import as_window
from fusedce.accumulate.graph import leaves_of
from fusedce.accumulate.guard import Guard
from fusedce.accumulate.leftovers import drop, leftovers
from fusedce.accumulate.message import CLOSE, ESTIMATE, FINISH, WINDOW, Terms, hash_of
from fusedce.accumulate.ranks import Meeting
from fusedce.accumulate.streaming import UNKNOWN, scale_gradients, trained_of
from fusedce.accumulate.totals import ONLY, Sums, Totals, names_of, stacked
from fusedce.accumulate.window import Window


@dataclass
class Steps:
    """The open window, and the totals of those that have ended.

    Attributes:
        meeting: all ranks that share the windows; ``tokens``: those of them whose losses are added
            (in a pipeline, the last stages).
        has_loss: whether this rank computes losses.
        adds, on_empty: settings, which all ranks must share.
    """

    tokens: Meeting
    adds: bool  # gradients over ranks, instead of averaging them
    on_empty: str
    meeting: Meeting = field(init=False)
    has_loss: bool = True
    guard: Guard = field(default_factory=Guard)
    totals: Totals = field(default_factory=Totals)
    window: Window | None = None
    announced: object = None  # what window(...) returned, until it is entered
    should_step: bool = True
    has_trained: bool = False  # what was trained needs no collective to be read

    def __post_init__(self) -> None:
        self.meeting = self.tokens
        self._agreed_estimate = False  # not yet, or not since a state was loaded
        self._dropped = False  # a window was, whose gradients FSDP2 may hold
        self._noted = self.new_faults()  # on a device, of windows that have ended

    def settings(self) -> Steps:
        """New ones of the same ranks, before any window."""
        new = Steps(Meeting(self.tokens.ranks), self.adds, self.on_empty, self.has_loss)
        if self.meeting is not self.tokens:
            new.meeting = Meeting(self.meeting.ranks)
        return new

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
        terms = self.terms(
            micro_batches=len(declared), losses=0 if ONLY in losses else hash_of(losses)
        )
        sent = self.meeting.send(WINDOW, local, terms)
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
            # Others that are told as well will not come to the window's end.
            known = error is self.meeting.told or window.was_refused()
            if isinstance(error, Exception) and not known:
                self.meeting.fail(CLOSE, error)
            return
        try:
            window.denominators()
            with self.meeting.on_the_way(CLOSE):
                if self.has_loss:
                    window.check_complete()
            sums = stacked(window.sums, names_of(window.weights))
            sums = self.meeting.send(CLOSE, sums, self.terms(), window.faults).wait()
        finally:
            self.ends()
        self._count_window(window, sums)

    # ---- streaming --------------------------------------------------------------------------

    def start_streaming(self, n_valid: Tensor, refusal: str | None) -> Window:
        if refusal is not None:
            raise RuntimeError(f"streaming is not possible here: {refusal}")
        if not self.has_loss:
            raise RuntimeError(
                "this rank has no loss in its pipeline: the last stage computes it. Elsewhere, "
                "from_mesh(..., has_loss=True) says so"
            )
        with self.tokens.on_the_way(ESTIMATE, not self._agreed_estimate):
            self._check_ready()
        estimate = self._estimate(n_valid)
        self._opens(Window({ONLY: 1.0}, None, estimate[None], self.new_faults()))
        self.guard.streams(True)
        assert self.window is not None
        return self.window

    def _estimate(self, n_valid: Tensor) -> Tensor:
        """A streaming denominator all ranks agree on; ``() `` float64.

        It costs a collective in the first window, and after a state was loaded: ranks that have
        loaded different ones would not even meet.
        """
        previous = self.totals.previous_count
        if previous is None or not self._agreed_estimate:
            loaded = 0 if previous is None else hash_of(int(previous))
            terms = self.terms(estimate=loaded)
            n = n_valid.clamp(min=0)[None]
            met = self.tokens.send(ESTIMATE, n, terms).wait()[0]
            self._agreed_estimate = previous is not None
            if previous is None:
                return torch.where(met > 0, met, float(UNKNOWN))
        return previous

    def check_nobody_has_ended(self, window: Window) -> None:
        """Before a micro-batch: raise what ranks that have ended this window would wait with."""
        streams = window.declared is None
        if not streams or not self.guard.others_stream():
            terms = self.terms(micro_batches=streams * (window.seen + 1))
            self.meeting.join_who_has_ended(window.seen, streams, terms)

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
            trained = trained_of(parameters, expects)
            self.guard.check_all_given(trained)
            self.guard.check_own(trained)
        seen = 0 if window is None else window.seen
        sums: Sums = {} if window is None else window.sums
        told = stacked(sums, names_of([ONLY]))
        estimate = torch.ones(1) if window is None else window.denominators()
        speaks = torch.full_like(estimate, float(seen > 0))
        told = torch.cat([told, _faults.moved(torch.cat([estimate * speaks, speaks]), told.device)])
        terms = self.terms(micro_batches=seen)
        faults = None if window is None else window.faults
        told = self.meeting.send(FINISH, told, terms, faults).wait()
        total, (estimate, n) = told[1], told[-2:]
        if seen == 0 and self.has_loss:
            raise RuntimeError("finish: no micro-batch since the last window: nothing to finish")
        self.ends()
        self.guard.touch_others(lambda: trained)
        self._decide_step(total)
        if self.should_step:
            scale_gradients(trained, estimate / n / total.clamp(min=1))
        else:
            for p in trained:
                p.grad = None
        previous = self.totals.previous_count
        previous = torch.tensor(float(UNKNOWN)) if previous is None else previous
        previous = _faults.moved(previous.double(), total.device)
        self.totals.previous_count = torch.where(total > 0, total, previous)
        self._agreed_estimate = True
        self._count_window(window, told[:-2])
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
        self.tokens.raise_unread()
        self.meeting.raise_unread()
        self._noted.raise_first()

    def load(self, state: Any) -> None:
        self.refuse_open_window("load a state")
        self.totals.load(state)
        self.has_trained = self.totals.n_windows > 0
        self._agreed_estimate = False

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
        window.on_begin = self._begins
        self.guard.watch(self._unfinished)

    def _begins(self, roots: list[Any]) -> None:
        """A micro-batch is differentiated: are these gradients another one's as well?"""
        if self.window is not None and self.window.declared is not None:
            self.guard.touch_others(lambda: leaves_of(roots))

    def _unfinished(self) -> str | None:
        """Why no optimizer may step now."""
        window = self.window
        if window is None or window.seen == 0 or window.is_complete():
            return None
        return window.progress()

    def _check_ready(self) -> None:
        if self.meeting.ranks.size() > 1:
            self.guard.check_join()
        if self._dropped and leftovers():
            raise RuntimeError(
                "FSDP2 still holds gradients of micro-batches that were dropped "
                "(set_requires_gradient_sync(False)), where zero_grad does not reach them, and "
                "would add them to this window: call acc.discard_window(model) first"
            )

    def terms(self, micro_batches: int = 0, losses: int = 0, estimate: int = 0) -> Terms:
        settings = (int(self.adds), int(self.on_empty == "skip"), int(self.on_empty == "raise"))
        return Terms(self.has_loss, micro_batches, losses, estimate, settings)

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
