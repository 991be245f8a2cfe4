"""First steps of the losses on a sharded vocabulary: checks, and agreement of the ranks.

The placement of vocabulary and tokens is read from DTensors or groups (:func:`_layout_of`). One
all-gather then compares the ranks' arguments and tokens, and finds each rank's rows of the
vocabulary (:func:`_compare`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.agreement import (
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
from fusedce.backends.choose import resolve_backend
from fusedce.backends.shards import ALL_HERE, Tokens, waiting_for_ranks
from fusedce.contract.checks import (
    autocast,
    check_options,
    check_problem,
    check_sharding,
    check_tensor_types,
    check_tensors,
    check_unsharded,
    flattened,
    has_several_labels,
    is_sharded,
    memory_budget_of,
    tempered,
    with_a_row,
)
from fusedce.contract.groups import Ranks, is_dtensor, local_of, name_of
from fusedce.contract.problem import Divergence, Problem, Shard, Task

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

Sharding = tuple[Any, bool, int | None]  # process_group, tokens_sharded, vocab_size


def is_vocabulary_shard(x: Any) -> bool:
    """Whether ``x`` is a ``DTensor`` of which each rank of a mesh holds some rows."""
    return is_dtensor(x) and x.device_mesh.ndim == 1 and x.placements[0].is_shard(0)


def agree(
    problem: Problem,
    sharding: Sharding,
    function: str,
    check: Callable[[Problem], dict[str, Any]],
    temperature: float | Tensor = 1.0,
) -> tuple[Problem, Shard, Tokens]:
    """Check and flatten a problem of a sharded vocabulary, and find this rank's shard.

    Labels ``(..., K)``, several classes of a token, become ``(N, K)``. The problem returned has the
    tokens of all ranks, and of ``weight`` the rows that are classes.

    Args:
        problem: as given to the public function.
        function: a constant of this module, from `SUM` to `DIVERGENCE`.
        check: checks the public function's own arguments, given the checked problem of this rank's
            tensors, and returns the settings that all ranks must share; under ``monitor`` the
            names of the statistics and outputs that are asked for beside the loss.
        temperature: a number, or one per token.

    Raises:
        TypeError, ValueError, RuntimeError: the same on all ranks that share the vocabulary.

    Collectives: those of :func:`_all_gather_rows`, and of
    :meth:`fusedce.backends.shards.Tokens.all_of`.
    """
    process_group, tokens_sharded, vocab_size = sharding
    groups = _groups_of(problem.weight, process_group)
    with tell_peers_on_error(groups, getattr(problem.labels, "device", None)):
        check_sharding(tokens_sharded, vocab_size)
        check_tensor_types(problem)
        given = tempered(problem, temperature)
        given, tokens_sharded = _layout_of(given, process_group, groups, tokens_sharded)
        given = autocast(given)
        one = given
        if function == STATISTICS and has_several_labels(given):
            function = f"{function}, {given.labels.shape[-1]} classes each"
            one = given.replace(labels=given.labels[..., 0])
        check_tensors(with_a_row(one))
        c = given.class_weight
        # The class weights are those of all ranks' classes, whose number `_compare` finds.
        check_options(given.replace(weight=c) if isinstance(c, Tensor) else given)
        asked = {"function": function, "monitor": "", **check(given)}
        given = given.replace(
            labels=given.labels.long(),  # some ranks' may be int32
            # An environment may differ between ranks as arguments may.
            memory_budget=memory_budget_of(given.memory_budget, given.chunk_tokens),
            backend=resolve_backend(given.backend, given.hidden),
        )
        flat = flattened(given)
        given = given.replace(temperature=flat.temperature)
        asked.update(tokens_sharded=tokens_sharded, vocab_size=vocab_size)
        mine = _row_of(given, asked)
    shard, tokens = _compare(given, groups, asked, _all_gather_rows(mine, groups))
    real = max(shard.V - shard.first, 0)
    if real < len(flat.weight):  # the others are padding
        bias = None if flat.bias is None else flat.bias[:real]
        flat = flat.replace(weight=flat.weight[:real], bias=bias)
    return tokens.all_of(flat), shard, tokens


def divergence_task(
    problem: Problem,
    sharding: Sharding,
    asked: dict[str, Any],
    check: Callable[[Problem, bool], Divergence],
) -> tuple[Task, Tokens]:
    """The task of a divergence, which the torch backend computes on a sharded vocabulary.

    ``asked`` are settings that all ranks must share. ``check`` makes the record from the checked
    problem of this rank's tensors, and from whether these are a shard's.
    """
    if not is_sharded(problem.weight, sharding[0]):
        check_unsharded(*sharding[1:])
        given = check_problem(problem)
        divergence = check(given, False)
        return Task(flattened(given), divergence=divergence), ALL_HERE
    found: list[Divergence] = []

    def checked(given: Problem) -> dict[str, Any]:
        if given.backend == "triton":
            raise RuntimeError(
                "a divergence over a sharded vocabulary needs backend='torch', the Triton kernels "
                "do not merge it over ranks"
            )
        found.append(check(given, True))
        return asked | found[0].settings()

    problem = problem.replace(backend=problem.backend or "torch")
    problem, shard, tokens = agree(problem, sharding, DIVERGENCE, checked)
    (divergence,), real = found, len(problem.weight)
    hidden, weight, bias, *_ = divergence
    divergence = divergence.replace(
        teacher_hidden=tokens.gather(hidden),
        teacher_weight=weight[:real],
        teacher_bias=None if bias is None else bias[:real],
    )
    return Task(problem, divergence=divergence, shard=shard), tokens


def no_labels(hidden: Any) -> Tensor:
    """``(...)`` int64 zeros, placed as ``hidden (..., H)``; a wrong ``hidden`` is returned."""
    if not isinstance(hidden, Tensor) or hidden.is_nested:
        return hidden
    if is_dtensor(hidden):
        return torch.zeros_like(hidden.detach().sum(-1), dtype=torch.int64)
    return torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)


# ---- what the ranks of a sharded vocabulary agree on ---------------------------------------------


def _row_of(problem: Problem, asked: dict[str, Any]) -> Tensor:
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


def _compare(
    problem: Problem,  # of local tensors
    groups: list[dist.ProcessGroup],  # as :func:`_groups_of`, the vocabulary's last
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
    """Send an error to the ranks of ``groups``, which receive it in :func:`_compare`."""
    try:
        yield
    except Exception as error:
        if not groups:
            raise
        if device is None or device.type in ("cpu", "meta"):  # where NCCL sends nothing
            device = device_for(groups[-1], torch.device("cpu"))
        nothing = torch.zeros(LENGTH - TEXT, dtype=torch.int64, device=device)
        _all_gather_rows(row(error_text(error), nothing), groups)


def _all_gather_rows(mine: Tensor, groups: list[dist.ProcessGroup]) -> list[RankReport]:
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


def _layout_of(
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
        raise ValueError("process_group must be None with a DTensor weight: its mesh is used")
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
    return problem.replace(**local), tokens_sharded


def _with(placement: str, placements: Sequence[object], at: int = 0) -> str:
    """The text of ``placements`` that are replicated but for one."""
    mended = ["Replicate()"] * len(placements)
    mended[at] = placement
    return f"[{', '.join(mended)}]"


def _groups_of(weight: Any, process_group: Any) -> list[dist.ProcessGroup]:
    """The groups in which this rank takes part, as far as they are known before any check.

    First one for each dimension of the mesh on which the weight is replicated, whose ranks must
    hold the same labels; last the ranks that share the vocabulary.
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
