"""One denominator for an optimizer step, whatever it was split into.

For micro-batches ``m`` and ranks ``r`` that hold distinct tokens, the loss of an optimizer step is

    loss = sum of loss_sum[m, r] / sum of n_valid[m, r]

and not the mean of the micro-batches' means, which weighs a token of a short micro-batch more
than one of a long one (https://github.com/huggingface/transformers/issues/34242,
https://huggingface.co/blog/gradient_accumulation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.engines import AccelerateEngine, Engine, token_mesh
from fusedce.accumulate.ranks import Ranks, submesh
from fusedce.accumulate.streaming import Streaming
from fusedce.accumulate.window import Window, as_counts, describe, unpack


class LossAccumulator(Streaming):
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

    Collectives, all of them all-reduces of 5 float64 on ``process_group``: one in ``window``; one
    in the very first streaming ``backward`` or ``scale``; one in ``finish``; one in ``metrics``.
    None without ``torch.distributed``.

    Args:
        process_group: the ranks that hold distinct tokens: a process group or a one-dimensional
            ``DeviceMesh`` (:meth:`from_mesh` for more dimensions). ``None``: all ranks if
            ``torch.distributed`` is initialised. Replicas of the same tokens (tensor parallel)
            must not be counted twice; slices of one sequence (context parallel) must all be.
        grad_reduction: "mean" where the engine averages gradients over exactly these ranks (DDP,
            FSDP), "sum" where it adds them, or averages over other ranks: then name what it
            divides by as ``backward_divisor``.
        backward_divisor: a constant the engine divides each loss or gradient by on its own.
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
        super().__init__(Ranks(process_group), on_empty)
        self._engine = Engine(backward_divisor)
        self._grad_reduction = grad_reduction

    @classmethod
    def from_mesh(
        cls,
        mesh: Any,
        token_dims: str | Sequence[str],
        *,
        grad_reduction: Literal["mean", "sum"] = "mean",
        backward_divisor: float = 1,
        on_empty: Literal["zero", "skip", "raise"] = "zero",
    ) -> LossAccumulator:
        """For the ranks along ``token_dims`` of a ``DeviceMesh`` with named dimensions.

        Args:
            mesh: e.g. ``init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "tp"))``.
            token_dims: the dimensions over which tokens differ: data and context parallel ones,
                not tensor parallel ones. None at all: every rank holds the same tokens.
            grad_reduction, backward_divisor, on_empty: as for the class.

        Collectives: several dimensions make one new group, on all ranks of the mesh, once.

        Raises:
            TypeError, ValueError: ``mesh`` is not a ``DeviceMesh`` or has no such dimensions.

        Example:
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
            >>> acc = LossAccumulator.from_mesh(mesh, "dp")
        """
        return cls(
            submesh(mesh, token_dims),
            grad_reduction=grad_reduction,
            backward_divisor=backward_divisor,
            on_empty=on_empty,
        )

    @classmethod
    def from_accelerator(
        cls, accelerator: Any, *, on_empty: Literal["zero", "skip", "raise"] = "zero"
    ) -> LossAccumulator:
        """For a loop that uses ``accelerate``: its ranks, its division, its backward.

        ``backward`` calls ``accelerator.backward``, and its constant division by
        ``gradient_accumulation_steps``, also in a shorter last window, is undone. Streaming fits
        ``accelerator.accumulate``; with declared counts draw the micro-batches of a window first
        and do without ``accumulate``, which takes each of the last ones for the end of the epoch
        once the dataloader is exhausted (``examples/accelerate_loop.py`` shows both).

        Args:
            accelerator: an ``accelerate.Accelerator``, on one device, with DDP, FSDP or DeepSpeed
                (declared counts only).
            on_empty: as for the class.

        Raises:
            TypeError: not an ``Accelerator``.
            ValueError: Megatron-LM, or DeepSpeed's sequence parallelism.

        Example:
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
            >>> acc = LossAccumulator.from_accelerator(accelerator)
        """
        new = cls(token_mesh(accelerator), on_empty=on_empty)
        new._engine = AccelerateEngine(accelerator)
        return new

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
        declared = as_counts(counts)
        local = sum(declared, torch.zeros((), dtype=torch.int64))
        total = self._reduce_counts(_faults.WINDOW, local, len(declared))
        if not declared:
            raise ValueError("counts must hold one number per micro-batch, got none at all")
        self._decide_step(total)
        self._window = window = Window(total.clamp(min=1).double(), declared)
        try:
            yield self
        except BaseException:
            self._window = None
            raise
        if self._window is not window:
            raise RuntimeError("the window was closed inside its own block")
        self._window = None
        window.check_complete()
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
            RuntimeError: streaming under an engine that steps on its own (DeepSpeed); more
                micro-batches than declared, or (at once on a CPU, later on a GPU) a
                count other than the declared one.
            ValueError: a label out of range (CPU tensors raise it earlier, in ``fused_ce``).
        """
        loss_sum, n_valid = unpack(out)
        self._faults.note(_faults.bad_label, n_valid < 0, n_valid)
        if self._window is None:
            if self._engine.no_streaming is not None:
                raise RuntimeError(f"streaming is not possible here: {self._engine.no_streaming}")
            self._window = Window(self._estimate(n_valid), None)
        window = self._window
        window.take(loss_sum, n_valid, self._faults)

        ranks, divisor = self._ranks.size(), self._engine.divisor()
        mean = self._grad_reduction == "mean"
        factor = divisor * (ranks if mean else 1) / window.denominator
        scaled = loss_sum * _faults.moved(factor, loss_sum.device).to(loss_sum.dtype)
        auxiliary = window.take_auxiliary()
        if auxiliary is not None:
            scaled = scaled + auxiliary.to(scaled) * (divisor / (1 if mean else ranks))
        return scaled

    def backward(self, out: tuple[Tensor, Tensor]) -> None:
        """``self.scale(out).backward()``. Call it for micro-batches without valid tokens too.

        After :meth:`from_accelerator`, ``accelerator.backward(self.scale(out))``. If that raises
        (out of memory), ``.grad`` holds a part of this micro-batch that nobody can take out again:
        to go on, call ``zero_grad`` and :meth:`discard_window`, or leave the ``with`` block.
        """
        self._engine.backward(self.scale(out))

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
            raise TypeError(f"auxiliary must be a floating tensor, got {describe(auxiliary)}")
        if auxiliary.numel() != 1:
            raise ValueError(f"auxiliary must be a scalar, got shape {tuple(auxiliary.shape)}")
        if self._window is None or self._window.declared is None:
            raise RuntimeError(
                "add_auxiliary needs a window with declared counts: use "
                "`with acc.window([count_valid(...) for each micro-batch])`. Streaming corrects "
                "all gradients by one factor in finish(), which would rescale the auxiliary loss."
            )
        self._window.auxiliary.append(auxiliary.reshape(()))
