"""The micro-batches of one optimizer step on this rank, checked against the declared counts.

A micro-batch counts when its loss has been differentiated, not when it has been scaled: a loss
that is never differentiated (a checkpoint computes it twice, a pipeline once more to learn shapes)
is not in ``.grad`` either. A backward that began and did not end breaks the window, since ``.grad``
holds a part of it that cannot be removed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.exchange import Pending, explain
from fusedce.accumulate.totals import Sums, add, key, stacked, sums_of
from fusedce.contract.monitors import MonitoredLossSum
from fusedce.contract.objective import expecting

Losses = dict[str, MonitoredLossSum]
"""The losses of a micro-batch by name: ``loss_sum ()`` and ``n_valid ()`` int64, and monitors."""


class Window:
    """An open window: its denominators are declared counts of all ranks, or an estimate.

    Args:
        weights: the factor of each of the window's losses, by name.
        declared: tokens of each micro-batch, ``(losses,)`` int64 each; ``None`` when streaming.
        denominators: ``(losses,)`` float64, tokens of all ranks.
        faults: stores errors found in its losses.

    Attributes:
        sums: sums of the micro-batches that were differentiated.
        n_done: their number.
        is_open: False once the window has ended.
        on_begin, on_end: called when a backward begins and ends.
    """

    def __init__(
        self,
        weights: dict[str, float],
        declared: list[Tensor] | None,
        denominators: Tensor | Pending,
        faults: _faults.Faults,
    ) -> None:
        self.weights = weights
        self.declared = declared
        self.faults = faults
        self.sums: Sums = {}
        self.n_done = 0
        self._auxiliary: list[Tensor] = []  # waiting for the next loss
        self.is_open = True
        self._denominators = denominators
        self._n_scaled = 0
        # Backwards that have not ended: id of the backward, number of the micro-batch, its losses.
        self._begun: list[tuple[int, int, Losses]] = []
        self._thread = threading.get_ident()
        self.on_begin: Callable[[list[Any], Tensor, Sequence[float]], None] | None = None
        self.on_end: Callable[[], None] | None = None

    def denominators(self) -> Tensor:
        """``(losses,)`` float64, at least 1; waits for the other ranks when first asked for.

        Raises:
            RuntimeError, TypeError, ValueError: a rank has failed, or settings differ.
        """
        if isinstance(self._denominators, Pending):
            self._denominators = self._denominators.wait().clamp(min=1)
        return self._denominators

    def was_refused(self) -> bool:
        """Whether the exchange that opened the window holds an error, which every rank raises."""
        sent = self._denominators
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
        if self.declared is not None and self.is_complete():
            raise _faults.too_many(len(self.declared))

    def factors(self, factor: float) -> list[Tensor]:
        """Factor of each loss, ``()`` float64: ``factor * weight / denominator``."""
        shares = factor / self.denominators()
        return [x * weight for x, weight in zip(shares, self.weights.values(), strict=True)]

    def scaled(
        self, losses: Losses, factor: float, ranks: int, upstream: Sequence[float]
    ) -> Tensor:
        """The loss ``()`` to differentiate; the micro-batch counts once that is done.

        Args:
            losses: those of one micro-batch.
            factor: factor of a loss sum without the denominator.
            ranks: number of ranks that the window's tokens come from.
            upstream: factors that the engine may multiply the loss by before its backward.
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

        A loss without a graph counts at once, since it has no gradient; but not while gradients are
        off, as in the first of a checkpoint's two passes.
        """
        if not scaled.requires_grad:
            if torch.is_grad_enabled():
                self._count(losses)
            return
        number, self._n_scaled = self._n_scaled, self._n_scaled + 1
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
        """Count the losses of a backward that has ended, in the order in which they were scaled."""
        mine = [begun for begun in self._begun if begun[0] == backward]
        for _, _, losses in sorted(mine, key=lambda begun: begun[1]):
            self._count(losses)
        self._begun = [begun for begun in self._begun if begun[0] != backward]
        if self.on_end is not None:
            # DDP and FSDP2 write reduced gradients in callbacks of this backward, too; this one
            # runs after theirs.
            Variable._execution_engine.queue_callback(self.on_end)

    def _count(self, losses: Losses) -> None:
        """Add a micro-batch that was differentiated, and compare its counts with those declared."""
        counts = torch.stack([n for _, n in losses.values()])
        if self.declared is not None:
            if self.n_done < len(self.declared):
                expected = _faults.moved(self.declared[self.n_done], counts.device)
                for declared, n in zip(expected, counts, strict=True):
                    self.faults.note(_faults.count_differs, declared != n, self.n_done, declared, n)
            else:
                everywhere = torch.ones((), dtype=torch.bool, device=counts.device)
                self.faults.note(_faults.too_many, everywhere, len(self.declared))
        self.n_done += 1
        for name, out in losses.items():
            self.sums = add(self.sums, sums_of(name, out))

    def n_tokens(self) -> Tensor:
        """Valid tokens of the micro-batches that were differentiated, ``()`` float64."""
        return stacked(self.sums, [key(loss, "n_valid") for loss in self.weights]).sum()

    def is_in_backward(self) -> bool:
        """Whether a backward has begun and not ended."""
        return bool(self._begun)

    def is_last(self) -> bool:
        """Whether the backward that runs now is that of the window's last micro-batch."""
        return self.declared is not None and self.n_done + len(self._begun) == len(self.declared)

    def add_auxiliary(self, auxiliary: Tensor) -> None:
        """Keep ``auxiliary ()`` for the next loss."""
        self._auxiliary.append(auxiliary.reshape(()))

    def _take_auxiliary(self) -> Tensor | None:
        """The sum of the auxiliary losses that wait, divided by the number of micro-batches."""
        if not self._auxiliary:
            return None
        assert self.declared is not None
        total = torch.stack(self._auxiliary).sum() / len(self.declared)
        self._auxiliary = []
        return total

    # ---- the window's end -------------------------------------------------------------------

    def is_complete(self) -> bool:
        """Whether all declared micro-batches were differentiated."""
        return self.declared is not None and self.n_done == len(self.declared)

    def check_complete(self) -> None:
        """Raise unless all declared micro-batches and auxiliary losses were differentiated."""
        if not self.is_complete() or self._begun:
            self.check_usable()
        if self.declared is not None and not self.is_complete():
            more = self._n_scaled - self.n_done
            never = f" ({more} more scaled, but not differentiated)" if more > 0 else ""
            raise RuntimeError(
                f"window: {len(self.declared)} micro-batches were declared, {self.n_done} "
                f"differentiated{never}: the gradients are divided by tokens of missing losses"
            )
        if self._auxiliary:
            raise RuntimeError(
                f"{len(self._auxiliary)} auxiliary losses were added after the last micro-batch: "
                f"call add_auxiliary before the backward it belongs to"
            )

    def progress(self) -> str:
        """The number of differentiated micro-batches, as a clause for messages."""
        if self.declared is None:
            return f"{self.n_done} micro-batches since the last finish() are still open"
        return f"{self.n_done} of {len(self.declared)} declared micro-batches were differentiated"

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


# ---- the leaves of a loss's graph ----------------------------------------------------------


def trains(roots: list[Any]) -> bool:
    """Whether the backward that runs now is for parameters below ``roots``.

    A pipeline's first step asks ``torch.autograd.grad`` for gradients of a stage's inputs alone, to
    learn their shapes. This is no training although there is a loss. The answer is

    - True in a graph without any ``nn.Parameter``;
    - True in ``backward()`` that reaches an ``nn.Parameter``;
    - True in ``torch.autograd.grad`` for an ``nn.Parameter``, if the graph has no other leaves;
    - else False: no parameter is reached, or ``torch.autograd.grad`` runs in a graph with other
      leaves, as a stage's inputs are.
    """
    parameters = others = grad_of_parameter = False
    for variable, node in _leaves(roots):
        if not isinstance(variable, torch.nn.Parameter):
            others = True
            continue
        parameters = True
        try:
            if torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # torch raises for the leaves that torch.autograd.grad was asked for
            grad_of_parameter = True
    if not parameters:
        return True
    return grad_of_parameter and not others


def leaves_of(roots: list[Any]) -> list[Tensor]:
    """The tensors whose ``.grad`` a backward through ``roots`` adds to."""
    return [variable for variable, _ in _leaves(roots)]


def _leaves(roots: list[Any]) -> Iterator[tuple[Tensor, Any]]:
    """The leaves of a graph and their nodes, those near the loss first."""
    level, visited = [node for node in roots if node is not None], set()
    while level:
        following = []
        for node in level:
            if node in visited:
                continue
            visited.add(node)
            if hasattr(node, "variable"):
                yield node.variable, node
            following += [x for x, _ in node.next_functions if x is not None]
        level = following
