"""First steps of the losses, on a sharded vocabulary too: checks, and agreement of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fusedce.backends.choose import resolve_backend
from fusedce.backends.shards.agreement import (
    DIVERGENCE,
    STATISTICS,
    agree,
    groups_of,
    layout_of,
    tell_peers_on_error,
)
from fusedce.backends.shards.collectives import Tokens
from fusedce.contract.checks import (
    autocast,
    check_number,
    check_options,
    check_placed,
    check_tensor_types,
    check_tensors,
    checked_temperature,
    flattened,
    memory_budget_of,
    with_a_row,
)
from fusedce.contract.groups import is_dtensor
from fusedce.contract.problem import Divergence, Problem, Shard, Task

Placed = tuple[Any, bool, int | None]  # process_group, tokens_sharded, vocab_size


def is_sharded(weight: object, process_group: object) -> bool:
    """Whether the vocabulary is sharded: a group was given, or the weight is a ``DTensor``."""
    return process_group is not None or is_dtensor(weight)


def is_vocabulary_shard(x: Any) -> bool:
    """Whether ``x`` is a ``DTensor`` of which each rank of a mesh holds some rows."""
    return is_dtensor(x) and x.device_mesh.ndim == 1 and x.placements[0].is_shard(0)


def ready(
    problem: Problem,
    placed: Placed,
    function: str,
    check: Callable[[Problem], dict[str, Any]],
    temperature: float | Tensor = 1.0,
) -> tuple[Problem, Shard | None, Tokens]:
    """Check and flatten a problem; where the vocabulary is sharded, find this rank's shard.

    Labels ``(..., K)``, several classes of a token, become ``(N, K)``. On a sharded vocabulary the
    problem returned has the tokens of all ranks, and of ``weight`` the rows that are classes.

    Args:
        problem: as given to the public function.
        function: what :mod:`fusedce.backends.shards.agreement` calls it.
        check: makes the checks of the public function's own arguments, given the checked problem of
            this rank's tensors, and returns those of its settings that all ranks must share; as
            ``monitor`` the names of the statistics and outputs that are asked for beside the loss.
        temperature: a number, or of each token its own.

    Raises:
        TypeError, ValueError, RuntimeError: the same on all ranks that share the vocabulary.

    Collectives, of a sharded vocabulary: those of :func:`fusedce.backends.shards.agreement.agree`
    and of :meth:`fusedce.backends.shards.collectives.Tokens.all_of`.
    """
    process_group, tokens_sharded, vocab_size = placed
    sharded = is_sharded(problem.weight, process_group)
    groups = groups_of(problem.weight, process_group) if sharded else []
    device = getattr(problem.labels, "device", None)
    with tell_peers_on_error(groups, device) if sharded else nullcontext():
        check_placed(tokens_sharded, vocab_size, sharded=sharded)
        check_tensor_types(problem)
        given = _tempered(problem, temperature)
        if sharded:
            given, tokens_sharded = layout_of(given, process_group, groups, tokens_sharded)
        given = autocast(given)
        labels, one = given.labels, given
        several = (
            function == STATISTICS
            and not labels.is_floating_point()
            and labels.dim() == given.hidden.dim() > 0
            and labels.shape[:-1] == given.hidden.shape[:-1]
            and labels.shape[-1] > 0
        )
        if several:
            function = f"{function}, {labels.shape[-1]} classes each"
            one = given.but(labels=labels[..., 0])
        check_tensors(with_a_row(one) if sharded else one)
        c = given.class_weight
        # The class weights are those of all ranks' classes, whose number `agree` finds.
        check_options(given.but(weight=c) if sharded and isinstance(c, Tensor) else given)
        asked = {"function": function, "monitor": "", **check(given)}
        if sharded:
            given = given.but(
                labels=labels.long(),  # some ranks' may be int32
                # An environment may differ between ranks as arguments may.
                memory_budget=memory_budget_of(given.memory_budget, given.chunk_tokens),
                backend=resolve_backend(given.backend, given.hidden),
            )
        flat = flattened(given)
        if flat.temperature is not None:
            used = flat.valid().any(1) if several else flat.valid()
            flat = flat.but(temperature=checked_temperature(flat.temperature, given.hidden, used))
    if not sharded:
        return flat, None, Tokens()
    shard, tokens = agree(
        given, groups, tokens_sharded=tokens_sharded, vocab_size=vocab_size, **asked
    )
    real = max(shard.V - shard.first, 0)
    if real < len(flat.weight):  # the others are padding
        bias = None if flat.bias is None else flat.bias[:real]
        flat = flat.but(weight=flat.weight[:real], bias=bias)
    return tokens.all_of(flat), shard, tokens


def _tempered(problem: Problem, temperature: float | Tensor) -> Problem:
    """The problem with its logits divided by a number, or by each token's own.

    ``(c / t) * tanh((s / t) * x / (c / t))`` is ``c * tanh(s * x / c) / t``.
    """
    if isinstance(temperature, Tensor):
        return problem.but(temperature=temperature)
    t, cap = check_number("temperature", temperature), problem.softcap
    if t == 1:
        return problem
    return problem.but(
        softcap=None if cap is None else check_number("softcap", cap) / t,
        logit_scale=check_number("logit_scale", problem.logit_scale) / t,
    )


def divergence_task(
    problem: Problem,
    placed: Placed,
    reduction: str,
    check: Callable[[Problem, bool], Divergence],
) -> tuple[Task, Tokens]:
    """The task of a divergence, which the torch backend computes on a sharded vocabulary.

    ``check`` makes the record beside the checked problem of this rank's tensors, and is told
    whether these are a shard's.
    """
    found: list[Divergence] = []
    sharded = is_sharded(problem.weight, placed[0])

    def checked(given: Problem) -> dict[str, Any]:
        if sharded and given.backend == "triton":
            raise RuntimeError(
                "a divergence over a sharded vocabulary needs backend='torch', the Triton kernels "
                "do not merge it over ranks"
            )
        found.append(check(given, sharded))
        return {"reduction": reduction} | found[0].settings()

    if sharded:
        problem = problem.but(backend=problem.backend or "torch")
    problem, shard, tokens = ready(problem, placed, DIVERGENCE, checked)
    (divergence,), real = found, len(problem.weight)
    hidden, weight, bias = divergence[:3]
    if shard is not None and hidden is not None and weight is not None:
        divergence = divergence.but(
            teacher_hidden=tokens.gather(hidden),
            teacher_weight=weight[:real],
            teacher_bias=None if bias is None else bias[:real],
        )
    return Task(problem, divergence=divergence, shard=shard), tokens


def no_labels(hidden: Any) -> Tensor:
    """``(...)`` int64 zeros, placed as ``hidden (..., H)``; a wrong ``hidden`` as it is."""
    if not isinstance(hidden, Tensor) or hidden.is_nested:
        return hidden
    if is_dtensor(hidden):
        return torch.zeros_like(hidden.detach().sum(-1), dtype=torch.int64)
    return torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
