"""The micro-batches of one optimizer step on this rank: recorded as backward runs, checked at once.

A micro-batch counts when its loss has been differentiated, not when it has been scaled: a loss
that is never differentiated (a checkpoint computes it twice, a pipeline once more to learn shapes)
is not in ``.grad`` either. A backward that began and did not end breaks the window, since ``.grad``
holds a part of it that cannot be removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from fusedce.accumulate import exchange as _exchange
from fusedce.accumulate.arguments import divisor_of
from fusedce.accumulate.exchange import Pending, explain
from fusedce.accumulate.guard import Guard
from fusedce.accumulate.sums import copied, sums_of
from fusedce.contract.objective import expecting
from fusedce.contract.results import MonitoredLossSum


class Record(NamedTuple):
    """The numbers of a micro-batch that a window keeps, without its graph."""

    number: int  # in the order of scale
    out: MonitoredLossSum
    upstreams: Sequence[float]  # factors that may multiply the loss before its backward
    divisor: Tensor | None  # what the loss was divided by before, ()
    arrived: Tensor | None = None  # the gradient () that its backward began with


class Window:
    """An open window, from its first micro-batch to its end."""

    def __init__(
        self,
        declared: list[Tensor] | None,  # tokens of each micro-batch, () int64; None: streaming
        denominator: Pending | float,  # a message whose first sum is all tokens, or a constant
        guard: Guard,
    ) -> None:
        self.declared = declared
        self.done: list[Record] = []  # differentiated
        self.is_open = True
        self._denominator: Pending | Tensor | float = denominator
        self._guard = guard
        self.auxiliary: list[Tensor] = []  # () each, waiting for the next loss
        self._n_scaled = 0
        self._factors: dict[object, Tensor | float] = {}
        self._begun: list[tuple[int, Record]] = []  # ids of backwards that have not ended

    def denominator(self) -> Tensor | float:
        """Tokens of all ranks, at least 1, or the constant; waits once, as :meth:`Pending.wait`."""
        if isinstance(self._denominator, Pending):
            self._denominator = self._denominator.wait()[0].clamp(min=1)
        return self._denominator

    def factor(self, factor: float, of: Tensor | None = None) -> Tensor | float:
        """``factor / denominator``, computed once, on the device and in the dtype of ``of``."""
        key = factor if of is None else (factor, of.device, of.dtype)
        if key not in self._factors:
            found = factor / self.denominator()
            if of is not None and isinstance(found, Tensor):
                found = _exchange.moved(found, of.device).to(of.dtype)
            self._factors[key] = found
        return self._factors[key]

    def was_refused(self) -> bool:
        """Whether the exchange that opened the window holds an error, which every rank raises."""
        sent = self._denominator
        return isinstance(sent, Pending) and explain(sent.read_rows()) is not None

    # ---- micro-batches ----------------------------------------------------------------------

    def check_usable(self, more: int = 1) -> None:
        """Raise if the window is broken, or full with ``more`` micro-batches."""
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint recomputes the loss inside a backward, in any thread
        if self._begun:
            raise RuntimeError(
                "this window can only be dropped: a backward has raised, and .grad holds a part of "
                "that micro-batch, which cannot be removed. Call zero_grad, and then "
                "discard_window() (streaming), or leave the `with` block by raising"
            )
        if self.declared is not None and len(self.done) + more > (n := len(self.declared)):
            raise RuntimeError(
                f"window: {n} micro-batches were declared, this is number {n + 1}. "
                f"{_exchange.TWICE}"
            )

    def scaled(
        self, out: MonitoredLossSum, factor: float, ranks: int, upstreams: Sequence[float]
    ) -> Tensor:
        """The loss ``()`` to differentiate; the micro-batch counts once that is done.

        At most ten tensor operations more than ``loss / n`` and its backward. ``factor``: that of a
        loss sum without the denominator; ``ranks``: how many the window's tokens come from.
        """
        terms = [out.loss_sum * self.factor(factor, out.loss_sum)]
        if self.auxiliary:
            assert self.declared is not None
            total = torch.stack(self.auxiliary).sum() / len(self.declared)
            terms.append(total.to(terms[0]) * (factor / ranks))
            self.auxiliary = []
        if torch.is_grad_enabled():  # off in the first of a checkpoint's two passes
            self._guard.note_schedule()
            record = Record(self._n_scaled, copied(out), upstreams, divisor_of(out.loss_sum))
            self._n_scaled += 1
            if any(term.requires_grad for term in terms):
                terms.append(self._ticket(terms, record))
            else:
                self.done.append(record)
        return reduce(torch.add, terms)

    def _ticket(self, terms: list[Tensor], record: Record) -> Tensor:
        """A zero to add to the loss; its hook sees the loss's gradient and counts the micro-batch.

        It is a leaf, so ``torch.autograd.grad`` for other tensors does not reach it: a pipeline's
        first step calls that for a stage's inputs, to learn their shapes.
        """
        ticket = torch.zeros_like(terms[0], requires_grad=True)
        roots = [term.grad_fn for term in terms]

        def begins(ticket: Tensor) -> None:
            arrived, ticket.grad = ticket.grad, None
            if not self.is_open:
                raise RuntimeError(
                    "a loss is differentiated after the window that has scaled it was closed: its "
                    "gradient would be divided by another window's tokens"
                )
            backward = torch._C._current_graph_task_id()
            self._guard.before_backward(roots, backward, len(self.done))
            self._begun.append((backward, record._replace(arrived=arrived)))
            Variable._execution_engine.queue_callback(partial(self._ended, backward))

        ticket.register_post_accumulate_grad_hook(begins)
        return ticket

    def _ended(self, backward: int) -> None:
        """Count the losses of a backward that has ended, in the order in which they were scaled."""
        mine = [record for of, record in self._begun if of == backward]
        self._begun = [x for x in self._begun if x[0] != backward]
        self.done += sorted(mine, key=lambda record: record.number)
        # DDP and FSDP2 write reduced gradients in callbacks of this backward, too; this one runs
        # after theirs.
        Variable._execution_engine.queue_callback(self._guard.after_backward)

    # ---- the window's end -------------------------------------------------------------------

    def check_complete(self) -> None:
        """Raise unless all declared micro-batches and auxiliary losses were differentiated."""
        self.check_usable(more=0)
        n = len(self.done)
        if self.declared is None and not n:
            raise RuntimeError("finish: no micro-batch since the last one: nothing to finish")
        if self.declared is not None and n < len(self.declared):
            raise RuntimeError(
                f"window: {len(self.declared)} micro-batches were declared, {n} differentiated "
                f"({self._n_scaled - n} more scaled, but not differentiated): the gradients would "
                f"be divided by the tokens of missing losses, too"
            )
        if self.auxiliary:
            raise RuntimeError(
                f"{len(self.auxiliary)} auxiliary losses were added after the last micro-batch: "
                f"call add_auxiliary before the backward it belongs to"
            )

    def sums(self) -> Tensor:
        """The sums ``(KINDS,)`` of this rank's losses, float64."""
        return sums_of([m.out for m in self.done])

    def fault(self) -> Tensor | None:
        """The first fault in the tensors of its micro-batches."""
        if not self.done:
            return None
        counts = _exchange.together(m.out.n_valid for m in self.done)
        at = counts.device
        rows = [_exchange.first(_exchange.BAD_LABEL, counts < 0, counts), self._means(counts)]
        if self.declared is not None:
            declared = _exchange.together(self.declared).to(at)
            micro = torch.arange(len(counts), device=at)
            wrong = declared != counts
            rows.append(_exchange.first(_exchange.OTHER_COUNT, wrong, micro, declared, counts))
        if arrived := [m.arrived for m in self.done if m.arrived is not None]:
            factors = [m.upstreams for m in self.done if m.arrived is not None]
            wrong, factor = self._guard.unexpected(
                _exchange.together(arrived).to(at).double(),
                torch.tensor(factors, dtype=torch.float64, device="cpu"),
            )
            rows.append(_exchange.first(_exchange.MULTIPLIED, wrong, factor.view(torch.int64)))
        rows += self._guard.faults(counts)
        return _exchange.first_of(rows)

    def _means(self, counts: Tensor) -> Tensor | None:
        """The fault of a mean: each loss was divided by its own of ``counts (micro-batches,)``."""
        if all(m.divisor is None for m in self.done):
            return None
        none = counts.new_full((), float("inf"), dtype=torch.float64)
        divisors = (none if m.divisor is None else m.divisor.double() for m in self.done)
        by = torch.stack([_exchange.moved(x, counts.device) for x in divisors])
        several = counts > 1
        wrong = several & (((by == counts) | by.isnan()) | ~several).all()
        return _exchange.first(_exchange.MEAN, wrong, counts)

    def progress(self) -> str:
        """The number of differentiated micro-batches, as a clause for messages."""
        if self.declared is None:
            return f"{len(self.done)} micro-batches since the last finish() are still open"
        n = f"{len(self.done)} of {len(self.declared)}"
        return f"{n} declared micro-batches were differentiated"

    def why_no_step(self) -> str | None:
        """The reason why no optimizer may step now; ``None`` if one may."""
        n = len(self.done) + len(self._begun)
        complete = self.declared is not None and n == len(self.declared)
        if self._begun:  # an optimizer in a backward hook: right if nothing is added to .grad
            ready = complete and not self._guard.ddp()
            return None if ready else f"a backward is still running, {self.progress()}"
        return self.progress() if n and not complete else None


class WindowBlock:
    """The context manager that ``acc.window(...)`` returns.

    Inside it, fused losses know the factor by which the window will scale them (``expected``).
    """

    def __init__(self, owner: Any, counts: Any) -> None:
        self._owner, self._counts = owner, counts

    def __enter__(self) -> Any:
        self._owner._enter(self._counts)
        self._expecting = expecting(self._owner._expected)
        self._expecting.__enter__()
        return self._owner

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._owner._leave(error)
        finally:
            self._expecting.__exit__(None, None, None)
