"""The public loss ``fused_ce``: checks, then one call of the layer below."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..autograd import dispatch
from ..contract.checks import check_argmax_out
from ..contract.groups import local_of
from ..contract.problem import Outputs, Problem, Task
from ..contract.results import MONITORS, LossSum, MonitoredLossSum
from ..ranks.agreement import SUM
from ..ranks.door import prepared


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
    ``softcap * tanh(z / softcap)`` where a cap is given, in nats::

        loss_sum = sum over positions i with labels[i] != ignore_index of
                   token_weight[i] * (CE[i] + z_loss * logsumexp(z[i])**2)
        CE[i]    = (1 - label_smoothing) * nll[i, labels[i]] + label_smoothing * mean(nll[i])
        nll[i]   = logsumexp(z[i]) - z[i]

    Position ``i`` predicts ``labels[i]``: see :func:`shift_labels`. The sum is not normalised:
    divide by the number of valid tokens of the whole optimizer step (:class:`LossAccumulator`), or
    call ``.mean()`` where one batch is the whole step.

    Examples:
        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)
        >>> weight = torch.randn(100, 16, requires_grad=True)
        >>> labels = torch.randint(100, (2, 5))
        >>> loss_sum, n_valid = fused_ce(hidden, weight, labels)
        >>> fused_ce(hidden, weight, labels).mean().backward()

    Args:
        hidden, weight, bias: ``(..., H)``, ``(V, H)``, ``(V,)``: float32, bfloat16, float16, or
            float64 (torch backend). If dtypes differ, all are cast to the widest, under autocast
            to that of ``F.linear``; each gradient has the dtype of its own argument.
        labels: ``(...)`` class indices in ``[0, V)``, or ``ignore_index``.
        ignore_index: the label of positions that do not count; ``None``: all of them count.
        softcap: positive cap on the size of a logit, or ``None`` (Gemma 2, arXiv:2408.00118).
        logit_scale: finite factor on the logits, their bias included.
        label_smoothing: share of the target spread evenly over the V classes, in [0, 1].
        z_loss: finite weight of the squared log-sum-exp (PaLM, arXiv:2204.02311).
        token_weight: ``(...)``, a mask or numbers of any dtype and sign, without gradient: a factor
            on each token's loss. Tokens of weight 0 count in ``n_valid``, and cost no time.
        chunk_tokens: positions whose logits are held at a time in training; ``None`` chooses.
        memory_budget: bytes that the call may hold beside its inputs and their gradients, not
            together with ``chunk_tokens``. ``None``: the environment variable
            ``FUSEDCE_MEMORY_BUDGET``; without that, on a GPU the logits of a quarter of the
            positions or of 2,048, whichever is more (at 8,192 positions of Llama 3 8B 0.7 GiB in
            all; Liger-Kernel holds 62 MiB and cut-cross-entropy 2 MiB there, in more time), on a
            CPU 56 MiB. A large number takes all logits at once, the fastest way; a small one a
            fourth product.
        backend: ``"triton"``, ``"torch"``, or ``None``: Triton on a GPU if 16 divides H.
        process_group: the ranks among which the rows of ``weight`` are split, where it is a local
            shard; a ``DTensor`` with ``Shard(0)`` says so by itself. See :mod:`fusedce.sharded`.
        tokens_sharded: whether each of these ranks passes its own tokens.
        vocab_size: classes of a sharded vocabulary whose last rows are padding.
        argmax_out: ``(...)`` int64, filled with the likeliest class of each valid token of weight
            other than 0 and with -1 elsewhere, in the same pass.
        monitor: names out of ``("correct", "entropy", "z_loss")``: sums over the tokens, without
            gradient, in ``.monitors`` of the result, a :class:`MonitoredLossSum`.

    Returns:
        :class:`LossSum`, a tuple ``(loss_sum, n_valid)`` in nats and tokens. ``loss_sum`` is
        differentiable, once, in ``hidden``, ``weight`` and ``bias``.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: shapes or devices do not match, a number is out of its range, the budget is too
            small (the message says the least), or, on a CPU, a label is out of range.
        RuntimeError: the requested backend cannot run here, or ``create_graph=True``.

    Note:
        Products have the inputs' dtype and accumulate in float32; all else is float32 or better.
        Deterministic. Gradients are computed in the forward pass, chunk by chunk, three products of
        the head's size in all, so later writes into ``weight`` do not change them. With "entropy"
        or "z_loss" monitored, a small budget, a sharded vocabulary, or label smoothing where a
        chunk is not held in float32, the logits are computed twice, a fourth product.

        With no valid label ``loss_sum`` and all gradients are 0; the graph is still there. The
        hidden state of an ignored position is never read. A valid position whose logits hold NaN or
        +inf makes the sum NaN or inf, and so does a label out of range on a GPU.
    """
    problem = Problem(
        hidden, weight, labels, bias=bias, token_weight=token_weight, ignore_index=ignore_index,
        softcap=softcap, logit_scale=logit_scale, label_smoothing=label_smoothing, z_loss=z_loss,
        chunk_tokens=chunk_tokens, memory_budget=memory_budget, backend=backend,
    )  # fmt: skip

    def check(given: Problem) -> dict[str, Any]:
        check_outputs(monitor, local_of(argmax_out), given.labels)
        beside = [*sorted(monitor), *["argmax_out"][: argmax_out is not None]]
        return {"monitor": ", ".join(beside)}

    sharding = process_group, tokens_sharded, vocab_size
    loss_alone = type(monitor) is tuple and not monitor and argmax_out is None
    problem, vocabulary = prepared(problem, sharding, SUM, None if loss_alone else check)
    wanted = Outputs(
        argmax=argmax_out is not None or "correct" in monitor,
        entropy="entropy" in monitor,
        lse="z_loss" in monitor,
    )
    out, values = dispatch.loss_sum(Task(problem, wanted), vocabulary.stats_of)
    if monitor:
        out = MonitoredLossSum.of(out, monitored_sums(problem, monitor, values))
    if argmax_out is not None:
        argmax, own = values["argmax"], local_of(argmax_out)
        (argmax,) = vocabulary.tokens.own(argmax)
        own.copy_(argmax.view(own.shape))  # last, since it may be the memory of labels
    return out


def check_outputs(
    monitor: Collection[str],
    argmax_out: Tensor | None,
    labels: Tensor,
    known: tuple[str, ...] = MONITORS,
) -> None:
    """Check the arguments that ask for more than the loss; of this rank's tensors."""
    if isinstance(monitor, (str, Tensor)) or not isinstance(monitor, Collection):
        raise TypeError(f"monitor must be a tuple of names out of {known}, got {monitor!r}")
    for name in monitor:
        if name not in known:
            raise ValueError(f"monitor must hold names out of {known}, got {name!r}")
    if argmax_out is not None:
        check_argmax_out(argmax_out, labels)


def monitored_sums(
    problem: Problem, monitor: Collection[str], of: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Monitored sums over all tokens, by name: ``()`` float64.

    Tokens without loss have -1 in ``argmax``, and 0 in ``lse`` and ``entropy``.
    """
    found = {}
    if "correct" in monitor:
        found["correct"] = ((of["argmax"] == problem.labels) & problem.valid()).sum().double()
    if "entropy" in monitor:
        found["entropy"] = of["entropy"].sum(dtype=torch.float64)
    if "z_loss" in monitor:
        z = problem.z_loss * of["lse"].double().square()
        if problem.token_weight is not None:
            z = z * problem.token_weight
        found["z_loss"] = z.masked_fill(~problem.valid(), 0).sum()
    return found
