"""What users hand to an accumulator: any integer, any order; anything else is an error in words."""

import numpy as np
import pytest
import torch
from support.bounds import SAME_SUMS
from support.loops import a_loss, batches, distance, new_weight, run_window, weight_and_grad
from transformers.modeling_outputs import CausalLMOutput

from fusedce import LossAccumulator, LossMeter, LossSum, fused_ce

# ---- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts",
    [np.array([3, 5]), [np.int32(3), np.int64(5)], [np.array(3), 5], torch.tensor([3, 5]), (3, 5)],
)
def test_counts_of_any_integer_type(counts):
    micro = batches([3, 5])
    weight, exact, _ = weight_and_grad(micro)
    with LossAccumulator().window(counts) as acc:
        for hidden, labels in micro:
            acc.backward(fused_ce(hidden, weight, labels))
    assert distance(weight.grad, exact) <= SAME_SUMS


@pytest.mark.parametrize(
    ("counts", "error", "words"),
    [
        (torch.tensor(3), TypeError, "counts must hold one number per micro-batch"),
        (iter([]), ValueError, r"one number per micro-batch, got none"),
        ([1, 2**63], ValueError, r"counts\[1\] must be an int64, got 9223372036854775808"),
        ({"a": [1]}, TypeError, r"counts\[0\] must be an integer, got str"),
        ([torch.ones(0, dtype=torch.int64)], TypeError, r"counts\[0\] must be an integer, got"),
    ],
)
def test_windows_that_are_none(counts, error, words):
    LossAccumulator().window([2**63 - 1]).__enter__()
    with pytest.raises(error, match=words):
        LossAccumulator().window(counts).__enter__()


# ---- losses -------------------------------------------------------------------------------------


def test_what_is_no_sum():
    mean = torch.tensor(1.0, requires_grad=True)
    output = CausalLMOutput(loss=mean, logits=torch.ones(2))
    wrong = [
        (a_loss(3).mean(), r"looks like a mean: pass fused_ce\(...\) itself"),
        (output, r"give \(out.loss \* n, n\).*FusedTrainerMixin"),
        ((mean, 3), r"out must be \(loss_sum, n_valid\) as fused_ce returns it"),
    ]
    for dtype in (torch.bfloat16, torch.float16):  # what a wrapper has cast
        out = LossSum(torch.tensor(3.0, dtype=dtype, requires_grad=True), torch.tensor(2))
        wrong.append((out, f"must be float32 or float64, got {dtype}"))
    for out, words in wrong:
        for call in (LossAccumulator().backward, LossMeter().update, LossAccumulator().scale):
            with pytest.raises(TypeError, match=words):
                call(out)
    LossAccumulator().backward((output.loss * 5, torch.tensor(5)))


@pytest.mark.parametrize(
    "part",
    [lambda out: out / 4, lambda out: 0.5 * out, lambda out: -out, lambda out: out + out / 2],
)
@pytest.mark.parametrize("monitor", [(), ("correct",)])
def test_a_sum_that_was_divided_is_refused(part, monitor):
    hidden, labels = batches([3])[0]
    out = part(fused_ce(hidden, new_weight(), labels, monitor=monitor))
    with pytest.raises(ValueError, match=r"out was multiplied or divided.*token_weight="):
        LossAccumulator().backward(out)
    LossMeter().update(out)  # of what is only reported, a part may be asked for


def test_a_loss_without_a_graph_is_not_trained():
    with torch.no_grad():
        out = a_loss(3)
    with pytest.raises(RuntimeError, match=r"out must require grad.*evaluation is .*LossMeter"):
        LossAccumulator().backward(out)


def test_auxiliary_losses():
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match="1 auxiliary losses were added after the last"):
        with acc.window([2]):
            acc.backward(a_loss(2))
            acc.add_auxiliary(torch.tensor(1.0))
    for _ in range(2):  # before any window, and after one
        with pytest.raises(RuntimeError, match="add_auxiliary was called outside of a window"):
            acc.add_auxiliary(torch.tensor(1.0))
        run_window(acc, new_weight(), batches([3]))


# ---- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda m, o: o, "parameters must be .*got SGD"),
        (lambda m, o: o.param_groups, "parameters must be .*param_groups.*it holds dict"),
        (
            lambda m, o: m.named_parameters(),
            r"parameters must be .*not named_parameters\(\).*it holds \(",
        ),
        (lambda m, o: m.state_dict(), "parameters must be .*not .*a state_dict.*it holds str"),
        (lambda m, o: m, r"parameters must be .*model.parameters\(\).*, got Linear"),
    ],
)
def test_finish_says_what_it_needs(wrong, words):
    model = torch.nn.Linear(8, 31, bias=False)
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match="nothing to finish"):
        acc.finish([])
    acc.backward(a_loss(2, model.weight))
    with pytest.raises(TypeError, match=words):
        acc.finish(wrong(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(RuntimeError, match=r"parameters: no parameter given has a \.grad"):
        acc.finish([])
    acc.finish(model.parameters())
