"""What an accumulator watches by itself and under a guard; and what it costs per micro-batch."""

import sys
import threading

import pytest
import torch
from support.bounds import SAME_SUMS
from support.loops import H, V, batches, distance
from torch.utils._python_dispatch import TorchDispatchMode

from fusedce import LossAccumulator, fused_ce
from fusedce.accumulate import faults as _faults

SIZES = [3, 50]
WAYS = pytest.mark.parametrize("streaming", [False, True], ids=["window", "streaming"])


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Linear(H, V, bias=False))


def loss_of(model, one):
    return fused_ce(model[0](one[0]), model[1].weight, one[1])


def step(acc, model, streaming, between=lambda: None, parameters=None):
    """One window of two micro-batches, with ``between`` after the first one."""

    def loop():
        for i, one in enumerate(batches(SIZES)):
            acc.backward(loss_of(model, one))
            if not i:
                between()

    if streaming:
        loop()
        acc.finish(model.parameters() if parameters is None else parameters)
    else:
        with acc.window(SIZES):
            loop()


def exact(extra=None):
    model = new_model()
    out = sum(loss_of(model, one) for one in batches(SIZES))
    loss = out.mean() + (0 if extra is None else extra(model))
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_exact(model, extra=None):
    for p, grad in zip(model.parameters(), exact(extra), strict=True):
        assert distance(p.grad, grad) <= SAME_SUMS


# ---- without a guard ----------------------------------------------------------------------------


@pytest.mark.parametrize("readable", [True, False])
@WAYS
def test_a_loop_without_zero_grad(streaming, readable, monkeypatch):
    """On a device, where nothing may be read, it is said when metrics are."""
    monkeypatch.setattr(_faults, "readable", lambda device: readable)
    model, acc = new_model(), LossAccumulator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loop():
        for _ in range(2):
            step(acc, model, streaming)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        acc.metrics()

    with pytest.raises(RuntimeError, match=r"zero_grad\(\) is missing after optimizer.step\(\)"):
        loop()


@pytest.mark.parametrize("to_none", [True, False])
@WAYS
def test_a_loop_with_zero_grad(streaming, to_none):
    model, acc = new_model(), LossAccumulator()
    for _ in range(3):
        model.zero_grad(set_to_none=to_none)
        step(acc, model, streaming)
        assert_exact(model)


@pytest.mark.parametrize("to_none", [True, False])
@WAYS
def test_zero_grad_between_micro_batches(streaming, to_none):
    model, acc = new_model(), LossAccumulator()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was called inside a window"):
        step(acc, model, streaming, lambda: model.zero_grad(set_to_none=to_none))


def test_finish_without_the_body():
    model, acc = new_model(), LossAccumulator()
    with pytest.raises(RuntimeError, match=r"parameters: 2 that have a \.grad were not given"):
        step(acc, model, True, parameters=model[1].parameters())
    acc.finish(model.parameters())
    assert_exact(model)


def test_a_loss_of_its_own_before_a_streaming_window():
    model, acc = new_model(), LossAccumulator()
    model[1].weight.square().mean().backward()
    with pytest.raises(RuntimeError, match="which finish\\(\\) would rescale"):
        step(acc, model, True)


def test_models_may_take_turns():
    """Gradients of a model that is not trained in a window do not matter to it."""
    models, acc = [new_model(), new_model()], LossAccumulator()
    for i in (0, 1, 0, 1):
        models[i].zero_grad()
        step(acc, models[i], True)
        assert_exact(models[i])


# ---- under a guard ------------------------------------------------------------------------------


def guarded():
    model, acc = new_model(), LossAccumulator()
    acc.guard(torch.optim.SGD(model.parameters(), lr=0.1))  # nobody else holds it
    return model, acc


@WAYS
def test_clipping_between_micro_batches(streaming):
    model, acc = guarded()
    with pytest.raises(RuntimeError, match="gradients were changed inside a window"):
        step(
            acc,
            model,
            streaming,
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        )


@pytest.mark.parametrize("last", [False, True])
def test_a_backward_of_its_own_in_a_streaming_window(last):
    model, acc = guarded()

    def regularise():
        model[1].weight.square().mean().backward()

    for one in batches(SIZES):
        acc.backward(loss_of(model, one))
        if not last:
            regularise()
    if last:
        regularise()
    with pytest.raises(RuntimeError, match="gradients were changed inside a window"):
        acc.finish(model.parameters())


def test_a_backward_of_its_own_in_a_window_of_declared_counts_is_right():
    model, acc = guarded()
    step(acc, model, False, lambda: model[1].weight.square().mean().backward())
    assert_exact(model, lambda model: model[1].weight.square().mean())


def test_an_optimizer_that_nobody_holds_is_guarded():
    model, acc = guarded()
    with pytest.raises(RuntimeError, match="parameters: 2 that"):
        step(acc, model, True, parameters=model[1].parameters())


# ---- threads, and costs -------------------------------------------------------------------------


def test_an_accumulator_for_each_of_six_threads():
    errors, interval = [], sys.getswitchinterval()

    def train():
        try:
            for _ in range(60):
                step(LossAccumulator(), new_model(), True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


class Counting(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += 1
        return function(*args, **(kwargs or {}))


def operations(streaming, n):
    """Tensor operations of a window of ``n`` micro-batches, and of divisions by a number."""
    p = torch.nn.Parameter(torch.ones(3))
    outs = [(p.sum() * 5, torch.tensor(5)) for _ in range(n)]
    acc = LossAccumulator()
    with Counting() as counted:
        if streaming is None:
            for loss, _ in outs:
                (loss / 5.0).backward()
        elif streaming:
            for out in outs:
                acc.backward(out)
            acc.finish([p])
        else:
            with acc.window([5] * n):
                for out in outs:
                    acc.backward(out)
    return counted.n


@WAYS
def test_at_most_ten_tensor_operations_for_a_micro_batch(streaming, monkeypatch):
    """Beside those of a division; on a device each is a launch."""
    monkeypatch.setattr(_faults, "readable", lambda device: False)
    more = operations(streaming, 40) - operations(streaming, 8)
    plain = operations(None, 40) - operations(None, 8)
    assert 0 < (more - plain) / 32 <= 10


def test_a_parameter_that_goes_inside_a_window_is_not_missed():
    """A known one of an earlier window, whose gradient was never of this one."""
    old, acc = new_model(), LossAccumulator()
    step(acc, old, True)
    model = new_model()
    first, second = batches(SIZES)
    acc.backward(loss_of(model, first))
    old = None
    acc.backward(loss_of(model, second))
    acc.finish(model.parameters())
    assert_exact(model)
