"""How long the way is from a public function to the first matrix product, in calls not in seconds.

Seconds differ between machines; what Python and torch are asked to do does not.
"""

import sys
from pathlib import Path

import pytest
import torch
from support.operators import Calls
from torch.profiler import ProfilerActivity, profile

import fusedce
from fusedce import fused_ce, fused_cross_entropy, fused_logprobs

PACKAGE = str(Path(fusedce.__file__).parent)


def inputs(*, train):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=rng).requires_grad_(train)
    weight = torch.randn(100, 32, generator=rng).requires_grad_(train)
    return hidden, weight, torch.randint(100, (64,), generator=rng)


def frames_before_the_first_product(call):
    """Code objects of the package that are entered, in order."""
    entered, met = [], False

    def watch(frame, event, argument):
        nonlocal met
        if event == "c_call":
            met = met or getattr(argument, "__name__", "") in ("mm", "addmm")
        elif event == "call" and not met and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code)

    call()  # imports
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert met
    return entered


@pytest.mark.parametrize("train", [True, False])
def test_the_way_of_a_sum_is_short(train):
    given = inputs(train=train)
    entered = frames_before_the_first_product(lambda: fused_ce(*given))
    # Ceilings, with room for a cleaner door (43 calls of 14 files to train); the goal: 40 of 10.
    assert len(entered) <= 49
    files = {code.co_filename for code in entered}
    assert len(files) <= 15
    assert not any("shard" in Path(name).name for name in files)


def aten_calls(call):
    """Operators of torch that are called, not those that these call."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    events = [e for e in found.events() if e.name.startswith("aten::")]
    return [
        e.name for e in events if e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::")
    ]


@pytest.mark.parametrize(("train", "most"), [(True, 53), (False, 24)])
def test_few_operators_stand_beside_the_products_of_one_tile(train, most):
    """The mean, backward and what fills ``.grad`` are among them."""
    hidden, weight, labels = inputs(train=train)

    def step():
        hidden.grad = weight.grad = None
        out = fused_ce(hidden, weight, labels)
        if train:
            out.mean().backward()

    names = aten_calls(step)
    assert names.count("aten::mm") == (3 if train else 1)
    assert len(names) - names.count("aten::mm") <= most


LOSSES = {
    "sum": lambda *x: fused_ce(*x).loss_sum,
    "none": lambda *x, **o: fused_cross_entropy(*x, reduction="none", **o).sum(),
    "logprob": lambda *x, **o: fused_logprobs(*x, **o).logprob.sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_eager_code_asks_no_operator_and_a_mode_sees_them(name, monkeypatch):
    loss = LOSSES[name]
    given = inputs(train=True)
    expected = torch.autograd.grad(loss(*given), given[:2])
    with Calls() as calls:
        found = torch.autograd.grad(loss(*given), given[:2])
    seen = {str(operator) for operator, *_ in calls.seen}
    assert any(text.startswith("fusedce.") for text in seen)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def refuse(*_, **__):
        raise AssertionError("eager code called an operator")

    for operator in ("sum", "stats", "grads"):
        monkeypatch.setattr(torch.ops.fusedce, operator, refuse)
    torch.autograd.grad(loss(*given), given[:2])


def smoothed(*x, **options):
    return fused_cross_entropy(*x, label_smoothing=0.1, **options)


@pytest.mark.parametrize(
    ("loss", "options", "products"),
    [
        (smoothed, {}, 3),
        (smoothed, {"softcap": 5.0}, 3),  # by tokens, whose logits are kept
        (LOSSES["none"], {}, 3),
        (LOSSES["logprob"], {}, 3),
        (lambda *x, **o: fused_logprobs(*x, **o).entropy.sum(), {}, 3),
        (LOSSES["none"], {"memory_budget": 2**24}, 4),
        (smoothed, {"memory_budget": 2**24}, 4),
    ],
)
def test_logits_are_computed_once_while_they_are_few(loss, options, products):
    hidden, weight, labels = inputs(train=True)
    names = aten_calls(lambda: loss(hidden, weight, labels, **options).backward())
    assert names.count("aten::mm") + names.count("aten::addmm") == products


def test_kept_logits_serve_several_backwards_and_hooks():
    hidden, weight, labels = inputs(train=True)
    leaves = hidden, weight
    stats = fused_logprobs(hidden, weight, labels, temperature=0.7, softcap=3.0)
    loss = (stats.logprob + 0.1 * stats.entropy).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    budget = fused_logprobs(
        hidden, weight, labels, temperature=0.7, softcap=3.0, memory_budget=2**24
    )
    anew = torch.autograd.grad((budget.logprob + 0.1 * budget.entropy).sum(), leaves)
    torch.testing.assert_close(first, anew)
