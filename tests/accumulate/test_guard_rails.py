"""Every mistake a loop can make with LossAccumulator is an error that names the numbers."""

import pytest
import torch
from support.bounds import EXACT
from support.loops import H, V, batches, new_weight, run_streaming, run_window

from fusedce import LossAccumulator, fused_ce


def a_loss(n=2):
    hidden, labels = batches([n])[0]
    return fused_ce(hidden, torch.randn(V, H, requires_grad=True), labels)


def test_window_left_open():
    acc = LossAccumulator()
    acc.backward(a_loss())
    for action in (acc.metrics, acc.state_dict, lambda: acc.window([1]).__enter__()):
        with pytest.raises(RuntimeError, match="1 micro-batches since the last finish"):
            action()
    acc.discard_window()
    assert acc.metrics()["n_tokens"] == 0


def test_a_count_may_be_any_int64():
    LossAccumulator().window([2**63 - 1]).__enter__()
    with pytest.raises(ValueError, match=r"counts\[1\] must be an int64, got 9223372036854775808"):
        LossAccumulator().window([1, 2**63]).__enter__()


def test_more_and_fewer_micro_batches():
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match="1 micro-batches were declared, this is number 2"):
        with acc.window([2]):
            acc.backward(a_loss())
            acc.backward(a_loss())
    with pytest.raises(RuntimeError, match="2 micro-batches were declared, 1 differentiated"):
        with acc.window([2, 2]):
            acc.backward(a_loss())
    assert acc.metrics()["n_windows"] == 0


def test_count_differs():
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match="declared with 3 valid tokens, its loss counts 2"):
        with acc.window([3]):
            acc.backward(a_loss(2))


def test_finish_without_anything():
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match="nothing to finish"):
        acc.finish([])
    acc.backward(a_loss())
    with pytest.raises(RuntimeError, match=r"no parameter given has a \.grad"):
        acc.finish([])
    with pytest.raises(TypeError, match=r"model.parameters\(\)"):
        acc.finish(torch.nn.Linear(2, 2))


def test_auxiliary_needs_a_window():
    with pytest.raises(RuntimeError, match="add_auxiliary was called outside of a window"):
        LossAccumulator().add_auxiliary(torch.tensor(1.0))


def test_no_micro_batches_at_all():
    with pytest.raises(ValueError, match="got none at all"):
        LossAccumulator().window([]).__enter__()


def test_mixing_the_two_ways():
    acc = LossAccumulator()
    with acc.window([2]):
        acc.backward(a_loss())
        with pytest.raises(RuntimeError, match="finish is for streaming"):
            acc.finish([new_weight()])
        with pytest.raises(RuntimeError, match="leave the `with` block"):
            acc.discard_window()
        with pytest.raises(RuntimeError, match="1 of 1 declared micro-batches"):
            acc.window([2]).__enter__()
    assert acc.metrics()["n_tokens"] == 2


def test_an_error_inside_a_window_closes_it():
    acc = LossAccumulator()
    with pytest.raises(ZeroDivisionError):
        with acc.window([2]):
            acc.backward(a_loss())
            raise ZeroDivisionError
    assert acc.metrics()["n_tokens"] == 0


@pytest.mark.parametrize(
    ("auxiliary", "error"),
    [(1.0, TypeError), (torch.tensor(1), TypeError), (torch.ones(2), ValueError)],
)
def test_bad_auxiliary(auxiliary, error):
    acc = LossAccumulator()
    with pytest.raises(error, match="auxiliary must be"):
        with acc.window([2]):
            acc.add_auxiliary(auxiliary)


def test_auxiliary_after_the_last_micro_batch():
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match="1 auxiliary losses were added after the last"):
        with acc.window([2]):
            acc.backward(a_loss())
            acc.add_auxiliary(torch.tensor(1.0))


def test_a_mesh_must_name_its_token_dimensions():
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got str"):
        LossAccumulator.from_mesh("dp", "dp")


def test_skipped_step_leaves_no_gradient():
    """An optimizer with momentum would move on a gradient of zeros."""
    acc, weight = LossAccumulator(on_empty="skip"), new_weight()
    run_streaming(acc, weight, batches([0, 0]))
    assert not acc.should_step
    assert weight.grad is None
    zero = new_weight()
    run_streaming(LossAccumulator(), zero, batches([0, 0]))
    torch.testing.assert_close(zero.grad, torch.zeros(V, H), **EXACT)


def test_on_empty():
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


def test_bad_label_code_raises():
    from fusedce.contract.labels import bad_label_code

    poisoned = (torch.tensor(float("nan")), torch.tensor(bad_label_code(5, 99)))
    with pytest.raises(ValueError, match="got 99 at flattened position 5"):
        LossAccumulator().add(poisoned)


def test_errors_on_a_device_wait_until_something_is_read(monkeypatch):
    """The test double forbids early reads of CPU tensors, which on a GPU would wait."""
    from fusedce.accumulate import faults as _faults
    from fusedce.contract.labels import bad_label_code

    monkeypatch.setattr(_faults, "readable", lambda device: False)
    acc = LossAccumulator()
    with acc.window([3, 2]):
        acc.backward(a_loss(2))  # 3 were declared
        acc.backward(a_loss(2))
    poisoned = (torch.tensor(float("nan")), torch.tensor(bad_label_code(5, 99)))
    with acc.window([2]):  # the second error does not hide the first
        acc.backward((poisoned[0].requires_grad_(), poisoned[1]))
    with pytest.raises(RuntimeError, match=r"micro-batch 0 was declared with 3 .* counts 2"):
        acc.metrics(reset=True)
    acc = LossAccumulator()
    acc.add(poisoned)
    with pytest.raises(ValueError, match="got 99 at flattened position 5"):
        acc.state_dict()
    assert acc.metrics()["n_windows"] == 0  # reported once


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
def test_bad_arguments(kwargs, error):
    with pytest.raises(error, match=next(iter(kwargs))):
        LossAccumulator(**kwargs)


@pytest.mark.parametrize(
    "count", [1.5, -1, torch.tensor(-1), torch.tensor(1.0), torch.tensor([1, 2]), True]
)
def test_bad_counts(count):
    with pytest.raises((TypeError, ValueError), match=r"counts\[0\]"):
        LossAccumulator().window([count]).__enter__()


@pytest.mark.parametrize("counts", [3, torch.tensor(3)])
def test_one_number_is_not_a_list_of_counts(counts):
    with pytest.raises(TypeError, match="counts must hold one number per micro-batch"):
        LossAccumulator().window(counts).__enter__()


def test_bad_out():
    with pytest.raises(TypeError, match=r"out must be \(loss_sum, n_valid\)"):
        LossAccumulator().add(torch.tensor(1.0))


def train(acc, weight, optimizer, windows):
    """Train streaming and declared windows in turn; return the end of the interval."""
    for i in windows:
        optimizer.zero_grad()
        run = run_streaming if i % 2 else run_window
        run(acc, weight, batches([3, 8, i], i))
        optimizer.step()


def test_resume_at_a_border_gives_the_same_bits(tmp_path):
    def start():
        weight = new_weight()
        return LossAccumulator(), weight, torch.optim.AdamW([weight], lr=1e-2)

    straight = start()
    train(*straight, range(7))
    acc, weight, optimizer = start()
    train(acc, weight, optimizer, range(4))
    saved = {"acc": acc.state_dict(), "weight": weight.detach(), "adam": optimizer.state_dict()}
    torch.save(saved, tmp_path / "checkpoint")

    saved = torch.load(tmp_path / "checkpoint")  # plain numbers: nothing to unpickle
    resumed = start()
    resumed[0].load_state_dict(saved["acc"])
    resumed[1].data.copy_(saved["weight"])
    resumed[2].load_state_dict(saved["adam"])
    train(*resumed, range(4, 7))
    torch.testing.assert_close(resumed[1], straight[1], **EXACT)
    assert resumed[0].metrics() == straight[0].metrics()
    assert resumed[0].state_dict() == straight[0].state_dict()


def test_state_in_the_middle_is_refused_with_instructions():
    acc = LossAccumulator()
    acc.backward(a_loss())
    for call in (acc.state_dict, lambda: acc.load_state_dict({})):
        with pytest.raises(RuntimeError, match=r"(?s)1 micro-batches.*Call finish\("):
            call()
    acc.discard_window()
    with acc.window([2]):
        with pytest.raises(RuntimeError, match=r"0 of 1 declared.*leave the `with` block"):
            acc.state_dict()
        acc.backward(a_loss())
    assert acc.state_dict()["n_windows"] == 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda s: {}, ValueError, "lacks"),
        (lambda s: 3, TypeError, "state must be a dict"),
        (lambda s: s | {"n_windows": -1}, ValueError, "n_windows"),
        (lambda s: s | {"n_valid": 1.5}, ValueError, "n_valid"),
    ],
)
def test_a_foreign_state_is_refused(change, error, words):
    acc = LossAccumulator()
    with pytest.raises(error, match=words):
        acc.load_state_dict(change(acc.state_dict()))


def test_parameters_are_not_one_tensor():
    acc, weight = LossAccumulator(), new_weight()
    hidden, labels = batches([2])[0]
    acc.backward(fused_ce(hidden, weight, labels))
    with pytest.raises(TypeError, match=r"iterable of tensors, such as .*, got Tensor"):
        acc.finish(weight)
