"""The micro-batches of one optimizer step on this rank: recorded as backward runs, checked at once.

A micro-batch counts when its loss has been differentiated, not when it has been scaled: a loss
that is never differentiated (a checkpoint computes it twice, a pipeline once more to learn shapes)
is not in ``.grad`` either. A backward that began and did not end breaks the window, since ``.grad``
holds a part of it that cannot be removed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.arguments import Losses, divisor_of
from fusedce.accumulate.exchange import KINDS, Pending, explain
from fusedce.accumulate.guard import Guard
from fusedce.accumulate.sums import copied, sums_of
from fusedce.contract.objective import expecting


class Record(NamedTuple):
    """The numbers of a micro-batch that a window keeps, without its graph."""

    losses: Losses
    arrived: Tensor | None = None  # the gradient () that its backward began with
    upstreams: Sequence[float] = ()  # what that gradient may be
    divisors: Sequence[Tensor | None] = ()  # what each loss was divided by before, () or None


class Window:
    """An open window, from its first micro-batch to its end.

    Args:
        weights: the factor of each of the window's losses, by name.
        declared: tokens of each loss of each micro-batch, ``()`` int64; ``None`` when streaming.
        denominator: the message that gives ``(losses,)`` tokens of all ranks, or a constant.
        guard: checks of the gradients.
    """

    def __init__(
        self,
        weights: dict[str, float],
        declared: list[tuple[Tensor, ...]] | None,
        denominator: Pending | float,
        guard: Guard,
    ) -> None:
        self.weights, self.declared = weights, declared
        self.done: list[Record] = []  # differentiated
        self.is_open = True
        self._denominator: Pending | Tensor | float = denominator
        self._guard = guard
        self._auxiliary: list[Tensor] = []  # waiting for the next loss
        self._n_scaled = 0
        self._factors: dict[object, list[Tensor | float]] = {}
        # Backwards that have not ended: id of the backward, number of the micro-batch, its record.
        self._begun: list[tuple[int, int, Record]] = []
        self._thread = threading.get_ident()

    def factors(self, factor: float, of: Tensor | None = None) -> list[Tensor | float]:
        """Factor of each loss: ``factor * weight / denominator``; waits once for the other ranks.

        It is computed once for each ``factor``, on the device and in the dtype of ``of``.

        Raises:
            RuntimeError, TypeError, ValueError: a rank has failed, or settings differ.
        """
        if isinstance(self._denominator, Pending):
            self._denominator = self._denominator.wait()[: len(self.weights)].clamp(min=1)
        key = factor if of is None else (factor, of.device, of.dtype)
        if (found := self._factors.get(key)) is None:
            of_all: Tensor | float = self._denominator
            totals: Any = of_all.unbind() if isinstance(of_all, Tensor) else [of_all]
            weights = self.weights.values()
            found = [factor / n * weight for n, weight in zip(totals, weights, strict=True)]
            if of is not None:
                found = [
                    _faults.moved(x, of.device).to(of.dtype) if isinstance(x, Tensor) else x
                    for x in found
                ]
            self._factors[key] = found
        return found

    def was_refused(self) -> bool:
        """Whether the exchange that opened the window holds an error, which every rank raises."""
        sent = self._denominator
        return isinstance(sent, Pending) and explain(sent.read_rows()) is not None

    # ---- micro-batches ----------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise if the window is broken, full, or another thread's."""
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint recomputes the loss inside a backward, in any thread
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "this window was opened by another thread: a LossAccumulator belongs to one "
                "thread, make one for each"
            )
        if self._begun:
            raise RuntimeError(
                "this window can only be dropped: a backward has raised, and .grad holds a part of "
                "that micro-batch, which cannot be removed. Call zero_grad, and then "
                "discard_window() (streaming), or leave the `with` block by raising"
            )
        if self.declared is not None and len(self.done) >= len(self.declared):
            raise self._too_many()

    def _too_many(self) -> RuntimeError:
        n = len(self.declared or ())
        return RuntimeError(
            f"window: {n} micro-batches were declared, this is number {n + 1}. {_faults.TWICE}"
        )

    def scaled(
        self, losses: Losses, factor: float, ranks: int, upstreams: Sequence[float]
    ) -> Tensor:
        """The loss ``()`` to differentiate; the micro-batch counts once that is done.

        At most ten tensor operations more than ``loss / n`` and its backward.

        Args:
            losses: those of one micro-batch.
            factor: factor of a loss sum without the denominator.
            ranks: number of ranks that the window's tokens come from.
            upstreams: factors that the engine may multiply the loss by before its backward.
        """
        sums = [out.loss_sum for out in losses.values()]
        terms = [x * self.factors(factor, x)[i] for i, x in enumerate(sums)]
        if self._auxiliary:
            assert self.declared is not None
            total = torch.stack(self._auxiliary).sum() / len(self.declared)
            terms.append(total.to(terms[0]) * (factor / ranks))
            self._auxiliary = []
        if torch.is_grad_enabled():  # off in the first of a checkpoint's two passes
            self._guard.note_schedule()
            kept = {name: copied(out) for name, out in losses.items()}
            record = Record(kept, None, upstreams, [divisor_of(x) for x in sums])
            if any(term.requires_grad for term in terms):
                terms.append(self._ticket(terms, record))
            else:
                self.done.append(record)
        return reduce(torch.add, terms)

    def _ticket(self, terms: list[Tensor], record: Record) -> Tensor:
        """A zero whose gradient is what arrives at the loss: the micro-batch counts with it.

        It is a leaf, so a ``torch.autograd.grad`` for other tensors leaves it out, as a pipeline's
        first step that asks for a stage's inputs to learn their shapes.
        """
        ticket = torch.zeros_like(terms[0], requires_grad=True)
        number, self._n_scaled = self._n_scaled, self._n_scaled + 1
        roots = [term.grad_fn for term in terms]

        def begins(ticket: Tensor) -> None:
            arrived, ticket.grad = ticket.grad, None
            if not self.is_open:
                raise RuntimeError(
                    "a loss is differentiated after the window that has scaled it was closed: its "
                    "gradient would be divided by another window's tokens"
                )
            backward = torch._C._current_graph_task_id()
            self._guard.before_backward(roots, backward)
            self._begun.append((backward, number, record._replace(arrived=arrived)))
            Variable._execution_engine.queue_callback(partial(self._ended, backward))

        ticket.register_post_accumulate_grad_hook(begins)
        return ticket

    def _ended(self, backward: int) -> None:
        """Count the losses of a backward that has ended, in the order in which they were scaled."""
        mine = sorted((x for x in self._begun if x[0] == backward), key=lambda x: x[1])
        self._begun = [x for x in self._begun if x[0] != backward]
        self.done += [record for *_, record in mine]
        # DDP and FSDP2 write reduced gradients in callbacks of this backward, too; this one runs
        # after theirs.
        Variable._execution_engine.queue_callback(self._guard.after_backward)

    def add_auxiliary(self, auxiliary: Tensor) -> None:
        """Keep ``auxiliary ()`` for the next loss."""
        self._auxiliary.append(auxiliary.reshape(()))

    # ---- the window's end -------------------------------------------------------------------

    def check_complete(self) -> None:
        """Raise unless all declared micro-batches and auxiliary losses were differentiated."""
        n, begun = len(self.done), self._begun
        if self.declared is None or begun:
            self.check_usable()
            if not n:
                raise RuntimeError("finish: no micro-batch since the last one: nothing to finish")
            return
        if n > len(self.declared):
            raise self._too_many()
        if n < len(self.declared):
            never = f" ({self._n_scaled - n} more scaled, but not differentiated)"
            raise RuntimeError(
                f"window: {len(self.declared)} micro-batches were declared, {n} differentiated"
                f"{never}: the gradients are divided by tokens of missing losses"
            )
        if self._auxiliary:
            raise RuntimeError(
                f"{len(self._auxiliary)} auxiliary losses were added after the last micro-batch: "
                f"call add_auxiliary before the backward it belongs to"
            )

    def sums(self) -> Tensor:
        """The sums of this rank's losses, one after the other, ``(losses * KINDS,)`` float64."""
        if not self.done:
            return torch.zeros(len(self.weights) * len(KINDS), dtype=torch.float64, device="cpu")
        found = [sums_of([m.losses[name] for m in self.done]) for name in self.weights]
        return _faults.together(found).flatten()

    def fault(self) -> Tensor | None:
        """The first error in the tensors of its micro-batches, as a row of :mod:`faults`."""
        if not self.done:
            return None
        counts = _faults.together(x.n_valid for m in self.done for x in m.losses.values())
        at = counts.device
        rows = [_faults.first(_faults.BAD_LABEL, counts < 0, counts), self._means(counts)]
        if self.declared is not None:
            declared = _faults.together(n for row in self.declared for n in row).to(at)
            micro = torch.arange(len(counts), device=at) // len(self.weights)
            columns = (declared != counts, micro, declared, counts)
            rows.append(_faults.first(_faults.OTHER_COUNT, *columns))
        if arrived := [m.arrived for m in self.done if m.arrived is not None]:
            factors = [m.upstreams for m in self.done if m.arrived is not None]
            wrong, factor = self._guard.unexpected(
                _faults.together(arrived).to(at).double(),
                torch.tensor(factors, dtype=torch.float64, device="cpu"),
            )
            rows.append(_faults.first(_faults.MULTIPLIED, wrong, factor.view(torch.int64)))
        rows += self._guard.faults(counts.clamp(min=0).sum())
        return _faults.first_of(rows)

    def _means(self, counts: Tensor) -> Tensor | None:
        """The fault of losses that all were divided by their own ``counts (losses,)``."""
        divisors = [x for m in self.done for x in m.divisors if x is not None]
        if len(divisors) < len(counts):
            return None
        by = _faults.together(x.double() for x in divisors).to(counts.device)
        several = counts > 1
        wrong = several & (((by == counts) | by.isnan()) | ~several).all()
        return _faults.first(_faults.MEAN, wrong, counts)

    def progress(self) -> str:
        """The number of differentiated micro-batches, as a clause for messages."""
        if self.declared is None:
            return f"{len(self.done)} micro-batches since the last finish() are still open"
        n = f"{len(self.done)} of {len(self.declared)}"
        return f"{n} declared micro-batches were differentiated"

    def why_no_step(self) -> str | None:
        """The reason why no optimizer may step now; ``None`` if one may."""
        n, declared = len(self.done), self.declared
        if self._begun:  # an optimizer in a backward hook: right if nothing is added to .grad
            last = declared is not None and n + len(self._begun) == len(declared)
            ready = last and not self._guard.ddp()
            return None if ready else f"a backward is still running, {self.progress()}"
        complete = declared is not None and n == len(declared)
        return self.progress() if n and not complete else None

    def refuse(self, action: str) -> None:
        """Raise ``RuntimeError``: ``action`` is only possible between windows."""
        if self.declared is None:
            raise RuntimeError(
                f"cannot {action}: {self.progress()}. Call finish(model.parameters()) for them, "
                f"an epoch's last, shorter window included (or zero_grad and discard_window() to "
                f"drop them)."
            )
        raise RuntimeError(
            f"cannot {action} inside a window: {self.progress()}; leave the `with` block first."
        )


class WindowBlock:
    """The context manager that ``acc.window(...)`` returns.

    Inside it, fused losses know the factor by which the window will scale them (``expected``).
    """

    def __init__(self, owner: Any, counts: Any, weights: Any) -> None:
        self._owner, self._declared = owner, [(counts, weights)]
        self._expecting = expecting(owner._expected)

    def __enter__(self) -> Any:
        if not self._declared:
            raise RuntimeError(
                "this window was entered before: each optimizer step has counts of its own, so "
                "write `with acc.window(counts):` in the loop"
            )
        self._owner._enter(*self._declared.pop())
        self._expecting.__enter__()
        return self._owner

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._owner._leave(error)
        finally:
            self._expecting.__exit__(None, None, None)
