"""Placement of vocabulary and tokens on the ranks, and the exchange that compares it.

The placement is read from DTensors or groups (:func:`layout_of`). One all-gather then compares the
ranks' arguments and tokens, and finds each rank's rows of the vocabulary (:func:`agree`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.agreement import (
    TEXT,
    Told,
    device_for,
    differing,
    failure_of,
    read,
    row,
    send,
    words_of,
)
from fusedce.backends.shards.collectives import Tokens, waiting_for_ranks
from fusedce.contract.groups import Ranks, is_dtensor, local_of, name_of
from fusedce.contract.problem import NUMBERS, Problem, Shard

SUM, LOSSES, STATISTICS, ARGMAX, TOPK, DIVERGENCE = (
    "a sum of losses",
    "losses of tokens",
    "statistics of tokens",
    "likeliest classes",
    "the k likeliest classes",
    "a divergence",
)
# Numbers that a rank sends: of its rows of the vocabulary, of its tokens, and checksums.
_ROWS, _TOKENS, _LABELS, _WEIGHTS, _TEMPERATURES = range(5)
LENGTH = TEXT + 5  # under 128 int64, the 1 KiB of which docstrings speak
_FIRST, _STEP = 0x2127599BF4325C37, 0x1_2DE6_BB58  # weights of a checksum: odd, even


def agree(
    problem: Problem,  # of local tensors
    groups: list[dist.ProcessGroup],  # as :func:`groups_of`, the vocabulary's last
    *,
    tokens_sharded: bool,
    vocab_size: int | None,
    **asked: Any,
) -> tuple[Shard, Tokens]:
    """Compare the ranks' settings and tokens, and find each rank's rows of the vocabulary.

    ``asked``: further settings that must be equal; a ``function``, and the names of what is asked
    for beside the loss as ``monitor``, decide on the others.

    Collectives: one all-gather of under 1 KiB on each of ``groups``.

    Raises:
        TypeError, ValueError, RuntimeError: the ranks do not fit, or one of them has raised; the
            same on all of them.
    """
    group, labels = groups[-1], problem.labels.reshape(-1).long()
    N = problem.hidden.shape[:-1].numel()
    mine = torch.zeros(LENGTH - TEXT, dtype=torch.int64, device="cpu")
    mine[_ROWS], mine[_TOKENS] = len(problem.weight), N
    mine = mine.to(labels.device, non_blocking=True)
    _checksum(labels, out=mine[_LABELS])
    valid = torch.ones(N, dtype=torch.bool, device=labels.device)
    if problem.ignore_index is not None and N:
        valid = (labels != problem.ignore_index).view(N, -1).any(1)
    for at, x in ((_WEIGHTS, problem.token_weight), (_TEMPERATURES, problem.temperature)):
        if x is not None:
            _checksum(torch.where(valid, x.detach().reshape(-1).double(), 0), out=mine[at])
    settings = _settings(problem, **asked, tokens_sharded=tokens_sharded, vocab_size=vocab_size)
    with tell_peers_on_error(groups, labels.device):
        mine = row(settings, mine)
    told = _meet(mine, groups)
    shared = "must be the same on all ranks that share the vocabulary"
    if (differ := differing(told)) is not None:
        name, said = differ
        if name in ("softcap", "logit_scale") and asked["function"].startswith(STATISTICS):
            name = f"{name} / temperature"
        raise ValueError(f"{name} {shared}, here it is {said}")
    rows, tokens, *checksums = zip(*(one.numbers for one in told), strict=True)
    if not tokens_sharded:
        if len({*tokens}) > 1 or len({*checksums[0]}) > 1:
            raise ValueError(
                f"labels {shared}, they hold {list(tokens)} tokens with different labels. (A "
                f"weight sharded by FSDP is no sharded vocabulary: compute the loss inside the "
                f"module's forward, where it is whole. Tokens that differ by design need "
                f"tokens_sharded=True.)"
            )
        for name, checksum in zip(("token_weight", "temperature"), checksums[1:], strict=True):
            if len({*checksum}) > 1:
                raise ValueError(f"{name} {shared}, here their values differ")
    if vocab_size is not None and not 0 < vocab_size <= sum(rows):
        raise ValueError(f"vocab_size must be 1 to {sum(rows)} (all rows), got {vocab_size}")
    classes = vocab_size or sum(rows)
    if problem.class_weight is not None and problem.class_weight.shape != (classes,):
        raise ValueError(
            f"class_weight must be (V,) = ({classes},), the weights of all ranks' classes, got "
            f"{tuple(problem.class_weight.shape)}"
        )
    gathered = Tokens(group, N, max(tokens)) if tokens_sharded else Tokens()
    H, element = problem.hidden.shape[-1], problem.hidden.element_size()
    first, held = sum(rows[: dist.get_rank(group)]), len(tokens) * gathered.most * H * element
    return Shard(name_of(group), first, classes, max(rows), held), gathered


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
        if device is None or device.type in ("cpu", "meta"):  # where NCCL sends nothing
            device = device_for(groups[-1], torch.device("cpu"))
        nothing = torch.zeros(LENGTH - TEXT, dtype=torch.int64, device=device)
        _meet(row(words_of(error), nothing), groups)


def _meet(mine: Tensor, groups: list[dist.ProcessGroup]) -> list[Told]:
    """Gather what the ranks that share the vocabulary hold: one all-gather in each of ``groups``.

    Every rank takes part in all of them, a rank with an error too: so the error passes from one
    dimension of the mesh to the next, and all ranks raise it.
    """
    for group in groups:
        with waiting_for_ranks(group):
            table, work = send(mine, group)
            work.wait()
        told = read(table)
        words = next((one.error for one in told if one.error), "")
        if not words and group is not groups[-1] and len({x.numbers[_LABELS] for x in told}) > 1:
            words = (
                "ValueError: weight is replicated over a dimension of its mesh over which the "
                "labels differ: its gradient would claim to be the same there, and differ. Put the "
                'weight on the vocabulary\'s dimension alone (mesh["tp"]), and let DDP or FSDP '
                "reduce over the other"
            )
        if words:
            mine = row(words, 0 * mine[TEXT:])
    if (error := failure_of(told)) is not None:
        raise error
    return told


def layout_of(
    problem: Problem, process_group: Any, groups: list[dist.ProcessGroup], tokens_sharded: bool
) -> tuple[Problem, bool]:
    """The problem of local tensors, and whether tokens are sharded, as its DTensors say.

    Raises:
        ValueError: a placement or group that does not describe a sharded vocabulary.
    """
    weight: Any = problem.weight
    if not is_dtensor(weight):
        if not groups:
            raise ValueError("process_group: torch.distributed must be initialised, it is not")
        return problem, tokens_sharded
    if process_group is not None:
        raise ValueError("process_group is for a local shard; a DTensor weight knows its ranks")
    mesh, placements = weight.device_mesh, weight.placements
    split = [i for i, p in enumerate(placements) if not p.is_replicate()]
    if len(split) != 1 or not placements[split[0]].is_shard(0):
        raise ValueError(
            f"weight must have Shard(0) over one dimension of its mesh and Replicate() over the "
            f"others, got {placements}: pass weight.redistribute(placements="
            f"{_with('Shard(0)', placements, *split[-1:])}), or weight.full_tensor() to compute "
            f"the whole head on each rank"
        )
    for name, x in problem._asdict().items():
        if is_dtensor(x) and x.device_mesh != mesh:
            raise ValueError(f"{name} must be on the mesh of weight {mesh}, got {x.device_mesh}")
    bias, hidden = problem.bias, cast(Any, problem.hidden)
    if bias is not None and getattr(bias, "placements", None) != placements:
        raise ValueError("bias must be a DTensor sharded like weight")
    if is_dtensor(hidden):
        found = hidden.placements[split[0]]
        tokens_sharded = found.is_shard() and found.dim % hidden.ndim != hidden.ndim - 1
        if sum(not p.is_replicate() for p in hidden.placements) != tokens_sharded:
            raise ValueError(
                f"hidden must be replicated, or sharded over tokens on the weight's mesh "
                f"dimension, got {hidden.placements}: pass hidden.redistribute("
                f"placements={_with('Replicate()', placements)})"
            )
    local = {name: local_of(x) for name, x in problem._asdict().items()}
    return problem.but(**local), tokens_sharded


def _with(placement: str, placements: Sequence[object], at: int = 0) -> str:
    """The text of ``placements`` that are replicated but for one."""
    mended = ["Replicate()"] * len(placements)
    mended[at] = placement
    return f"[{', '.join(mended)}]"


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
