"""Steps that a training loop forgets: entering, finishing, shifting, passing all parameters."""

import gc
import threading
import warnings

import numpy as np
import pytest
import torch
from support.bounds import EXACT, SAME_SUMS
from support.loops import batches, distance, new_weight, run_streaming, run_window, weight_and_grad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from fusedce import LossAccumulator, count_valid, fused_ce


def a_loss(weight, n=2):
    hidden, labels = batches([n])[0]
    return fused_ce(hidden, weight, labels)


@pytest.mark.parametrize(
    "use",
    [
        lambda acc, w: acc.backward(a_loss(w)),
        lambda acc, w: acc.finish([w]),
        lambda acc, w: acc.metrics(),
        lambda acc, w: acc.state_dict(),
    ],
)
def test_a_window_that_was_not_entered(use):
    acc, weight = LossAccumulator(), new_weight()
    acc.window([2])
    with pytest.raises(RuntimeError, match=r"not entered: write `with acc.window\(counts\):`"):
        use(acc, weight)
    acc.discard_window()
    run_window(acc, weight, batches([2]))
    assert acc.metrics()["n_tokens"] == 2


def test_a_step_inside_an_open_window_warns_once():
    acc, weight = LossAccumulator(), new_weight()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    acc.backward(a_loss(weight))
    with pytest.warns(UserWarning, match=r"SGD.step\(\) inside an open window: 1 micro-batches"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    acc.finish([weight])
    optimizer.step()


def test_a_guarded_optimizer_does_not_step_inside_a_window():
    acc, weight = LossAccumulator(), new_weight()
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    acc.guard(optimizer)
    before = weight.detach().clone()
    acc.backward(a_loss(weight))
    with pytest.raises(RuntimeError, match=r"AdamW.step\(\) inside an open window"):
        optimizer.step()
    torch.testing.assert_close(weight.detach(), before, **EXACT)
    acc.finish([weight])
    optimizer.step()
    optimizer.zero_grad()
    with acc.window([2, 2]):
        acc.backward(a_loss(weight))
        with pytest.raises(RuntimeError, match="1 of 2 declared micro-batches"):
            optimizer.step()
        acc.backward(a_loss(weight))
        optimizer.step()  # all are in: its gradients are what they will be
    assert not torch.equal(weight, before)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got str"):
        acc.guard("adam")
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
        acc.guard(optimizer, weight)


def test_windows_leave_no_hooks_behind():
    def hooks():
        gc.collect()
        return sum(type(x) is RemovableHandle for x in gc.get_objects())

    acc, weight = LossAccumulator(), new_weight()
    run_window(acc, weight, batches([3]))
    before = hooks()
    for run in (run_window, run_streaming) * 3:
        run(acc, weight, batches([3]))
    assert hooks() == before


def test_finish_knows_the_parameters_that_are_guarded():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 31, bias=False))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def train(acc):
        hidden, labels = batches([4])[0]
        acc.backward(fused_ce(model[0](hidden), model[1].weight, labels))

    acc = LossAccumulator()
    acc.guard(optimizer)
    train(acc)
    with pytest.raises(RuntimeError, match=r"parameters: 1 that have a \.grad were not given"):
        acc.finish(model[0].parameters())
    with pytest.raises(RuntimeError, match=r"parameters: 2 that have a \.grad were not given"):
        acc.finish(model[1].parameters())  # the loss has trained others, too
    acc.finish(model.parameters())
    model.zero_grad()
    acc = LossAccumulator()
    acc.guard(optimizer, model)
    train(acc)
    with pytest.raises(RuntimeError, match=r"parameters: 2 that .*: 0\.weight, 0\.bias"):
        acc.finish(model[1].parameters())
    acc.finish(model.parameters())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda m, o: o, "parameters: .*got SGD"),
        (lambda m, o: o.param_groups, "parameters: .*param_groups are dicts"),
        (lambda m, o: m.named_parameters(), r"parameters: .*named_parameters\(\) gives pairs"),
        (lambda m, o: m.state_dict(), "parameters: .*names are no tensors"),
        (lambda m, o: None, "parameters: .*got NoneType"),
        (lambda m, o: m, r"parameters: .*model.parameters\(\), got Linear"),
        (lambda m, o: [3], "parameters: .*it holds int"),
    ],
)
def test_finish_says_what_it_needs(wrong, words):
    model = torch.nn.Linear(8, 31, bias=False)
    acc = LossAccumulator()
    acc.backward(a_loss(model.weight))
    with pytest.raises(TypeError, match=words):
        acc.finish(wrong(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(TypeError, match="parameters"):
        acc.finish()
    with pytest.raises(RuntimeError, match="parameters: no parameter given"):
        acc.finish([])
    acc.finish(model.parameters())


def test_labels_that_were_not_shifted():
    hidden, labels = torch.randn(2, 9, 8), torch.randint(0, 31, (2, 9))
    with pytest.raises(RuntimeError, match=r"declared with 16 .* counts 18\. .*shift_labels"):
        with LossAccumulator().window([count_valid(labels)]) as acc:
            acc.backward(fused_ce(hidden, new_weight(), labels))


def test_one_thread():
    acc, weight = LossAccumulator(), new_weight()
    acc.backward(a_loss(weight))
    caught = []

    def other():
        with pytest.raises(RuntimeError, match="one thread, make one for each") as e:
            acc.backward(a_loss(weight))
        caught.append(e)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(caught) == 1
    acc.finish([weight])


# ---- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts",
    [np.array([3, 5]), [np.int32(3), np.int64(5)], [np.array(3), 5], torch.tensor([3, 5]), (3, 5)],
)
def test_counts_of_any_integer_type(counts):
    micro = batches([3, 5])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    with acc.window(counts):
        for hidden, labels in micro:
            acc.backward(fused_ce(hidden, weight, labels))
    assert distance(weight.grad, exact) <= SAME_SUMS


@pytest.mark.parametrize("count", [np.float32(2), np.bool_(True), "2", None, np.array([1, 2])])
def test_counts_that_are_none(count):
    with pytest.raises(TypeError, match=r"counts\[0\]"):
        LossAccumulator().window([count]).__enter__()


def test_counts_are_copied():
    buffer = torch.tensor([3, 5])
    weight, acc = new_weight(), LossAccumulator()
    with acc.window(buffer):
        buffer.zero_()  # reused for the next batch
        for hidden, labels in batches([3, 5]):
            acc.backward(fused_ce(hidden, weight, labels))
    assert acc.metrics()["n_tokens"] == 8


def test_streaming_in_float64_is_not_rounded():
    hidden, labels = (torch.cat(x) for x in zip(*batches([7, 3]), strict=True))
    weight = new_weight().detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(fused_ce(hidden.double(), weight, labels).mean(), weight)
    acc = LossAccumulator()
    for n, (h, y) in zip((7, 3), batches([7, 3]), strict=True):
        assert n == int((y != -100).sum())
        acc.backward(fused_ce(h.double(), weight, y))
    acc.finish([weight])
    assert distance(weight.grad, exact) < 1e-14


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_correction_is_not_rounded_on_a_device(dtype):
    from fusedce.accumulate.gradients import scale_gradients

    device = torch.accelerator.current_accelerator()
    factor = torch.tensor(1.00589, dtype=torch.float64, device=device)
    tensors = [torch.randn(n, device=device).to(dtype) for n in (7, 1000, 2**20)]
    for x in tensors:
        x.grad = x.clone()
    scale_gradients(tensors, factor)
    for x in tensors:
        wide = torch.promote_types(dtype, torch.float32)
        exact = (x.to(wide) * factor.to(wide)).to(dtype)
        torch.testing.assert_close(x.grad, exact, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("of_grad", "of_factor"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_the_correction_reads_nothing_from_a_device(of_grad, of_factor, dtype):
    """A fake tensor has no value: reading one raises."""
    from fusedce.accumulate.gradients import scale_gradients

    with FakeTensorMode():
        p = torch.empty(7, dtype=dtype, device=of_grad)
        p.grad = torch.empty_like(p)
        scale_gradients([p], torch.ones((), dtype=torch.float64, device=of_factor))


def test_before_anything_there_are_no_metrics():
    m = LossAccumulator().metrics()
    assert (m["n_tokens"], m["n_windows"]) == (0, 0)
    assert m["loss"] != m["loss"]
    acc = LossAccumulator()
    run_streaming(acc, new_weight(), batches([2]))
    acc.metrics(reset=True)
    assert acc.metrics()["n_tokens"] == 0
