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

from fusedce.accumulate.arguments import OnEmpty, as_counts, check_module, describe, unpack
from fusedce.accumulate.engines import Engine, from_accelerator, from_mesh
from fusedce.accumulate.exchange import CLOSE, FINISH, WINDOW, Exchange, together
from fusedce.accumulate.gradients import STREAMED, drop_gradients, given_to_finish, scale_gradients
from fusedce.accumulate.guard import Guard
from fusedce.accumulate.sums import Loss, Metrics
from fusedce.accumulate.window import Window, WindowBlock
from fusedce.contract.checks import check_choice
from fusedce.contract.groups import Ranks
from fusedce.contract.results import ScaledLossSum


class LossAccumulator(Metrics):
    """Divides the losses of an optimizer step by all its valid tokens, and keeps the metrics.

    Counts known in advance, or streaming, where they become known only at the end::

        with acc.window([fusedce.count_valid(b["labels"]) for b in micro_batches]):
            for b in micro_batches:
                acc.backward(fused_ce(...))

        for b in micro_batches:
            acc.backward(fused_ce(...))
        acc.finish(model.parameters())          # before gradient clipping

    Each micro-loss is multiplied by ``R * backward_divisor / max(sum of n_valid, 1)``, the sum
    over micro-batches and ranks, with ``R`` the number of ranks where gradients are averaged and
    1 where they are added. Streaming divides by 1024 per rank at first, and ``finish`` corrects
    ``.grad`` once. Do not call ``finish`` after clipping; :meth:`guard` catches other mistakes.

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

    Attributes:
        should_step: False after a window without any valid token under "skip", else True.

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

    Note:
        A label out of range, other counts than declared, a factor on the loss, or gradients set to
        zero raise an error at the window's end, the same on all ranks, before an optimizer steps.
        On a GPU the error comes later, so that windows do not wait for the GPU: in ``metrics`` or
        ``state_dict``, and after 33 windows at the latest.

    Collectives: each is an all-gather of 121 int64 from each rank on ``process_group`` (under gloo,
    on a new group of the same ranks). Streaming has one per window, in ``finish``. Declared counts
    have one when the window opens, which is awaited at its first ``scale``, and one when it ends.
    ``metrics`` has one if batches were ``add``-ed. There are none per micro-batch. A rank that
    waits in vain raises an error after the process group's timeout. One accumulator belongs to one
    thread.
    """

    from_mesh: classmethod[LossAccumulator, ..., LossAccumulator] = classmethod(from_mesh)
    from_accelerator: classmethod[LossAccumulator, ..., LossAccumulator] = classmethod(
        from_accelerator
    )

    def __init__(
        self,
        process_group: Any = None,
        *,
        grad_reduction: Literal["mean", "sum"] = "mean",
        backward_divisor: float = 1,
        on_empty: OnEmpty = "zero",
    ) -> None:
        check_choice("grad_reduction", grad_reduction, ("mean", "sum"))
        check_choice("on_empty", on_empty, ("zero", "skip", "raise"))
        self._tokens = Ranks(process_group)  # whose losses are added (a pipeline's last stages)
        self._exchange = Exchange(self._tokens)  # with all ranks that share the windows
        self._engine = Engine(backward_divisor)
        self._grad_reduction, self._on_empty = grad_reduction, on_empty
        self._has_loss = True  # whether this rank computes losses
        self._guard = Guard()
        self._window: Window | None = None  # the open one
        self._announced: object = None  # the result of `window(...)` until it is entered
        self.should_step = True
        super().__init__()

    # ---- training ---------------------------------------------------------------------------

    def window(self, counts: Iterable[Tensor | int] = ()) -> WindowBlock:
        """``with acc.window(counts):`` an optimizer step whose valid tokens are known in advance.

        Several losses over shared parameters (heads for several tokens ahead), each divided by its
        own tokens, have an accumulator each, and one backward; ``token_weight`` weighs them::

            with first.window(counts), second.window(others):
                for b in micro_batches:
                    (first.scale(fused_ce(...)) + second.scale(fused_ce(...))).backward()

        Args:
            counts: for each micro-batch of this rank, in the order of their ``backward`` calls,
                its number of valid tokens *after* the shift (:func:`count_valid`): integers, or
                int64 tensors of one element. All ranks declare the same number of micro-batches;
                one without tokens declares 0.
        """
        self._announced = block = WindowBlock(self, counts)
        return block

    def _enter(self, counts: Any) -> None:
        """Open a window of declared counts. One all-gather."""
        self._announced = None
        with self._exchange.tell_peers_on_error(WINDOW):
            self._refuse_open_window("open another")
            self._check_ready()
            declared = as_counts(counts)
            if not declared and self._has_loss:
                empty = f"{counts!r}, which gives none"
                raise ValueError(f"counts must hold one number per micro-batch, got {empty}")
        none = torch.zeros(1, dtype=torch.int64, device="cpu")
        n_valid = together(declared).sum(0, keepdim=True) if declared else none
        n_micro = 1 + len(declared) if self._has_loss else 0
        sent = self._exchange.send(WINDOW, n_valid, self._equal(), n_micro)
        if self._on_empty != "zero" or sent.work is None:
            self._decide_step(sent.wait()[0])
        else:
            self.should_step = True
        self._open(Window(declared, sent, self._guard))

    def _leave(self, error: BaseException | None) -> None:
        """Close a window of declared counts, or drop it after ``error``. One all-gather."""
        window = self._window
        assert window is not None
        if error is not None:
            self._close(dropped=True)
            # Ranks that already know of the error do not come to the window's end.
            if not getattr(error, "is_known", False) and not window.was_refused():
                self._exchange.fail(CLOSE, error)
            return
        try:
            window.denominator()
            sums, _ = self._end(CLOSE, window)
        finally:
            self._close(dropped=False)
        self._count_window(sums)

    def scale(self, out: Loss) -> Tensor:
        """The loss to call ``backward`` on, for loops that do so themselves (GradScaler).

        ``loss_sum * R * backward_divisor / denominator`` and the auxiliary losses that wait. It
        counts as a micro-batch once it is differentiated; another factor than the engine's or a
        GradScaler's is an error where the ranks meet next.

        Args:
            out: what :func:`fused_ce` returned: ``loss_sum ()`` in nats, ``n_valid ()`` in tokens.
        """
        self._check_entered()
        sums = unpack(out)
        if isinstance(sums, ScaledLossSum):
            raise ValueError(
                "out was multiplied or divided by a number, but a window divides the sum by all of "
                "its tokens itself. Do not divide by the number of micro-batches or ranks; to give "
                "a loss a smaller weight, use token_weight="
            )
        if (window := self._window) is None:
            if self._engine.no_streaming is not None:
                raise RuntimeError(f"streaming is not possible here: {self._engine.no_streaming}")
            if not self._has_loss:
                raise RuntimeError(
                    "this rank has no loss in its pipeline: the last stage computes it. Elsewhere, "
                    "from_mesh(..., has_loss=True) says so"
                )
            self._check_ready()
            self._exchange.number()
            window = self._open(self._streaming())
        window.check_usable()
        size, upstreams = self._tokens.size(), self._engine.upstreams()
        return window.scaled(sums, self._factor(), size, upstreams)

    def _streaming(self) -> Window:
        """A streaming window. Its losses are divided by a constant until it knows the tokens."""
        return Window(None, float(STREAMED * self._tokens.size()), self._guard)

    def _factor(self) -> float:
        """Factor of this rank's loss sum without the denominator: ``R * backward_divisor``."""
        ranks = self._tokens.size() if self._grad_reduction == "mean" else 1
        return self._engine.divisor() * ranks

    def _expected(self) -> Tensor | float | None:
        """Upstream gradient that a loss of the open window will receive; ``None`` if unknown.

        This waits for the other ranks' counts; :meth:`scale` raises an error among them.
        """
        window = self._window
        if window is None:
            return None
        try:
            return window.factor(self._factor() * self._engine.upstreams()[0])
        except (RuntimeError, TypeError, ValueError):
            return None

    def backward(self, out: Loss) -> None:
        """``self.scale(out).backward()``. Call it for micro-batches without valid tokens too.

        If it raises (out of memory), ``.grad`` holds a part of this micro-batch that cannot be
        removed: to go on, leave the ``with`` block, or call :meth:`discard_window`.
        """
        scaled = self.scale(out)
        if not scaled.requires_grad:
            raise RuntimeError(
                "out must require grad, got a loss without a graph: hidden, weight and bias are "
                "frozen, or it was computed under torch.no_grad(). Training needs one of them with "
                "requires_grad=True; evaluation is acc.add(out)"
            )
        self._engine.backward(scaled)

    def add_auxiliary(self, auxiliary: Tensor) -> None:
        """Add a mean (MoE router's loss) to the next ``scale`` of a window with declared counts.

        ``auxiliary ()`` is divided by micro-batches and ranks, and is not part of the metrics.
        """
        if not isinstance(auxiliary, Tensor) or not auxiliary.is_floating_point():
            raise TypeError(f"auxiliary must be a floating tensor, got {describe(auxiliary)}")
        if auxiliary.numel() != 1:
            raise ValueError(f"auxiliary must be a scalar, got shape {tuple(auxiliary.shape)}")
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes it again
        if self._window is None or self._window.declared is None:
            raise RuntimeError(
                "add_auxiliary was called outside of a window with declared counts, and needs one: "
                "use `with acc.window([count_valid(...) for each micro-batch])`. Streaming "
                "corrects all gradients by one factor in finish(), which would rescale the "
                "auxiliary loss."
            )
        self._window.auxiliary.append(auxiliary.reshape(()))

    def finish(self, parameters: Iterable[Tensor]) -> bool:
        """Close a streaming window: correct every ``.grad`` once, in place, before clipping.

        Args:
            parameters: all parameters that received gradients, e.g. ``model.parameters()``.

        Returns:
            :attr:`should_step`.
        """
        window = self._window or self._streaming()
        if window.declared is not None:
            raise RuntimeError(
                "finish is for streaming; a window with declared counts needs no correction"
            )
        sums, trained = self._end(FINISH, window, parameters)
        self._close(dropped=False)
        self._decide_step(sums[1])
        if self.should_step:
            scale_gradients(trained, STREAMED * self._tokens.size() / sums[1].clamp(min=1))
        else:
            for p in trained:
                p.grad = None
        self._count_window(sums)
        return self.should_step

    def discard_window(self, module: torch.nn.Module | None = None) -> None:
        """Forget the micro-batches of an open streaming window; call ``zero_grad`` as well.

        Args:
            module: forget its gradients too, so that no ``zero_grad`` is needed. FSDP2 needs this
                after ``set_requires_gradient_sync(False)``, which holds gradients inside.
        """
        check_module(module)
        if self._window is not None and self._window.declared is not None:
            raise RuntimeError("discard_window is for streaming: leave the `with` block instead")
        self._announced = None
        if module is not None:
            drop_gradients(module)
        self._close(dropped=module is None)

    def guard(self, optimizer: Any, module: torch.nn.Module | None = None) -> None:
        """Raise an error where a loop would spoil a window's gradients.

        That is: an optimizer step or ``zero_grad`` inside an open window; gradients written by
        something else than its losses, or not given to ``finish``.

        Args:
            optimizer: a ``torch.optim.Optimizer``, accelerate's wrapper included.
            module: the model (DDP around it, where there is one), whose parameters are watched too.
        """
        self._guard.add(optimizer, module)

    # ---- evaluation (see Metrics) -----------------------------------------------------------

    def without_repeats(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the batch with the labels of repeated samples set to ``ignore_index``.

        The samplers of ``accelerate`` repeat samples until all ranks have whole batches. After
        :meth:`from_accelerator`, evaluate with ``acc.add(model(**acc.without_repeats(batch)))``.
        Batches without repeated samples are returned unchanged.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch must be a mapping of tensors, got {describe(batch)}")
        return self._engine.without_repeats(batch)

    # ---- every window -----------------------------------------------------------------------

    def _open(self, window: Window) -> Window:
        self._window = window
        self._guard.open(window.why_no_step, window.declared is None)
        return window

    def _close(self, *, dropped: bool) -> None:
        """Forget the open window; ``dropped`` if its gradients are not to be used."""
        if self._window is not None:
            self._window.is_open = False
        self._window = None
        self._guard.close(dropped)

    def _end(
        self, purpose: str, window: Window, parameters: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The sums over ranks of a window that ends, after its one all-gather.

        ``parameters`` are those of ``finish``; the result holds those that have gradients.
        """
        with self._exchange.tell_peers_on_error(purpose):
            self._check_entered()
            if self._has_loss:
                window.check_complete()
            given = given_to_finish(parameters) if purpose == FINISH else None
            self._guard.check_end(given)
        sent = self._exchange.send(purpose, window.sums(), self._equal(), fault=window.fault())
        return sent.wait(), [p for p in given or [] if p.grad is not None]

    def _equal(self) -> dict[str, object]:
        """Settings that must be equal on all ranks at every exchange."""
        return {
            "grad_reduction": self._grad_reduction,
            "on_empty": self._on_empty,
            "backward_divisor": self._engine.divisor(),
        }

    def _decide_step(self, total: Tensor) -> None:
        """Set :attr:`should_step` from the tokens ``total ()`` of all ranks, or raise."""
        self.should_step = self._on_empty == "zero" or int(total) > 0
        if not self.should_step and self._on_empty == "raise":
            self.should_step = True
            raise RuntimeError(
                "no valid token in this window on any rank (on_empty='raise'): "
                "every label is ignore_index"
            )

    def _check_ready(self) -> None:
        """Raise ``RuntimeError`` where no window may open now."""
        if self._evaluates:
            raise RuntimeError(
                "the metrics hold batches that were added for evaluation since the last reset, and "
                "would mix them with training: call metrics(reset=True) first, or evaluate with a "
                "LossAccumulator of its own"
            )
        self._guard.check_ready()

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
                f"call finish(model.parameters()), after an epoch's last, shorter window too "
                f"(zero_grad and discard_window() drop it)"
            )

    # ---- copies and text --------------------------------------------------------------------

    def __repr__(self) -> str:
        n = self._tokens.size()
        now = f"{self._n_windows} windows since the reset"
        return (
            f"LossAccumulator({n} rank{'s' * (n > 1)}, grad_reduction={self._grad_reduction!r}, "
            f"on_empty={self._on_empty!r}, "
            f"{now if self._window is None else self._window.progress()})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """State for ``deepcopy`` and ``pickle``; raises ``RuntimeError`` inside a window."""
        self._refuse_open_window("copy it")
        return self.__dict__
