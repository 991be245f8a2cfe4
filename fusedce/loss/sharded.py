"""The loss with a vocabulary that is sharded over ranks (tensor parallelism).

Column-parallel output layer and cross-entropy of Megatron-LM (arXiv:1909.08053, section 3), with
the logits of a chunk of tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.autograd import sharded
from fusedce.backends.choose import resolve_backend
from fusedce.backends.sharded.agreement import SUM, agree, check_vocab_size, on_the_way
from fusedce.backends.sharded.layout import groups_of, is_dtensor, layout_of
from fusedce.backends.sharded.tiles import Shard
from fusedce.contract.checks import (
    autocast,
    check_options,
    check_tensor_types,
    check_tensors,
    checked_temperature,
    flattened,
)
from fusedce.contract.explain import explains_names
from fusedce.contract.problem import Problem
from fusedce.contract.results import LossSum


def is_sharded(weight: object, process_group: object) -> bool:
    """Whether :func:`sharded_ce` is meant: a group was given, or the weight is a ``DTensor``."""
    return process_group is not None or is_dtensor(weight)


@explains_names
def sharded_ce(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V_local, H) with process_group, or a DTensor (V, H) with Shard(0)
    labels: Tensor,  # (...) int64 or int32
    *,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    bias: Tensor | None = None,  # (V_local,), or a DTensor (V,) with Shard(0)
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...) numbers or bool, no gradient
    chunk_tokens: int | None = None,
) -> LossSum:
    """:func:`fusedce.fused_ce` with the rows of ``weight`` spread over ranks; the same results.

    With ``z = logit_scale * (hidden @ weight.T + bias)`` over all ranks' rows, soft-capped where a
    cap is given, ``eps = label_smoothing`` and ``lse = logsumexp(z)``::

        loss_sum = sum over valid i of token_weight[i] * (lse[i]
            - (1 - eps) * z[i, labels[i]] - eps * mean(z[i]) + z_loss * lse[i]^2)

    Every rank returns the whole ``loss_sum`` and ``n_valid``, and receives its rows of the weight
    and bias gradients and the whole gradient of its ``hidden``: the loss counts once, not once per
    rank. A :class:`fusedce.LossAccumulator` must therefore not count these ranks
    (``from_mesh(mesh, ["dp"])``).

    A rank holds the logits of one chunk of tokens for its own rows, never ``(N, V_local)``.
    Deterministic; all ranks compute the same bits of the loss. Waits for the device once (on a mesh
    of more dimensions, once in each), to compare what the ranks hold and to cut the chunks.

    Collectives on the vocabulary's ranks, all in the forward pass, none in backward:

    * one all-gather of 69 int64: do all ranks hold the same tokens and options, how many rows has
      each, and has one found an error; for a weight that is replicated over other dimensions of its
      mesh, before it one on each of those, over which labels must be equal and hidden states
      within 1% of their norm;
    * per chunk, one all-gather of 3 float64 per token (4 with label smoothing): maximum, sum of
      exponentials, the label's logit, the sum of logits;
    * per chunk, where ``hidden`` requires grad, one all-reduce of its valid rows ``(C, H)`` in
      float32, which runs while the next chunk is computed;
    * with sharded tokens, one all-gather each of hidden, labels and token weights before, and a
      reduce-scatter of ``(N, H)`` in place of the all-reduces.

    Args:
        hidden: ``(..., H)``, the same on all ranks, or each rank's own tokens; a ``DTensor`` on the
            weight's mesh says by its placement which (``Replicate``, or ``Shard`` of a dimension
            other than the last).
        weight: ``(V_local, H)``, this rank's rows: class ``c`` is row ``c - (rows of lower
            ranks)``; shards may be unequal or empty. Or a ``DTensor (V, H)`` with placement
            ``Shard(0)``.
        labels: ``(...)``, as ``hidden``: all tokens' labels in ``[0, V)``, or this rank's.
        process_group: the ranks that hold the shards, a group or one-dimensional ``DeviceMesh``;
            for a ``DTensor`` it is known.
        tokens_sharded: for plain tensors, whether each rank passes its own tokens (sequence
            parallelism); their numbers may differ. ``loss_sum`` still covers all of them.
        vocab_size: classes, where the last rows are padding that must have no probability;
            ``None`` counts every row.
        bias: like ``weight``.
        ignore_index, softcap, logit_scale, chunk_tokens: as in :func:`fusedce.fused_ce`.
        label_smoothing: in ``[0, 1]``, spread evenly over the classes.
        z_loss: factor of ``lse^2`` (PaLM, arXiv:2204.02311).
        token_weight: ``(...)``, factor of each token's loss. Tokens of weight 0 are left out,
            whatever their hidden state holds; they still count in ``n_valid``.

    Returns:
        :class:`fusedce.LossSum`, equal on all ranks, in nats and tokens.

    Raises:
        TypeError, ValueError: as :func:`fusedce.fused_ce`; ranks disagree on tokens, labels or
            rows, or hold other tokens where the weight is replicated (on all ranks); a placement
            other than those above.

    Example:
        >>> # every rank; alone, it holds the whole vocabulary
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        >>> weight = distribute_tensor(torch.randn(11, 4), mesh, [Shard(0)]).requires_grad_()
        >>> hidden, labels = torch.randn(3, 4), torch.tensor([1, -100, 10])
        >>> sharded_ce(hidden, weight, labels).mean().backward()
        >>> weight.grad.placements
        (Shard(dim=0),)
    """
    problem = Problem(
        hidden,
        weight,
        labels,
        bias=bias,
        token_weight=token_weight,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        chunk_tokens=chunk_tokens,
        backend="torch",
    )
    return sharded.loss_sum(*met(problem, process_group, tokens_sharded, vocab_size))


def met(
    problem: Problem,
    process_group: Any,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    function: str = SUM,
) -> tuple[Problem, Shard]:
    """The problem of this rank, checked and flattened, after all ranks have compared theirs.

    Raises the same error on all ranks that share the vocabulary.
    """
    with on_the_way(groups_of(problem.weight, process_group), device_of(problem.labels)):
        check_tensor_types(problem)
        layout = layout_of(problem, process_group, tokens_sharded)
        problem = autocast(layout.problem)
        layout = layout._replace(problem=problem)
        if len(problem.weight):
            check_tensors(problem)
        else:  # a rank without rows
            row = problem.weight.new_empty(1, problem.weight.shape[-1])
            check_tensors(problem.but(weight=row, bias=None))
        resolve_backend(problem.backend, problem.hidden)
        c = problem.class_weight
        # Weights of all ranks' classes: how many there are is known once the ranks have met.
        check_options(problem.but(weight=c) if isinstance(c, Tensor) else problem)
        flat = flattened(problem.but(labels=problem.labels.long()))  # some ranks' may be int32
        if problem.temperature is not None:
            t = checked_temperature(problem.temperature, problem.hidden, flat.valid())
            flat = flat.but(temperature=t)
        check_vocab_size(vocab_size)
    shard = agree(layout, vocab_size, function)
    return flat, shard


def device_of(x: object) -> torch.device | None:
    return getattr(x, "device", None)
