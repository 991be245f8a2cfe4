"""Loops that change losses or gradients behind an accumulator get an error that says so.

Some errors need no guard: after its first loss an accumulator watches the parameters by itself.
"""

import gc
import warnings

import accelerate
import pytest
import torch
from support.bounds import EXACT, SAME_SUMS
from support.loops import (
    H,
    V,
    a_loss,
    batches,
    distance,
    new_weight,
    out_of,
    weight_and_grad,
    windowed,
)
from support.operators import Calls
from torch.utils.hooks import RemovableHandle

from fusedce import LossAccumulator, fused_ce
from fusedce.accumulate import exchange as _exchange

WAYS = pytest.mark.parametrize("streaming", [False, True], ids=["window", "streaming"])
READABLE = pytest.mark.parametrize("readable", [True, False])
SIZES = [3, 50]


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Linear(H, V, bias=False))


def loss_of(model, one):
    return fused_ce(model[0](one[0]), model[1].weight, one[1])


def step(acc, model, streaming, between=lambda: None, parameters=None, last=lambda: None):
    """One window of two micro-batches, with ``between`` after the first one."""

    def loop():
        for i, one in enumerate(batches(SIZES)):
            acc.backward(loss_of(model, one))
            (last if i else between)()

    trained = model.parameters() if parameters is None else parameters
    windowed(acc, streaming, trained, SIZES, loop)


def assert_exact(model, extra=lambda model: 0):
    same = new_model()
    out = sum(loss_of(same, one) for one in batches(SIZES))
    exact = torch.autograd.grad(out.mean() + extra(same), list(same.parameters()))
    for p, grad in zip(model.parameters(), exact, strict=True):
        assert distance(p.grad, grad) <= SAME_SUMS


def guarded(make=torch.optim.SGD):
    """A model, its guarded optimizer, and the accumulator."""
    model, acc = new_model(), LossAccumulator()
    optimizer = make(model.parameters(), lr=0.1)
    acc.guard(optimizer)
    return model, optimizer, acc


# ---- mistakes -----------------------------------------------------------------------------------

ZEROED = r"zero_grad\(\) was called inside a window"
WRITTEN = "gradients were changed inside a window by something else"


def regularise(model):
    model[1].weight.square().mean().backward()


def body_forgotten(acc, model, streaming):
    step(acc, model, streaming, parameters=model[1].parameters())


def never_zeroed(acc, model, streaming):
    for _ in range(2):
        step(acc, model, streaming)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    acc.metrics()


def zeroed(at, to_none):
    def mistake(acc, model, streaming):
        step(acc, model, streaming, **{at: lambda: model.zero_grad(set_to_none=to_none)})
        acc.metrics()

    return mistake


def zeroed_by_one_of_two_optimizers(acc, model, streaming):
    step(acc, model, streaming, between=torch.optim.SGD(model[1].parameters()).zero_grad)


def regularised(at):
    def mistake(acc, model, streaming):
        step(acc, model, streaming, **{at: lambda: regularise(model)})

    return mistake


def clipped(acc, model, streaming):
    step(
        acc, model, streaming,
        between=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    )  # fmt: skip


def beside_streaming(acc, model, streaming):
    regularise(model)
    step(acc, model, streaming)


def left_by_an_expert(acc, model, streaming):
    expert = torch.nn.Parameter(torch.ones(2))
    for _ in range(2):  # it takes no part in the first window
        step(acc, model, streaming, parameters=[*model.parameters(), expert])
        model.zero_grad()
        expert.grad = torch.ones(2)


# name: mistake, error, and where it is one (without a guard too, with declared counts too)
MISTAKES = {
    "no zero_grad": (never_zeroed, r"zero_grad\(\) is missing after optimizer", True, True),
    "left by an expert": (left_by_an_expert, r"which finish\(\) would rescale", True, False),
    "a loss before": (beside_streaming, r"which finish\(\) would rescale", True, False),
    "zeroed": (zeroed("between", False), ZEROED, True, True),
    "set to None": (zeroed("between", True), ZEROED, True, True),
    "zeroed by one of two optimizers": (zeroed_by_one_of_two_optimizers, ZEROED, True, True),
    "zeroed at the end": (zeroed("last", False), ZEROED, True, True),
    "None at the end": (zeroed("last", True), r"zero_grad(\(\))? (was )?called", True, True),
    "body forgotten": (body_forgotten, r"parameters: 2 that have a \.grad were not", True, False),
    "clipped": (clipped, WRITTEN, False, True),
    "regularised": (regularised("between"), WRITTEN, False, False),
    "regularised at the end": (regularised("last"), WRITTEN, False, False),
}
EACH = [
    (name, has_guard, streaming)
    for name, (_, _, alone, declared) in MISTAKES.items()
    for has_guard in ((False, True) if alone else (True,))
    for streaming in ((False, True) if declared else (True,))
]


@pytest.mark.parametrize(("name", "has_guard", "streaming"), EACH)
def test_mistakes_of_a_loop_are_named(name, has_guard, streaming):
    mistake, words, *_ = MISTAKES[name]
    model, acc = new_model(), LossAccumulator()
    if has_guard:
        acc.guard(torch.optim.SGD(model.parameters(), lr=0.1))  # nobody else holds it
    with pytest.raises(RuntimeError, match=words):
        mistake(acc, model, streaming)
    acc.discard_window()
    model.zero_grad()
    step(acc, model, streaming)
    assert_exact(model)


@pytest.mark.parametrize("name", ["no zero_grad", "zeroed", "zeroed at the end"])
@WAYS
def test_on_a_device_mistakes_are_named_when_metrics_are_read(name, streaming, monkeypatch):
    """The test double is a CPU tensor that must not be read."""
    monkeypatch.setattr(_exchange, "readable", lambda device: False)
    model, _, acc = guarded()
    mistake, words, *_ = MISTAKES[name]
    with pytest.raises(RuntimeError, match=words):
        mistake(acc, model, streaming)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("by", ["optimizer", "model"])
@WAYS
def test_zero_grad_between_windows_is_right(streaming, by, to_none):
    model, optimizer, acc = guarded()
    for _ in range(3):
        {"optimizer": optimizer, "model": model}[by].zero_grad(set_to_none=to_none)
        step(acc, model, streaming)
        assert_exact(model)
        regularise(model)  # outside of windows anything may be differentiated
        optimizer.zero_grad()


@WAYS
def test_a_parameter_that_dies_inside_a_window_left_no_gradients(streaming):
    """An error's frames may keep the last model until then."""
    acc, last = LossAccumulator(), [new_model()]
    step(acc, last[0], streaming)
    model = new_model()

    def last_dies():
        last.clear()
        gc.collect()

    step(acc, model, streaming, between=last_dies)
    assert_exact(model)


@WAYS
def test_gradients_may_be_changed_by_hand_after_the_last_micro_batch(streaming):
    """A factor, a frozen parameter, and a rank's gradients where nothing was valid."""
    model = torch.nn.Linear(8, 31)
    acc = LossAccumulator()
    acc.guard(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    for sizes in ([3, 5], [0, 0]):

        def loop(sizes=sizes):
            for hidden, labels in batches(sizes):
                acc.backward(fused_ce(hidden, model.weight, labels, bias=model.bias))
            model.weight.grad.mul_(0.5)
            model.bias.grad.zero_()

        optimizer.zero_grad()
        windowed(acc, streaming, model.parameters(), sizes, loop)
    assert acc.metrics()["n_windows"] == 2


def test_a_backward_of_its_own_in_a_window_of_declared_counts_is_right():
    model, _, acc = guarded()
    step(acc, model, False, lambda: regularise(model))
    assert_exact(model, lambda model: model[1].weight.square().mean())


def test_two_models_in_turns():
    models, acc = [new_model(), new_model()], LossAccumulator()
    for i in (0, 1, 0, 1):
        models[i].zero_grad()
        step(acc, models[i], True)
        assert_exact(models[i])


def test_finish_knows_the_parameters_that_are_guarded():
    """Those of the optimizer, of the loss and, by name, of the module."""
    model, acc = new_model(), LossAccumulator()
    acc.guard(torch.optim.SGD(model[1].parameters(), lr=0.1))
    acc.backward(loss_of(model, batches([4])[0]))
    with pytest.raises(RuntimeError, match=r"parameters: 1 that have a \.grad were not given"):
        acc.finish(model[0].parameters())
    acc.guard(torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    with pytest.raises(RuntimeError, match=r"parameters: 2 that .*: 0\.\w+, 0\.\w+"):
        acc.finish(model[1].parameters())
    acc.finish(model.parameters())


# ---- steps --------------------------------------------------------------------------------------


def test_a_step_inside_an_open_window_warns_once_and_is_an_error_under_a_guard():
    model, optimizer, acc = guarded()
    before = model[1].weight.detach().clone()
    alone, weight = LossAccumulator(), new_weight()
    alone.backward(a_loss(2, weight))
    with pytest.warns(UserWarning, match=r"SGD.step\(\) inside an open window: 1 micro-batches"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    alone.finish([weight])
    acc.backward(loss_of(model, batches([3])[0]))
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) inside an open window"):
        optimizer.step()
    torch.testing.assert_close(model[1].weight.detach(), before, **EXACT)
    acc.finish(model.parameters())
    optimizer.step()
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_after_the_last_declared_micro_batch_may_be_followed_by_zero_grad(to_none):
    model, optimizer, acc = guarded(torch.optim.AdamW)
    before = model[1].weight.detach().clone()
    for _ in range(2):
        with acc.window(SIZES):
            for i, one in enumerate(batches(SIZES)):
                acc.backward(loss_of(model, one))
                if not i:
                    with pytest.raises(RuntimeError, match="1 of 2 declared micro-batches"):
                        optimizer.step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert acc.metrics()["n_windows"] == 2
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("n", [1, 2])
def test_an_optimizer_that_steps_inside_the_last_backward(n):
    """With declared counts its gradients are what they will be; before, and streaming, not."""
    micro = batches([3, 2][:n])
    weight, exact, _ = weight_and_grad(micro)
    before = weight.detach().clone()
    optimizer, acc = torch.optim.SGD([weight], lr=0.1), LossAccumulator()
    acc.guard(optimizer)

    def loop():
        for i, one in enumerate(micro):
            if i == n - 1:
                hook = weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
            acc.backward(out_of(weight, one))
        hook.remove()

    with acc.window([3, 2][:n]):
        loop()
    torch.testing.assert_close(weight, before - 0.1 * exact)
    weight.grad = None
    for streaming in (True, False):
        words = r"SGD.step\(\) inside an open window: a backward is still running"
        with pytest.raises(RuntimeError, match=words):
            windowed(acc, streaming, weight, [3, 2, 2][: n + 1], loop)
        acc.discard_window()
        weight._post_accumulate_grad_hooks.clear()
        weight.grad = None


# ---- factors ------------------------------------------------------------------------------------


def scaled(acc, streaming, backward):
    """The gradient of a window whose scaled losses are differentiated by ``backward``."""
    weight = new_weight()

    def loop():
        for one in batches([3, 5]):
            backward(acc.scale(out_of(weight, one)))

    windowed(acc, streaming, weight, [3, 5], loop)
    assert acc.metrics()["n_tokens"] == 8
    return weight.grad


def error_of_exact(grad):
    return distance(grad, weight_and_grad(batches([3, 5]))[1])


@pytest.mark.parametrize("factor", [0.25, 2.0, 1 / 3, 100.0, 8.0])
@READABLE
@WAYS
def test_a_factor_after_scale_is_named(streaming, readable, factor, monkeypatch):
    """On a device, where metrics are read; there a loss scale may be any 2**k above 1."""
    monkeypatch.setattr(_exchange, "readable", lambda device: readable)
    use = LossAccumulator(), streaming, lambda loss: (loss * factor).backward()
    if factor in (2, 8) and not readable:
        assert error_of_exact(scaled(*use) / factor) <= SAME_SUMS
    else:
        with pytest.raises(RuntimeError, match=rf"multiplied by {factor:g} after scale\(\)"):
            scaled(*use)


@WAYS
def test_accelerates_division_is_named_unless_the_accumulator_was_told(streaming):
    engine = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    with pytest.raises(RuntimeError, match=r"multiplied by 0.25 after scale\(\)"):
        scaled(LossAccumulator(), streaming, engine.backward)
    for acc in (LossAccumulator(backward_divisor=4), LossAccumulator.from_accelerator(engine)):
        assert error_of_exact(scaled(acc, streaming, engine.backward)) <= SAME_SUMS


@pytest.mark.parametrize("init_scale", [1024.0, 1000.0])
@READABLE
@WAYS
def test_the_scale_of_a_grad_scaler_is_none(streaming, readable, init_scale, monkeypatch):
    monkeypatch.setattr(_exchange, "readable", lambda device: readable)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    grad = scaled(LossAccumulator(), streaming, lambda loss: scaler.scale(loss).backward())
    assert error_of_exact(grad / init_scale) <= SAME_SUMS


# ---- costs --------------------------------------------------------------------------------------


def test_windows_leave_no_hooks_behind():
    def hooks():
        gc.collect()
        return sum(type(x) is RemovableHandle for x in gc.get_objects())

    model, optimizer, acc = guarded()
    step(acc, model, True)
    before = hooks()
    for streaming in (False, True) * 3:
        optimizer.zero_grad()
        step(acc, model, streaming)
    assert hooks() == before


def operations(streaming, n):
    """Tensor operations of a window of ``n`` micro-batches, and of divisions by a number."""
    p = torch.nn.Parameter(torch.ones(3))
    outs = [(p.sum() * 5, torch.tensor(5)) for _ in range(n)]
    acc = LossAccumulator()
    acc.guard(torch.optim.SGD([p], lr=0.1))

    def loop():
        for loss, n_valid in outs:
            (loss / 5.0).backward() if streaming is None else acc.backward((loss, n_valid))

    with Calls() as calls:
        loop() if streaming is None else windowed(acc, streaming, p, [5] * n, loop)
    return len(calls.seen)


@WAYS
def test_at_most_ten_tensor_operations_for_a_micro_batch(streaming, monkeypatch):
    """Beside those of a division; on a device each is a launch."""
    monkeypatch.setattr(_exchange, "readable", lambda device: False)
    more = operations(streaming, 40) - operations(streaming, 8)
    plain = operations(None, 40) - operations(None, 8)
    assert 0 < (more - plain) / 32 <= 10
