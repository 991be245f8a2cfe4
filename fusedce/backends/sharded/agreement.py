"""Whether ranks that share a vocabulary ask for the same, and hold the same."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.backends.sharded.layout import Layout
from fusedce.backends.sharded.tiles import Shard, all_gather
from fusedce.contract.checks import DTYPES
from fusedce.contract.problem import NUMBERS, Problem

# What ranks must share besides sizes: numbers of the loss, and what decides which collectives run.
_WHOLE = ("ignore_index", "chunk_tokens")
_SETTINGS = (
    *_WHOLE,
    *NUMBERS,
    "bias",
    "token_weight",
    "temperature",
    "hidden.dtype",
    "hidden.requires_grad",
    "class_weight",
    "function",
    "weight.requires_grad",
)
_NONE = -(2**63) + 1
_WORDS = 40  # int64, 8 bytes of an error each
_KINDS = {"TypeError": TypeError, "RuntimeError": RuntimeError}
FUNCTIONS = SUM, LOSSES, STATISTICS, MEAN_LOGIT, ARGMAX = (
    "a sum of losses",
    "losses of tokens",
    "statistics of tokens",
    "statistics of tokens with mean_logit",
    "likeliest classes",
)

# A rank's row: sizes, settings, an error's words, a checksum of labels, a sketch of hidden states.
_COUNTED = 4  # of the sizes, the tokens that are computed
_TEXT = slice(_COUNTED + 1 + len(_SETTINGS), _COUNTED + 1 + len(_SETTINGS) + _WORDS)
_CHECKSUM = _TEXT.stop
_SKETCH = slice(_CHECKSUM + 1, _CHECKSUM + 10)
LENGTH = _SKETCH.stop  # under 128 int64, the 1 KiB of which docstrings speak
_NOISE = 0.01  # of their norm, by which replicas' hidden states may differ: other orders of sums


def _settings(problem: Problem, function: str) -> list[int]:
    """The settings as int64: floats by their bits, tensors by whether they are there."""
    whole = [_NONE if x is None else x for x in (getattr(problem, name) for name in _WHOLE)]
    numbers = [_bits(getattr(problem, name)) for name in NUMBERS]
    there = [x is not None for x in (problem.bias, problem.token_weight, problem.temperature)]
    grad = torch.is_grad_enabled()
    c = problem.class_weight
    return [
        *whole,
        *numbers,
        *map(int, there),
        DTYPES.index(problem.hidden.dtype),
        int(grad and problem.hidden.requires_grad),
        _NONE if c is None else int(_checksum(c.double().view(torch.int64).reshape(-1))),
        FUNCTIONS.index(function),
        # A sum has done with its collectives before backward.
        int(grad and problem.weight.requires_grad and function != SUM),
    ]


def _checksum(x: Tensor) -> Tensor:
    """``()`` int64 of ``x (n,)`` int64: depends on values and order, and wraps around."""
    order = torch.arange(1, len(x) + 1, device=x.device)
    return (x * (2 * order + 1)).sum()


def _bits(x: float | None) -> int:
    return _NONE if x is None else struct.unpack("q", struct.pack("d", x))[0]


def _shown(name: str, values: list[int]) -> list[Any]:
    if name == "class_weight":
        return ["none" if x == _NONE else f"one with the checksum {x}" for x in values]
    if name == "hidden.dtype":
        return [DTYPES[x] for x in values]
    if name == "function":
        return [FUNCTIONS[x] for x in values]
    if name in _WHOLE:
        return [None if x == _NONE else x for x in values]
    if name in NUMBERS:
        return [None if x == _NONE else struct.unpack("d", struct.pack("q", x))[0] for x in values]
    return [bool(x) for x in values]


@contextlib.contextmanager
def on_the_way(groups: list[dist.ProcessGroup], device: torch.device | None) -> Iterator[None]:
    """Tell the ranks of ``groups`` of an error before they meet to :func:`agree`."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if not groups:
            raise
        where = f" (on rank {dist.get_rank()})"
        text = str(error).encode()[: 8 * _WORDS - len(where) - 12].decode(errors="ignore")
        kind = _KINDS.get(type(error).__name__, ValueError)
        nothing = torch.zeros(LENGTH, dtype=torch.int64, device=device)
        _meet(nothing, groups, kind(text + where))


def _meet(
    mine: Tensor, groups: list[dist.ProcessGroup], error: Exception | None = None
) -> list[list[int]]:
    """Rows of the ranks that share the vocabulary, after one all-gather in each of ``groups``.

    Every rank takes part in all of them, one that knows of an error too: so it gets from one
    dimension of the mesh to the next, and all ranks raise it.
    """
    told: list[list[int]] = []
    for group in groups:
        if error is not None:
            words = f"{type(error).__name__}: {error}".encode().ljust(8 * _WORDS, b"\0")
            mine[_TEXT] = torch.tensor(struct.unpack(f"{_WORDS}q", words), device=mine.device)
        told = all_gather(mine, group).view(-1, LENGTH).tolist()
        error = _first_words(told)
        if error is None and group is not groups[-1]:
            error = _other_tokens(told)
    if error is not None:
        raise error
    return told


def _first_words(told: list[list[int]]) -> Exception | None:
    for row in told:
        words = struct.pack(f"{_WORDS}q", *row[_TEXT]).rstrip(b"\0")
        if words:
            name, _, text = words.decode(errors="ignore").partition(": ")
            return _KINDS.get(name, ValueError)(text)
    return None


def _other_tokens(told: list[list[int]]) -> Exception | None:
    """What ranks over which the weight is replicated must not differ in."""
    what = "labels" if len({row[_CHECKSUM] for row in told}) > 1 else ""
    first, *others = (struct.unpack("9d", struct.pack("9q", *row[_SKETCH])) for row in told)
    for other in others:
        apart = sum((a - b) ** 2 for a, b in zip(first[1:], other[1:], strict=True))
        if apart > _NOISE**2 * max(first[0], other[0]):
            what = what or "hidden states"
    if not what:
        return None
    return ValueError(
        f"weight is replicated over a dimension of its mesh over which the {what} differ: its "
        f"gradient would claim to be the same there, and differ. Put the weight on the "
        f'vocabulary\'s dimension alone (mesh["tp"]), and let DDP or FSDP reduce over the other'
    )


def _sketch(problem: Problem) -> Tensor:
    """``(9,)`` float64 that tell how far apart two ranks' hidden states are.

    The squared norm, and eight sums with random signs (Alon, Matias and Szegedy 1996): the squared
    distance of two ranks' sums is about that of what they sum. Ignored positions are no part of it.
    """
    hidden = problem.hidden.detach().reshape(-1, problem.hidden.shape[-1])
    valid = _valid(problem).unflatten(0, (len(hidden), -1 if len(hidden) else 1)).any(1)
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    wide = wide.masked_fill(~valid[:, None], 0)
    eight = torch.arange(8, device=wide.device)
    rows = torch.arange(len(wide), device=wide.device)[:, None]
    columns = torch.arange(wide.shape[1], device=wide.device)
    sums = _signs(rows * 8 + eight).to(wide).t() @ wide  # (8, H)
    sums = (sums.double() * _signs(columns + eight[:, None] * len(columns))).sum(1)
    return torch.cat([wide.square().sum(dtype=torch.float64)[None], sums])


def _valid(problem: Problem) -> Tensor:
    labels = problem.labels.reshape(-1)
    if problem.ignore_index is None:
        return torch.ones_like(labels, dtype=torch.bool)
    return labels != problem.ignore_index


def _signs(i: Tensor) -> Tensor:
    """1 or -1 for each number below 2**32, the same on every rank, without a pattern."""
    for _ in range(2):  # mix bits as a hash does, where a product alone alternates
        i = ((i ^ (i >> 16)) + 1) * 0x45D9F3B & 0xFFFFFFFF
    return 1 - 2 * ((i >> 16) & 1)


def check_vocab_size(vocab_size: object) -> None:
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int)):
        raise TypeError(f"vocab_size must be an int or None, got {type(vocab_size).__name__}")


def agree(layout: Layout, vocab_size: int | None, function: str = SUM) -> Shard:
    """What ranks must know of each other; raises on all of them where they do not fit."""
    problem, group = layout.problem, layout.groups[-1]
    labels = problem.labels.reshape(-1).long()
    checksum = _checksum(labels)
    counted = _valid(problem)
    if function == SUM and problem.token_weight is not None:
        counted = counted & (problem.token_weight.reshape(-1) != 0)
    sizes = [len(problem.weight), len(labels), problem.hidden.shape[-1], vocab_size or 0, 0]
    mine = torch.tensor([*sizes, *_settings(problem, function), *[0] * (_WORDS + 10)])
    mine = mine.to(labels.device, non_blocking=True)
    mine[_COUNTED], mine[_CHECKSUM] = counted.sum(), checksum
    if len(layout.groups) > 1:
        mine[_SKETCH] = _sketch(problem).view(torch.int64)
    told = _meet(mine, layout.groups)
    rows, tokens, H, V = (list(x) for x in zip(*(row[:4] for row in told), strict=True))
    counts, checksums = ([row[i] for row in told] for i in (_COUNTED, _CHECKSUM))
    for i, name in enumerate(_SETTINGS, start=_COUNTED + 1):
        if len({row[i] for row in told}) > 1:
            shown = _shown(name, [row[i] for row in told])
            if name in ("softcap", "logit_scale") and function in (STATISTICS, MEAN_LOGIT):
                name = f"{name} / temperature"
            raise ValueError(
                f"{name} must be the same on all ranks that share the vocabulary, here it is "
                f"{shown}"
            )
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
    classes = vocab_size or sum(rows)
    if problem.class_weight is not None and problem.class_weight.shape != (classes,):
        raise ValueError(
            f"class_weight must be (V,) = ({classes},), the weights of all ranks' classes, got "
            f"{tuple(problem.class_weight.shape)}"
        )
    return Shard(
        group=group,
        first=sum(rows[: dist.get_rank(group)]),
        V=classes,
        largest=max(rows),
        tokens=tuple(tokens) if layout.tokens_sharded else None,
        counted=sum(counts) if layout.tokens_sharded else counts[0],
    )
