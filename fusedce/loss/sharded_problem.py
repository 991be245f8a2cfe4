"""First steps of all losses on a sharded vocabulary: checks, and agreement of the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.backends.choose import resolve_backend
from fusedce.backends.shards.agreement import (
    MEAN_LOGIT,
    STATISTICS,
    SUM,
    agree,
    check_vocab_size,
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
    checked_temperature,
    flattened,
)
from fusedce.contract.groups import is_dtensor, local_of
from fusedce.contract.problem import Problem
from fusedce.contract.task import Shard


def is_sharded(weight: object, process_group: object) -> bool:
    """Whether the vocabulary is sharded: a group was given, or the weight is a ``DTensor``."""
    return process_group is not None or is_dtensor(weight)


def is_vocabulary_shard(x: Any) -> bool:
    """Whether ``x`` is a ``DTensor`` of which each rank of a mesh holds some rows."""
    return is_dtensor(x) and x.device_mesh.ndim == 1 and x.placements[0].is_shard(0)


def agree_on_problem(
    problem: Problem,
    process_group: Any,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    function: str = SUM,
    reduction: str | None = None,
    beside: str | None = None,
) -> tuple[Problem, Shard]:
    """Check and flatten this rank's problem, and compare it with those of the other ranks.

    Labels ``(..., K)``, several classes of a token, become ``(N, K)``.

    Args:
        problem, process_group, tokens_sharded, vocab_size: as given to the public function.
        function: one of :data:`fusedce.backends.shards.agreement.FUNCTIONS`.
        reduction: that of the public function, if it has one.
        beside: names of the statistics and outputs that are asked for beside the loss.

    Returns:
        The problem of this rank's tensors, and its shard.

    Raises:
        TypeError, ValueError, RuntimeError: the same on all ranks that share the vocabulary.

    Collectives: see :func:`fusedce.backends.shards.agreement.agree`.
    """
    with tell_peers_on_error(groups_of(problem.weight, process_group), device_of(problem.labels)):
        check_tensor_types(problem)
        layout = layout_of(problem, process_group, tokens_sharded)
        problem = autocast(layout.problem)
        classes = None
        if function in (STATISTICS, MEAN_LOGIT) and has_several_classes(problem):
            classes = problem.labels
            function = f"{function}, {classes.shape[-1]} classes each"
            problem = problem.but(labels=classes[..., 0])
        if len(problem.weight):
            check_tensors(problem)
        else:  # a rank without rows
            row = problem.weight.new_empty(1, problem.weight.shape[-1])
            check_tensors(problem.but(weight=row, bias=None))
        problem = problem.but(backend=resolve_backend(problem.backend, problem.hidden))
        layout = layout._replace(problem=problem)
        c = problem.class_weight
        # The class weights are those of all ranks' classes, whose number `agree` finds.
        check_options(problem.but(weight=c) if isinstance(c, Tensor) else problem)
        if classes is not None:
            problem = problem.but(labels=classes)
            layout = layout._replace(problem=problem)
        flat = flattened(problem.but(labels=problem.labels.long()))  # some ranks' may be int32
        if classes is not None:
            flat = flat.but(labels=flat.labels.view(-1, classes.shape[-1]))
        if problem.temperature is not None:
            used = flat.valid() if classes is None else flat.valid().any(1)
            t = checked_temperature(problem.temperature, problem.hidden, used)
            flat = flat.but(temperature=t)
        check_vocab_size(vocab_size)
        check_flag("tokens_sharded", tokens_sharded)
    shard = agree(layout, vocab_size, function, reduction, beside)
    return flat, shard


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


def tokens_of(labels: Any) -> torch.Size:
    """The shape of this rank's labels."""
    return local_of(labels).shape
