"""First steps of the losses, on a sharded vocabulary too: checks, and agreement of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedce.backends.choose import resolve_backend
from fusedce.backends.shards.agreement import (
    DIVERGENCE,
    MEAN_LOGIT,
    STATISTICS,
    SUM,
    agree,
    groups_of,
    layout_of,
    tell_peers_on_error,
)
from fusedce.contract.checks import (
    autocast,
    check_flag,
    check_options,
    check_tensor_types,
    check_tensors,
    check_vocab_size,
    check_whole,
    checked,
    checked_temperature,
    flattened,
    memory_budget_of,
    with_a_row,
)
from fusedce.contract.divergence import Divergence
from fusedce.contract.groups import is_dtensor, local_of
from fusedce.contract.problem import Problem
from fusedce.contract.task import Shard, Task


def is_sharded(weight: object, process_group: object) -> bool:
    """Whether the vocabulary is sharded: a group was given, or the weight is a ``DTensor``."""
    return process_group is not None or is_dtensor(weight)


def is_vocabulary_shard(x: Any) -> bool:
    """Whether ``x`` is a ``DTensor`` of which each rank of a mesh holds some rows."""
    return is_dtensor(x) and x.device_mesh.ndim == 1 and x.placements[0].is_shard(0)


def ready(
    problem: Problem,
    placed: tuple[Any, bool, int | None],  # process_group, tokens_sharded, vocab_size
    function: str,
    check: Callable[[Problem], Problem],
    **asked: Any,
) -> tuple[Problem, Shard | None]:
    """Check and flatten a problem; and find this rank's shard where the vocabulary is sharded.

    ``check`` makes the checks of the public function's own arguments first. The rest is as in
    :func:`agree_on_problem`.
    """
    if is_sharded(problem.weight, placed[0]):
        with tell_peers_on_error(groups_of(problem.weight, placed[0]), device_of(problem.labels)):
            problem = check(problem)
        return agree_on_problem(problem, *placed, function, **asked)
    check_whole(*placed[1:])
    given = check(problem)
    several = function in (STATISTICS, MEAN_LOGIT) and has_several_classes(given)
    problem = checked(given.but(labels=given.labels[..., 0]) if several else given)
    if several:
        problem = problem.but(labels=given.labels.reshape(-1, given.labels.shape[-1]))
    return with_temperature(problem, given.hidden), None


def with_temperature(problem: Problem, hidden: Tensor) -> Problem:
    """A flattened problem with its tokens' temperatures checked; ``hidden (..., H)`` as given."""
    if problem.temperature is None:
        return problem
    used = problem.valid() if problem.labels.dim() == 1 else problem.valid().any(1)
    return problem.but(temperature=checked_temperature(problem.temperature, hidden, used))


def agree_on_problem(
    problem: Problem,
    process_group: Any,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    function: str = SUM,
    monitor: str | None = None,
    **asked: Any,
) -> tuple[Problem, Shard]:
    """Check and flatten this rank's problem, and compare it with those of the other ranks.

    Labels ``(..., K)``, several classes of a token, become ``(N, K)``.

    Args:
        problem, process_group, tokens_sharded, vocab_size: as given to the public function.
        function: one of :data:`fusedce.backends.shards.agreement.FUNCTIONS`.
        monitor: names of the statistics and outputs that are asked for beside the loss.
        asked: further settings of the public function, which all ranks must share.

    Returns:
        The problem of this rank's tensors, and its shard.

    Raises:
        TypeError, ValueError, RuntimeError: the same on all ranks that share the vocabulary.

    Collectives: see :func:`fusedce.backends.shards.agreement.agree`.
    """
    with tell_peers_on_error(groups_of(problem.weight, process_group), device_of(problem.labels)):
        check_tensor_types(problem)
        problem, groups, by_tokens = layout_of(problem, process_group, tokens_sharded)
        problem = autocast(problem)
        classes = None
        if function in (STATISTICS, MEAN_LOGIT) and has_several_classes(problem):
            classes = problem.labels
            function = f"{function}, {classes.shape[-1]} classes each"
            problem = problem.but(labels=classes[..., 0])
        check_tensors(with_a_row(problem))
        problem = problem.but(backend=resolve_backend(problem.backend, problem.hidden))
        c = problem.class_weight
        # The class weights are those of all ranks' classes, whose number `agree` finds.
        check_options(problem.but(weight=c) if isinstance(c, Tensor) else problem)
        # An environment may differ between ranks as arguments may.
        budget = memory_budget_of(problem.memory_budget, problem.chunk_tokens)
        labels = problem.labels if classes is None else classes
        problem = problem.but(labels=labels, memory_budget=budget)
        flat = flattened(problem.but(labels=problem.labels.long()))  # some ranks' may be int32
        if classes is not None:
            flat = flat.but(labels=flat.labels.view(-1, classes.shape[-1]))
        flat = with_temperature(flat, problem.hidden)
        check_vocab_size(vocab_size)
        check_flag("tokens_sharded", tokens_sharded)
    shard = agree(
        problem, groups, tokens_sharded=by_tokens, vocab_size=vocab_size,
        function=function, monitor=monitor or "", **asked,
    )  # fmt: skip
    return flat, shard


def divergence_task(
    problem: Problem,
    placed: tuple[Any, bool, int | None],  # process_group, tokens_sharded, vocab_size
    reduction: str,
    checked: Callable[[Problem, bool], tuple[Problem, Divergence]],
) -> Task:
    """The task of a divergence, which the torch backend computes on a sharded vocabulary.

    ``checked`` makes both records of this rank's tensors, and is told whether these are a shard's.
    """
    if not is_sharded(problem.weight, placed[0]):
        check_whole(*placed[1:])
        problem, divergence = checked(problem, False)
        return Task(problem, divergence=divergence)
    with tell_peers_on_error(groups_of(problem.weight, placed[0]), device_of(problem.labels)):
        if problem.backend == "triton":
            raise RuntimeError(
                "a divergence over a sharded vocabulary needs backend='torch', the Triton kernels "
                "do not merge it over ranks"
            )
        check_tensor_types(problem)
        local = problem.but(**{name: local_of(x) for name, x in problem._asdict().items()})
        divergence = checked(local, True)[1]
        problem = problem.but(backend=problem.backend or "torch")
        asked = {"reduction": reduction} | divergence.settings()
    problem, shard = agree_on_problem(problem, *placed, DIVERGENCE, **asked)
    return Task(problem, divergence=divergence, shard=shard)


def no_labels(hidden: Any) -> Tensor:
    """``(...)`` int64 zeros, placed as ``hidden (..., H)`` is; what no loss takes as it is."""
    if not isinstance(hidden, Tensor) or hidden.is_nested:
        return hidden
    if is_dtensor(hidden):
        return torch.zeros_like(hidden.detach().sum(-1), dtype=torch.int64)
    return torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)


def has_several_classes(problem: Problem) -> bool:
    """Whether the labels are ``(..., K)`` class indices for ``hidden (..., H)``."""
    hidden, labels = problem.hidden, problem.labels
    return (
        isinstance(hidden, Tensor)
        and isinstance(labels, Tensor)
        and not hidden.is_nested
        and not labels.is_floating_point()
        and labels.dim() == hidden.dim() > 0
        and labels.shape[:-1] == hidden.shape[:-1]
        and labels.shape[-1] > 0
    )


def device_of(x: object) -> torch.device | None:
    """The device of a tensor; ``None`` for an argument that is none, or that has no values."""
    device = getattr(x, "device", None)
    return None if device is None or device.type == "meta" else device
