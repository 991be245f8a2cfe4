"""LossAccumulator in one process equals the big batch, stays in range and never waits unread."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import SAME_MODEL, SAME_SUMS
from support.coverage import covered
from support.loops import batches, distance, new_weight, run_streaming, run_window, weight_and_grad

from fusedce import LossAccumulator, count_valid, fused_ce
from fusedce.accumulate import faults as _faults

RUNS = pytest.mark.parametrize("run", [run_window, run_streaming])


@st.composite
def epochs(draw):
    """Windows of micro-batches of valid tokens: the last window of an epoch may be shorter."""
    accumulation = draw(st.integers(1, 6), label="accumulation steps")
    windows = []
    for _ in range(draw(st.integers(1, 3), label="epochs")):
        sizes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=2 * accumulation))
        windows += [sizes[i : i + accumulation] for i in range(0, len(sizes), accumulation)]
    return windows


@RUNS
@settings(max_examples=40, deadline=None)
@given(windows=epochs())
def test_any_split_is_the_big_batch(run, windows):
    covered("LossAccumulator", run.__name__)
    acc = LossAccumulator()
    tokens, losses = 0, 0.0
    for i, sizes in enumerate(windows):
        micro = batches(sizes, i)
        weight, exact, loss = weight_and_grad(micro)
        run(acc, weight, micro)
        assert distance(weight.grad, exact) <= SAME_SUMS
        tokens, losses = tokens + sum(sizes), losses + loss * sum(sizes)
    m = acc.metrics()
    assert (m["n_tokens"], m["n_windows"]) == (tokens, len(windows))
    if tokens:
        assert m["loss"] == pytest.approx(losses / tokens, rel=1e-6)
        assert m["perplexity"] == pytest.approx(math.exp(m["loss"]))
    else:
        assert math.isnan(m["loss"])


@RUNS
def test_optimizer_state_after_20_steps(run):
    """AdamW keeps sums of gradients and of their squares: both see every step."""

    def states(step):
        weight = new_weight()
        optimizer = torch.optim.AdamW([weight], lr=1e-2)
        rng = torch.Generator().manual_seed(1)
        for i in range(20):
            optimizer.zero_grad()
            step(weight, batches(torch.randint(0, 15, (4,), generator=rng).tolist(), i))
            optimizer.step()
        return [weight, *(optimizer.state[weight][k] for k in ("exp_avg", "exp_avg_sq"))]

    def full(weight, micro):
        hidden, labels = (torch.cat(x) for x in zip(*micro, strict=True))
        fused_ce(hidden, weight, labels).mean().backward()

    def naive(weight, micro):
        for hidden, labels in micro:
            (fused_ce(hidden, weight, labels).mean() / len(micro)).backward()

    acc = LossAccumulator()
    exact = states(full)
    for a, b in zip(states(lambda weight, micro: run(acc, weight, micro)), exact, strict=True):
        assert distance(a, b) <= SAME_MODEL
    assert all(distance(a, b) > 1e-2 for a, b in zip(states(naive), exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_streaming_stays_in_range(dtype):
    """Gradients of sums leave fp16 through a GradScaler's 2**16; pre-scaled ones do not."""
    micro = batches([700, 0, 1300])
    master, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    optimizer = torch.optim.SGD([master], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)

    def largest_gradient(scale):
        """Run the micro-batches; return the largest gradient that the low precision held."""
        largest = []
        for hidden, labels in micro:
            weight = master.to(dtype)
            weight.register_hook(lambda g: largest.append(g.abs().max().float()))
            scaler.scale(scale(fused_ce(hidden.to(dtype), weight, labels))).backward()
        return max(largest)

    for _ in range(2):  # the first window estimates from one micro-batch, the second knows more
        optimizer.zero_grad()
        assert largest_gradient(acc.scale) < 0.2 * torch.finfo(torch.float16).max
        assert acc.finish([master])
        scaler.unscale_(optimizer)
        assert distance(master.grad, exact) < 2 * torch.finfo(dtype).eps
        scaler.step(optimizer)
        scaler.update()
    if dtype == torch.float16:
        assert largest_gradient(lambda out: out.loss_sum).isinf()


def test_clipping_after_finish_sees_the_true_norm():
    micro = batches([1, 30, 4])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    acc.backward(fused_ce(*_arguments(micro[0], weight)))  # a window that makes the estimate wrong
    acc.finish([weight])
    weight.grad = None
    for one in micro:
        acc.backward(fused_ce(*_arguments(one, weight)))
    assert distance(weight.grad, exact) > 0.9  # before finish the norm means nothing
    acc.finish([weight])
    norm = torch.nn.utils.clip_grad_norm_([weight], 0.1)
    assert norm == pytest.approx(exact.norm().item(), rel=1e-6)
    assert weight.grad.norm() == pytest.approx(0.1, rel=1e-4)


def _arguments(one, weight):
    return one[0], weight, one[1]


def test_a_parameter_given_twice_is_corrected_once():
    micro = batches([1, 30])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    for one in micro:
        acc.backward(fused_ce(*_arguments(one, weight)))
    acc.finish([weight, weight])  # tied, and listed by both of its modules
    assert distance(weight.grad, exact) <= SAME_SUMS


def test_metrics_do_not_depend_on_the_split():
    """Same tokens as 1, 2 and 6 micro-batches, as 1 and 3 windows."""
    sizes = [5, 0, 11, 1, 8, 2]
    micro = batches(sizes)
    weight = new_weight().detach()
    seen = []
    for size, windows in ((6, 1), (1, 6), (2, 3), (3, 2)):
        acc = LossAccumulator()
        for i in range(windows):
            with acc.window(sizes[i * size : (i + 1) * size]):
                for h, y in micro[i * size : (i + 1) * size]:
                    acc.scale(fused_ce(h, weight, y))
        seen.append(acc.metrics())
        assert seen[-1]["n_windows"] == windows
    for m in seen[1:]:
        assert m["n_tokens"] == seen[0]["n_tokens"] == 27
        assert m["loss"] == pytest.approx(seen[0]["loss"], rel=1e-7)


@RUNS
def test_nothing_waits_for_the_device_until_metrics_are_read(run, monkeypatch):
    """Nothing reads a tensor's value: the test double reports reads, which on a GPU would wait."""
    looks = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def look(self, *args, _name=name, _original=original, **kwargs):
            looks.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, look)
    monkeypatch.setattr(_faults, "readable", lambda device: False)
    weight, micro = new_weight(), batches([4, 0, 9])
    outs = [
        ((h @ weight.T).sum(), (y != -100).sum()) for h, y in micro
    ]  # these choices read no count
    counts = [count_valid(y, offset=0) for _, y in micro]
    looks.clear()

    acc = LossAccumulator()
    for _ in range(2):
        weight.grad = None
        if run is run_window:
            with acc.window(counts):
                scaled = [acc.scale(out) for out in outs]
                sum(scaled).backward(retain_graph=True)
        else:
            scaled = [acc.scale(out) for out in outs]
            sum(scaled).backward(retain_graph=True)
            acc.finish([weight])
    evaluation = LossAccumulator()
    evaluation.add(outs[0])
    assert len(scaled) == 3
    assert looks == []
    assert acc.metrics()["n_tokens"] == 2 * 13
    assert evaluation.metrics()["n_tokens"] == 4
    assert looks  # the test double reports reads
    looks.clear()
    LossAccumulator(on_empty="skip").window(counts).__enter__()
    assert looks  # documented: this choice reads the count


def test_naive_mean_of_means_is_wrong_here():
    """The bug that the class prevents is visible on the same data."""
    micro = batches([1, 20])
    weight, exact, _ = weight_and_grad(micro)
    for hidden, labels in micro:
        (fused_ce(hidden, weight, labels).mean() / 2).backward()
    assert (weight.grad - exact).norm() / exact.norm() > 0.1


def test_evaluation_does_not_depend_on_batch_size():
    micro = batches([3, 0, 11, 1])
    weight, _, loss = weight_and_grad(micro)
    acc = LossAccumulator()
    for hidden, labels in micro:
        acc.add(fused_ce(hidden, weight, labels))
    assert acc.metrics(reset=True)["loss"] == pytest.approx(loss, rel=1e-6)
    assert acc.metrics()["n_tokens"] == 0


def test_auxiliary_loss_is_divided_by_micro_batches():
    micro = batches([4, 9])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    extra = torch.zeros(3, requires_grad=True)
    with acc.window([4, 9]):
        for i, (hidden, labels) in enumerate(micro):
            acc.add_auxiliary((extra * (i + 1)).sum())
            acc.backward(fused_ce(hidden, weight, labels))
    torch.testing.assert_close(weight.grad, exact, rtol=SAME_MODEL, atol=1e-7)
    torch.testing.assert_close(extra.grad, torch.full((3,), 1.5))


def test_backward_divisor():
    micro = batches([4, 9])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator(backward_divisor=2)
    with acc.window([4, 9]):
        for hidden, labels in micro:
            (acc.scale(fused_ce(hidden, weight, labels)) / 2).backward()
    torch.testing.assert_close(weight.grad, exact, rtol=SAME_MODEL, atol=1e-7)


def test_streaming_bf16_factor_is_not_rounded():
    acc = LossAccumulator()
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    for n in (1, 300):
        acc.backward(((weight.float().sum() * n), torch.tensor(n)))
    acc.finish([weight])
    torch.testing.assert_close(weight.grad.float(), torch.ones(4), rtol=2**-8, atol=0)


def test_an_empty_first_micro_batch_does_not_overflow():
    """A first estimate of one token would let the sums of the next micro-batches leave fp16."""
    hidden, labels = torch.rand(40000, 8).half() + 6, torch.zeros(40000, dtype=torch.int64)
    for empty_window in (False, True):
        weight = torch.randn(13, 8, generator=torch.Generator().manual_seed(0)).half()
        exact = weight.clone().requires_grad_()
        (fused_ce(hidden, exact, labels).loss_sum / 40000).backward()
        weight.requires_grad_()
        acc = LossAccumulator()
        acc.backward(fused_ce(hidden[:9], weight, torch.full((9,), -100)))
        if empty_window:
            acc.finish([weight])
            weight.grad = None
        acc.backward(fused_ce(hidden, weight, labels))
        acc.finish([weight])
        torch.testing.assert_close(weight.grad, exact.grad, rtol=1e-2, atol=1e-3)
