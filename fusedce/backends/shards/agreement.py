"""Placement of vocabulary and tokens on the ranks, and the exchange that compares it.

The placement is read from DTensors or groups (:func:`layout_of`). One all-gather then compares the
ranks' arguments and tokens, and finds each rank's rows of the vocabulary (:func:`agree`).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.agreement import (
    GUARDS,
    TEXT,
    Told,
    device_for,
    differing,
    failure_of,
    row,
    send,
    words_of,
)
from fusedce.backends.gradients import memory_of
from fusedce.backends.plan import device_budget
from fusedce.backends.shards.collectives import waiting_for_ranks
from fusedce.contract.groups import Ranks, is_dtensor, name_of
from fusedce.contract.objective import folded
from fusedce.contract.problem import NUMBERS, Problem
from fusedce.contract.task import Shard

FUNCTIONS = SUM, LOSSES, STATISTICS, MEAN_LOGIT, ARGMAX, TOPK, DIVERGENCE = (
    "a sum of losses",
    "losses of tokens",
    "statistics of tokens",
    "statistics of tokens with mean_logit",
    "likeliest classes",
    "the k likeliest classes",
    "a divergence",
)
# A rank sends the number of its rows of the vocabulary, of its tokens, of those that are computed
# and of those that are valid; its bytes for a chunk's logits; checksums of labels, weights and
# temperatures; and a sketch of its hidden states.
_ROWS, _TOKENS, _COUNTED, _VALID, _BUDGET, _LABELS, _WEIGHTS, _TEMPERATURES, _SKETCH = range(9)
LENGTH = TEXT + _SKETCH + 9  # under 128 int64, the 1 KiB of which docstrings speak
_FIRST, _STEP = 0x2127599BF4325C37, 0x1_2DE6_BB58  # weights of a checksum: odd, even
_NOISE = 0.01  # share of their norm by which replicas' hidden states may differ, from rounding


def _settings(problem: Problem, **asked: Any) -> dict[str, Any]:
    """Settings that ranks must share: options of the loss, and what decides the collectives."""
    c = problem.class_weight
    grad = torch.is_grad_enabled()
    settings = {
        **{
            name: getattr(problem, name)
            for name in ("ignore_index", "chunk_tokens", "memory_budget", *NUMBERS)
        },
        **{
            name: getattr(problem, name) is not None
            for name in ("bias", "token_weight", "temperature")
        },
        "hidden.dtype": str(problem.hidden.dtype),
        "hidden.requires_grad": grad and problem.hidden.requires_grad,
        # The shape beside the checksum, so that no rank alone raises for its shape.
        "class_weight": None if c is None else f"{[*c.shape]}, checksum {_checksum(c.double())}",
        **asked,
        "backend": problem.backend,
        "weight.requires_grad": grad
        and any(x is not None and x.requires_grad for x in (problem.weight, problem.bias)),
        "H": problem.hidden.shape[-1],
    }
    return {name: x for name, x in settings.items() if x is not None}


def _checksum(x: Tensor, out: Tensor | None = None) -> Tensor:
    """``()`` int64 of ``x (n,)`` int64 or float64: depends on values and order, wraps around.

    It is a weighted sum, in three launches. The weights are large, so that no few small labels that
    differ have the same sum, as ``[a, b]`` and ``[a + 5, b - 3]`` have with weights 3 and 5; they
    are odd, so that each bit of each element counts.
    """
    x = x.view(torch.int64).reshape(-1)
    weights = torch.arange(_FIRST, _FIRST + _STEP * len(x), _STEP, device=x.device)
    return torch.sum(x * weights, 0, out=out)


@contextlib.contextmanager
def tell_peers_on_error(
    groups: list[dist.ProcessGroup], device: torch.device | None
) -> Iterator[None]:
    """Send an error to the ranks of ``groups``, which receive it in :func:`agree`."""
    try:
        yield
    except Exception as error:
        if not groups:
            raise
        if device is None or device.type == "cpu":  # wrong labels may lie where NCCL sends nothing
            device = device_for(groups[-1], torch.device("cpu"))
        nothing = torch.zeros(LENGTH - TEXT, dtype=torch.int64, device=device)
        _meet(row(words_of(error), nothing), groups)


def _meet(mine: Tensor, groups: list[dist.ProcessGroup]) -> list[Told]:
    """Gather what the ranks that share the vocabulary hold: one all-gather in each of ``groups``.

    Every rank takes part in all of them, a rank with an error too: so the error passes from one
    dimension of the mesh to the next, and all ranks raise it.
    """
    error: Exception | None = None
    for group in groups:
        with waiting_for_ranks(group):
            table, work = send(mine, group)
            work.wait()
        told = table.read()
        words = next((one.error for one in told if one.error), "")
        if not words and group is not groups[-1]:
            words = _other_tokens(told)
        if words:
            mine = row(words, 0 * mine[TEXT:])
        error = failure_of(told)
    if error is not None:
        raise error
    return told


def _other_tokens(told: list[Told]) -> str:
    """An error's words, if ranks differ over which the weight is replicated."""
    what = "labels" if len({one.numbers[_LABELS] for one in told}) > 1 else ""
    what = what or ("hidden states" if _hidden_differs(told) else "")
    return what and (
        f"ValueError: weight is replicated over a dimension of its mesh over which the {what} "
        f"differ: its gradient would claim to be the same there, and differ. Put the weight on the "
        f'vocabulary\'s dimension alone (mesh["tp"]), and let DDP or FSDP reduce over the other'
    )


def _hidden_differs(told: list[Told]) -> bool:
    """Whether the hidden states of two ranks that have sent sketches differ beyond rounding."""
    sketches = [struct.unpack("9d", struct.pack("9q", *one.numbers[_SKETCH:])) for one in told]
    first, *others = [x for x in sketches if x[0] > 0] or sketches[:1]
    return any(
        sum((a - b) ** 2 for a, b in zip(first[1:], other[1:], strict=True))
        > _NOISE**2 * max(first[0], other[0])
        for other in others
    )


def _sketch(problem: Problem) -> Tensor:
    """``(9,)`` float64 that tell how far apart two ranks' hidden states are.

    The squared norm, and eight sums with random signs (Alon, Matias and Szegedy 1996): the squared
    distance of two ranks' sums is about that of what they sum. Ignored positions are no part of it.
    """
    hidden = problem.hidden.detach().reshape(-1, problem.hidden.shape[-1])
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    wide = wide.masked_fill(~_valid(problem)[:, None], 0)
    eight = torch.arange(8, device=wide.device)
    rows = torch.arange(len(wide), device=wide.device)[:, None]
    columns = torch.arange(wide.shape[1], device=wide.device)
    sums = _signs(rows * 8 + eight).to(wide).t() @ wide  # (8, H)
    sums = (sums.double() * _signs(columns + eight[:, None] * len(columns))).sum(1)
    return torch.cat([wide.square().sum(dtype=torch.float64)[None], sums])


def _valid(problem: Problem) -> Tensor:
    """``(N,)`` bool: tokens with a label to predict, or with several classes one of them."""
    N = problem.hidden.shape[:-1].numel()
    labels = problem.labels.reshape(N, -1 if N else 1)
    if problem.ignore_index is None:
        return torch.ones_like(labels[:, 0], dtype=torch.bool)
    valid = labels != problem.ignore_index
    return valid[:, 0] if labels.shape[1] == 1 else valid.any(1)


def _signs(i: Tensor) -> Tensor:
    """1 or -1 for each number below 2**32, the same on every rank, without a pattern."""
    for _ in range(2):  # mix bits as a hash does, where a product alone alternates
        i = ((i ^ (i >> 16)) + 1) * 0x45D9F3B & 0xFFFFFFFF
    return 1 - 2 * ((i >> 16) & 1)


def agree(
    problem: Problem,  # of local tensors
    groups: list[dist.ProcessGroup],  # as :func:`groups_of`, the vocabulary's last
    *,
    tokens_sharded: bool,
    vocab_size: int | None,
    **asked: Any,
) -> Shard:
    """Compare the ranks' settings and tokens, and find each rank's rows of the vocabulary.

    ``asked``: further settings that must be equal; a ``function`` of `FUNCTIONS`, and the names of
    what is asked for beside the loss as ``monitor``, decide on the others.

    Collectives: one all-gather of under 1 KiB on each of ``groups``.

    Raises:
        TypeError, ValueError, RuntimeError: the ranks do not fit, or one of them has raised; the
            same on all of them.
    """
    group = groups[-1]
    labels = problem.labels.reshape(-1).long()
    valid = _valid(problem)
    N = len(valid)
    weights, temperatures = (
        None if x is None else torch.where(valid, x.detach().reshape(-1).double(), 0)
        for x in (problem.token_weight, problem.temperature)
    )
    # Tokens of weight 0 are left out; a class weight counts as its tokens' weight.
    c = problem.class_weight
    if c is not None and (asked["function"] == DIVERGENCE or c.dim() != 1 or not len(c)):
        c = None  # a factor of probabilities, or an error below
    flat = problem.but(labels=labels, token_weight=weights, class_weight=c)
    w = folded(flat).token_weight
    counted = valid if w is None else valid & (w != 0)
    mine = torch.zeros(LENGTH - TEXT, dtype=torch.int64, device="cpu")
    mine[_ROWS], mine[_TOKENS] = len(problem.weight), N
    mine[_BUDGET] = device_budget(memory_of(labels.device))
    mine = mine.to(labels.device, non_blocking=True)
    torch.sum(valid, 0, out=mine[_VALID])
    torch.sum(counted, 0, out=mine[_COUNTED])
    checked = {_LABELS: labels, _WEIGHTS: weights, _TEMPERATURES: temperatures}
    for at, x in checked.items():
        if x is not None:
            _checksum(x, out=mine[at])
    if len(groups) > 1 or (GUARDS and not tokens_sharded):
        mine[_SKETCH:] = _sketch(problem).view(torch.int64)
    both = {"tokens_sharded": tokens_sharded, "vocab_size": vocab_size}
    settings = _settings(problem, **asked, **both)
    with tell_peers_on_error(groups, labels.device):
        mine = row(settings, mine)
    told = _meet(mine, groups)
    if (differ := differing(told)) is not None:
        name, said = differ
        if name in ("softcap", "logit_scale") and asked["function"].startswith(STATISTICS):
            name = f"{name} / temperature"
        raise ValueError(
            f"{name} must be the same on all ranks that share the vocabulary, here it is {said}"
        )
    rows, tokens, counts, valids, budgets, *checksums = zip(
        *(one.numbers[:_SKETCH] for one in told), strict=True
    )
    if not tokens_sharded:
        if len({*tokens}) > 1 or len({*checksums[0]}) > 1:
            raise ValueError(
                f"labels must be the same on all ranks that share the vocabulary, they hold "
                f"{list(tokens)} tokens with different labels. (A weight sharded by FSDP is no "
                f"sharded vocabulary: compute the loss inside the module's forward, where it is "
                f"whole. Tokens that differ by design need tokens_sharded=True.)"
            )
        for name, checksum in zip(("token_weight", "temperature"), checksums[1:], strict=True):
            if len({*checksum}) > 1:
                raise ValueError(
                    f"{name} must be the same on all ranks that share the vocabulary, here their "
                    f"values differ"
                )
        if _hidden_differs(told):
            raise ValueError(
                "hidden must be the same on all ranks that share the vocabulary, here the hidden "
                "states differ beyond rounding: gather what sequence parallelism has divided, and "
                "give dropout the same seed on these ranks"
            )
    if vocab_size is not None and not 0 < vocab_size <= sum(rows):
        raise ValueError(f"vocab_size must be 1 to {sum(rows)} (all rows), got {vocab_size}")
    classes = vocab_size or sum(rows)
    if problem.class_weight is not None and problem.class_weight.shape != (classes,):
        raise ValueError(
            f"class_weight must be (V,) = ({classes},), the weights of all ranks' classes, got "
            f"{tuple(problem.class_weight.shape)}"
        )
    return Shard(
        name=name_of(group),
        first=sum(rows[: dist.get_rank(group)]),
        V=classes,
        largest=max(rows),
        tokens=tokens if tokens_sharded else None,
        counted=sum(counts) if tokens_sharded else counts[0],
        valid=sum(valids) if tokens_sharded else valids[0],
        budget=min(budgets),
    )


def layout_of(
    problem: Problem, process_group: Any, tokens_sharded: bool
) -> tuple[Problem, list[dist.ProcessGroup], bool]:
    """The problem of local tensors, :func:`groups_of` it, and whether tokens are sharded.

    They are read from its DTensors, or from the group that was given.

    Raises:
        ValueError: a placement or group that does not describe a sharded vocabulary.
    """
    weight: Any = problem.weight
    if not is_dtensor(weight):
        groups = groups_of(weight, process_group)
        if not groups:
            raise ValueError("process_group: torch.distributed must be initialised, it is not")
        return problem, groups, tokens_sharded
    if process_group is not None:
        raise ValueError("process_group is for a local shard; a DTensor weight knows its ranks")
    mesh, dim = weight.device_mesh, shard_dim("weight", weight)
    bias = problem.bias
    if bias is not None and (not is_dtensor(bias) or shard_dim("bias", bias) != dim):
        raise ValueError("bias must be a DTensor sharded like weight")
    if is_dtensor(problem.hidden):
        tokens_sharded = _tokens_sharded(problem.hidden, dim)
    local: dict[str, Any] = {}
    for name, x in problem._asdict().items():
        if is_dtensor(x):
            if x.device_mesh != mesh:
                raise ValueError(
                    f"{name} must be on the mesh of weight {mesh}, got {x.device_mesh}"
                )
            local[name] = x.to_local()
    return problem.but(**local), groups_of(weight, None), tokens_sharded


def groups_of(weight: Any, process_group: Any) -> list[dist.ProcessGroup]:
    """The groups in which this rank takes part, as far as they are known before any check.

    Over each dimension of the mesh on which the weight is replicated, the ranks that must hold the
    same; last, those that share the vocabulary.
    """
    if not is_dtensor(weight):
        group = Ranks(process_group).group()
        return [] if group is None else [group]
    sharded = [i for i, p in enumerate(weight.placements) if p.is_shard()]
    if len(sharded) != 1:
        return []
    mesh = weight.device_mesh
    others = (i for i in range(mesh.ndim) if i not in sharded and mesh.size(i) > 1)
    return [mesh.get_group(i) for i in (*others, *sharded)]


def shard_dim(name: str, x: Any) -> int:
    """The mesh dimension over which ``x`` has ``Shard(0)``, all others replicated.

    Raises:
        ValueError: it has another placement.
    """
    sharded = [i for i, p in enumerate(x.placements) if not p.is_replicate()]
    if not sharded:
        raise ValueError(
            f"{name} must have Shard(0) over one dimension of its mesh, got {x.placements}: every "
            f"rank holds the whole {name}, so pass {name}.to_local()"
        )
    if len(sharded) != 1 or not x.placements[sharded[0]].is_shard(0):
        mended = ["Replicate()"] * x.device_mesh.ndim
        mended[sharded[-1]] = "Shard(0)"
        raise ValueError(
            f"{name} must have Shard(0) over one dimension of its mesh and Replicate() over the "
            f"others, got {x.placements}: pass "
            f"{name}.redistribute(placements=[{', '.join(mended)}])"
        )
    return sharded[0]


def _tokens_sharded(hidden: Any, dim: int) -> bool:
    """Whether ``hidden`` is sharded over tokens on the mesh dimension of the vocabulary."""
    for i, placement in enumerate(hidden.placements):
        tokens = placement.is_shard() and placement.dim % hidden.ndim != hidden.ndim - 1
        if not placement.is_replicate() and not (i == dim and tokens):
            raise ValueError(
                f"hidden must be replicated, or sharded over tokens on the weight's mesh "
                f"dimension, got {hidden.placements}: pass hidden.redistribute(placements="
                f"[{', '.join(['Replicate()'] * len(hidden.placements))}])"
            )
    return not hidden.placements[dim].is_replicate()
