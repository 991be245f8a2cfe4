"""Where public functions come in: checks, and with a sharded vocabulary the ranks' agreement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.dispatch import StatsOf
from ..backends.choose import resolve_backend
from ..contract.checks import (
    autocast,
    check_options,
    check_problem,
    check_sharding,
    check_tensor_types,
    check_tensors,
    flattened,
    has_several_labels,
    is_sharded,
    memory_budget_of,
    refuse_sharding,
    tempered,
    with_a_row,
)
from ..contract.groups import is_dtensor
from ..contract.problem import Divergence, Problem, Shard, Task
from .agreement import (
    DIVERGENCE,
    STATISTICS,
    TOPK,
    all_gather_rows,
    compare,
    row_of,
    tell_peers_on_error,
)
from .layout import ALL_HERE, Tokens, groups_of, layout_of
from .merge import token_stats

Sharding = tuple[Any, bool, int | None]  # process_group, tokens_sharded, vocab_size


class Vocabulary(NamedTuple):
    """Where the classes and the tokens of a call lie."""

    shard: Shard | None = None
    tokens: Tokens = ALL_HERE
    stats_of: StatsOf | None = None  # statistics over all ranks' classes; None: all are here


_WHOLE = Vocabulary()


def prepared(
    problem: Problem,
    sharding: Sharding,
    function: str,
    check: Callable[[Problem], dict[str, Any]] | None,
    temperature: float | Tensor = 1.0,
) -> tuple[Problem, Vocabulary]:
    """Check, cast and flatten a problem; with a sharded vocabulary, the tokens of all ranks.

    Labels ``(..., K)``, several classes of a token, become ``(N, K)``. Of a shard's ``weight`` the
    problem returned has the rows that are classes.

    Args:
        problem: as given to the public function.
        function: a constant of :mod:`fusedce.ranks.agreement`.
        check: checks the public function's own arguments, given the checked problem of this rank's
            tensors, and returns the settings that all ranks must share; under ``monitor`` the
            names of the statistics and outputs that are asked for beside the loss. ``None`` if it
            has none.
        temperature: a number, or one per token.

    Raises:
        TypeError, ValueError, RuntimeError: the same on all ranks that share the vocabulary.

    Collectives: with a sharded vocabulary those of :func:`_agree`.
    """
    if is_sharded(problem.weight, sharding[0]):
        return _agree(problem, sharding, function, check, temperature)
    if sharding[1] is not False or sharding[2] is not None:
        refuse_sharding(*sharding[1:])
    by_token = function in (STATISTICS, TOPK)
    given = check_problem(tempered(problem, temperature) if by_token else problem, several=by_token)
    if check is not None:
        check(given)
    return flattened(given), _WHOLE


def _agree(
    problem: Problem,
    sharding: Sharding,
    function: str,
    check: Callable[[Problem], dict[str, Any]] | None,
    temperature: float | Tensor = 1.0,
) -> tuple[Problem, Vocabulary]:
    """Check and flatten a problem of a sharded vocabulary, and find this rank's shard.

    Collectives: those of :func:`fusedce.ranks.agreement.all_gather_rows`, and of
    :meth:`fusedce.ranks.layout.Tokens.all_of`.
    """
    process_group, tokens_sharded, vocab_size = sharding
    groups = groups_of(problem.weight, process_group)
    with tell_peers_on_error(groups, getattr(problem.labels, "device", None)):
        check_sharding(tokens_sharded, vocab_size)
        check_tensor_types(problem)
        given = tempered(problem, temperature)
        given, tokens_sharded = layout_of(given, process_group, groups, tokens_sharded)
        given = autocast(given)
        one = given
        if function == STATISTICS and has_several_labels(given):
            function = f"{function}, {given.labels.shape[-1]} classes each"
            one = given.replace(labels=given.labels[..., 0])
        check_tensors(with_a_row(one))
        c = given.class_weight
        # The class weights are those of all ranks' classes, whose number `compare` finds.
        check_options(given.replace(weight=c) if isinstance(c, Tensor) else given)
        asked = {"function": function, "monitor": "", **(check(given) if check else {})}
        given = given.replace(
            labels=given.labels.long(),  # some ranks' may be int32
            # An environment may differ between ranks as arguments may.
            memory_budget=memory_budget_of(given.memory_budget, given.chunk_tokens),
            backend=resolve_backend(given.backend, given.hidden),
        )
        flat = flattened(given)
        given = given.replace(temperature=flat.temperature)
        asked.update(tokens_sharded=tokens_sharded, vocab_size=vocab_size)
        mine = row_of(given, asked)
    shard, tokens = compare(given, groups, asked, all_gather_rows(mine, groups))
    real = max(shard.V - shard.first, 0)
    if real < len(flat.weight):  # the others are padding
        bias = None if flat.bias is None else flat.bias[:real]
        flat = flat.replace(weight=flat.weight[:real], bias=bias)
    stats_of = functools.partial(token_stats, shard=shard)
    return tokens.all_of(flat), Vocabulary(shard, tokens, stats_of)


def divergence_task(
    problem: Problem,
    sharding: Sharding,
    asked: dict[str, Any],
    check: Callable[[Problem, bool], Divergence],
) -> tuple[Task, Vocabulary]:
    """The task of a divergence, which the torch backend computes on a sharded vocabulary.

    ``asked`` are settings that all ranks must share. ``check`` makes the record from the checked
    problem of this rank's tensors, and from whether these are a shard's.
    """
    if not is_sharded(problem.weight, sharding[0]):
        if sharding[1] is not False or sharding[2] is not None:
            refuse_sharding(*sharding[1:])
        given = check_problem(problem)
        divergence = check(given, False)
        return Task(flattened(given), divergence=divergence), _WHOLE
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
    problem, vocabulary = _agree(problem, sharding, DIVERGENCE, checked)
    (divergence,), real = found, len(problem.weight)
    hidden, weight, bias, *_ = divergence
    divergence = divergence.replace(
        teacher_hidden=vocabulary.tokens.gather(hidden),
        teacher_weight=weight[:real],
        teacher_bias=None if bias is None else bias[:real],
    )
    return Task(problem, divergence=divergence, shard=vocabulary.shard), vocabulary


def no_labels(hidden: Any) -> Tensor:
    """``(...)`` int64 zeros, placed as ``hidden (..., H)``; a wrong ``hidden`` is returned."""
    if not isinstance(hidden, Tensor) or hidden.is_nested:
        return hidden
    if is_dtensor(hidden):
        return torch.zeros_like(hidden.detach().sum(-1), dtype=torch.int64)
    return torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
