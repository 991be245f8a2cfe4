"""One denominator for an optimizer step, however it was split into micro-batches and ranks.

For micro-batches ``m`` and ranks ``r`` that hold distinct tokens, the loss of an optimizer step is

    loss = sum of loss_sum[m, r] / sum of n_valid[m, r]

and not the mean of the micro-batches' means, which weighs a token of a short micro-batch more
than one of a long one (https://github.com/huggingface/transformers/issues/34242,
https://huggingface.co/blog/gradient_accumulation).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fusedce.accumulate.checks import (
    OnEmpty,
    check_auxiliary,
    check_settings,
    check_whole,
    describe,
    unpack,
)
from fusedce.accumulate.engines import Engine, from_accelerator, from_mesh
from fusedce.accumulate.exchange import Exchange
from fusedce.accumulate.lifecycle import Lifecycle, Metrics
from fusedce.accumulate.totals import UNNAMED
from fusedce.accumulate.window import WindowBlock
from fusedce.contract.checks import check_flag
from fusedce.contract.groups import Ranks

Loss = tuple[Tensor, Tensor]  # loss_sum () in nats, n_valid () in tokens


class LossAccumulator:
    """Divides the losses of an optimizer step by all its valid tokens, and keeps the metrics.

    There are two ways to train. With counts known in advance, one exchange gives the denominator
    first::

        with acc.window([fusedce.count_valid(b["labels"]) for b in micro_batches]):
            for b in micro_batches:
                acc.backward(fused_ce(...))

    Streaming is for counts that become known only at the end::

        for b in micro_batches:
            acc.backward(fused_ce(...))
        acc.finish(model.parameters())          # before gradient clipping

    Each micro-loss is multiplied by ``R * backward_divisor / max(sum of n_valid, 1)``, the sum
    over micro-batches and ranks, with ``R`` the number of ranks where gradients are averaged and
    1 where they are added. Streaming uses an estimate (the previous window's count; in the first
    window 1024 tokens per rank) to keep gradients in the range of fp16 and bf16, and
    ``finish`` corrects ``.grad`` once. Calling it after clipping is wrong, and cannot be detected.
    :meth:`guard` catches other mistakes.

    To evaluate, call ``acc.add(out)`` for every batch and then ``acc.metrics()``, which gives
    sum / count over all batches and ranks, independent of the batch size.

    Nothing waits for a GPU until ``metrics``, ``state_dict``, or a choice of ``on_empty`` other
    than "zero" must read a number. Errors found on the device (a label out of range, a count that
    differs from the declared one) are raised there at the latest. A single process on a CPU raises
    them at once; several ranks raise them at the window's end, before an optimizer steps, and all
    of them raise the same error.

    Collectives: each is an all-gather of 218 int64 from each rank on ``process_group`` (under gloo,
    on a new group of the same ranks, made when the first window opens or ends):

    * streaming: one per window, in ``finish``;
    * declared counts: one when the window opens, which gives the denominator and is awaited at its
      first ``scale``, and one when it ends, which carries losses and errors. One alone cannot do
      both: the first backward needs the counts of all ranks, and before the optimizer steps each
      rank must learn whether another one has failed in its last backward;
    * ``metrics``: one if batches were ``add``-ed, none after training windows.

    There are none in a single process and none per micro-batch. A rank that waits for one that
    does not come raises an error after the process group's timeout, with advice. Under
    ``TORCH_DISTRIBUTED_DEBUG=INFO`` each ``scale`` first reads from the store of
    ``torch.distributed`` whether another rank has ended the window.

    One accumulator belongs to one thread.

    Args:
        process_group: the ranks that hold distinct tokens: a process group or a one-dimensional
            ``DeviceMesh`` (:meth:`from_mesh` for more dimensions). ``None``: all ranks if
            ``torch.distributed`` is initialised. Replicas of the same tokens (tensor parallel)
            must not be counted twice; slices of one sequence (context parallel) must all count.
        grad_reduction: "mean" where the engine averages gradients over exactly these ranks (DDP,
            FSDP), "sum" where it adds them. An engine that averages over other ranks needs "sum"
            and its divisor as ``backward_divisor``.
        backward_divisor: a constant the engine divides each loss or gradient by on its own.
        on_empty: the result of a window without a valid token on any rank. "zero": zero gradients.
            "skip": :attr:`should_step` is False, and ``finish`` sets ``.grad`` to None. "raise":
            ``RuntimeError`` on all ranks. The last two read the count once per window.

    Raises:
        TypeError, ValueError: an argument is none of these.

    Examples:
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
        on_empty: OnEmpty = "zero",
    ) -> None:
        check_settings(grad_reduction, on_empty)
        ranks, engine = Ranks(process_group), Engine(backward_divisor)
        self._lifecycle = Lifecycle(ranks, Exchange(ranks), engine, grad_reduction, on_empty)
        self._metrics = Metrics(self._lifecycle)

    from_mesh: classmethod[LossAccumulator, ..., LossAccumulator] = classmethod(from_mesh)
    from_accelerator: classmethod[LossAccumulator, ..., LossAccumulator] = classmethod(
        from_accelerator
    )

    # ---- training ---------------------------------------------------------------------------

    def window(
        self,
        counts: Iterable[Tensor | int] | Mapping[str, Iterable[Tensor | int]] = (),
        *,
        weights: Mapping[str, float] | None = None,
    ) -> WindowBlock:
        """``with acc.window(counts):`` an optimizer step whose valid tokens are known in advance.

        Several losses over shared parameters (heads for several tokens ahead), each divided by its
        own tokens: a dict of counts. Each micro-batch is then a dict of losses, and
        ``sum of weights[k] * loss_k`` is what is trained::

            with acc.window({"next": counts, "second": others}, weights={"second": 0.3}):
                acc.backward({"next": fused_ce(...), "second": fused_ce(...)})

        Args:
            counts: for each micro-batch of this rank, in the order of their ``backward`` calls,
                its number of valid tokens *after* the shift (:func:`count_valid`): integers, or
                int64 tensors of one element. All ranks declare the same number of micro-batches;
                one without tokens declares 0.
            weights: factors of losses by name; a loss that is left out has the factor 1.

        Raises (on entering, or at the first ``scale`` for errors of other ranks):
            RuntimeError: another window is open; ranks declare different numbers of micro-batches;
                at the end, fewer were differentiated than declared, or with other counts;
                ``on_empty="raise"`` and no rank has a token.
            TypeError, ValueError: counts are not integers, or negative; weights are not numbers.
        """
        lifecycle = self._lifecycle
        lifecycle.announced = opening = WindowBlock(
            self, lambda: lifecycle.enter(counts, weights), lifecycle.leave, self._expected
        )
        return opening

    def scale(self, out: Loss | Mapping[str, Loss]) -> Tensor:
        """The loss to call ``backward`` on, for loops that do so themselves (GradScaler).

        ``loss_sum * R * backward_divisor / denominator`` plus the auxiliary losses that wait.
        Counts as one micro-batch once it is differentiated.

        Args:
            out: what :func:`fused_ce` returned: ``loss_sum ()`` in nats, ``n_valid ()`` in tokens;
                in a window of several losses a dict of them.

        Returns:
            ``()`` tensor of ``loss_sum``'s dtype. Another factor that arrives in its backward than
            the engine's own, or a GradScaler's, is an error where the ranks meet next.

        Raises:
            RuntimeError: streaming under an engine that steps on its own (DeepSpeed); more
                micro-batches than declared; a window that was not entered; one in which a backward
                has raised.
            TypeError, ValueError: not a loss, or one in a dtype that cannot hold a sum; a
                :class:`LossSum` that was multiplied or divided by a number; a label out of range
                (CPU tensors raise it earlier, in ``fused_ce``).
        """
        lifecycle = self._lifecycle
        lifecycle.check_entered()
        losses = unpack(out, [UNNAMED] if lifecycle.window is None else lifecycle.window.weights)
        check_whole(losses)
        window = lifecycle.window or lifecycle.start_streaming()
        window.check_usable()
        lifecycle.exchange.before_micro_batch(
            window.n_done, window.declared is None, lifecycle.equal()
        )
        ranks, upstream = lifecycle.tokens.size(), lifecycle.engine.upstreams()
        return window.scaled(losses, self._factor(), ranks, upstream)

    def _factor(self) -> float:
        """Factor of this rank's loss sum without the denominator: ``R * backward_divisor``."""
        lifecycle = self._lifecycle
        ranks = lifecycle.tokens.size() if lifecycle.grad_reduction == "mean" else 1
        return lifecycle.engine.divisor() * ranks

    def _expected(self) -> Tensor | None:
        """Upstream gradient that a loss of the open window will receive; ``None`` if unknown.

        A window of several losses has several factors, hence ``None``. This waits for the other
        ranks' counts; an error among them is left for :meth:`scale` to raise.
        """
        window = self._lifecycle.window
        if window is None or len(window.weights) > 1:
            return None
        try:
            return window.factors(self._factor())[0] * self._lifecycle.engine.upstreams()[0]
        except (RuntimeError, TypeError, ValueError):
            return None

    def backward(self, out: Loss | Mapping[str, Loss]) -> None:
        """``self.scale(out).backward()``. Call it for micro-batches without valid tokens too.

        After :meth:`from_accelerator`, ``accelerator.backward(self.scale(out))``. If that raises
        (out of memory), ``.grad`` holds a part of this micro-batch that cannot be removed: to go
        on, leave the ``with`` block, or call :meth:`discard_window`.

        Raises:
            RuntimeError: nothing that the loss depends on requires grad.
            TypeError, ValueError, RuntimeError: as :meth:`scale`.
        """
        scaled = self.scale(out)
        if not scaled.requires_grad:
            raise RuntimeError(
                "out must require grad, got a loss without a graph: hidden, weight and bias are "
                "frozen, or it was computed under torch.no_grad(). Training needs one of them with "
                "requires_grad=True; evaluation is acc.add(out)"
            )
        try:
            self._lifecycle.engine.backward(scaled)
        except RuntimeError as error:
            if self._lifecycle.window is None or self._lifecycle.window.declared is None:
                self._lifecycle.exchange.note_wait(error)  # else where the block is left
            raise

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
        check_auxiliary(auxiliary)
        window = self._lifecycle.window
        if window is None or window.declared is None:
            raise RuntimeError(
                "add_auxiliary was called outside of a window with declared counts, and needs one: "
                "use `with acc.window([count_valid(...) for each micro-batch])`. Streaming "
                "corrects all gradients by one factor in finish(), which would rescale the "
                "auxiliary loss."
            )
        window.add_auxiliary(auxiliary)

    def finish(self, parameters: Iterable[Tensor]) -> bool:
        """Close a streaming window: correct every ``.grad`` once, in place, before clipping.

        Args:
            parameters: all parameters that received gradients, e.g. ``model.parameters()``. Shards
                (DTensor) are scaled locally; a parameter given twice is scaled once.

        Returns:
            :attr:`should_step`.

        Raises:
            TypeError: ``parameters`` is no iterable of tensors.
            RuntimeError: no micro-batch since the last window; a backward has raised; no parameter
                has a gradient, or one that :meth:`guard` knows was not given; another accumulator
                streams over the same gradients; ranks had different numbers of micro-batches;
                ``on_empty="raise"`` and nothing was valid.
        """
        return self._lifecycle.finish(parameters)

    @property
    def should_step(self) -> bool:
        """False after a window without any valid token under ``on_empty="skip"``, else True."""
        return self._lifecycle.should_step

    def discard_window(self, module: torch.nn.Module | None = None) -> None:
        """Forget the micro-batches of an open streaming window; call ``zero_grad`` as well.

        Args:
            module: forget its gradients too, so that no ``zero_grad`` is needed. FSDP2 after
                ``set_requires_gradient_sync(False)`` holds gradients inside, where ``zero_grad``
                does not reach them: it needs this, also after a ``with`` block that was left by
                an error.

        Raises:
            TypeError: ``module`` is no module.
            RuntimeError: inside ``with acc.window(...)``: leave the block instead.
        """
        self._lifecycle.discard(module)

    def guard(self, optimizer: Any, module: torch.nn.Module | None = None) -> None:
        """Raise an error where a loop would spoil a window's gradients.

        These are errors from then on: an optimizer step inside an open window, or inside the
        backward of a streaming one; ``zero_grad`` inside a window, before the step; a gradient that
        ``finish`` was not given; gradients that DDP has not reduced (``module`` must be DDP, or
        hold it).

        Without a guard, a step before the window's end gives one warning: the optimizer may belong
        to another model.

        Args:
            optimizer: a ``torch.optim.Optimizer``, accelerate's wrapper included. A gradient of
                one of its parameters that is not given to ``finish`` is an error there.
            module: the model (DDP around it, where there is one). Its parameters are watched as
                those of the optimizer are, and DDP's ``Join`` raises an error even if the model was
                made after the first window.

        Raises:
            TypeError: ``optimizer`` is no optimizer, or ``module`` no module.
            RuntimeError: later, when one of these mistakes happens.
        """
        self._lifecycle.guard.add(optimizer, module)

    # ---- metrics and state ------------------------------------------------------------------

    def add(self, out: Loss) -> None:
        """Count a batch in the metrics without training on it (evaluation). No collective.

        Args:
            out: one loss, as for :meth:`scale`.

        Raises:
            TypeError: ``out`` is something else.
            ValueError: a label was out of range (on a CPU at once, else when metrics are read).
            RuntimeError: training windows are in the metrics since the last reset.
        """
        one = unpack(out, [UNNAMED])[UNNAMED]
        if not one.loss_sum.requires_grad:
            self._lifecycle.engine.check_evaluated()
        self._metrics.add(one)

    def without_repeats(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the batch with the labels of repeated samples set to ``ignore_index``.

        The samplers of ``accelerate`` repeat samples until all ranks have whole batches. After
        :meth:`from_accelerator`, evaluate with ``acc.add(model(**acc.without_repeats(batch)))``.
        Batches without repeated samples are returned unchanged.

        Raises:
            TypeError: ``batch`` is no mapping.
            ValueError: it holds no labels.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch must be a mapping of tensors, got {describe(batch)}")
        return self._lifecycle.engine.without_repeats(batch)

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        """Metrics of the interval over all ranks: a plain dict of numbers, ready for a tracker.

        After training windows, whose sums are exchanged at their ends, without any collective: one
        rank may call it alone (``if rank == 0: wandb.log(acc.metrics(reset=True))``). Where
        something was ``add``-ed, or nothing ever trained, one all-gather: every rank must call it.

        Args:
            reset: start a new interval.

        Returns:
            ``loss``: nats per token, sum of losses / number of tokens (NaN without tokens);
            ``perplexity``: ``exp(loss)``; ``n_tokens``: valid tokens; ``n_windows``: windows
            (optimizer steps, and those that ``on_empty="skip"`` left out). With several losses,
            ``loss`` is their weighted sum, and each has ``name/loss`` and so on. Of losses made
            with ``fused_ce(..., monitor=...)``, over the tokens of those that were:
            ``correct_tokens`` and ``mean_token_accuracy`` ("correct"), ``entropy`` and ``z_loss``,
            nats per token.

        Raises:
            RuntimeError: a window is still open (an epoch's last, shorter window must be finished
                too); a count differed from the declared one; ranks are at different places.
            ValueError: a label was out of range.
            TypeError: ``reset`` is not True or False.

        Examples:
            >>> acc = fusedce.LossAccumulator()
            >>> acc.add((torch.tensor(6.0), torch.tensor(4)))
            >>> acc.metrics()["loss"]
            1.5
        """
        check_flag("reset", reset)
        return self._metrics.read(reset)

    def state_dict(self) -> dict[str, Any]:
        """Totals of all ranks and the streaming estimate, as plain numbers. No collective.

        Equal on all ranks: one may save alone and all of them load it, in any number.

        Raises:
            RuntimeError: a window is open: its gradients live in ``.grad``, which no checkpoint
                holds, so save between optimizer steps. Also raised when batches were added on
                several ranks and ``metrics()`` has not summed them yet.
        """
        return self._metrics.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the same bits as without the interruption.

        All ranks load the same state, whichever rank saved it, of however many.

        Raises:
            RuntimeError: a window is open.
            TypeError, ValueError: ``state`` is something else.
        """
        self._metrics.load(state)

    # ---- copies and text --------------------------------------------------------------------

    def __repr__(self) -> str:
        lifecycle, n = self._lifecycle, self._lifecycle.tokens.size()
        now = f"{lifecycle.totals.n_windows} windows since the reset"
        return (
            f"LossAccumulator({n} rank{'s' * (n > 1)}, grad_reduction="
            f"{lifecycle.grad_reduction!r}, on_empty={lifecycle.on_empty!r}, "
            f"{now if lifecycle.window is None else lifecycle.window.progress()})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """State for ``deepcopy`` and ``pickle``; raises ``RuntimeError`` inside a window."""
        self._lifecycle.refuse_open_window("copy it")
        return {
            **self.__dict__,
            "_lifecycle": self._lifecycle.fresh(),
            "_metrics": self.state_dict(),
        }

    def __setstate__(self, copied: dict[str, Any]) -> None:
        self.__dict__.update(copied, _metrics=Metrics(copied["_lifecycle"]))
        self._metrics.load(copied["_metrics"])
