"""LossAccumulator in one process: equal to the big batch, metrics, guard rails, state."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedce import LossAccumulator, count_valid, fused_ce

V, H = 31, 8


def batches(sizes, seed=0):
    """Micro-batches with the given numbers of valid tokens, each with ignored ones beside."""
    rng = torch.Generator().manual_seed(seed)
    out = []
    for n in sizes:
        hidden = torch.randn(n + 3, H, generator=rng)
        labels = torch.randint(0, V, (n + 3,), generator=rng)
        labels[n:] = -100
        out.append((hidden, labels))
    return out


def weight_and_grad(micro):
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(9)).requires_grad_()
    hidden, labels = (torch.cat(x) for x in zip(*micro, strict=True))
    loss = fused_ce(hidden, weight, labels).mean()
    return weight, torch.autograd.grad(loss, weight)[0], loss.item()


def run_window(acc, weight, micro):
    with acc.window([count_valid(y, offset=0) for _, y in micro]):
        for hidden, labels in micro:
            acc.backward(fused_ce(hidden, weight, labels))


def run_streaming(acc, weight, micro):
    for hidden, labels in micro:
        acc.backward(fused_ce(hidden, weight, labels))
    acc.finish([weight])


@pytest.mark.parametrize("run", [run_window, run_streaming])
@settings(max_examples=30, deadline=None)
@given(
    windows=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), min_size=1, max_size=3)
)
def test_any_split_is_the_big_batch(run, windows):
    acc = LossAccumulator()
    tokens, losses = 0, 0.0
    for i, sizes in enumerate(windows):
        micro = batches(sizes, i)
        weight, exact, loss = weight_and_grad(micro)
        run(acc, weight, micro)
        torch.testing.assert_close(weight.grad, exact, rtol=1e-5, atol=1e-7)
        tokens, losses = tokens + sum(sizes), losses + loss * sum(sizes)
    m = acc.metrics()
    assert (m["n_tokens"], m["n_windows"]) == (tokens, len(windows))
    if tokens:
        assert m["loss"] == pytest.approx(losses / tokens, rel=1e-6)
        assert m["perplexity"] == pytest.approx(math.exp(m["loss"]))
    else:
        assert math.isnan(m["loss"])


def test_naive_mean_of_means_is_wrong_here():
    """The bug this class exists for is visible on the same data."""
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
    torch.testing.assert_close(weight.grad, exact, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(extra.grad, torch.full((3,), 1.5))


def test_backward_divisor():
    micro = batches([4, 9])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator(backward_divisor=2)
    with acc.window([4, 9]):
        for hidden, labels in micro:
            (acc.scale(fused_ce(hidden, weight, labels)) / 2).backward()
    torch.testing.assert_close(weight.grad, exact, rtol=1e-5, atol=1e-7)


def test_streaming_bf16_factor_is_not_rounded():
    acc = LossAccumulator()
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    for n in (1, 300):
        acc.backward(((weight.float().sum() * n), torch.tensor(n)))
    acc.finish([weight])
    torch.testing.assert_close(weight.grad.float(), torch.ones(4), rtol=2**-8, atol=0)


def a_loss(n=2):
    hidden, labels = batches([n])[0]
    return fused_ce(hidden, torch.randn(V, H, requires_grad=True), labels)


class TestGuardRails:
    def test_window_left_open(self):
        acc = LossAccumulator()
        acc.backward(a_loss())
        for action in (acc.metrics, acc.state_dict, lambda: acc.window([1]).__enter__()):
            with pytest.raises(RuntimeError, match="1 micro-batches since the last finish"):
                action()
        acc.discard_window()
        assert acc.metrics()["n_tokens"] == 0

    def test_more_and_fewer_micro_batches(self):
        acc = LossAccumulator()
        with pytest.raises(RuntimeError, match="1 micro-batches were declared, this is number 2"):
            with acc.window([2]):
                acc.backward(a_loss())
                acc.backward(a_loss())
        with pytest.raises(RuntimeError, match="2 micro-batches were declared, 1 were seen"):
            with acc.window([2, 2]):
                acc.backward(a_loss())
        assert acc.metrics()["n_windows"] == 0

    def test_count_differs(self):
        acc = LossAccumulator()
        with pytest.raises(RuntimeError, match="declared with 3 valid tokens, its loss counts 2"):
            with acc.window([3]):
                acc.backward(a_loss(2))

    def test_finish_without_anything(self):
        acc = LossAccumulator()
        with pytest.raises(RuntimeError, match="nothing to finish"):
            acc.finish([])
        acc.backward(a_loss())
        with pytest.raises(RuntimeError, match=r"no parameter given has a \.grad"):
            acc.finish([])
        with pytest.raises(TypeError, match=r"model.parameters\(\)"):
            acc.finish(torch.nn.Linear(2, 2))

    def test_auxiliary_needs_a_window(self):
        with pytest.raises(RuntimeError, match="add_auxiliary needs a window"):
            LossAccumulator().add_auxiliary(torch.tensor(1.0))

    def test_on_empty(self):
        with pytest.raises(RuntimeError, match="no valid token"):
            with LossAccumulator(on_empty="raise").window([0]):
                pass
        acc = LossAccumulator(on_empty="skip")
        with acc.window([0]):
            acc.backward(a_loss(0))
        assert not acc.should_step
        with acc.window([2]):
            acc.backward(a_loss(2))
        assert acc.should_step

    def test_bad_label_code_raises(self):
        from fusedce.labels import bad_label_code

        poisoned = (torch.tensor(float("nan")), torch.tensor(bad_label_code(5, 99)))
        with pytest.raises(ValueError, match="got 99 at flattened position 5"):
            LossAccumulator().add(poisoned)

    def test_errors_on_a_device_wait_until_something_is_read(self, monkeypatch):
        """With a test double: CPU tensors that may not be looked at early, as on a GPU."""
        from fusedce import _faults
        from fusedce.labels import bad_label_code

        monkeypatch.setattr(_faults, "readable", lambda device: False)
        acc = LossAccumulator()
        with acc.window([3, 2]):
            acc.backward(a_loss(2))  # 3 were declared
            acc.backward(a_loss(2))
        poisoned = (torch.tensor(float("nan")), torch.tensor(bad_label_code(5, 99)))
        acc.add(poisoned)  # the second error does not hide the first
        with pytest.raises(RuntimeError, match=r"micro-batch 0 was declared with 3 .* counts 2"):
            acc.metrics()
        acc.add(poisoned)
        with pytest.raises(ValueError, match="got 99 at flattened position 5"):
            acc.state_dict()
        assert acc.metrics()["n_windows"] == 1  # reported once

    @pytest.mark.parametrize(
        ("kwargs", "error"),
        [
            ({"grad_reduction": "avg"}, ValueError),
            ({"on_empty": "ignore"}, ValueError),
            ({"backward_divisor": 0}, ValueError),
            ({"backward_divisor": "2"}, TypeError),
            ({"process_group": "world"}, TypeError),
        ],
    )
    def test_bad_arguments(self, kwargs, error):
        with pytest.raises(error, match=next(iter(kwargs))):
            LossAccumulator(**kwargs)

    @pytest.mark.parametrize("count", [1.5, -1, torch.tensor(1.0), torch.tensor([1, 2]), True])
    def test_bad_counts(self, count):
        with pytest.raises((TypeError, ValueError), match=r"counts\[0\]"):
            LossAccumulator().window([count]).__enter__()

    def test_bad_out(self):
        with pytest.raises(TypeError, match=r"out must be \(loss_sum, n_valid\)"):
            LossAccumulator().add(torch.tensor(1.0))


def test_state_at_a_border_gives_the_same_bits():
    def run(interrupt):
        acc = LossAccumulator()
        grads = []
        for i in range(4):
            if interrupt and i == 2:
                state = acc.state_dict()
                acc = LossAccumulator()
                acc.load_state_dict(state)
            micro = batches([3, 8, i], i)
            weight, _, _ = weight_and_grad(micro)
            run_streaming(acc, weight, micro)
            grads.append(weight.grad)
        return grads, acc.metrics()

    (a, ma), (b, mb) = run(False), run(True)
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert ma == mb
    with pytest.raises(ValueError, match="rank 1 of 2"):
        LossAccumulator().load_state_dict(LossAccumulator().state_dict() | {"rank": 1, "ranks": 2})
    with pytest.raises(ValueError, match="lacks"):
        LossAccumulator().load_state_dict({})
