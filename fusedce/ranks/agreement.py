"""One all-gather in which the ranks compare arguments and tokens, and share numbers of rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..agreement import (
    TEXT,
    RankReport,
    device_for,
    differing,
    error_text,
    failure_of,
    read,
    row,
    send,
)
from ..backends.shards import waiting_for_ranks
from ..contract.groups import name_of
from ..contract.problem import Problem, Shard
from .layout import Tokens

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


def row_of(problem: Problem, asked: dict[str, Any]) -> Tensor:
    """Make the row that this rank sends: its settings, and the numbers from `_ROWS` on."""
    labels, N = problem.labels.reshape(-1).long(), problem.hidden.shape[:-1].numel()
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
    return row(_settings(problem, asked), mine)


def compare(
    problem: Problem,  # of local tensors
    groups: list[dist.ProcessGroup],  # as `groups_of`, the vocabulary's last
    asked: dict[str, Any],  # settings of this call beside the problem's
    told: list[RankReport],
) -> tuple[Shard, Tokens]:
    """Compare the ranks' settings and tokens, and find each rank's rows of the vocabulary.

    Raises:
        TypeError, ValueError: the ranks do not fit; the same on all of them.
    """
    tokens_sharded, vocab_size = asked["tokens_sharded"], asked["vocab_size"]
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
    group, (*leading, H) = groups[-1], problem.hidden.shape
    N, element = math.prod(leading), problem.hidden.element_size()
    gathered = Tokens(group, N, max(tokens)) if tokens_sharded else Tokens()
    first, held = sum(rows[: dist.get_rank(group)]), len(tokens) * gathered.most * H * element
    return Shard(name_of(group), first, classes, max(rows), held), gathered


def _settings(problem: Problem, asked: dict[str, Any]) -> dict[str, Any]:
    """Settings that ranks must share: options of the loss, and what decides the collectives."""
    c, grad = problem.class_weight, torch.is_grad_enabled()
    settings = {
        **{name: True if isinstance(x, Tensor) else x for name, x in problem._asdict().items()},
        "hidden.dtype": str(problem.hidden.dtype),
        "hidden.requires_grad": grad and problem.hidden.requires_grad,
        # The shape beside the checksum, so that no rank alone raises for its shape.
        "class_weight": None if c is None else f"{[*c.shape]}, checksum {_checksum(c.double())}",
        **asked,
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
    """Send an error to the ranks of ``groups``, which receive it in :func:`compare`."""
    try:
        yield
    except Exception as error:
        if not groups:
            raise
        if device is None or device.type in ("cpu", "meta"):  # where NCCL sends nothing
            device = device_for(groups[-1], torch.device("cpu"))
        nothing = torch.zeros(LENGTH - TEXT, dtype=torch.int64, device=device)
        all_gather_rows(row(error_text(error), nothing), groups)


def all_gather_rows(mine: Tensor, groups: list[dist.ProcessGroup]) -> list[RankReport]:
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
                "labels differ, so its gradient would differ between these replicas. Put the "
                'weight on the vocabulary\'s dimension alone (mesh["tp"]), and let DDP or FSDP '
                "reduce over the other"
            )
        if words:
            mine = row(words, 0 * mine[TEXT:])
    if (error := failure_of(told)) is not None:
        raise error
    return told
