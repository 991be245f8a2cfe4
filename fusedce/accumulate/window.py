"""The micro-batches of one optimizer step on this rank: recorded as backward runs, checked at once.

A micro-batch counts when its loss has been differentiated, not when it has been scaled: a loss
that is never differentiated (a checkpoint computes it twice, a pipeline once more to learn shapes)
is not in ``.grad`` either. A backward that began and did not end breaks the window, since ``.grad``
holds a part of it that cannot be removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract.results import MonitoredLossSum
from .engines import (
    Engine,
    backward_keeps_graph,
    backward_reaches,
    current_backward,
    when_backward_ends,
)
from .exchange import SUMS, Pending, explain, read
from .sums import copied, counts_of, sums_of
from .watch import Watch


class Record(NamedTuple):
    """The numbers of a micro-batch that a window keeps, without its graph."""

    number: int  # in the order of scale
    outs: list[MonitoredLossSum]  # one for each loss
    expected_factors: Sequence[float]  # that may multiply the loss before its backward
    is_recomputed: bool  # made inside a backward, by a checkpoint
    upstream_grad: Tensor | None = None  # () with which its backward began


class Window:
    """An open window, from its first micro-batch to its end."""

    def __init__(
        self,
        declared: list[list[int]] | None,  # tokens, [loss][micro-batch]; None: streaming
        denominator: Pending | list[float],  # a message with all ranks' tokens, or constants
        weights: Mapping[str, float],  # of the losses, by name
        watch: Watch,
        engine: Engine,
    ) -> None:
        self.declared = declared
        self.n_declared = None if declared is None else len(declared[0])
        self.done: list[Record] = []  # differentiated
        self.is_open = True
        self.auxiliary: list[Tensor] = []  # () each, waiting for the next loss
        self.has_graphless_auxiliary = False  # of the first pass of a reentrant checkpoint
        self._denominator = denominator
        self._weights, self._watch, self._engine = weights, watch, engine
        self._loss_scale: Tensor | None = None  # the scaler's (), as the first backward began
        self._n_scaled = 0
        self._waiting: set[int] = set()  # numbers of losses that are not differentiated yet
        self._running: list[tuple[int, Record]] = []  # losses whose backward has not ended, by id
        # A leaf of every loss. Only a backward that adds to all leaves reaches it.
        self._leaf = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)

    def denominators(self) -> list[float]:
        """Tokens of all ranks for each loss, at least 1, or the constants; waits once."""
        found = self._denominator
        if isinstance(found, Pending):
            tokens = found.wait()[1 :: len(SUMS)]
            self._denominator = found = [max(n, 1) for n in tokens[: len(self._weights)]]
        return found

    def was_refused(self) -> bool:
        """Whether the exchange that opened the window holds an error, which every rank raises."""
        sent = self._denominator
        return isinstance(sent, Pending) and explain(sent.read_rows()) is not None

    # ---- micro-batches ----------------------------------------------------------------------

    def check_usable(self, more: int = 1) -> None:
        """Raise if the window is broken, or full with ``more`` micro-batches."""
        if current_backward() != -1:
            return  # a checkpoint recomputes the loss inside a backward, in any thread
        if self._running:
            raise RuntimeError(
                "this window can only be dropped: a backward has raised, and .grad holds a part of "
                "that micro-batch, which cannot be removed. Call zero_grad, and then "
                "discard_window() (streaming), or leave the `with` block by raising"
            )
        n = self.n_declared
        if n is not None and len(self.done) + more > n:
            raise RuntimeError(f"window: {n} micro-batches were declared, this is number {n + 1}")

    def scaled(self, outs: list[MonitoredLossSum], factor: float, ranks: int) -> Tensor:
        """The loss ``()`` to differentiate; the micro-batch counts once that is done.

        At most ten tensor operations more than ``loss / n`` and its backward. ``factor``: that of a
        loss sum without the denominator; ``ranks``: how many the window's tokens come from.
        """
        of_losses = zip(outs, self._weights.values(), self.denominators(), strict=True)
        first, *others = [out.loss_sum * (w * factor / n) for out, w, n in of_losses]
        loss = sum(others, first)
        if self.auxiliary:
            assert self.n_declared, "add_auxiliary is for declared counts"
            total = torch.stack(self.auxiliary).sum() / self.n_declared
            loss = loss + total.to(loss) * (factor / ranks)
            self.auxiliary = []
        if not torch.is_grad_enabled():  # the first of a checkpoint's two passes
            return loss
        is_recomputed = current_backward() != -1
        record = Record(
            self._n_scaled,
            [copied(out) for out in outs],
            self._engine.expected_loss_factors(),
            is_recomputed,
        )
        self._n_scaled += 1
        if not loss.requires_grad:
            self.done.append(record)
            return loss
        # A checkpoint makes the loss again inside the backward of the first one. A pipeline's
        # schedule scales one more to learn shapes, and may or may not differentiate it.
        if not (is_recomputed or self._watch.in_pipeline):
            self._waiting.add(record.number)
        return Ticket.apply(loss, self._leaf, self, record)

    def begins(self, record: Record, upstream_grad: Tensor) -> None:
        """The backward of a loss begins: count it once, when that backward has ended."""
        if not self.is_open:
            raise RuntimeError(
                "a loss is differentiated after the window that has scaled it was closed: its "
                "gradient would be divided by another window's tokens"
            )
        if not self._adds_gradients():
            return
        backward, scaler = current_backward(), self._engine.grad_scaler
        if scaler is not None and self._loss_scale is None:
            # Now, since `update` may come inside the block; by a tensor, since `get_scale` waits.
            self._loss_scale = scaler.scale(torch.ones_like(upstream_grad))
        if self.declared is None:
            self._watch.begin()
        if all(of != backward for of, _ in self._running):
            when_backward_ends(partial(self._count, backward))
        self._running.append((backward, record._replace(upstream_grad=upstream_grad.detach())))

    def _adds_gradients(self) -> bool:
        """Whether the running backward is a micro-batch's: ``torch.autograd.grad`` is none.

        A pipeline's schedule learns shapes by it, and frees the graph; for a micro-batch it keeps
        the graph, from which the weights' gradients come later.
        """
        if backward_reaches(self._leaf):
            return True
        if self._watch.in_pipeline:
            return backward_keeps_graph()
        # backward(inputs=...) adds to these alone. Without a watch gradients may be added by hand.
        return not self._watch.watches or any(map(backward_reaches, self._watch.parameters()))

    def _count(self, backward: int) -> None:
        """Count the losses of a backward: when it has ended, since it may raise in the middle."""
        ended = [record for of, record in self._running if of == backward]
        self._running = [x for x in self._running if x[0] != backward]
        if self.declared is None:
            # (An outer backward goes on after that of a reentrant checkpoint.)
            self._watch.after_backward(is_nested=any(x.is_recomputed for x in ended))
        counted = {record.number for record in self.done}
        for record in ended:
            self._waiting.discard(record.number)
            if record.number not in counted:  # else the other half of its parameters
                self.done.append(record)

    # ---- the window's end -------------------------------------------------------------------

    def check_complete(self) -> None:
        """Raise unless all declared micro-batches and auxiliary losses were differentiated."""
        self.check_usable(more=0)
        n = len(self.done)
        if self._waiting and (self.declared is None or n == self.n_declared):
            raise RuntimeError(
                f"{len(self._waiting)} of {self._n_scaled} losses were passed to scale(), and no "
                f"backward has added their gradients to .grad (torch.autograd.grad adds none): "
                f"differentiate each loss that you scale. watch=False allows to add gradients by "
                f"hand"
            )
        if self.declared is None and not n:
            raise RuntimeError("finish: no micro-batch since the last one: nothing to finish")
        if self.n_declared is not None and n < self.n_declared:
            raise RuntimeError(
                f"window: {self.n_declared} micro-batches were declared, {n} differentiated "
                f"({len(self._waiting)} more scaled, and no backward has added their gradients to "
                f".grad): the gradients would be divided by the tokens of missing losses, too"
            )
        if self.auxiliary:
            raise RuntimeError(
                f"{len(self.auxiliary)} auxiliary losses were added after the last micro-batch: "
                f"call add_auxiliary before the backward it belongs to"
            )

    def sums(self) -> list[float]:
        """The sums of this rank's micro-batches, those of each loss after the other.

        Waits for their device. Raises an error for what their numbers show.
        """
        self.done.sort(key=lambda m: m.number)  # some schedules differentiate the last one first
        found: list[float] = []
        for i, name in enumerate(self._weights):
            outs = [m.outs[i] for m in self.done]
            counts = counts_of(outs)
            self._check_counts(i, f" of {name!r}" if name else "", counts)
            found += sums_of(outs, counts)
        self._check_factors()
        return found

    def _check_counts(self, i: int, of: str, counts: Sequence[int]) -> None:
        """Raise unless the losses have the tokens that were declared."""
        declared = counts if self.declared is None else self.declared[i]
        for at, (said, n) in enumerate(zip(declared, counts, strict=True)):
            if said != n:
                raise RuntimeError(
                    f"window: micro-batch {at}{of} was declared with {said} valid tokens, its loss "
                    f"counts {n}. Does the loss get labels without shift_labels(labels), which "
                    f"drops the first of every sequence? Were they counted before the shift, or "
                    f"with another ignore_index? Counts belong to losses in the order of scale"
                )

    def _check_factors(self) -> None:
        """Raise unless each gradient came times the engine's factor, and the loss scale."""
        with_gradient = [(m, g) for m in self.done if (g := m.upstream_grad) is not None]
        values = read(g.double() for _, g in with_gradient)
        scale = 1.0 if self._loss_scale is None else float(self._loss_scale)
        of_all: set[int] | None = None  # indices of `expected_factors` that fit every loss
        for x, (record, _) in zip(values, with_gradient, strict=True):
            factors = [x / f for f in record.expected_factors]
            if any(map(math.isnan, factors)):  # as the gradients are: a GradScaler skips the step
                continue
            found = {i for i, f in enumerate(factors) if _near(f, scale)}
            of_all = found if of_all is None else of_all & found
            if not of_all:
                odd = ", other losses of this window by another" if found else ""
                if scale != 1 and any(_near(f, 1.0) for f in factors):
                    raise RuntimeError(
                        f"the loss was multiplied by 1 after scale(), and the GradScaler of "
                        f"grad_scaler= multiplies by {scale:g}: pass it through the scaler's scale "
                        f"before backward, or call acc.backward(out)"
                    )
                raise RuntimeError(
                    f"the loss was multiplied by {factors[0]:g} after scale(){odd}: the window has "
                    f"divided it by all of its tokens already, so leave other divisions out (by "
                    f"the number of micro-batches, of ranks). A GradScaler is named by "
                    f"grad_scaler=, a constant that the engine divides by by backward_divisor= "
                    f"(accelerate: LossAccumulator.from_accelerator)"
                )

    def progress(self) -> str:
        """The number of differentiated micro-batches, as a clause for messages."""
        if self.n_declared is None:
            return f"{len(self.done)} micro-batches since the last finish() are still open"
        n = f"{len(self.done)} of {self.n_declared}"
        return f"{n} declared micro-batches were differentiated"

    def why_no_step(self) -> str | None:
        """The reason why no optimizer may step now; ``None`` if one may."""
        n = len(self.done) + len(self._running)
        if self._running:  # an optimizer in a backward hook: right if nothing is added to .grad
            running = f"a backward is still running, {self.progress()}"
            return None if n == self.n_declared else running
        return self.progress() if n and n != self.n_declared else None


class Ticket(torch.autograd.Function):
    """A loss ``()`` as it is; its backward tells the window, whoever calls it and for what."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, leaf: Tensor, window: Window, record: Record) -> Tensor:
        ctx.window, ctx.record = window, record
        return loss.clone()  # (torch would return an input as a view of it)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.window.begins(ctx.record, grads[0])
        return grads[0], None, None, None


def _near(x: float, y: float) -> bool:
    return x == y or abs(x - y) <= 1e-4 * abs(y)  # 1/3 in float32 is not 1/3


class WindowBlock:
    """The context manager that ``acc.window(...)`` returns."""

    def __init__(self, owner: Any, counts: list[Any]) -> None:
        self._owner, self._counts = owner, counts

    def __enter__(self) -> Any:
        self._owner._enter(self._counts)
        return self._owner

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._owner._leave(error)
