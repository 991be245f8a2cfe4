"""Every argument of every public loss raises an error for every kind of wrong value.

The table is the product of functions, arguments and values: each value is either one that the
argument takes, in ``TAKEN``, or is refused by an error that names the argument.
"""

import inspect

import pytest
import torch
from support.bad_inputs import H, N, V, refused

import fusedce
from fusedce import sharded
from fusedce.contract.problem import NUMBERS, RANGES

pytestmark = pytest.mark.usefixtures("one_rank")  # whose shard is the whole vocabulary


def shifted(*args, **kwargs):
    """``linear_cross_entropy`` of labels that have yet to be shifted."""
    return fusedce.linear_cross_entropy(*args, **{"shift": 1} | kwargs)


shifted.__signature__ = inspect.signature(fusedce.linear_cross_entropy)


def module(*, hidden, weight, labels, bias=None, token_weight=None, **options):
    """``FusedLinearCrossEntropyLoss`` made and called."""
    loss = fusedce.FusedLinearCrossEntropyLoss(**options)
    return loss(weight, hidden, labels, bias, token_weight=token_weight)


module.__signature__ = inspect.Signature(
    x
    for x in inspect.signature(fusedce.fused_cross_entropy).parameters.values()
    if x.name not in ("process_group", "tokens_sharded", "vocab_size")
)
FUNCTIONS = (
    fusedce.fused_ce, fusedce.fused_cross_entropy, fusedce.fused_logprobs, fusedce.fused_argmax,
    fusedce.fused_topk, fusedce.fused_kl, fusedce.fused_kl_tokens, fusedce.linear_cross_entropy,
    shifted, module, sharded.sharded_ce, sharded.sharded_cross_entropy, sharded.sharded_logprobs,
    sharded.sharded_argmax,
)  # fmt: skip
NUMBER = {"three", "2.5", "zero", "minus one", "2**70"}
TAKEN = {
    **dict.fromkeys({*NUMBERS} - {*RANGES}, NUMBER),
    "k": {"three"},
    "labels": {"(N,) int64"},
    "bias": {"None", "(V,) leaf"},
    "token_weight": {"None", "(N,) int64", "(N,) nan"},
    "class_weight": {"None"},
    "teacher_bias": {"None", "(V,) leaf"},
    "softcap": NUMBER - {"zero", "minus one"} | {"None"},
    "teacher_softcap": NUMBER - {"zero", "minus one"} | {"None"},
    "teacher_logit_scale": NUMBER,
    "ce_weight": NUMBER,
    "label_smoothing": {"zero"},
    "beta": {"zero"},
    "temperature": NUMBER - {"zero", "minus one"},
    "ignore_index": {"None", "zero", "three", "minus one"},
    "chunk_tokens": {"None", "three"},
    "memory_budget": {"None"},
    "mean_logit": {"true"},
    "backend": {"None"},
    "process_group": {"None"},
    "argmax_out": {"None", "(N,) int64"},
    "monitor": {"dict"},  # an empty collection of names
    "shift": {"true", "zero", "three"},
    "vocab_size": {"None"},
}
# what one function takes instead
TAKEN_BY = {
    ("fused_logprobs", "labels"): {"(N,) int64", "(N, H) int64"},  # H classes of each token
    ("shifted", "ignore_index"): {"zero", "three", "minus one"},
    ("sharded_logprobs", "labels"): {"(N,) int64", "(N, H) int64"},
    ("sharded_argmax", "vocab_size"): {"None", "three"},
    **{
        (f"sharded_{name}", "tokens_sharded"): {"true"}
        for name in ("ce", "cross_entropy", "logprobs", "argmax")
    },
    ("fused_kl", "labels"): {"(N,) int64", "None"},
    ("fused_kl_tokens", "labels"): {"(N,) int64", "None"},
}


def good(function) -> dict:
    given = {
        "hidden": torch.linspace(-1, 1, N * H).view(N, H),
        "weight": torch.linspace(1, -1, V * H).view(V, H),
        "labels": torch.tensor([1, 2, 5, 3, 4, 9]),
        "k": 2,
        "teacher_hidden": torch.linspace(-2, 1, N * 5).view(N, 5),
        "teacher_weight": torch.linspace(2, -1, V * 5).view(V, 5),
    }
    return {k: x for k, x in given.items() if k in inspect.signature(function).parameters}


def cases():
    for function in FUNCTIONS:
        for argument in inspect.signature(function).parameters:
            yield pytest.param(function, argument, id=f"{function.__name__}-{argument}")


def result(function, **change):
    out = function(**good(function) | change)
    return [x.clone() for x in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize(("function", "argument"), [*cases()])
def test_a_wrong_value_is_refused_by_name_and_leaves_nothing_behind(function, argument):
    name = function.__name__
    taken = TAKEN_BY.get((name, argument), TAKEN.get(argument, set()))
    before = result(function)
    for kind, words in refused(lambda value: result(function, **{argument: value}), taken):
        # A smaller vocabulary that is possible leaves out the class of a label.
        sharded_three = name.startswith("sharded") and (argument, kind) == ("vocab_size", "three")
        named = "labels" if sharded_three else argument
        assert named in words, (kind, words)
        assert "fusedce::" not in words, (kind, words)  # the dispatcher's message
    for x, y in zip(before, result(function), strict=True):
        assert torch.equal(x, y)
