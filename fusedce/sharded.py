"""The loss with a vocabulary that is sharded over ranks (tensor parallelism).

Column-parallel output layer and cross-entropy of Megatron-LM (arXiv:1909.08053, section 3), with
the logits of a chunk of tokens at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedce._ranks import Ranks
from fusedce.autograd import _scaled
from fusedce.backends.sharded import Options, Shard, Wanted, loss_and_grads
from fusedce.labels import _check_labels
from fusedce.loss import (
    LossSum,
    _autocast,
    _check_chunk_tokens,
    _check_logit_scale,
    _check_softcap,
    _check_tensors,
)


def sharded_ce(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V_local, H) with process_group, or a DTensor (V, H) with Shard(0)
    labels: Tensor,  # (...) int64 or int32
    *,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    bias: Tensor | None = None,  # (V_local,), or a DTensor (V,) with Shard(0)
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...) fp32, no gradient
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
    Deterministic; all ranks compute the same bits of the loss.

    Collectives on the vocabulary's ranks, all in the forward pass, none in backward:

    * one all-gather of 5 int64: do all ranks hold the same tokens, and how many rows each;
    * per chunk, one all-gather of 3 float64 per token (4 with label smoothing): maximum, sum of
      exponentials, the label's logit, the sum of logits;
    * where ``hidden`` requires grad, one all-reduce of ``(N_valid, H)`` in float32;
    * with sharded tokens, one all-gather each of hidden, labels and token weights before, and a
      reduce-scatter of ``(N, H)`` in place of the all-reduce.

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
        token_weight: ``(...)``, factor of each token's loss. ``n_valid`` does not depend on it.

    Returns:
        :class:`fusedce.LossSum`, equal on all ranks, in nats and tokens.

    Raises:
        TypeError, ValueError: as :func:`fusedce.fused_ce`; ranks disagree on tokens, labels or
            rows (on all ranks); a placement other than those above.

    Example:
        >>> # 2 ranks, V = 11: rank 0 holds rows 0 to 5, rank 1 rows 6 to 10
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> weight = distribute_tensor(torch.randn(11, 4), mesh, [Shard(0)]).requires_grad_()
        >>> sharded_ce(hidden, weight, labels).mean().backward()
        >>> weight.grad.placements
        (Shard(dim=0),)
    """
    layout = _layout(hidden, weight, labels, bias, token_weight, process_group, tokens_sharded)
    _check_labels(layout.labels)
    h, w, b = _autocast(layout.hidden, layout.weight, layout.bias)
    if len(w):
        _check_tensors(h, w, layout.labels, b)
    else:  # a rank without rows
        _check_tensors(h, w.new_empty(1, w.shape[-1]), layout.labels, None)
    options = Options(
        ignore_index=ignore_index,
        softcap=_check_softcap(softcap),
        logit_scale=_check_logit_scale(logit_scale),
        label_smoothing=_check_number("label_smoothing", label_smoothing, most=1.0),
        z_loss=_check_number("z_loss", z_loss),
        chunk_tokens=chunk_tokens,
    )
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    _check_chunk_tokens(chunk_tokens)
    weights = layout.token_weight
    if weights is not None and weights.shape != layout.labels.shape:
        raise ValueError(
            f"token_weight must have the shape of labels {tuple(layout.labels.shape)}, "
            f"got {tuple(weights.shape)}"
        )
    shard = _agree(layout, vocab_size)
    loss_sum, n_valid = _ShardedCE.apply(
        h.reshape(-1, h.shape[-1]),
        w,
        b,
        layout.labels.reshape(-1),
        None if weights is None else weights.reshape(-1).detach(),
        shard,
        options,
        torch.is_grad_enabled(),
    )
    return LossSum(loss_sum, n_valid)


class _Layout(NamedTuple):
    """Local tensors, and who holds the rest of the vocabulary."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    token_weight: Tensor | None
    group: dist.ProcessGroup
    tokens_sharded: bool


def _layout(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    process_group: Any,
    tokens_sharded: bool,
) -> _Layout:
    tensors = {"hidden": hidden, "weight": weight, "labels": labels}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not is_dtensor(weight):
        group = Ranks(process_group).group()
        if group is None:
            raise ValueError("process_group: torch.distributed must be initialised, it is not")
        return _Layout(hidden, weight, labels, bias, token_weight, group, tokens_sharded)
    if process_group is not None:
        raise ValueError("process_group is for a local shard; a DTensor weight knows its ranks")
    whole: Any = weight
    mesh, dim = whole.device_mesh, shard_dim("weight", whole)
    group = mesh.get_group(dim)

    def local(name: str, x: Any) -> Any:
        if x is None or not is_dtensor(x):
            return x
        if x.device_mesh != mesh:
            raise ValueError(f"{name} must be on the mesh of weight {mesh}, got {x.device_mesh}")
        return x.to_local()

    if bias is not None and (not is_dtensor(bias) or shard_dim("bias", bias) != dim):
        raise ValueError("bias must be a DTensor sharded like weight")
    if is_dtensor(hidden):
        tokens_sharded = _tokens_sharded(hidden, dim)
    return _Layout(
        local("hidden", hidden),
        whole.to_local(),
        local("labels", labels),
        local("bias", bias),
        local("token_weight", token_weight),
        group,
        tokens_sharded,
    )


def is_dtensor(x: object) -> bool:
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def shard_dim(name: str, x: Any) -> int:
    """The mesh dimension over which ``x`` has ``Shard(0)``, all others replicated.

    Raises:
        ValueError: it is placed in another way.
    """
    sharded = [i for i, p in enumerate(x.placements) if not p.is_replicate()]
    if len(sharded) != 1 or not x.placements[sharded[0]].is_shard(0):
        raise ValueError(
            f"{name} must have Shard(0) over one dimension of its mesh and Replicate() over the "
            f"others, got {x.placements}"
        )
    return sharded[0]


def _tokens_sharded(hidden: Any, dim: int) -> bool:
    for i, placement in enumerate(hidden.placements):
        tokens = placement.is_shard() and placement.dim % hidden.ndim != hidden.ndim - 1
        if not placement.is_replicate() and not (i == dim and tokens):
            raise ValueError(
                f"hidden must be replicated, or sharded over tokens on the weight's mesh "
                f"dimension, got {hidden.placements}"
            )
    return not hidden.placements[dim].is_replicate()


def _agree(layout: _Layout, vocab_size: int | None) -> Shard:
    """What ranks must know of each other; raises on all of them where they do not fit."""
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int)):
        raise TypeError(f"vocab_size must be an int or None, got {type(vocab_size).__name__}")
    labels = layout.labels.reshape(-1).long()
    order = torch.arange(1, len(labels) + 1, device=labels.device)
    checksum = (labels * (2 * order + 1)).sum()  # wraps around: depends on values and order
    mine = torch.tensor(
        [len(layout.weight), len(labels), layout.hidden.shape[-1], vocab_size or 0],
        device=labels.device,
    )
    ranks = dist.get_world_size(layout.group)
    told = mine.new_empty(ranks, 5)
    dist.all_gather_into_tensor(
        told.view(-1), torch.cat([mine, checksum[None]]), group=layout.group
    )
    rows, tokens, H, V, checksums = (list(x) for x in zip(*told.tolist(), strict=True))
    if len(set(H)) > 1 or len(set(V)) > 1:
        raise ValueError(f"ranks must agree on H and vocab_size, got H={H}, vocab_size={V}")
    if not layout.tokens_sharded and (len(set(tokens)) > 1 or len(set(checksums)) > 1):
        raise ValueError(
            f"labels must be the same on all ranks that share the vocabulary, they hold {tokens} "
            f"tokens with different labels. (A weight sharded by FSDP is no sharded vocabulary: "
            f"compute the loss inside the module's forward, where it is whole. Tokens that differ "
            f"by design need tokens_sharded=True.)"
        )
    if vocab_size is not None and not 0 < vocab_size <= sum(rows):
        raise ValueError(f"vocab_size must be 1 to {sum(rows)} (all rows), got {vocab_size}")
    return Shard(
        group=layout.group,
        first=sum(rows[: dist.get_rank(layout.group)]),
        V=vocab_size or sum(rows),
        largest=max(rows),
        tokens=tuple(tokens) if layout.tokens_sharded else None,
    )


def _check_number(name: str, value: float, most: float = float("inf")) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (0 <= value <= most and value < float("inf")):
        raise ValueError(f"{name} must be in [0, {most}], got {value}")
    return float(value)


class _ShardedCE(torch.autograd.Function):
    """Gradients of the sum are computed in forward; backward multiplies them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        token_weight: Tensor | None,
        shard: Shard,
        options: Options,
        grad: bool,
    ) -> tuple[Tensor, Tensor]:
        wanted = Wanted(*(grad and needed for needed in ctx.needs_input_grad[:3]))
        with torch.autocast(hidden.device.type, enabled=False):
            loss_sum, n_valid, grads = loss_and_grads(
                hidden, weight, labels, bias, token_weight, shard, options, wanted
            )
        ctx.save_for_backward(*grads)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(n_valid)
        return loss_sum, n_valid

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        grads = (
            None if grad is None else _scaled(grad, grad_loss).to(ctx.dtype)
            for grad in ctx.saved_tensors
        )
        return (*grads, None, None, None, None, None)
