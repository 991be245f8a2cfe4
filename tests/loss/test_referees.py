"""Every public loss under every way torch has of running it, which docs/trust.md names.

A run gives the values and gradients of a plain call.
"""

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.bounds import EXACT, SAME_SUMS
from support.copies import COPIES
from support.heads import ce, loss_and_grads, plain_model, tokens
from support.params import slow
from torch.utils.checkpoint import checkpoint

import fusedce
from fusedce.autograd import sums
from fusedce.autograd import tokens as losses_of_tokens

N, H, V = 5, 6, 11
PAGE = Path(__file__).parents[2] / "docs" / "trust.md"
LABELS = torch.tensor([1, 10, -100, 0, 7])


def inputs(dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    shapes = ((N, H), (V, H), (N, 4), (V, 4))
    drawn = [torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.requires_grad_() for x in drawn[:2]], drawn[2:]


def functions(teacher):
    """Functions by name, each giving one differentiable number from hidden and weight."""
    ce, kl = fusedce.fused_cross_entropy, fusedce.fused_kl
    return {
        "fused_ce": lambda h, w: fusedce.fused_ce(h, w, LABELS, softcap=5.0, z_loss=0.1).loss_sum,
        "fused_ce(...).mean()": lambda h, w: fusedce.fused_ce(h, w, LABELS).mean(),
        "fused_cross_entropy": lambda h, w: ce(h, w, LABELS, label_smoothing=0.1),
        'fused_cross_entropy(reduction="none")': lambda h, w: (
            ce(h, w, LABELS, reduction="none").square().sum()
        ),
        "fused_logprobs": lambda h, w: sum_of_statistics(
            fusedce.fused_logprobs(h, w, LABELS, temperature=0.7)
        ),
        "fused_kl": lambda h, w: kl(h, w, *teacher, LABELS, divergence="jsd").loss_sum,
        "fused_kl_tokens": lambda h, w: (
            fusedce.fused_kl_tokens(h, w, *teacher, LABELS).square().sum()
        ),
        "linear_cross_entropy": lambda h, w: fusedce.linear_cross_entropy(h, w, LABELS, shift=1),
        "fused_argmax": lambda h, w: fusedce.fused_argmax(h, w).sum(),
    }


def sum_of_statistics(stats):  # (torch 2.8 cannot compile a slice of a named tuple)
    return stats.logprob.sum() + stats.entropy.sum() + stats.lse.sum()


NAMES = tuple(functions(inputs()[1]))


def value_and_gradients(function, leaves):
    out = function(*leaves)
    if out.requires_grad:
        out.backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def plain(name, change=lambda f: f):
    """Value and gradients of the function, run as ``change`` wraps it."""
    leaves, teacher = inputs()
    return value_and_gradients(change(functions(teacher)[name]), leaves)


def gradcheck(name):
    leaves, teacher = inputs(torch.float64)
    assert torch.autograd.gradcheck(functions(teacher)[name], leaves)


def at_once(calls):
    """The calls in a thread each; their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def in_threads(name):
    """Four threads at once, each with leaves of its own."""
    expected = plain(name)
    for got in at_once([functools.partial(plain, name)] * 4):
        assert_equal(got, expected)


def inference(name):
    leaves, teacher = inputs()
    with torch.inference_mode():
        assert_equal([functions(teacher)[name](*leaves)], plain(name)[:1])


def anomaly(name):
    with torch.autograd.detect_anomaly(check_nan=True):
        found = plain(name)
    assert_equal(found, plain(name))


def other_default(name):
    """Models are built inside ``set_default_dtype(bfloat16)``, scripts of physics set float64."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):

        def found(dtype=dtype):
            leaves, teacher = inputs(dtype)
            return value_and_gradients(functions(teacher)[name], leaves)

        expected, before = found(), torch.get_default_dtype()
        for default in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(default)
            try:
                got = found()
            finally:
                torch.set_default_dtype(before)
            torch.testing.assert_close(got, expected, **EXACT)
    leaves, teacher = inputs()
    function = functions(teacher)[name]
    with torch.device("meta"):  # what is made without a device of its own has no values
        got = value_and_gradients(function, leaves)
    assert_equal(got, plain(name))


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=SAME_SUMS, atol=SAME_SUMS)  # of terms of size 1


def changed(change):
    return lambda name: assert_equal(plain(name, change), plain(name))


WAYS = {
    "gradcheck": gradcheck,
    "checkpoint": changed(lambda f: lambda h, w: checkpoint(f, h, w, use_reentrant=False)),
    "reentrant checkpoint": changed(lambda f: lambda h, w: reentrant(f, h, w)),
    "anomaly mode": anomaly,
    "threads": in_threads,
    "inference mode": inference,
    "other default dtype": other_default,
}


def reentrant(function, h, w):
    return checkpoint(function, h, w, use_reentrant=True)


COMPILED = "compile", "export"  # which are in test_compiled.py


def test_the_page_names_every_function_and_way():
    page = " ".join(PAGE.read_text().split())
    for name in (*NAMES, *OBJECTS):
        assert f"`{name}`" in page or f" {name}" in page
    for way in (*WAYS, *COMPILED, *COPIES):
        assert way in page


@pytest.mark.parametrize(
    ("name", "way"),
    [
        slow(name, way) if way == "gradcheck" and name in NAMES[2:] else (name, way)
        for name in NAMES
        for way in WAYS
        if name != "fused_argmax"
        or way not in ("gradcheck", "reentrant checkpoint", "anomaly mode")
    ],
)
def test_a_way_to_run_gives_what_a_plain_call_gives(name, way):
    WAYS[way](name)


# ---- operators, as the functions call them


def registered():
    """Names of all operators of the package, whose functions are imported at their first use."""
    assert all(hasattr(fusedce, name) for name in fusedce.__all__)
    operators = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("fusedce::") for name in operators if name.startswith("fusedce::")}


@contextlib.contextmanager
def recorded():
    """``[(name, operator, its arguments)]`` of the calls inside, backward passes included.

    Eager code calls the functions behind them; here it asks the operators, as compilers do.
    """
    calls = []

    def recording(name):
        operator = getattr(torch.ops.fusedce, name)

        def call(*arguments):
            apart = not torch.is_grad_enabled()  # as in backward: nothing differentiates the call
            calls.append((name, operator, [_detached(x) if apart else x for x in arguments]))
            return operator(*arguments)

        return call

    with contextlib.ExitStack() as stack:
        for module in (sums, losses_of_tokens):
            stack.enter_context(mock.patch.object(module, "in_eager_mode", return_value=False))
        for name in registered():
            stack.enter_context(mock.patch.object(torch.ops.fusedce, name, recording(name)))
        yield calls


def _detached(x):
    return x.detach() if isinstance(x, torch.Tensor) else x


def calls(backend):
    """``(function, what it takes after hidden and weight, options that reach its operators)``."""
    _, teacher = inputs()
    bias, labels = torch.linspace(-1, 1, V).requires_grad_(), LABELS.where(LABELS >= 0, 7)
    logits = {"bias": bias, "softcap": 5.0, "logit_scale": -0.7}
    of_tokens = logits | {"ignore_index": 7, "chunk_tokens": 2}
    terms = {"label_smoothing": 0.1, "z_loss": 0.1, "token_weight": torch.linspace(0, 1, N)}
    losses = of_tokens | terms
    of_classes = {"class_weight": torch.linspace(0, 1, V)}
    of_pair = of_tokens | {
        "divergence": "jsd", "beta": 0.3, "temperature": 1.7, "ce_weight": 0.4,
        "teacher_bias": torch.linspace(1, -1, V), "teacher_softcap": 3.0,
        "teacher_logit_scale": 1.3, "token_weight": torch.linspace(0, 1, N),
    }  # fmt: skip
    each = {"temperature": torch.linspace(0.5, 2, N)}
    beside = {"argmax_out": torch.zeros(N, dtype=torch.int64)}
    monitor = {"monitor": ("correct", "entropy", "z_loss")}
    by_token = functools.partial(fusedce.fused_cross_entropy, reduction="none")
    several = torch.stack([labels, labels.clamp(min=3), labels], dim=1)
    yield fusedce.fused_ce, (labels,), losses | beside | monitor
    yield fusedce.fused_cross_entropy, (labels,), losses | of_classes
    yield by_token, (labels,), losses | of_classes
    yield fusedce.fused_logprobs, (labels,), of_tokens | each | {"mean_logit": True}
    yield fusedce.fused_logprobs, (several,), of_tokens | each
    yield fusedce.fused_argmax, (), logits
    yield fusedce.fused_kl, (*teacher, labels), of_pair | {"monitor": ("correct", "entropy")}
    yield fusedce.fused_kl_tokens, (*teacher, labels), of_pair


def trained_and_evaluated(function, arguments, options):
    """Call a function with gradients, twice through one graph, and without."""
    leaves, _ = inputs()
    found = function(*leaves, *arguments, **options)
    with torch.no_grad():
        function(*leaves, *arguments, **options)
    found = (found,) if isinstance(found, torch.Tensor) else found
    differentiable = [x.sum() for x in found if x.requires_grad]
    if differentiable:
        sum(differentiable).backward(retain_graph=True)
        sum(differentiable).backward()


def signature(name, arguments):
    """Key of a call: its options, shapes and dtypes."""
    return name, tuple(
        (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in arguments
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_opcheck_of_every_operator(backend):
    """Plain, and with all options: for real, on fake tensors, with autograd, of symbolic sizes."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if backend == "torch":  # (the interpreter is slow)
        tests.append("test_aot_dispatch_dynamic")
    distinct = {}
    for function, arguments, options in calls(backend):
        for chosen in ({}, options):
            with recorded() as seen:
                trained_and_evaluated(function, arguments, chosen | {"backend": backend})
            assert seen, (function, chosen)
            distinct |= {signature(which, args): (op, args) for which, op, args in seen}
    for operator, given in distinct.values():
        torch.library.opcheck(operator, given, test_utils=tests)
    assert {name for name, _ in distinct} == registered()


def results():
    """Results that a user may keep, without a graph, by the name of their class."""
    (h, w), _ = inputs()
    with torch.no_grad():
        out = fusedce.fused_ce(h, w, LABELS)
        return {
            "LossSum": out,
            "LossSum / 2": out / 2,
            "LossSum with monitors": fusedce.fused_ce(h, w, LABELS, monitor=("correct",)),
            "TokenStats": fusedce.fused_logprobs(h, w, LABELS),
            "TokenStatsAndMean": fusedce.fused_logprobs(h, w, LABELS, mean_logit=True),
        }


def result_is_copied(name, way):
    result = results()[name]
    again = COPIES[way](result)
    assert type(again) is type(result)
    torch.testing.assert_close(tuple(again), tuple(result), rtol=0, atol=0)
    assert {k: float(x) for k, x in getattr(again, "monitors", {}).items()} == {
        k: float(x) for k, x in getattr(result, "monitors", {}).items()
    }
    if name.startswith("LossSum"):
        assert (again + again).n_valid == 2 * result.n_valid


def accumulator_is_copied(way):
    """Between windows: the copy has the totals, and its windows do not count in the original."""
    (h, w), _ = inputs()
    acc = fusedce.LossAccumulator()
    with acc.window([4]):
        acc.backward(fusedce.fused_ce(h, w, LABELS))
    again = COPIES[way](acc)
    assert again.metrics() == acc.metrics()
    if way == "copy":
        return  # shares its parts with the original, as a shallow copy does
    with again.window([4]):
        again.backward(fusedce.fused_ce(h, w, LABELS))
    assert (again.metrics()["n_windows"], acc.metrics()["n_windows"]) == (2, 1)


def module_is_copied(way):
    (h, w), _ = inputs()
    module = fusedce.FusedLinearCrossEntropyLoss(label_smoothing=0.1)
    assert_equal([COPIES[way](module)(w, h, LABELS)], [module(w, h, LABELS)])


def model_is_copied(way):
    model = fusedce.replace_loss_head(plain_model())
    x, y = tokens(2, 3), tokens(2, 3, seed=1)
    for found in (COPIES[way](model), model):
        assert_equal(loss_and_grads(found, x, y, ce), loss_and_grads(plain_model(), x, y, ce))


OBJECTS = {name: functools.partial(result_is_copied, name) for name in results()} | {
    "LossAccumulator": accumulator_is_copied,
    "FusedLinearCrossEntropyLoss": module_is_copied,
    "model with a replaced head": model_is_copied,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_copy_has_the_same_values(name, way):
    OBJECTS[name](way)


def test_backward_of_several_losses_in_one_thread_each():
    """Graphs made here, differentiated elsewhere: gradients meet in one shared head."""
    (h, w), teacher = inputs()
    made = functions(teacher)
    names = [name for name in NAMES if name != "fused_argmax"]
    expected = sum(plain(name)[2] for name in names)
    at_once([made[name](h, w).backward for name in names])
    assert_equal([w.grad], [expected])
