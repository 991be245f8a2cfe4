"""Guards around the gradients of an accumulator's model: mistakes are named, right code is not.

Each case runs with declared counts and streaming; after a mistake the next window is right.
"""

import copy
import gc
import weakref

import pytest
import torch
from support.bounds import SAME_SUMS
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
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from fusedce import LossAccumulator, fused_ce

WAYS = pytest.mark.parametrize("streaming", [False, True], ids=["window", "streaming"])
SIZES = [3, 50]


class Model(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(H, H), nn.Linear(H, V, bias=False))


def loss_of(model, one):
    return fused_ce(model[0](one[0]), model[1].weight, one[1])


def step(acc, model, streaming, between=lambda: None, last=lambda: None, trained=None):
    """One window of two micro-batches; ``between`` runs after the first, ``last`` at the end."""

    def loop():
        for i, one in enumerate(batches(SIZES)):
            acc.backward(loss_of(model, one))
            (last if i else between)()

    windowed(acc, streaming, trained, SIZES, loop)


def exact_of(model, extra=lambda model: 0):
    same = copy.deepcopy(model)
    out = sum(loss_of(same, one) for one in batches(SIZES))
    return torch.autograd.grad(out.mean() + extra(same), list(same.parameters()))


def assert_exact(model, extra=lambda model: 0):
    for p, grad in zip(model.parameters(), exact_of(model, extra), strict=True):
        assert distance(p.grad, grad) <= SAME_SUMS


def sgd(model, lr=0.0):
    return torch.optim.SGD(model.parameters(), lr=lr)


def watched(**options):
    model = Model()
    return model, LossAccumulator(model, **options)


def regularise(model):
    model[1].weight.square().mean().backward()


def clip(model, to=0.01):
    torch.nn.utils.clip_grad_norm_(model.parameters(), to)


# ---- mistakes -----------------------------------------------------------------------------------

LATE = r"changed between the last micro-batch and finish\(\)"
LEFT = r"zero_grad\(\) is missing after optimizer.step\(\)"
BOTH, STREAMING = (False, True), (True,)


def during(at, act):
    return lambda acc, model, streaming: step(acc, model, streaming, **{at: lambda: act(model)})


def never_zeroed(steps):
    def loop(acc, model, streaming):
        for _ in range(2):
            step(acc, model, streaming)
            if steps:
                clip(model, 1.0)
                sgd(model).step()

    return loop


def before(acc, model, streaming):
    regularise(model)
    step(acc, model, streaming)


def steps_inside(acc, model, streaming):
    step(acc, model, streaming, between=sgd(model).step)


# name: the mistake, its error, and in which of the two ways it is one
MISTAKES = {
    "never zeroed": (never_zeroed(True), LEFT, STREAMING),
    "never zeroed, no optimizer of torch": (never_zeroed(False), LEFT, STREAMING),
    "a loss before": (before, r"finish\(\) would rescale", STREAMING),
    "clipped before finish": (during("last", clip), LATE, STREAMING),
    "regularised at the end": (during("last", regularise), LATE, STREAMING),
    "a step": (steps_inside, r"SGD.step\(\) inside an open window: 1 ", BOTH),
}


@pytest.mark.parametrize("given", ["module", "parameters"])
@pytest.mark.parametrize(
    ("name", "streaming"), [(name, way) for name, (*_, ways) in MISTAKES.items() for way in ways]
)
def test_mistakes_of_a_loop_are_named(name, streaming, given):
    mistake, words, _ = MISTAKES[name]
    model = Model()
    acc = LossAccumulator(model if given == "module" else model.parameters())
    with pytest.raises(RuntimeError, match=words):
        mistake(acc, model, streaming)
    acc.discard_window()
    model.requires_grad_(True)
    step(acc, model, streaming)
    assert_exact(model)


# ---- right code ---------------------------------------------------------------------------------


def after_a_step(acc, model, streaming, to_none):
    """Steps and zero_grad between windows, other losses outside of them, kept zeros."""
    optimizer = sgd(model)
    for _ in range(3):
        step(acc, model, streaming)
        assert_exact(model)
        regularise(model)
        clip(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)


def stepped_inside(acc, model, streaming, to_none):
    """A step and zero_grad after the last declared micro-batch, inside the block."""
    optimizer = sgd(model)
    for _ in range(2):
        if streaming:
            step(acc, model, streaming)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            continue
        with acc.window(SIZES):
            for one in batches(SIZES):
                acc.backward(loss_of(model, one))
            assert_exact(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)


def dropped_and_tried_again(acc, model, streaming, to_none):
    def fail():
        raise KeyError("labels")

    with pytest.raises(KeyError):
        step(acc, model, streaming, between=fail)
    acc.discard_window()
    step(acc, model, streaming)
    assert_exact(model)


RIGHT = [
    after_a_step, stepped_inside,
     dropped_and_tried_again,
]  # fmt: skip


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("case", RIGHT)
@WAYS
def test_right_code_is_right(streaming, case, to_none):
    model, acc = watched()
    case(acc, model, streaming, to_none)


@WAYS
def test_a_plain_tensor_may_be_a_parameter(streaming):
    weight, micro = new_weight(), batches(SIZES)
    acc, (_, exact, _) = LossAccumulator([weight]), weight_and_grad(micro)

    def loop():
        for one in micro:
            acc.backward(out_of(weight, one))

    windowed(acc, streaming, None, SIZES, loop)
    assert distance(weight.grad, exact) <= SAME_SUMS
    if streaming:
        weight.grad = None
        loop()
        weight.grad.mul_(0.5)
        with pytest.raises(RuntimeError, match=LATE):
            acc.finish()


@pytest.mark.parametrize("n", [1, 2])
def test_an_optimizer_that_steps_inside_the_last_backward(n):
    """With declared counts its gradients are what they will be; before, and streaming, not."""
    micro = batches([3, 2][:n])
    weight, exact, _ = weight_and_grad(micro)
    start = weight.detach().clone()
    optimizer, acc = torch.optim.SGD([weight], lr=0.1), LossAccumulator([weight])

    def step_and_zero(p):
        optimizer.step()
        optimizer.zero_grad()

    def loop():
        for i, one in enumerate(micro):
            if i == n - 1:
                hook = weight.register_post_accumulate_grad_hook(step_and_zero)
            acc.backward(out_of(weight, one))
        hook.remove()

    for _ in range(2):
        with acc.window([3, 2][:n]):
            loop()
        torch.testing.assert_close(weight.detach(), start - 0.1 * exact)
        weight.data.copy_(start)
    for streaming in (True, False):
        words = r"SGD.step\(\) inside an open window: a backward is still running"
        with pytest.raises(RuntimeError, match=words):
            windowed(acc, streaming, None, [3, 2, 2][: n + 1], loop)
        acc.discard_window()
        weight._post_accumulate_grad_hooks.clear()
        weight.grad = None


def test_finish_is_told_or_knows_its_parameters():
    model, acc = watched()
    acc.backward(loss_of(model, batches([4])[0]))
    with pytest.raises(TypeError, match=r"finish\(\) takes no parameters"):
        acc.finish(model.parameters())
    acc.finish()
    acc = LossAccumulator()
    acc.backward(a_loss(4))
    with pytest.raises(TypeError, match=r"finish\(parameters\) needs the parameters"):
        acc.finish()


@pytest.mark.parametrize("watch", [True, False])
def test_dropping_a_window_drops_the_gradients_of_a_given_model(watch):
    model, acc = watched(watch=watch)
    acc.backward(loss_of(model, batches([4])[0]))
    acc.discard_window()
    assert all(p.grad is None for p in model.parameters())


# ---- factors ------------------------------------------------------------------------------------


def scaled(acc, streaming, weight, backward):
    """The gradient of a window whose scaled losses are differentiated by ``backward``."""

    def loop():
        for one in batches([3, 5]):
            backward(acc.scale(out_of(weight, one)))

    windowed(acc, streaming, None, [3, 5], loop)
    assert acc.metrics()["n_tokens"] == 8
    return weight.grad


def error_of_exact(grad):
    return distance(grad, weight_and_grad(batches([3, 5]))[1])


@pytest.mark.parametrize("factor", [0.25, 1.001, 100.0])
@WAYS
def test_a_factor_after_scale_is_named(streaming, factor):
    weight = new_weight()
    with pytest.raises(RuntimeError, match=rf"multiplied by {factor:g} after scale\(\)"):
        scaled(
            LossAccumulator([weight]), streaming, weight, lambda loss: (loss * factor).backward()
        )


@pytest.mark.parametrize("init_scale", [1024.0, 1000.0, 1.0])
@pytest.mark.parametrize("by_hand", [True, False])
@WAYS
def test_the_scale_of_a_grad_scaler_that_was_given(streaming, by_hand, init_scale):
    """Its update may come inside the block, and every window may have another scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1)
    weight = new_weight()
    optimizer, acc = (
        torch.optim.SGD([weight], lr=0.0),
        LossAccumulator([weight], grad_scaler=scaler),
    )

    def loop():
        for one in batches([3, 5]):
            if by_hand:
                scaler.scale(acc.scale(out_of(weight, one))).backward()
            else:
                acc.backward(out_of(weight, one))
        if not streaming:
            end()

    def end():
        scaler.unscale_(optimizer)
        assert error_of_exact(weight.grad) <= SAME_SUMS
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(2):
        windowed(acc, streaming, None, [3, 5], loop)
        if streaming:
            end()
    assert scaler.get_scale() == 4 * init_scale


@WAYS
@pytest.mark.parametrize("scales", [(True, False), (False, True), (False, False)])
def test_a_loss_that_a_grad_scaler_was_not_asked_to_scale_is_refused(streaming, scales):
    """`unscale_` would divide its gradient, too."""
    scaler, weight, scale = torch.amp.GradScaler("cpu"), new_weight(), iter(scales)
    acc = LossAccumulator([weight], grad_scaler=scaler)
    words = r"multiplied by 1 after scale\(\), and the GradScaler of .* multiplies by 65536"
    with pytest.raises(RuntimeError, match=words):
        scaled(
            acc, streaming, weight,
            lambda loss: (scaler.scale(loss) if next(scale) else loss).backward(),
        )  # fmt: skip


@WAYS
def test_losses_that_an_engine_divides_and_others_are_refused_together(streaming):
    weight, factors = new_weight(), iter((1.0, 0.5))
    acc = LossAccumulator([weight], backward_divisor=2)
    words = r"multiplied by 0.5 after scale\(\), other losses of this window by another"
    with pytest.raises(RuntimeError, match=words):
        scaled(acc, streaming, weight, lambda loss: (loss * next(factors)).backward())


# ---- costs --------------------------------------------------------------------------------------


def test_windows_leave_no_hooks_and_accumulators_nothing_behind():
    def hooks():
        gc.collect()
        return sum(type(x) is RemovableHandle for x in gc.get_objects())

    before = hooks()
    model, acc = watched()
    step(acc, model, True)
    first = hooks()
    for streaming in (False, True) * 3:
        model.zero_grad()
        step(acc, model, streaming)
    assert hooks() == first
    grads = [weakref.ref(p.grad) for p in model.parameters()]
    model.zero_grad()
    assert all(grad() is None for grad in grads)
    del acc
    assert hooks() == before


def operations(streaming, n):
    """Tensor operations of a window of ``n`` micro-batches, and of divisions by a number."""
    p = torch.nn.Parameter(torch.ones(3))
    outs = [(p.sum() * 5, torch.tensor(5)) for _ in range(n)]
    acc = LossAccumulator([p])

    def loop():
        for loss, n_valid in outs:
            (loss / 5.0).backward() if streaming is None else acc.backward((loss, n_valid))

    with Calls() as calls:
        loop() if streaming is None else windowed(acc, streaming, None, [5] * n, loop)
    return len(calls.seen)


@WAYS
def test_at_most_ten_tensor_operations_for_a_micro_batch(streaming):
    """Beside those of a division; on a device each is a launch."""
    more = operations(streaming, 40) - operations(streaming, 8)
    plain = operations(None, 40) - operations(None, 8)
    assert 0 < (more - plain) / 32 <= 10


# ---- clipping that cannot come too early --------------------------------------------------------


@pytest.mark.parametrize("given", ["module", "parameters"])
@pytest.mark.parametrize("most", [0.05, 1e9])
@WAYS
def test_clipping_is_torchs(streaming, most, given):
    model = Model()
    acc = LossAccumulator(model if given == "module" else model.parameters())
    exact = exact_of(model)
    for _ in range(2):
        step(acc, model, streaming)
        norm = acc.clip_grad_norm_(most)
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(exact))
        for p, grad in zip(model.parameters(), exact, strict=True):
            torch.testing.assert_close(p.grad, grad * min(1, most / float(norm)))
        model.zero_grad()
    assert acc.clip_grad_norm_(most) == 0


@WAYS
def test_clipping_inside_a_window_is_refused(streaming):
    model, acc = watched()

    def loop():
        for one in batches(SIZES):
            acc.backward(loss_of(model, one))
            with pytest.raises(RuntimeError, match=r"cannot clip gradients: \d"):
                acc.clip_grad_norm_(1.0)

    windowed(acc, streaming, None, SIZES, loop)
    assert_exact(model)


def test_clipping_needs_gradients_and_a_number():
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match=r"LossAccumulator\(model\) knows them"):
        acc.clip_grad_norm_(1.0)
    for wrong, error in (("1", TypeError), (None, TypeError), (-1.0, ValueError)):
        with pytest.raises(error, match="max_norm must be"):
            acc.clip_grad_norm_(wrong)
    with pytest.raises(ValueError, match="max_norm must be at least 0, got nan"):
        acc.clip_grad_norm_(float("nan"))


# ---- other programs -----------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@WAYS
def test_a_loss_inside_of_a_checkpoint_raises_no_alarm(streaming, reentrant):
    """A reentrant one's outer backward writes after that of the loss has ended."""
    model, acc = watched()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def loop():
        for hidden, labels in batches(SIZES):
            body = model[0](hidden)

            def loss(h, labels=labels):
                return acc.scale(fused_ce(h, model[1].weight, labels))

            checkpoint(loss, body, use_reentrant=reentrant).backward()

    windowed(acc, streaming, None, SIZES, loop)
    assert_exact(model)


def test_an_auxiliary_loss_of_a_reentrant_checkpoint_is_refused():
    """Its first pass has no graph, and in the second its window has its sum already."""
    weight, router = new_weight(), torch.ones(1, dtype=torch.float64, requires_grad=True)
    hidden, labels = batches([5])[0]
    acc = LossAccumulator([weight, router])

    def body(h):
        acc.add_auxiliary((router * h.square().mean()).sum())
        return h * router

    def step(reentrant):
        h = hidden.to(weight.dtype).requires_grad_()
        with acc.window([int((labels != -100).sum())]):
            acc.backward(fused_ce(checkpoint(body, h, use_reentrant=reentrant), weight, labels))

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        step(True)
    weight.grad = router.grad = None
    step(False)
