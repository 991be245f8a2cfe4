"""Loops that change losses or gradients behind an accumulator get an error that says so."""

import pytest
import torch
from support.bounds import EXACT, SAME_SUMS
from support.loops import batches, distance, new_weight, run_streaming, run_window, weight_and_grad

from fusedce import LossAccumulator, LossSum, fused_ce
from fusedce.accumulate import faults as _faults

WAYS = pytest.mark.parametrize("streaming", [False, True], ids=["window", "streaming"])
SIZES = [3, 5]


def windowed(acc, streaming, loop, parameters, sizes=SIZES):
    """A window of micro-batches of ``sizes`` tokens, in which ``loop`` runs."""
    if streaming:
        loop()
        acc.finish(parameters)
    else:
        with acc.window(sizes):
            loop()


# ---- factors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.25, 2.0, 1 / 3, 100.0])
@WAYS
def test_a_factor_after_scale_is_named(streaming, factor):
    weight, acc = new_weight(), LossAccumulator()

    def loop():
        for hidden, labels in batches(SIZES):
            (acc.scale(fused_ce(hidden, weight, labels)) * factor).backward()

    with pytest.raises(RuntimeError, match=rf"multiplied by {factor:g} after scale\(\)"):
        windowed(acc, streaming, loop, [weight])


@WAYS
def test_accelerates_division_is_named_unless_the_accumulator_was_told(streaming):
    accelerate = pytest.importorskip("accelerate")
    engine = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)

    def run(acc):
        weight = new_weight()

        def loop():
            for hidden, labels in batches(SIZES):
                engine.backward(acc.scale(fused_ce(hidden, weight, labels)))

        windowed(acc, streaming, loop, [weight])
        return weight.grad

    with pytest.raises(RuntimeError, match=r"multiplied by 0.25 after scale\(\)"):
        run(LossAccumulator())
    _, exact, _ = weight_and_grad(batches(SIZES))
    for acc in (LossAccumulator(backward_divisor=4), LossAccumulator.from_accelerator(engine)):
        assert distance(run(acc), exact) <= SAME_SUMS


@pytest.mark.parametrize(("factor", "named"), [(0.25, True), (1 / 3, True), (8.0, False)])
def test_a_factor_on_a_device_is_named_when_metrics_are_read(monkeypatch, factor, named):
    """A loss scale may be any 2**k; the test double is a CPU tensor that must not be read."""
    monkeypatch.setattr(_faults, "readable", lambda device: False)
    weight, acc = new_weight(), LossAccumulator()
    with acc.window(SIZES):
        for hidden, labels in batches(SIZES):
            (acc.scale(fused_ce(hidden, weight, labels)) * factor).backward()
    if named:
        with pytest.raises(RuntimeError, match=f"multiplied by {factor:g} after"):
            acc.metrics()
    assert acc.metrics()["n_tokens"] == 8


@pytest.mark.parametrize("init_scale", [1024.0, 1000.0])
@pytest.mark.parametrize("readable", [True, False])
@WAYS
def test_the_scale_of_a_grad_scaler_is_none(streaming, readable, init_scale, monkeypatch):
    monkeypatch.setattr(_faults, "readable", lambda device: readable)
    weight, exact, _ = weight_and_grad(batches(SIZES))
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    acc = LossAccumulator()

    def loop():
        for hidden, labels in batches(SIZES):
            scaler.scale(acc.scale(fused_ce(hidden, weight, labels))).backward()

    windowed(acc, streaming, loop, [weight])
    assert distance(weight.grad / init_scale, exact) <= SAME_SUMS
    assert acc.metrics()["n_tokens"] == 8


@pytest.mark.parametrize(
    "part",
    [lambda out: out / 4, lambda out: 0.5 * out, lambda out: -out, lambda out: out + out / 2],
)
@pytest.mark.parametrize("monitor", [(), ("correct",)])
def test_a_sum_that_was_divided_is_refused(part, monitor):
    hidden, labels = batches([3])[0]
    out = part(fused_ce(hidden, new_weight(), labels, monitor=monitor))
    with pytest.raises(ValueError, match=r"out was multiplied or divided.*weights="):
        LossAccumulator().backward(out)
    LossAccumulator().add(out)  # of what is only reported, a part may be asked for
    assert LossSum(*out).is_whole


def test_sums_of_whole_losses_are_whole():
    micro = batches(SIZES)
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    acc.backward(sum(fused_ce(hidden, weight, labels) for hidden, labels in micro))
    acc.finish([weight])
    assert distance(weight.grad, exact) <= SAME_SUMS


# ---- zero_grad, and steps inside backward -------------------------------------------------------


def model_and_optimizer(kind=torch.optim.SGD):
    model = torch.nn.Linear(8, 31, bias=False)
    return model, kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("by", ["optimizer", "model"])
@WAYS
def test_zero_grad_between_micro_batches(streaming, by, to_none):
    model, optimizer = model_and_optimizer()
    acc = LossAccumulator()
    acc.guard(optimizer, model)

    def loop():
        for hidden, labels in batches(SIZES):
            {"optimizer": optimizer, "model": model}[by].zero_grad(set_to_none=to_none)
            acc.backward(fused_ce(hidden, model.weight, labels))

    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was called inside a window"):
        windowed(acc, streaming, loop, model.parameters())
    optimizer.zero_grad()
    acc.discard_window()
    for run in (run_streaming, run_window):  # as often as one likes at a window's border
        optimizer.zero_grad()
        run(acc, model.weight, batches(SIZES))
        optimizer.step()
        optimizer.zero_grad()
    assert acc.metrics()["n_windows"] == 2


@pytest.mark.parametrize("to_none", [True, False])
@WAYS
def test_zero_grad_after_the_last_micro_batch(streaming, to_none):
    model, optimizer = model_and_optimizer()
    acc = LossAccumulator()
    acc.guard(optimizer, model)

    def loop():
        for hidden, labels in batches(SIZES):
            acc.backward(fused_ce(hidden, model.weight, labels))
        optimizer.zero_grad(set_to_none=to_none)

    with pytest.raises(RuntimeError, match=r"zero_grad(\(\))? (was )?called"):
        windowed(acc, streaming, loop, model.parameters())


def test_zeros_on_a_device_are_named_when_metrics_are_read(monkeypatch):
    """The test double is a CPU tensor that must not be read."""
    monkeypatch.setattr(_faults, "readable", lambda device: False)
    model, optimizer = model_and_optimizer()
    acc = LossAccumulator()
    acc.guard(optimizer, model)
    for hidden, labels in batches(SIZES):
        acc.backward(fused_ce(hidden, model.weight, labels))
    optimizer.zero_grad(set_to_none=False)
    acc.finish(model.parameters())
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was called inside a window"):
        acc.metrics()


def test_a_step_inside_the_block_may_be_followed_by_zero_grad():
    model, optimizer = model_and_optimizer()
    acc = LossAccumulator()
    acc.guard(optimizer, model)
    before = model.weight.detach().clone()
    for to_none in (True, False):
        with acc.window(SIZES):
            for hidden, labels in batches(SIZES):
                acc.backward(fused_ce(hidden, model.weight, labels))
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert acc.metrics()["n_windows"] == 2
    assert not torch.equal(model.weight, before)


@WAYS
def test_gradients_may_be_changed_by_hand_after_the_last_micro_batch(streaming):
    """A factor, a frozen parameter, and a rank's gradients where nothing was valid."""
    model = torch.nn.Linear(8, 31)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = LossAccumulator()
    acc.guard(optimizer, model)
    for sizes in (SIZES, [0, 0]):

        def loop(sizes=sizes):
            for hidden, labels in batches(sizes):
                acc.backward(fused_ce(hidden, model.weight, labels, bias=model.bias))
            model.weight.grad.mul_(0.5)
            model.bias.grad.zero_()

        optimizer.zero_grad()
        windowed(acc, streaming, loop, model.parameters(), sizes)
    assert acc.metrics()["n_windows"] == 2


@WAYS
def test_gradients_may_be_zero_between_micro_batches(streaming):
    model, optimizer = model_and_optimizer()
    acc = LossAccumulator()
    acc.guard(optimizer, model)

    def loop():
        for hidden, labels in batches(SIZES):
            acc.backward(fused_ce(hidden * 0, model.weight, labels))  # its gradient is zero
        for hidden, labels in batches(SIZES):
            acc.backward(fused_ce(hidden, model.weight, labels))

    windowed(acc, streaming, loop, model.parameters(), SIZES * 2)


def step_inside(model, optimizer):
    model.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())


def test_an_optimizer_that_steps_inside_the_only_backward_of_a_streaming_window():
    model, optimizer = model_and_optimizer()
    step_inside(model, optimizer)
    acc = LossAccumulator()
    acc.guard(optimizer)
    hidden, labels = batches([3])[0]
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) inside an open window: a backward is"):
        acc.backward(fused_ce(hidden, model.weight, labels))
    acc.discard_window()
    torch.testing.assert_close(model.weight.detach(), before, **EXACT)


def test_an_optimizer_that_steps_inside_the_last_backward_of_declared_counts():
    """Its gradients are divided by what they will be divided by: this is right."""
    model, optimizer = model_and_optimizer()
    exact = torch.nn.Linear(8, 31, bias=False)
    exact.load_state_dict(model.state_dict())
    step_inside(model, optimizer)
    acc = LossAccumulator()
    acc.guard(optimizer)
    hidden, labels = batches([3])[0]
    with acc.window([3]):
        acc.backward(fused_ce(hidden, model.weight, labels))
    fused_ce(hidden, exact.weight, labels).mean().backward()
    torch.optim.SGD(exact.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.weight, exact.weight)
    with pytest.raises(RuntimeError, match="a backward is still running, 0 of 2 declared"):
        with acc.window([3, 3]):
            acc.backward(fused_ce(hidden, model.weight, labels))


def test_an_optimizer_that_steps_inside_the_last_of_two_backwards():
    model, optimizer = model_and_optimizer()
    exact = torch.nn.Linear(8, 31, bias=False)
    exact.load_state_dict(model.state_dict())
    acc = LossAccumulator()
    acc.guard(optimizer)
    first, last = batches([3, 2])
    with acc.window([3, 2]):
        acc.backward(fused_ce(first[0], model.weight, first[1]))
        step_inside(model, optimizer)
        acc.backward(fused_ce(last[0], model.weight, last[1]))
    hidden, labels = (torch.cat(x) for x in zip(first, last, strict=True))
    fused_ce(hidden, exact.weight, labels).mean().backward()
    torch.optim.SGD(exact.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.weight, exact.weight)


# ---- evaluation, and words ----------------------------------------------------------------------


@pytest.mark.parametrize("run", [run_window, run_streaming])
def test_training_and_evaluation_are_not_mixed(run):
    acc, weight = LossAccumulator(), new_weight()
    run(acc, weight, batches(SIZES))
    out = fused_ce(*batches([2])[0][:1], weight.detach(), batches([2])[0][1])
    with pytest.raises(
        RuntimeError, match=r"add: the metrics hold 1 training windows .*reset=True"
    ):
        acc.add(out)
    training = acc.metrics(reset=True)
    acc.add(out)
    evaluation = acc.metrics()
    with pytest.raises(RuntimeError, match=r"batches that were added for evaluation"):
        run(acc, weight, batches(SIZES))
    assert acc.metrics(reset=True) == evaluation
    run(acc, weight, batches(SIZES))
    assert training["n_tokens"] == acc.metrics()["n_tokens"] == 8
    assert evaluation["n_tokens"] == 2


def test_a_window_is_entered_once():
    acc, weight = LossAccumulator(), new_weight()
    window = acc.window([3])
    for again in (False, True):
        if again:
            with pytest.raises(RuntimeError, match="this window was entered before"):
                window.__enter__()
        else:
            with window:
                acc.backward(fused_ce(*batches([3])[0][:1], weight, batches([3])[0][1]))
    run_window(acc, weight, batches([3]))


def test_an_output_of_transformers_is_no_sum():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    out = outputs.CausalLMOutput(loss=torch.tensor(1.0, requires_grad=True), logits=torch.ones(2))
    for call in (LossAccumulator().backward, LossAccumulator().add):
        with pytest.raises(TypeError, match=r"give \(out.loss \* n, n\).*FusedTrainerMixin"):
            call(out)
    acc = LossAccumulator()
    acc.backward((out.loss * 5, torch.tensor(5)))


def test_an_auxiliary_loss_outside_of_a_window():
    acc, weight = LossAccumulator(), new_weight()
    run_window(acc, weight, batches([3]))
    with pytest.raises(RuntimeError, match="add_auxiliary was called outside of a window"):
        acc.add_auxiliary(torch.tensor(1.0))


def test_a_mean_is_no_sum():
    weight = new_weight()
    ((hidden, labels),) = batches([3])
    mean = fused_ce(hidden, weight, labels).mean()
    for call in (LossAccumulator().backward, LossAccumulator().add, LossAccumulator().scale):
        with pytest.raises(TypeError, match=r"looks like a mean: pass fused_ce\(...\) itself"):
            call(mean)


@WAYS
def test_a_loss_without_a_graph_is_not_trained(streaming):
    weight, acc = new_weight(), LossAccumulator()

    def loop():
        with torch.no_grad():
            for hidden, labels in batches(SIZES):
                acc.backward(fused_ce(hidden, weight, labels))

    with pytest.raises(RuntimeError, match=r"out must require grad.*evaluation is acc.add\(out\)"):
        windowed(acc, streaming, loop, [weight])
