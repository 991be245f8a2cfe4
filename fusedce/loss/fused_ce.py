"""The public loss and its contract: checks, then one call of the layer below."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from fusedce.autograd import dispatch
from fusedce.autograd.sums import SumWithGrads as SumWithGrads
from fusedce.backends.shards.agreement import SUM
from fusedce.contract.checks import check_argmax_out
from fusedce.contract.explain import explains_names
from fusedce.contract.groups import local_of
from fusedce.contract.monitors import MonitoredLossSum, check_monitor, sums, wanted_for
from fusedce.contract.problem import Problem
from fusedce.contract.results import LossSum
from fusedce.contract.task import Shard, Task
from fusedce.loss.sharded_problem import ready

ce_with_grads = dispatch.sum_with_grads  # for a caller with an autograd node of its own


@explains_names
def fused_ce(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) floats
    labels: Tensor,  # (...) int64 or int32
    *,
    bias: Tensor | None = None,  # (V,) floats
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...) numbers or bool
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    argmax_out: Tensor | None = None,  # (...) int64
    monitor: Collection[str] = (),
) -> LossSum:
    """Linear layer and cross-entropy in one operation, without the ``(N, V)`` logits.

    With ``z = logit_scale * (hidden @ weight.T + bias)``, soft-capped to
    ``softcap * tanh(z / softcap)`` where a cap is given (Gemma 2, arXiv:2408.00118)::

        loss_sum = sum over positions i with labels[i] != ignore_index of
                   token_weight[i] * (CE[i] + z_loss * logsumexp(z[i])**2)
        CE[i]    = (1 - label_smoothing) * nll[i, labels[i]] + label_smoothing * mean(nll[i])
        nll[i]   = logsumexp(z[i]) - z[i]

    Labels are already aligned: position ``i`` predicts ``labels[i]`` (:func:`shift_labels`).
    The sum is not normalised: divide by the number of valid tokens of the whole optimizer step
    (:class:`LossAccumulator`), or call ``.mean()`` where one batch is the whole step.

    Examples:
        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)
        >>> weight = torch.randn(100, 16, requires_grad=True)
        >>> labels = torch.randint(100, (2, 5))
        >>> loss_sum, n_valid = fused_ce(hidden, weight, labels)
        >>> fused_ce(hidden, weight, labels).mean().backward()

    Args:
        hidden: ``(..., H)``, float32, bfloat16, float16, or float64 (torch backend).
        weight: ``(V, H)``, device of ``hidden``; of its dtype, or see the note.
        labels: ``(...)``, int64 or int32: class indices in ``[0, V)``, or ``ignore_index``.
        bias: ``(V,)``, the same.
        ignore_index: the label of positions that do not count; ``None``: all of them count.
        softcap: positive cap on the size of a logit, or ``None``.
        logit_scale: finite factor on the logits (their bias included).
        label_smoothing: share of the target spread evenly over the V classes, in [0, 1]; it
            costs a fourth product of the head's size.
        z_loss: finite weight of the squared log-sum-exp (PaLM, arXiv:2204.02311).
        token_weight: ``(...)``, a mask (bool), integers or floats of any dtype, without gradient: a
            factor on each token's loss, any sign, taken in float32 or better. Tokens of weight 0
            are left out, whatever their hidden state holds, and cost no time. They still count in
            ``n_valid``.
        chunk_tokens: positions whose logits are held at a time in training; ``None`` chooses the
            fastest (about 56 MiB of logits on a CPU, 1 GiB elsewhere).
        memory_budget: bytes that the call may hold beside its inputs and their gradients, at least
            about ``4 * N * H`` in bfloat16. The fastest way that fits is taken: one chunk, chunks
            with a float32 sum of the weight gradient, or tiles of the vocabulary, which take four
            products of the head's size instead of three. ``None``: the environment variable
            ``FUSEDCE_MEMORY_BUDGET``, else no limit. Not together with ``chunk_tokens``.
        backend: ``"triton"``, ``"torch"``, or ``None``: Triton for CUDA, ROCm and XPU tensors, the
            chunked torch implementation for all others.
        process_group: the ranks over which the rows of ``weight`` are spread, where it is a local
            shard ``(V_local, H)``; a ``DTensor`` weight with ``Shard(0)`` says so by itself. Same
            results, and what each rank holds and sends: :mod:`fusedce.sharded`.
        tokens_sharded: beside a local shard, whether each rank passes its own tokens (sequence
            parallelism). The sums cover all of them; ``argmax_out`` is this rank's.
        vocab_size: classes of a sharded vocabulary, where the last rows are padding that must have
            no probability; ``None`` counts every row.
        argmax_out: ``(...)`` int64, filled with the likeliest class of each valid token of weight
            other than 0 and with -1 elsewhere, in the same pass.
        monitor: names out of ``("correct", "entropy", "z_loss")``: sums over the tokens, without
            gradient, in ``.monitors`` of the result, which is a :class:`MonitoredLossSum` then.
            "correct" is free of cost; with the other two a training step computes the logits a
            second time in backward, a fourth product of the head's size.

    Returns:
        :class:`LossSum`, a tuple ``(loss_sum, n_valid)`` in nats and tokens. ``loss_sum`` is
        differentiable in ``hidden``, ``weight`` and ``bias``.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: shapes or devices do not match, a number is out of its range, the backend is
            unknown, ``memory_budget`` is too small (the message says the least), or (CPU tensors) a
            label is out of range: the message names the first one.
        RuntimeError: the requested backend cannot run here, or ``loss_sum`` is differentiated
            twice (``create_graph=True``).

    Note:
        Products are taken in the inputs' dtype with float32 accumulation; log-sum-exp, loss and
        sums are float32 or better; the weight gradient accumulates in float32. Where an input
        requires grad, its gradient is computed in the forward pass, chunk by chunk, for the inputs
        that require one; with label smoothing, and over a vocabulary that is sharded on a CPU, in
        backward, and inputs must stay as they are until then. Under ``torch.no_grad()`` nothing is
        kept. Deterministic. The gradient itself is not differentiable again. Under autocast, inputs
        are cast as ``F.linear`` casts them. Elsewhere tensors of several dtypes are cast to the
        widest (`torch.promote_types`): a bfloat16 head of float32 hidden states is computed in
        float32, beside a copy of it. Each
        gradient comes in the dtype of its own argument. Elsewhere writing into ``weight`` between
        forward and backward does not change the gradients; eager torch raises an error there if
        ``hidden`` requires grad.

        With no valid label ``loss_sum`` is 0, and so are all gradients; the graph is still there.
        The hidden state of an ignored position is never read. A valid position whose logits hold
        NaN or +inf makes the sum NaN or inf.
    """
    problem = Problem(
        hidden, weight, labels, bias=bias, token_weight=token_weight, ignore_index=ignore_index,
        softcap=softcap, logit_scale=logit_scale, label_smoothing=label_smoothing, z_loss=z_loss,
        chunk_tokens=chunk_tokens, memory_budget=memory_budget, backend=backend,
    )  # fmt: skip
    return ce_as_given(problem, process_group, argmax_out, monitor, vocab_size, tokens_sharded)


def checked_ce(
    problem: Problem,
    monitor: Collection[str] = (),
    argmax_out: Tensor | None = None,
    shard: Shard | None = None,
) -> LossSum:
    """:func:`fused_ce` of arguments that are checked, cast and flattened."""
    wanted = wanted_for(monitor, argmax=argmax_out is not None)
    out, values = dispatch.loss_sum(Task(problem, wanted, shard=shard))
    if monitor:
        found = sums(problem, monitor, *values)
        if shard is not None:
            total = dispatch.over_ranks(torch.stack(list(found.values())), shard)
            found = dict(zip(found, total.unbind(), strict=True))
        out = MonitoredLossSum.of(out, found)
    if argmax_out is not None and values.argmax is not None:
        # now that labels, whose memory it may be, were read
        argmax_out.copy_(values.argmax.view(argmax_out.shape))
    return out


def ce_as_given(
    problem: Problem,
    process_group: Any = None,
    argmax_out: Tensor | None = None,
    monitor: Collection[str] = (),
    vocab_size: int | None = None,
    tokens_sharded: bool = False,
) -> LossSum:
    """:func:`fused_ce` of arguments as they were given, of a whole vocabulary too."""

    def check(given: Problem) -> tuple[Problem, dict[str, Any]]:
        check_monitor(monitor)
        beside = sorted(monitor)
        if argmax_out is not None:
            check_argmax_out(local_of(argmax_out), given.but(labels=local_of(given.labels)))
            beside.append("argmax_out")
        return given, {"monitor": ", ".join(beside)}

    placed = process_group, tokens_sharded, vocab_size
    problem, shard = ready(problem, placed, SUM, check)
    return checked_ce(problem, monitor, local_of(argmax_out), shard)
