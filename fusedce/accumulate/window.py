"""The micro-batches of one optimizer step on this rank, and what they must agree with.

A micro-batch counts when its loss has been differentiated, not when it has been scaled: a loss
that is never differentiated (or computed twice by a checkpoint, or once more by a pipeline that
looks for shapes) is not in ``.grad`` either. A backward that began and did not end breaks the
window, since ``.grad`` holds a part of it that nobody can take out again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.graph import trains
from fusedce.accumulate.ranks import Sent, explain
from fusedce.accumulate.totals import Sums, add, sums_of
from fusedce.contract.denominator import expecting
from fusedce.contract.monitors import MonitoredLossSum

Losses = dict[str, MonitoredLossSum]
"""``loss_sum ()`` and ``n_valid ()`` int64 of each loss of a micro-batch, and what it carries."""


class Window:
    """An open window: its denominators are declared counts of all ranks, or an estimate.

    Args:
        weights: the window's losses, by name, and what each is multiplied by.
        declared: tokens of each micro-batch, ``(losses,)`` int64 each; ``None`` when streaming.
        denominators: ``(losses,)`` float64, tokens of all ranks.
        faults: where errors found in its losses are noted.
    """

    def __init__(
        self,
        weights: dict[str, float],
        declared: list[Tensor] | None,
        denominators: Tensor | Sent,
        faults: _faults.Faults,
    ) -> None:
        self.weights = weights
        self.declared = declared
        self.faults = faults
        self.sums: Sums = {}
        self.seen = 0  # micro-batches that were differentiated
        self._auxiliary: list[Tensor] = []  # waiting for the next loss
        self.is_open = True
        self._denominators = denominators
        self._scaled = 0
        self._begun: list[tuple[int, int, Losses]] = []  # backward, number; not ended
        self._thread = threading.get_ident()
        self.on_begin: Callable[[list[Any], Tensor, Sequence[float]], None] | None = None
        self.on_end: Callable[[], None] | None = None

    def denominators(self) -> Tensor:
        """``(losses,)`` float64, at least 1; waits for the other ranks when first asked for.

        Raises:
            RuntimeError, TypeError, ValueError: what the ranks have told each other is an error.
        """
        if isinstance(self._denominators, Sent):
            self._denominators = self._denominators.wait().clamp(min=1)
        return self._denominators

    def was_refused(self) -> bool:
        """For a rank that leaves the window early: whether all ranks will hear of another error."""
        sent = self._denominators
        return isinstance(sent, Sent) and explain(sent.told()) is not None

    # ---- micro-batches ----------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise if the window is broken, full, or another thread's."""
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes it again while it is differentiated, in any thread
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "this window was opened by another thread: a LossAccumulator belongs to one "
                "thread, make one for each"
            )
        if self._begun:
            raise RuntimeError(
                "this window can only be dropped: a backward has raised, and .grad holds a part of "
                "that micro-batch which nobody can take out again. Call zero_grad, and then "
                "discard_window() (streaming), or leave the `with` block by raising"
            )
        if self.declared is not None and self.is_complete():
            raise _faults.too_many(len(self.declared))

    def factors(self, factor: float) -> list[Tensor]:
        """What each of the losses is multiplied by, ``()`` float64; ``factor`` but for these."""
        shares = factor / self.denominators()
        return [x * weight for x, weight in zip(shares, self.weights.values(), strict=True)]

    def scaled(
        self, losses: Losses, factor: float, ranks: int, upstream: Sequence[float]
    ) -> Tensor:
        """The loss to differentiate: counted once it has been.

        Args:
            losses: of one micro-batch.
            factor: what a sum of this rank's tokens is multiplied by, but for the denominator.
            ranks: that the window's tokens come from.
            upstream: what the engine may multiply the loss by before its backward.
        """
        for _, n_valid in losses.values():
            self.faults.note(_faults.bad_label, n_valid < 0, n_valid)
        terms = []
        for share, (loss_sum, _) in zip(self.factors(factor), losses.values(), strict=True):
            terms.append(loss_sum * _faults.moved(share, loss_sum.device).to(loss_sum.dtype))
        auxiliary = self._take_auxiliary()
        if auxiliary is not None:
            terms.append(auxiliary.to(terms[0]) * (factor / ranks))
        scaled = reduce(torch.add, terms)
        self._follow(scaled, losses, upstream)
        return scaled

    def _follow(self, scaled: Tensor, losses: Losses, upstream: Sequence[float]) -> None:
        """Count the micro-batch when ``scaled`` has been differentiated.

        One without a graph counts at once, since no gradient will ever lack it; but not where
        gradients are off, as in the first of two passes of a checkpoint.
        """
        if not scaled.requires_grad:
            if torch.is_grad_enabled():
                self._count(losses)
            return
        number, self._scaled = self._scaled, self._scaled + 1
        roots = [] if scaled.grad_fn is None else [x for x, _ in scaled.grad_fn.next_functions]

        def begins(grad: Tensor) -> None:
            if not trains(roots):
                return
            if not self.is_open:
                raise RuntimeError(
                    "a loss is differentiated after the window that has scaled it was closed: its "
                    "gradient would be divided by another window's tokens"
                )
            if self.on_begin is not None:
                self.on_begin(roots, grad.detach(), upstream)
            backward = torch._C._current_graph_task_id()
            self._begun.append((backward, number, losses))
            Variable._execution_engine.queue_callback(partial(self._ended, backward))

        scaled.register_hook(begins)

    def _ended(self, backward: int) -> None:
        """At the end of a backward, which visits several losses from the last to the first."""
        mine = [begun for begun in self._begun if begun[0] == backward]
        for _, _, losses in sorted(mine, key=lambda begun: begun[1]):
            self._count(losses)
        self._begun = [begun for begun in self._begun if begun[0] != backward]
        if self.on_end is not None:
            self.on_end()

    def _count(self, losses: Losses) -> None:
        counts = torch.stack([n for _, n in losses.values()])
        if self.declared is not None:
            if self.seen < len(self.declared):
                expected = _faults.moved(self.declared[self.seen], counts.device)
                for declared, n in zip(expected, counts, strict=True):
                    self.faults.note(_faults.count_differs, declared != n, self.seen, declared, n)
            else:
                everywhere = torch.ones((), dtype=torch.bool, device=counts.device)
                self.faults.note(_faults.too_many, everywhere, len(self.declared))
        self.seen += 1
        for name, out in losses.items():
            self.sums = add(self.sums, sums_of(name, out))

    def is_in_backward(self) -> bool:
        return bool(self._begun)

    def is_last(self) -> bool:
        """Whether the backward that runs now is that of the window's last micro-batch."""
        return self.declared is not None and self.seen + len(self._begun) == len(self.declared)

    def add_auxiliary(self, auxiliary: Tensor) -> None:
        """It waits for the next loss."""
        if self.declared is None:
            raise no_auxiliary()
        self._auxiliary.append(auxiliary.reshape(()))

    def _take_auxiliary(self) -> Tensor | None:
        """The sum of what waits, divided by the number of micro-batches."""
        if not self._auxiliary:
            return None
        assert self.declared is not None
        total = torch.stack(self._auxiliary).sum() / len(self.declared)
        self._auxiliary = []
        return total

    # ---- its end ----------------------------------------------------------------------------

    def is_complete(self) -> bool:
        return self.declared is not None and self.seen == len(self.declared)

    def check_complete(self) -> None:
        """Raise unless as many micro-batches were seen as declared, and all losses were used."""
        if not self.is_complete() or self._begun:
            self.check_usable()
        if self.declared is not None and not self.is_complete():
            more = self._scaled - self.seen
            never = f" ({more} more scaled, and never differentiated)" if more > 0 else ""
            raise RuntimeError(
                f"window: {len(self.declared)} micro-batches were declared, {self.seen} were "
                f"seen{never}: the gradients are divided by tokens that never came"
            )
        if self._auxiliary:
            raise RuntimeError(
                f"{len(self._auxiliary)} auxiliary losses were added after the last micro-batch: "
                f"call add_auxiliary before the backward it belongs to"
            )

    def progress(self) -> str:
        if self.declared is None:
            return f"{self.seen} micro-batches since the last finish() are still open"
        return f"{self.seen} of {len(self.declared)} declared micro-batches were seen"

    def refuse(self, action: str) -> None:
        """Raise: ``action`` needs a border between windows."""
        if self.declared is None:
            raise RuntimeError(
                f"cannot {action}: {self.progress()}. Call finish(model.parameters()) for them, "
                f"an epoch's last, shorter window included (or zero_grad and discard_window() to "
                f"drop them)."
            )
        raise RuntimeError(
            f"cannot {action} inside a window: {self.progress()}; leave the `with` block first."
        )


def no_auxiliary() -> RuntimeError:
    return RuntimeError(
        "add_auxiliary was called outside of a window with declared counts, and needs one: use "
        "`with acc.window([count_valid(...) for each micro-batch])`. Streaming corrects "
        "all gradients by one factor in finish(), which would rescale the auxiliary loss."
    )


class Opening:
    """What ``acc.window(...)`` returns: a ``with`` block, and a reminder if it is not one.

    Inside, losses expect the factor that the window will scale them by (``expected``).
    """

    def __init__(
        self,
        owner: Any,
        enter: Callable[[], None],
        leave: Callable[[BaseException | None], None],
        expected: Callable[[], Tensor | None],
    ) -> None:
        self._owner, self._enter, self._leave = owner, enter, leave
        self._expecting = expecting(expected)
        self._was_entered = False

    def __enter__(self) -> Any:
        if self._was_entered:
            raise RuntimeError(
                "this window was entered before: each optimizer step has counts of its own, so "
                "write `with acc.window(counts):` in the loop"
            )
        self._was_entered = True
        self._enter()
        self._expecting.__enter__()
        return self._owner

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._leave(error)
        finally:
            self._expecting.__exit__(None, None, None)
