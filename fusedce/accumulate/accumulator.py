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

from ..contract.checks import check_choice, check_flag
from ..contract.groups import Ranks
from ..contract.results import ScaledLossSum
from .arguments import (
    OnEmpty,
    as_counts,
    as_tensors,
    by_loss,
    check_losses,
    describe,
    unpack,
)
from .engines import (
    Engine,
    Pipeline,
    current_backward,
    from_accelerator,
    from_deepspeed,
    from_mesh,
)
from .exchange import CLOSE, FINISH, SUMS, WINDOW, Exchange
from .gradients import STREAMED, clip_gradients, scale_gradients
from .sums import Loss, Totals
from .watch import Watch
from .window import Window, WindowBlock


class LossAccumulator:
    """Divides the losses of an optimizer step by all its valid tokens, and keeps the metrics.

    Streaming, where counts become known only at the end, or counts known in advance::

        acc = fusedce.LossAccumulator(model)

        for b in micro_batches:
            acc.backward(fused_ce(...))
        acc.finish()                            # right after the last one, before clipping

        with acc.window([fusedce.count_valid(b["labels"]) for b in micro_batches]):
            for b in micro_batches:
                acc.backward(fused_ce(...))

    Each micro-loss is multiplied by ``R * backward_divisor / max(sum of n_valid, 1)``, the sum
    over micro-batches and ranks, with ``R`` the number of ranks where gradients are averaged and
    1 where they are added. Streaming divides by 1024 per rank at first, and ``finish`` corrects
    ``.grad`` once.

    Args:
        model: the module that the loop calls (with DDP or FSDP around it), or all parameters that
            the losses train. ``finish`` divides these. Errors are a step inside an open window, a
            streaming window over gradients that are not zero, gradients that FSDP2 holds inside at
            the end, and plain gradients that change between the last backward and ``finish``.
            A list does not follow parameters that are made later, and does not show what FSDP2
            holds inside. ``None``: ``finish(parameters)``, nothing is watched.
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
            ``RuntimeError`` on all ranks.
        grad_scaler: the ``torch.amp.GradScaler`` of the loop; :meth:`backward` calls its
            ``scale``. Unscale after the window.
        losses: names and weights of several losses a step, ``{"main": 1, "next2": 0.3}`` (at most
            8). Each is divided by its own tokens; counts must be declared.
        watch: False, no guard, for engines that take gradients away from ``.grad``.
        name: tells accumulators of the same ranks apart, where these might finish windows of two of
            them in another order: that raises. Equal on all of them.

    Attributes:
        should_step: False after a window without any valid token under "skip", else True.

    Examples:
        >>> weight = torch.randn(11, 4, requires_grad=True)
        >>> acc = LossAccumulator([weight])
        >>> for _ in range(2):
        ...     labels = torch.randint(11, (3,))
        ...     acc.backward(fusedce.fused_ce(torch.randn(3, 4), weight, labels))
        >>> acc.finish()
        True
        >>> acc.metrics()["n_tokens"]
        6

    Note:
        The host reads a window's numbers once, at its end (with declared counts at its first loss,
        too), and raises there for a label out of range (on a CPU the loss has raised before),
        other counts than declared, a loss that was scaled and never differentiated, a factor on
        the loss, or what was watched: on all ranks, before an optimizer steps.

    Collectives: each is an all-gather of 173 int64 from each rank on ``process_group`` (under gloo,
    on a new group of the same ranks). Streaming has one per window, in ``finish``. Declared counts
    have one when the window opens, which is awaited at its first ``scale``, and one when it ends.
    There are none per micro-batch, and none for ``metrics``. A rank that waits in vain raises an
    error after the process group's timeout. One accumulator belongs to one thread.
    """

    from_mesh: classmethod[LossAccumulator, ..., LossAccumulator] = classmethod(from_mesh)
    from_accelerator: classmethod[LossAccumulator, ..., LossAccumulator] = classmethod(
        from_accelerator
    )
    from_deepspeed: classmethod[LossAccumulator, ..., LossAccumulator] = classmethod(from_deepspeed)

    def __init__(
        self,
        model: torch.nn.Module | Iterable[Tensor] | None = None,
        *,
        process_group: Any = None,
        grad_reduction: Literal["mean", "sum"] = "mean",
        backward_divisor: float = 1,
        on_empty: OnEmpty = "zero",
        grad_scaler: Any = None,
        losses: Mapping[str, float] | None = None,
        watch: bool = True,
        name: str | None = None,
        _engine: Engine | None = None,
        _pipeline: Pipeline | None = None,
    ) -> None:
        check_choice("grad_reduction", grad_reduction, ("mean", "sum"))
        check_choice("on_empty", on_empty, ("zero", "skip", "raise"))
        check_flag("watch", watch)
        self._weights = check_losses(losses)
        self._tokens = Ranks(process_group)  # whose losses are added (a pipeline's last stages)
        self._pipeline = _pipeline
        # With all ranks that share the windows.
        self._exchange = Exchange(_pipeline.everyone if _pipeline else self._tokens, name)
        self._engine = _engine or Engine(backward_divisor, grad_scaler)
        self._grad_reduction, self._on_empty = grad_reduction, on_empty
        self._has_loss = _pipeline is None or _pipeline.has_loss
        self._watch = Watch(model, watches=watch, in_pipeline=_pipeline is not None)
        self._totals = Totals(self._weights)  # equal on all ranks after each window
        self._window: Window | None = None  # the open one
        self._announced: object = None  # the result of `window(...)` until it is entered
        self.should_step = True

    # ---- a window ---------------------------------------------------------------------------

    def window(
        self, counts: Iterable[Tensor | int] = (), **counts_by_loss: Iterable[Tensor | int]
    ) -> WindowBlock:
        """``with acc.window(counts):`` an optimizer step whose valid tokens are known in advance.

        Args:
            counts: for each micro-batch of this rank, in the order of their ``scale`` or
                ``backward`` calls, its number of valid tokens *after* the shift
                (:func:`count_valid`): integers, or int64 tensors of one element. All ranks declare
                the same number of micro-batches; one without tokens declares 0.
            counts_by_loss: of several losses by name: ``acc.window(main=counts, next2=others)``.
        """
        given: list[Any] = []
        if self._has_loss:
            one = () if counts_by_loss and counts == () else (counts,)
            given = by_loss("window", self._weights, one, counts_by_loss)
        self._announced = block = WindowBlock(self, given)
        return block

    def _enter(self, counts: list[Any]) -> None:
        """Open a window of declared counts. One all-gather."""
        self._announced = None
        with self._exchange.tell_peers_on_error(WINDOW):
            self._refuse_open_window("open another")
            declared = [
                as_counts(f"counts of {name!r}" if name else "counts", x)
                for name, x in zip(self._weights, counts, strict=False)
            ]
            n_micro = {len(x) for x in declared}
            if 0 in n_micro:
                raise ValueError("counts must hold one number per micro-batch, got none")
            if len(n_micro) > 1:
                found = dict(zip(self._weights, map(len, declared), strict=True))
                raise ValueError(f"counts must be as many for each loss, got {found}")
            if declared:
                self._engine.check_opening(len(declared[0]))
        sums: list[float] = [0.0] * (len(SUMS) * len(declared))
        sums[1 :: len(SUMS)] = map(sum, declared)
        n = 1 + len(declared[0]) if declared else 0
        sent = self._exchange.send(WINDOW, sums, self._equal(), n)
        # Where `should_step` depends on the tokens, the loop may ask for it at once. Else the first
        # `scale` reads them, and the forward pass before it hides the exchange.
        if self._on_empty != "zero" or sent.work is None:
            self._decide_step(sent.wait())
        else:
            self.should_step = True
        self._open(Window(declared or [[]], sent, self._weights, self._watch, self._engine))

    def _leave(self, error: BaseException | None) -> None:
        """Close a window of declared counts, or drop it after ``error``. One all-gather."""
        window = self._window
        assert window is not None
        if error is not None:
            self._close()
            # Ranks that already know of the error do not come to the window's end.
            if not getattr(error, "is_shared", False) and not window.was_refused():
                self._exchange.fail(CLOSE, error)
            return
        try:
            window.denominators()  # if nothing was scaled: the opening's errors come first
            sums, _ = self._end(CLOSE, window)
        finally:
            self._close()
        self._count_window(sums)

    def scale(self, out: Loss | None = None, **outs_by_loss: Loss) -> Tensor:
        """The loss to call ``backward`` on, for loops that do so themselves (GradScaler).

        ``loss_sum * R * backward_divisor / denominator`` and the auxiliary losses that wait. It
        counts as a micro-batch once a backward adds its gradients to ``.grad``, which
        ``torch.autograd.grad`` does not. Never to differentiate it, or by another factor than the
        engine's or the GradScaler's, is an error at the window's end.

        Args:
            out: what :func:`fused_ce` returned: ``loss_sum ()`` in nats, ``n_valid ()`` in tokens.
            outs_by_loss: of several losses by name: ``acc.scale(main=a, next2=b)``.
        """
        self._check_entered()
        one = () if outs_by_loss and out is None else (out,)
        outs = [unpack(x) for x in by_loss("scale", self._weights, one, outs_by_loss)]
        if any(isinstance(x, ScaledLossSum) for x in outs):
            raise ValueError(
                "out was multiplied or divided by a number, but a window divides the sum by all of "
                "its tokens itself. Do not divide by the number of micro-batches or ranks; to give "
                "a loss a smaller weight, use losses= or token_weight="
            )
        window = self._window or self._stream()
        window.check_usable()
        return window.scaled(outs, self._factor(), self._tokens.size())

    def _stream(self) -> Window:
        """Open a streaming window: a constant divides its losses until it knows the tokens."""
        why_not = self._engine.no_streaming
        if not self._has_loss:
            why_not = (
                "this rank has no loss in its pipeline: the last stage computes it. Elsewhere, "
                "from_mesh(..., has_loss=True) says so"
            )
        elif "" not in self._weights:
            why_not = (
                "finish() corrects all gradients by one factor, and several losses have as many. "
                "Declare the counts: `with acc.window(main=counts, next2=others)`"
            )
        if why_not is not None:
            raise RuntimeError(f"streaming is not possible here: {why_not}")
        return self._open(self._streaming())

    def _streaming(self) -> Window:
        denominator = float(STREAMED * self._tokens.size())
        return Window(None, [denominator], self._weights, self._watch, self._engine)

    def _factor(self) -> float:
        """Factor of this rank's loss sums without the denominator: ``R * backward_divisor``."""
        ranks = self._tokens.size() if self._grad_reduction == "mean" else 1
        return self._engine.divisor() * ranks

    def backward(self, out: Loss | None = None, **outs_by_loss: Loss) -> None:
        """``self.scale(out).backward()``, as the engine does it, with the loss scale.

        Call it for micro-batches without valid tokens too. If it raises (out of memory), ``.grad``
        holds a part of this micro-batch that cannot be removed: to go on, leave the ``with`` block
        and call ``zero_grad``, or in streaming call :meth:`discard_window`.
        """
        scaled = self.scale(out, **outs_by_loss)
        if not scaled.requires_grad:
            raise RuntimeError(
                "out must require grad, got a loss without a graph: hidden, weight and bias are "
                "frozen, or it was computed under torch.no_grad(). Training needs one of them with "
                "requires_grad=True; evaluation is fusedce.LossMeter().update(out)"
            )
        try:
            self._engine.backward(scaled)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise RuntimeError(
                "out was computed from a graph that an earlier backward has freed: give each loss "
                "to acc.backward once. Several losses of one forward pass are one micro-batch: "
                "name them in LossAccumulator(model, losses={...}), acc.backward(main=a, other=b)"
            ) from error

    def add_auxiliary(self, auxiliary: Tensor) -> None:
        """Add a mean (MoE router's loss) to the next ``scale`` of a window with declared counts.

        ``auxiliary ()`` is divided by micro-batches and ranks, and is not part of the metrics.
        """
        if not isinstance(auxiliary, Tensor) or not auxiliary.is_floating_point():
            raise TypeError(f"auxiliary must be a floating tensor, got {describe(auxiliary)}")
        if auxiliary.numel() != 1:
            raise ValueError(f"auxiliary must be a scalar, got shape {tuple(auxiliary.shape)}")
        if current_backward() != -1:
            if auxiliary.requires_grad and self._window and self._window.has_graphless_auxiliary:
                raise RuntimeError(
                    "add_auxiliary was called inside of a checkpoint with use_reentrant=True, "
                    "whose first pass has no graph: pass use_reentrant=False, or return the "
                    "auxiliary loss from the checkpoint and add it outside"
                )
            return  # a checkpoint computes it again
        if self._window is None or self._window.declared is None:
            raise RuntimeError(
                "add_auxiliary was called outside of a window with declared counts, and needs one: "
                "use `with acc.window([count_valid(...) for each micro-batch])`. Streaming "
                "corrects all gradients by one factor in finish(), which would rescale the "
                "auxiliary loss."
            )
        self._window.has_graphless_auxiliary |= not torch.is_grad_enabled()
        self._window.auxiliary.append(auxiliary.reshape(()))

    def finish(self, parameters: Iterable[Tensor] | None = None) -> bool:
        """Close a streaming window: correct every ``.grad`` once, in place.

        Call it right after the last micro-batch: sum over ranks, unscale and clip after it
        (:meth:`clip_grad_norm_` cannot come too early).

        Args:
            parameters: all that received gradients, where the accumulator was given none.

        Returns:
            :attr:`should_step`.
        """
        if self._watch.is_given and parameters is not None:
            raise TypeError(
                "finish() takes no parameters: LossAccumulator was given a model or parameters, "
                "and divides exactly these"
            )
        if not self._watch.is_given and parameters is None:
            raise TypeError(
                "finish(parameters) needs the parameters to divide, e.g. model.parameters(); "
                "LossAccumulator(model) knows them, and watches them too"
            )
        # (An empty one raises in `_end`, where the other ranks hear of it.)
        window = self._window or self._streaming()
        if window.declared is not None:
            raise RuntimeError(
                "finish is for streaming; a window with declared counts needs no correction"
            )
        sums, trained = self._end(FINISH, window, parameters)
        self._close()
        self._decide_step(sums)
        if self.should_step:
            scale_gradients(trained, STREAMED * self._tokens.size() / max(sums[1], 1))
        else:
            for p in trained:
                p.grad = None
        self._count_window(sums)
        return self.should_step

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the model by their common norm, and return it, ``()``.

        Torch's own clipping (FSDP1's, where it is around the model), after a window: it cannot come
        too early. With a ``GradScaler`` unscale first.

        Args:
            max_norm: the largest norm that is left alone, at least 0.

        Raises:
            RuntimeError: inside an open window; without a given model; where the engine keeps
                gradients elsewhere (DeepSpeed clips by itself); or where other ranks may hold
                other parts of the model, as plain tensors (a shard of the vocabulary).

        Collectives: those of DTensors' norms and of FSDP1; in a pipeline one all-reduce among its
        stages, so that every stage calls it. Else none.
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)):
            raise TypeError(f"max_norm must be a number, got {describe(max_norm)}")
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be at least 0, got {max_norm}")
        self._refuse_open_window("clip gradients")
        if not self._watch.is_given or self._engine.no_streaming is not None:
            raise RuntimeError(
                "clip_grad_norm_ needs the gradients: LossAccumulator(model) knows them. DeepSpeed "
                "keeps them to itself, and clips by gradient_clipping in its configuration"
            )
        watch, stages = self._watch, self._pipeline and self._pipeline.stages
        ranks = self._exchange.ranks
        return clip_gradients(watch.module, watch.parameters(), max_norm, ranks, stages)

    def discard_window(self) -> None:
        """Forget the micro-batches of an open streaming window, and the given model's gradients.

        An accumulator that was given none needs ``zero_grad`` as well.
        """
        if self._window is not None and self._window.declared is not None:
            raise RuntimeError("discard_window is for streaming: leave the `with` block instead")
        self._announced = None
        self._watch.drop_gradients()
        self._close()

    def _open(self, window: Window) -> Window:
        self._window = window
        self._watch.open(window.why_no_step)
        return window

    def _close(self) -> None:
        """Forget the open window, and let optimizers step."""
        if self._window is not None:
            self._window.is_open = False
        self._window = None
        self._watch.close()

    def _end(
        self, purpose: str, window: Window, parameters: Any = None
    ) -> tuple[list[float], list[Tensor]]:
        """Sums over ranks of a window that ends, after its one all-gather, and what to divide."""
        with self._exchange.tell_peers_on_error(purpose):
            self._check_entered()
            sums: list[float] = []
            if self._has_loss:
                window.check_complete()
                sums = window.sums()
            if window.declared is not None and self._has_loss:
                self._engine.check_closing(len(window.done))
            given = self._watch.check_end()
            if parameters is not None:
                given = as_tensors("parameters", parameters)
            trained = [p for p in given if p.grad is not None]
            if purpose == FINISH and not trained:
                raise RuntimeError(
                    "parameters: no parameter given has a .grad to correct (was the generator used "
                    "up, or zero_grad called before finish?)"
                )
        return self._exchange.send(purpose, sums, self._equal()).wait(), trained

    def _equal(self) -> dict[str, object]:
        """Settings that must be equal on all ranks at every exchange."""
        return {
            "grad_reduction": self._grad_reduction,
            "on_empty": self._on_empty,
            "backward_divisor": self._engine.divisor(),
            "losses": str(self._weights),  # (as text, which a Counter of what differs can count)
        }

    def _decide_step(self, sums: list[float]) -> None:
        """Set :attr:`should_step` from the sums of all ranks, or raise."""
        self.should_step = self._on_empty == "zero" or any(sums[1 :: len(SUMS)])
        if not self.should_step and self._on_empty == "raise":
            self.should_step = True
            raise RuntimeError(
                "no valid token in this window on any rank (on_empty='raise'): "
                "every label is ignore_index"
            )

    def _count_window(self, sums: list[float]) -> None:
        self._totals.add(sums)
        self._totals.n_windows += 1

    def _check_entered(self) -> None:
        """Raise ``RuntimeError`` if ``window(...)`` was called without ``with``."""
        if self._announced is not None:
            raise RuntimeError(
                "acc.window(...) was called and not entered: write `with acc.window(counts):` "
                "around the micro-batches (discard_window() forgets it)"
            )

    def _refuse_open_window(self, action: str) -> None:
        """Raise ``RuntimeError`` if a window is open; ``action`` says what needs it closed."""
        self._check_entered()
        if self._window is not None:
            raise RuntimeError(
                f"cannot {action}: {self._window.progress()}. Leave the `with` block first, or "
                f"call finish(), after an epoch's last, shorter window too (discard_window() drops "
                f"it)"
            )

    # ---- metrics and state ------------------------------------------------------------------

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        """Metrics of the interval over all ranks: a plain dict of numbers, ready for a tracker.

        No collective: windows sum over ranks at their ends, so one rank may call it alone
        (``if rank == 0: wandb.log(acc.metrics(reset=True))``). Evaluation has its own object,
        :class:`fusedce.LossMeter`.

        Returns (``reset`` starts a new interval):
            ``loss``: nats per token, sum of losses / number of tokens (NaN without tokens);
            ``perplexity``: ``exp(loss)``, without a meaning where the loss is no cross-entropy
            (GRPO): pop it before you log; ``n_tokens``: valid tokens; ``n_windows``: windows
            (optimizer steps, and those that ``on_empty="skip"`` left out). Of losses made with
            ``fused_ce(..., monitor=...)``, over the tokens of those that were: ``correct_tokens``
            and ``mean_token_accuracy`` ("correct"), ``entropy`` and ``z_loss``, nats per token.
            Several losses have these under their names (``main/loss``, ``main/n_tokens``), and
            ``loss`` is their weighted sum.
        """
        check_flag("reset", reset)
        self._refuse_open_window("read metrics")
        found = {**self._totals.means(), "n_windows": self._totals.n_windows}
        if reset:
            self._totals.reset()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Totals of all ranks, as plain numbers. No collective.

        Equal on all ranks: one may save alone and all of them load it, in any number. Save between
        optimizer steps: the gradients of an open window live in ``.grad``, which no checkpoint has.
        """
        self._refuse_open_window("save the state (its gradients are in .grad, in no checkpoint)")
        return self._totals.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the same bits as without the interruption.

        All ranks load the same state, whichever rank saved it, of however many.
        """
        self._refuse_open_window("load a state")
        self._totals.load_state_dict(state)

    def mask_repeated_samples(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the batch with the labels of repeated samples set to ``ignore_index``.

        The samplers of ``accelerate`` repeat samples until all ranks have whole batches. After
        :meth:`from_accelerator`, evaluate ``model(**acc.mask_repeated_samples(batch))`` on the
        batches of a prepared loader. Those without repeated samples are returned unchanged. So are
        those of an ``IterableDataset`` with ``dispatch_batches=False``, of which accelerate does
        not say how many samples it has repeated: they count twice.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch must be a mapping of tensors, got {describe(batch)}")
        return self._engine.mask_repeated_samples(batch)

    # ---- copies and text --------------------------------------------------------------------

    def __repr__(self) -> str:
        n = self._tokens.size()
        now = f"{self._totals.n_windows} windows since the reset"
        return (
            f"LossAccumulator({n} rank{'s' * (n > 1)}, grad_reduction={self._grad_reduction!r}, "
            f"on_empty={self._on_empty!r}, "
            f"{now if self._window is None else self._window.progress()})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """State for ``deepcopy`` and ``pickle``; raises ``RuntimeError`` inside a window."""
        self._refuse_open_window("copy it")
        return self.__dict__
