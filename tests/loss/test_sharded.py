"""A vocabulary spread over real gloo processes gives what the whole one gives: a table of calls."""

import functools

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.params import slow
from support.vocabulary import OF_TOKENS, Layout, compare, inputs, sure
from torch.distributed.tensor import DTensor

from fusedce import (
    fused_argmax,
    fused_ce,
    fused_cross_entropy,
    fused_kl,
    fused_kl_tokens,
    fused_logprobs,
    fused_topk,
)


def monitored(hidden, weight, labels, **options):
    """Sums beside the loss and the likeliest classes."""
    own = labels.to_local() if isinstance(labels, DTensor) else labels
    argmax = torch.empty(own.shape, dtype=torch.int64)
    names = ("correct", "entropy", "z_loss")
    out = fused_ce(hidden, weight, labels, monitor=names, argmax_out=argmax, **options)
    return *out, *(out.monitors[name] for name in names), argmax


def correct(hidden, weight, labels, **options):
    out = fused_ce(hidden, weight, labels, monitor=("correct",), **options)
    return *out, out.monitors["correct"]


def kl_monitored(*tensors, **options):
    """A divergence and the sums beside it."""
    out = fused_kl(*tensors, monitor=("correct", "entropy"), **options)
    return *out, *out.monitors.values()


def argmax(hidden, weight, labels, **options):
    return fused_argmax(hidden.nan_to_num(), weight, **options)


def topk(hidden, weight, labels, **options):
    return fused_topk(hidden.nan_to_num(), weight, 2, **options)


def in_batches(hidden, weight, labels, **options):
    options |= {"reduction": "none"}
    return fused_cross_entropy(hidden[:, None], weight, labels[:, None], **options)[:, 0]


FUNCTIONS = {
    "sum": fused_ce,
    "monitored": monitored,
    "correct": correct,
    "argmax": argmax,
    "topk": topk,
    "batches": in_batches,
    "losses": functools.partial(fused_cross_entropy, reduction="none"),
    "mean": functools.partial(fused_cross_entropy, reduction="mean"),
    "sum of losses": functools.partial(fused_cross_entropy, reduction="sum"),
    "statistics": fused_logprobs,
    "divergence": fused_kl,
    "divergences": fused_kl_tokens,
    "monitored divergence": kl_monitored,
}
EVERYTHING = {
    "softcap": 3.0, "logit_scale": 0.7, "label_smoothing": 0.2, "z_loss": 0.05,
    "token_weight": True, "bias": True, "ignore_index": 2,
}  # fmt: skip
TEACHER = {
    "teacher_hidden": True, "teacher_weight": True, "beta": 0.3, "temperature": 1.5,
    "ce_weight": 0.4,
}  # fmt: skip
LONGEST = {  # numbers of many digits, which ranks compare as text
    "beta": 1 / 3, "temperature": 4 / 3, "ce_weight": 1 / 3e5, "softcap": 100 / 3, "bias": True,
    "teacher_softcap": 100 / 7, "logit_scale": 1 / 3, "teacher_logit_scale": -1 / 3e4,
    "token_weight": True, "memory_budget": 10**12,
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "scale": {"logit_scale": -1.5},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.3},
    "weights": {"token_weight": True},
    "bias": {"bias": True},
    "chunks": {"chunk_tokens": 7},
    "class weights": {"class_weight": True, "bias": True},
    "everything": EVERYTHING | {"chunk_tokens": 7},
    "unsmoothed": EVERYTHING | {"label_smoothing": 0.0, "chunk_tokens": 7},
    "all of losses": EVERYTHING | {"class_weight": True},
    "all of statistics": {
        "softcap": 3.0, "logit_scale": -0.7, "temperature": 0.6, "mean_logit": True, "bias": True,
    },
    "temperatures": {"temperature": True, "bias": True},
    "K": {"kind": "several"},
    "all of K": {
        "kind": "several", "softcap": 3.0, "logit_scale": -0.7, "temperature": 0.6,
        "mean_logit": True, "bias": True,
    },
    "temperatures of K": {"kind": "several", "temperature": True, "bias": True},
    "forward": TEACHER | LONGEST | {"divergence": "forward"},
    "reverse": TEACHER | {"divergence": "reverse", "chunk_tokens": 4},
    "jsd": TEACHER | {"divergence": "jsd", "token_weight": True},
}  # fmt: skip
# 256 classes share a reference in the interpreter: some ranks have several such blocks.
WIDE = {2: (300, 530), 4: (40, 530, 0, 70)}
EVEN = {2: (6, 5), 4: (3, 3, 3, 2)}
LAYOUTS = {
    "": Layout(),
    "wide": Layout(WIDE),
    "own tokens": Layout(own_tokens=True),
    "padded": Layout(padded=True),
    "padded, own tokens": Layout(padded=True, own_tokens=True),
    "DTensor": Layout(EVEN, hidden="plain"),
    "DTensor, empty": Layout({2: (2, 1), 4: (1, 1, 1, 0)}, hidden="plain"),
    "DTensors": Layout(EVEN, hidden="placed"),
    "DTensors, empty": Layout({2: (5, 4), 4: (3, 3, 3, 0)}, hidden="placed"),
    "DTensors, own tokens": Layout(hidden="placed", own_tokens=True),
}
GAPS = {"sure and right": 16.0, "sure and wrong": -60.0}  # bfloat16 keeps the largest logits


def of_row(row, rank):
    """Compare the row; return the results that all ranks have alike."""
    function, options, backend, dtype, layout, special = (*row, "", "")[:6]
    layout = LAYOUTS[layout]
    V = sum(layout.sizes[dist.get_world_size()])
    x = inputs(V, getattr(torch, dtype), **OPTIONS[options]) | {"backend": backend}
    if special in GAPS:
        x = sure(x, GAPS[special])
    if special == "nothing valid":
        x["labels"] = torch.full_like(x["labels"], -100)
    if special == "no tokens":
        x |= {name: x[name][:0] for name in OF_TOKENS if name in x}
    if special == "masked":
        x["bias"][1:4] = -torch.inf
        x["labels"] = torch.where((x["labels"] > 0) & (x["labels"] < 4), 0, x["labels"])
    if layout.padded:
        real = layout.real(dist.get_world_size())
        ignored = x["labels"] == x.get("ignore_index", -100)
        x["labels"] = torch.where(ignored | (x["labels"] < real), x["labels"], 0)
        if "bias" in x:
            x["bias"][real:] = 100.0
    out = compare(x, FUNCTIONS[function], layout, rank)
    alike = [y for y in out if not y.dim() or not layout.own_tokens]
    return [y.tolist() for y in alike]


# Function, options, backend, dtype, layout, and what is special about the inputs.
TORCH = [
    *(("sum", name, "torch", "float64") for name in [*OPTIONS][:8]),
    ("sum", "everything", "torch", "float64"),
    *(("sum", "everything", "torch", dtype) for dtype in ("float32", "bfloat16", "float16")),
    ("sum", "plain", "torch", "bfloat16"),
    ("sum", "plain", "torch", "float32", "", "sure and right"),
    ("sum", "everything", "torch", "float64", "padded"),
    ("sum", "plain", "torch", "float64", "own tokens"),
    ("sum", "everything", "torch", "float64", "own tokens"),
    ("sum", "plain", "torch", "float64", "DTensor"),
    ("sum", "plain", "torch", "float64", "DTensors, empty"),
    ("sum", "everything", "torch", "float64", "DTensors"),
    ("sum", "plain", "torch", "float64", "DTensors, own tokens"),
    ("sum", "everything", "torch", "float64", "DTensors, own tokens"),
    ("monitored", "plain", "torch", "float32"),
    ("monitored", "unsmoothed", "torch", "float32"),
    ("monitored", "z_loss", "torch", "float32", "DTensors, own tokens"),
    ("correct", "unsmoothed", "torch", "float32"),
    ("argmax", "bias", "torch", "float32"),
    ("argmax", "plain", "torch", "float32", "DTensor"),
    ("topk", "bias", "torch", "float32"),
    ("topk", "plain", "torch", "float32", "padded, own tokens"),
    ("topk", "temperatures", "torch", "float32", "own tokens"),
    ("topk", "softcap", "torch", "bfloat16"),
    *(
        (reduction, name, "torch", "float64")
        for reduction in ("mean", "sum of losses")
        for name in ("z_loss", "class weights")
    ),
    *((reduction, "all of losses", "torch", "float64", "own tokens")
      for reduction in ("losses", "mean", "sum of losses")),
    ("losses", "plain", "torch", "float64"),
    ("losses", "class weights", "torch", "float64", "DTensor"),
    ("losses", "class weights", "torch", "float64", "DTensor, empty"),
    *(("losses", "all of losses", "torch", dtype) for dtype in ("float64", "float32", "bfloat16")),
    ("batches", "softcap", "torch", "float32"),
    ("statistics", "plain", "torch", "float64"),
    ("statistics", "temperatures", "torch", "float64"),
    ("statistics", "temperatures", "torch", "float64", "own tokens"),
    ("statistics", "all of statistics", "torch", "float64", "padded"),
    ("statistics", "bias", "torch", "float32", "", "masked"),
    ("statistics", "plain", "torch", "float64", "DTensor"),
    ("statistics", "plain", "torch", "float64", "DTensor, empty"),
    *(("statistics", "all of statistics", "torch", x) for x in ("float64", "float32", "bfloat16")),
    ("statistics", "all of K", "torch", "float64"),
    ("statistics", "K", "torch", "bfloat16"),
    ("statistics", "temperatures of K", "torch", "float64", "own tokens"),
    ("statistics", "plain", "torch", "float32", "", "sure and right"),
    *(
        (function, "plain", "torch", "float64", layout, special)
        for function in ("sum", "losses", "statistics")
        for layout in ("", "own tokens")
        for special in ("nothing valid", "no tokens")
    ),
    ("statistics", "K", "torch", "float64", "own tokens", "no tokens"),
    ("topk", "plain", "torch", "float64", "", "no tokens"),
    *(
        (function, kind, "torch", "float64", layout)
        for function in ("divergence", "divergences")
        for kind, layout in (
            ("forward", ""), ("forward", "own tokens"), ("forward", "padded"), ("reverse", ""),
            ("reverse", "padded, own tokens"), ("jsd", ""), ("jsd", "own tokens"),
        )
    ),
    ("divergence", "forward", "torch", "float64", "DTensor"),
    ("monitored divergence", "forward", "torch", "float64"),
    ("monitored divergence", "forward", "torch", "float64", "padded, own tokens"),
]  # fmt: skip
QUICK = [
    ("sum", "everything", "triton", "float32"),
    ("sum", "chunks", "triton", "float32", "wide"),
    ("sum", "unsmoothed", "triton", "bfloat16"),
    ("sum", "unsmoothed", "triton", "float32", "padded"),
    ("sum", "unsmoothed", "triton", "float32", "own tokens"),
]
FOUR = [  # four ranks on few cores take long: cases in which their number matters
    ("sum", "plain", "triton", "float32"),
    ("sum", "everything", "triton", "float32"),
    ("sum", "plain", "triton", "float32", "wide"),
    ("sum", "unsmoothed", "triton", "float32", "padded"),
    ("sum", "unsmoothed", "triton", "float32", "own tokens"),
    ("monitored", "unsmoothed", "triton", "float32"),
]
TRITON = [
    *(("sum", name, "triton", "float32") for name in [*OPTIONS][:7]),
    ("sum", "unsmoothed", "triton", "float32"),
    ("sum", "unsmoothed", "triton", "bfloat16", "wide"),
    ("sum", "unsmoothed", "triton", "float16"),
    ("losses", "plain", "triton", "float32", "wide", "sure and right"),
    ("sum", "plain", "triton", "bfloat16", "wide", "sure and wrong"),
    ("sum", "chunks", "triton", "float32", "own tokens"),
    ("sum", "bias", "triton", "float32", "", "masked"),
    *((name, "plain", "triton", "float32") for name in ("monitored", "correct", "argmax")),
    ("monitored", "unsmoothed", "triton", "float32"),
    ("monitored", "z_loss", "triton", "float32", "DTensors, own tokens"),
    ("topk", "bias", "triton", "float32"),
    ("losses", "plain", "triton", "float32"),
    ("losses", "class weights", "triton", "float32"),
    ("losses", "everything", "triton", "float32"),
    ("losses", "everything", "triton", "bfloat16"),
    *(
        (function, "plain", "triton", "float32", layout, "nothing valid")
        for function in ("sum", "losses", "statistics")
        for layout in ("", "own tokens")
    ),
    ("statistics", "plain", "triton", "float32"),
    ("statistics", "bias", "triton", "float32", "", "masked"),
    ("statistics", "plain", "triton", "float32", "", "sure and right"),
    ("statistics", "temperatures", "triton", "float32"),
    ("statistics", "all of statistics", "triton", "float32"),
    ("statistics", "all of statistics", "triton", "bfloat16"),
    ("statistics", "all of K", "triton", "float32"),
    ("statistics", "temperatures of K", "triton", "bfloat16"),
]
RUNS = {"torch": TORCH, "quick": QUICK, "four": FOUR, "triton": TRITON}


@functools.cache
def results(run, world):
    return ranks.run({row: functools.partial(of_row, row) for row in RUNS[run]}, world)


def rows():
    for run, world in (("torch", 2), ("torch", 4), ("quick", 2)):
        yield from ((run, world, row) for row in RUNS[run])
    for run, world in (("triton", 2), ("four", 4)):
        yield from (slow(run, world, row) for row in RUNS[run])


@pytest.mark.parametrize(
    ("run", "world", "row"), [*rows()],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else str(x),
)  # fmt: skip
def test_equals_the_whole_vocabulary(run, world, row):
    first, *others = ranks.of(results(run, world), row)
    assert all(found == first for found in others)  # the same bits on all ranks
