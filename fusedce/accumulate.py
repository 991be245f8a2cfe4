"""One denominator for an optimizer step, whatever it was split into.

For micro-batches ``m`` and ranks ``r`` that hold distinct tokens, the loss of an optimizer step is

    loss = sum of loss_sum[m, r] / sum of n_valid[m, r]

and not the mean of the micro-batches' means, which weighs a token of a short micro-batch more
than one of a long one (https://github.com/huggingface/transformers/issues/34242,
https://huggingface.co/blog/gradient_accumulation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fusedce import _faults
from fusedce._inplace import scale_
from fusedce._ranks import Ranks


@dataclass
class _Window:
    """The micro-batches of one optimizer step on this rank, so far."""

    denominator: Tensor  # () float64: all valid tokens, or the estimate when streaming
    declared: list[Tensor] | None  # () int64 each; None when streaming
    seen: int = 0
    totals: Tensor | None = None  # (2,) float64: loss_sum, n_valid
    auxiliary: list[Tensor] = field(default_factory=list)  # waiting for the next loss


class LossAccumulator:
    """Divides the losses of an optimizer step by all its valid tokens, and keeps the metrics.

    Two ways to train. With counts known in advance, one all-reduce gives the denominator first::

        with acc.window([fusedce.count_valid(b["labels"]) for b in micro_batches]):
            for b in micro_batches:
                acc.backward(fused_ce(...))

    Streaming, where they become known only at the end::

        for b in micro_batches:
            acc.backward(fused_ce(...))
        acc.finish(model.parameters())          # before gradient clipping

    Each micro-loss is multiplied by ``R * backward_divisor / max(sum of n_valid, 1)``, the sum
    over micro-batches and ranks, with ``R`` the number of ranks where gradients are averaged and
    1 where they are added. Streaming uses an estimate (the previous window's count; in the first
    window, the ranks' first micro-batches) to keep gradients in the range of fp16 and bf16, and
    ``finish`` corrects ``.grad`` once.

    Evaluation: ``acc.add(out)`` for every batch, then ``acc.metrics()``. The result is
    sum / count over all batches and ranks, whatever the batch size.

    Nothing waits for the GPU until ``metrics``, ``state_dict``, or a choice of ``on_empty`` other
    than "zero" must read a number. Errors found on the device (a label out of range, a count that
    differs from the declared one) are raised there at the latest; on a CPU, at once.

    Call ``finish`` before clipping: a clipped gradient cannot be told from another, so the mistake
    cannot be detected.

    Collectives, all on ``process_group``: ``window`` one all-reduce of 3 int64; streaming, the
    very first ``backward`` or ``scale`` one of 1 int64, and ``finish`` one of 3 int64; ``metrics``
    one of 2 float64. None without ``torch.distributed``.

    Args:
        process_group: the ranks that hold distinct tokens: a process group or a one-dimensional
            ``DeviceMesh``. ``None``: all ranks if ``torch.distributed`` is initialised. With
            tensor parallelism pass the data-parallel group: replicas of the same tokens must not
            be counted twice.
        grad_reduction: "mean" where the engine averages gradients over ranks (DDP, FSDP), "sum"
            where it adds them.
        backward_divisor: a constant the engine divides each loss by in its own backward
            (accelerate: its number of accumulation steps).
        on_empty: what a window without any valid token on any rank means. "zero": zero gradients.
            "skip": :attr:`should_step` is False, and ``finish`` sets ``.grad`` to None. "raise":
            ``RuntimeError`` on all ranks. The last two read the count once per window.

    Raises:
        TypeError, ValueError: an argument is not one of those above.

    Example:
        >>> acc = LossAccumulator()
        >>> weight = torch.randn(11, 4, requires_grad=True)
        >>> for _ in range(2):
        ...     labels = torch.randint(11, (3,))
        ...     acc.backward(fusedce.fused_ce(torch.randn(3, 4), weight, labels))
        >>> acc.finish([weight])
        True
        >>> acc.metrics()["n_tokens"]
        6
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        grad_reduction: Literal["mean", "sum"] = "mean",
        backward_divisor: float = 1,
        on_empty: Literal["zero", "skip", "raise"] = "zero",
    ) -> None:
        if grad_reduction not in ("mean", "sum"):
            raise ValueError(f"grad_reduction must be 'mean' or 'sum', got {grad_reduction!r}")
        if on_empty not in ("zero", "skip", "raise"):
            raise ValueError(f"on_empty must be 'zero', 'skip' or 'raise', got {on_empty!r}")
        if isinstance(backward_divisor, bool) or not isinstance(backward_divisor, (int, float)):
            raise TypeError(
                f"backward_divisor must be a number, got {type(backward_divisor).__name__}"
            )
        if not 0 < backward_divisor < math.inf:
            raise ValueError(f"backward_divisor must be positive, got {backward_divisor}")
        self._ranks = Ranks(process_group)
        self._grad_reduction = grad_reduction
        self._backward_divisor = backward_divisor
        self._on_empty = on_empty
        self._window: _Window | None = None
        self._previous_count: Tensor | None = None  # () int64, > 0: the streaming estimate
        self._totals: Tensor | None = None  # (2,) float64: loss_sum, n_valid of this interval
        self._n_windows = 0
        self._faults = _faults.DeviceFaults()
        self._should_step = True

    # ---- training ---------------------------------------------------------------------------

    @contextmanager
    def window(self, counts: Iterable[Tensor | int]) -> Iterator[LossAccumulator]:
        """An optimizer step whose micro-batches' valid tokens are known in advance.

        Args:
            counts: for each micro-batch of this rank, in the order of their ``backward`` calls,
                its number of valid tokens *after* the shift (:func:`count_valid`): ints, or int64
                tensors of one element. All ranks declare the same number of micro-batches; one
                without tokens declares 0.

        Raises:
            RuntimeError: another window is open; ranks declare different numbers of micro-batches;
                at the end, fewer were seen than declared (more, or one with another count, raise
                in their ``backward``); ``on_empty="raise"`` and no rank has a token.
            TypeError, ValueError: counts are not integers, or negative.
        """
        self._refuse_open_window("open another")
        declared = [_as_count(i, count) for i, count in enumerate(counts)]
        local = sum(declared, torch.zeros((), dtype=torch.int64))
        total = self._reduce_counts(local, len(declared))
        self._decide_step(total)
        self._window = window = _Window(total.clamp(min=1).double(), declared)
        try:
            yield self
        except BaseException:
            self._window = None
            raise
        if self._window is not window:
            raise RuntimeError("the window was closed inside its own block")
        self._window = None
        if window.seen != len(declared):
            raise RuntimeError(
                f"window: {len(declared)} micro-batches were declared, {window.seen} were seen: "
                f"the gradients are divided by tokens that never came"
            )
        self._close(window)

    def scale(self, out: tuple[Tensor, Tensor]) -> Tensor:
        """The loss to call ``backward`` on, for loops that do so themselves (GradScaler).

        ``loss_sum * R * backward_divisor / denominator`` plus the auxiliary losses that wait.
        Counts as one micro-batch.

        Args:
            out: what :func:`fused_ce` returned: ``loss_sum ()`` in nats, ``n_valid ()`` in tokens.

        Returns:
            ``()`` tensor of ``loss_sum``'s dtype.

        Raises:
            RuntimeError: more micro-batches than declared, or (at once on a CPU, later on a GPU) a
                count other than the declared one.
            ValueError: a label out of range (CPU tensors raise it earlier, in ``fused_ce``).
        """
        loss_sum, n_valid = _unpack(out)
        self._faults.note(_faults.bad_label, n_valid < 0, n_valid)
        window = self._window
        if window is None:
            window = self._window = _Window(self._estimate(n_valid), None)
        if window.declared is not None:
            if window.seen == len(window.declared):
                raise RuntimeError(
                    f"window: {len(window.declared)} micro-batches were declared, "
                    f"this is number {window.seen + 1}"
                )
            expected = window.declared[window.seen].to(n_valid.device)
            self._faults.note(
                _faults.count_differs, expected != n_valid, window.seen, expected, n_valid
            )
        window.seen += 1
        window.totals = _add(window.totals, loss_sum, n_valid)

        ranks = self._ranks.size()
        factor = self._backward_divisor * (ranks if self._grad_reduction == "mean" else 1)
        scaled = loss_sum * (factor / window.denominator).to(loss_sum.device, loss_sum.dtype)
        if window.auxiliary:
            assert window.declared is not None
            share = self._backward_divisor / len(window.declared)
            share /= 1 if self._grad_reduction == "mean" else ranks
            for auxiliary in window.auxiliary:
                scaled = scaled + share * auxiliary.to(scaled)
            window.auxiliary = []
        return scaled

    def backward(self, out: tuple[Tensor, Tensor]) -> None:
        """``self.scale(out).backward()``. Call it for micro-batches without valid tokens too."""
        self.scale(out).backward()

    def add_auxiliary(self, auxiliary: Tensor) -> None:
        """Add a loss that is a mean by itself (MoE router) to the next micro-batch's ``scale``.

        It is divided by the number of micro-batches and of ranks, never by tokens, and is not part
        of the metrics.

        Args:
            auxiliary: ``()``, floating, with its graph.

        Raises:
            RuntimeError: outside ``window``: streaming corrects all gradients by one factor at the
                end, which fits the token loss and would be wrong for this one.
            TypeError, ValueError: not a floating tensor of one element.
        """
        if not isinstance(auxiliary, Tensor) or not auxiliary.is_floating_point():
            raise TypeError(f"auxiliary must be a floating tensor, got {_describe(auxiliary)}")
        if auxiliary.numel() != 1:
            raise ValueError(f"auxiliary must be a scalar, got shape {tuple(auxiliary.shape)}")
        if self._window is None or self._window.declared is None:
            raise RuntimeError(
                "add_auxiliary needs a window with declared counts: use "
                "`with acc.window([count_valid(...) for each micro-batch])`. Streaming corrects "
                "all gradients by one factor in finish(), which would rescale the auxiliary loss."
            )
        self._window.auxiliary.append(auxiliary.reshape(()))

    def finish(self, parameters: Iterable[Tensor]) -> bool:
        """Close a streaming window: correct every ``.grad`` once, in place, before clipping.

        Args:
            parameters: all parameters that received gradients, e.g. ``model.parameters()``. Shards
                (DTensor) are scaled locally; a parameter given twice is scaled once.

        Returns:
            :attr:`should_step`.

        Raises:
            RuntimeError: no streaming window is open; no parameter has a gradient; ranks saw
                different numbers of micro-batches; ``on_empty="raise"`` and nothing was valid.
        """
        window = self._window
        if window is None:
            raise RuntimeError("finish: no micro-batch since the last window: nothing to finish")
        if window.declared is not None:
            raise RuntimeError(
                "finish is for streaming; a window with declared counts needs no correction"
            )
        if isinstance(parameters, torch.nn.Module):
            raise TypeError("parameters must be an iterable of tensors: pass model.parameters()")
        grads = {id(p): p.grad for p in parameters if p.grad is not None}
        if not grads:
            raise RuntimeError(
                "finish: no parameter given has a .grad to correct (was the generator used up, or "
                "zero_grad called before finish?)"
            )
        assert window.totals is not None
        total = self._reduce_counts(window.totals[1].long(), window.seen)
        self._window = None
        self._decide_step(total)
        correction = (window.denominator.to(total.device) / total.clamp(min=1)).float()
        for grad in grads.values():
            scale_(grad.to_local() if hasattr(grad, "to_local") else grad, correction)
        previous = self._previous_count
        self._previous_count = (
            total.clamp(min=1)
            if previous is None
            else torch.where(total > 0, total, previous.to(total.device))
        )
        self._close(window)
        return self._should_step

    @property
    def should_step(self) -> bool:
        """False after a window without any valid token under ``on_empty="skip"``, else True."""
        return self._should_step

    def discard_window(self) -> None:
        """Forget the micro-batches of an open streaming window; call ``zero_grad`` as well."""
        if self._window is not None and self._window.declared is not None:
            raise RuntimeError("discard_window is for streaming: leave the `with` block instead")
        self._window = None

    # ---- metrics ----------------------------------------------------------------------------

    def add(self, out: tuple[Tensor, Tensor]) -> None:
        """Count a batch in the metrics without training on it (evaluation)."""
        loss_sum, n_valid = _unpack(out)
        self._faults.note(_faults.bad_label, n_valid < 0, n_valid)
        self._totals = _add(self._totals, loss_sum, n_valid)

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        """Metrics of the interval over all ranks; every rank must call it.

        Args:
            reset: start a new interval.

        Returns:
            ``loss``: nats per token, sum of losses / number of tokens (NaN without tokens);
            ``perplexity``: ``exp(loss)``; ``n_tokens``: valid tokens; ``n_windows``: optimizer
            steps.

        Raises:
            RuntimeError: a window is still open (an epoch's last, shorter window must be finished
                too), or a count differed from the declared one.
            ValueError: a label was out of range.
        """
        self._refuse_open_window("read metrics")
        self._faults.raise_first()
        totals = torch.zeros(2, dtype=torch.float64) if self._totals is None else self._totals
        loss_sum, n_tokens = self._ranks.all_reduce(totals).tolist()
        n_windows = self._n_windows
        if reset:
            self._totals, self._n_windows = None, 0
        loss = loss_sum / n_tokens if n_tokens else math.nan
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 709 else math.inf if loss == loss else math.nan,
            "n_tokens": int(n_tokens),
            "n_windows": n_windows,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's totals and streaming estimate, as plain numbers. No collective.

        Raises:
            RuntimeError: a window is open. Its gradients live in ``.grad``, which no checkpoint
                holds: save between optimizer steps.
        """
        self._refuse_open_window("save the state")
        self._faults.raise_first()
        loss_sum, n_valid = (0.0, 0.0) if self._totals is None else self._totals.tolist()
        previous = self._previous_count
        return {
            "loss_sum": loss_sum,
            "n_valid": int(n_valid),
            "n_windows": self._n_windows,
            "previous_count": None if previous is None else int(previous),
            "rank": self._ranks.rank(),
            "ranks": self._ranks.size(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the same bits as without the interruption.

        Raises:
            RuntimeError: a window is open.
            ValueError: keys are missing, or the state is another rank's or of another number of
                ranks: totals are per rank, so each rank loads its own.
        """
        self._refuse_open_window("load a state")
        missing = {"loss_sum", "n_valid", "n_windows", "previous_count", "rank", "ranks"} - set(
            state
        )
        if missing:
            raise ValueError(f"state must come from state_dict(), it lacks {sorted(missing)}")
        here = (self._ranks.rank(), self._ranks.size())
        if (state["rank"], state["ranks"]) != here:
            raise ValueError(
                f"state was saved by rank {state['rank']} of {state['ranks']}, this is rank "
                f"{here[0]} of {here[1]}: totals are per rank. Save and load each rank's own, or "
                f"start a new interval with metrics(reset=True) before saving."
            )
        self._totals = torch.tensor([state["loss_sum"], state["n_valid"]], dtype=torch.float64)
        self._n_windows = state["n_windows"]
        previous = state["previous_count"]
        self._previous_count = None if previous is None else torch.tensor(previous)

    # ---- inside -----------------------------------------------------------------------------

    def _close(self, window: _Window) -> None:
        if window.auxiliary:
            raise RuntimeError(
                f"{len(window.auxiliary)} auxiliary losses were added after the last micro-batch: "
                f"call add_auxiliary before the backward it belongs to"
            )
        if window.totals is not None:
            self._totals = (
                window.totals
                if self._totals is None
                else self._totals.to(window.totals.device) + window.totals
            )
        self._n_windows += 1

    def _estimate(self, n_valid: Tensor) -> Tensor:
        """A streaming denominator all ranks agree on: only the first one costs a collective."""
        if self._previous_count is None:
            return self._ranks.all_reduce(n_valid.clamp(min=0)).clamp(min=1).double()
        return self._previous_count.double()

    def _reduce_counts(self, local: Tensor, micro_batches: int) -> Tensor:
        """Valid tokens of all ranks; notes ranks with different numbers of micro-batches."""
        m = torch.full((), micro_batches, dtype=torch.int64, device=local.device)
        ranks = self._ranks.size()
        total, sum_m, sum_m2 = self._ranks.all_reduce(torch.stack([local, m, m * m])).unbind()
        # The numbers are equal exactly where their variance is zero.
        differ = ranks * sum_m2 != sum_m * sum_m
        self._faults.note(_faults.ranks_differ, differ, micro_batches, sum_m, ranks)
        return total

    def _decide_step(self, total: Tensor) -> None:
        self._should_step = True
        if self._on_empty == "zero" or int(total) > 0:
            return
        if self._on_empty == "raise":
            raise RuntimeError(
                "no valid token in this window on any rank (on_empty='raise'): "
                "every label is ignore_index"
            )
        self._should_step = False

    def _refuse_open_window(self, action: str) -> None:
        window = self._window
        if window is None:
            return
        if window.declared is None:
            raise RuntimeError(
                f"cannot {action}: {window.seen} micro-batches since the last finish() are still "
                f"open. Call finish(model.parameters()) for them, an epoch's last, shorter window "
                f"included (or zero_grad and discard_window() to drop them)."
            )
        raise RuntimeError(
            f"cannot {action} inside a window: {window.seen} of {len(window.declared)} declared "
            f"micro-batches were seen; leave the `with` block first."
        )


def _as_count(i: int, count: Tensor | int) -> Tensor:
    if isinstance(count, Tensor):
        if count.is_floating_point() or count.dtype == torch.bool or count.numel() != 1:
            raise TypeError(f"counts[{i}] must be one integer, got {_describe(count)}")
        count = count.detach().reshape(()).long()
    elif isinstance(count, int) and not isinstance(count, bool):
        count = torch.tensor(count)
    else:
        raise TypeError(f"counts[{i}] must be an int or a tensor, got {_describe(count)}")
    if count.device.type == "cpu" and count < 0:
        raise ValueError(f"counts[{i}] must be >= 0, got {int(count)}")
    return count


def _unpack(out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if (
        not isinstance(out, tuple)
        or len(out) != 2
        or not all(isinstance(x, Tensor) and x.numel() == 1 for x in out)
        or not out[0].is_floating_point()
        or out[1].is_floating_point()
    ):
        raise TypeError(
            f"out must be (loss_sum, n_valid) as fused_ce returns it: a floating and an integer "
            f"scalar tensor, got {_describe(out)}"
        )
    return out[0].reshape(()), out[1].detach().reshape(()).long()


def _add(totals: Tensor | None, loss_sum: Tensor, n_valid: Tensor) -> Tensor:
    new = torch.stack([loss_sum.detach().double(), n_valid.clamp(min=0).double()])
    return new if totals is None else totals.to(new.device) + new


def _describe(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
    if isinstance(x, tuple):
        return "(" + ", ".join(_describe(y) for y in x) + ")"
    return type(x).__name__
