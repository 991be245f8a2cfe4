"""Known bugs of the denominator: the naive loop is visibly wrong, and ours is right.

Each test names the reports it stands for; those of models are in ``tests/trainer``.
"""

import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_SUMS, STATISTIC
from support.loops import (
    H,
    V,
    batches,
    distance,
    new_weight,
    out_of,
    run_streaming,
    run_window,
    weight_and_grad,
)

from fusedce import LossAccumulator, count_valid, fused_ce, shift_labels

SIZES = [1, 20, 3, 8]
RUNS = pytest.mark.parametrize("run", [run_window, run_streaming])


def means(weight, micro, steps=None):
    """trl#2175, transformers#24725, #34191."""
    for one in micro:
        (out_of(weight, one).mean() / (steps or len(micro))).backward()


def usual_steps(weight, micro):
    """transformers#38837, OpenRLHF#489: a short last window, divided by the usual number."""
    means(weight, micro, 2 * len(micro))


def left_over(weight, micro):
    """transformers#22082, OpenRLHF#1337, Lightning#19987: gradients of the epoch before."""
    out_of(weight, batches([4], 7)[0]).mean().backward()
    for one in micro:
        (out_of(weight, one).loss_sum / sum(SIZES)).backward()


def clipped(weight, micro):
    """transformers#986, accelerate#641: gradients that are not complete yet are clipped."""
    for one in micro:
        (out_of(weight, one).loss_sum / sum(SIZES)).backward()
        torch.nn.utils.clip_grad_norm_([weight], 0.5 * float(weight.grad.norm()))


@pytest.mark.parametrize("naive", [means, usual_steps, left_over, clipped])
@RUNS
def test_gradients(run, naive):
    micro = batches(SIZES)
    weight, exact, _ = weight_and_grad(micro)
    wrong = new_weight()
    naive(wrong, micro)
    assert distance(wrong.grad, exact) > 0.3
    run(LossAccumulator(), weight, micro)
    assert distance(weight.grad, exact) <= SAME_SUMS


@RUNS
def test_losses(run):
    """transformers#35204, axolotl#2262, LlamaFactory#7443, Liger-Kernel#802: not divided by steps.

    transformers#39241, #41898: an evaluation is a mean of means.
    """
    micro = batches(SIZES)
    weight, _, exact = weight_and_grad(micro)
    losses = [out_of(weight, one).mean().item() for one in micro]
    assert sum(losses) > 3 * exact
    assert abs(sum(losses) / len(losses) - exact) > 0.05
    acc, evaluation = LossAccumulator(), LossAccumulator()
    run(acc, weight, micro)
    for one in micro:
        evaluation.add(out_of(weight.detach(), one))
    for m in (acc.metrics(), evaluation.metrics()):
        assert m["loss"] == pytest.approx(exact, rel=STATISTIC)


def test_counted_before_the_shift():
    """transformers#46204: a causal model trains T - 1 of T tokens. 8 rows: 201 for 193."""
    lengths = [40, 33, 12, 30, 25, 41, 9, 11]
    labels = torch.full((8, 41), -100)
    for row, length in zip(labels, lengths, strict=True):
        row[:length] = torch.arange(length) % V
    naive = int((labels != -100).sum())
    assert (naive, int(count_valid(labels))) == (201, 193)

    hidden, weight = torch.randn(8, 41, H), new_weight()
    out = fused_ce(hidden, weight, shift_labels(labels))
    exact = F.cross_entropy(
        (hidden[:, :-1] @ weight.T).flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    ).item()
    assert out.loss_sum.item() / naive < 0.97 * exact
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match=r"declared with 201 .* counts 193\. .*shift_labels"):
        with acc.window([naive]):  # the same mistake is an error here
            acc.backward(out)
    with acc.window([count_valid(labels)]):
        acc.backward(fused_ce(hidden, weight, shift_labels(labels)))
    assert acc.metrics()["loss"] == pytest.approx(exact, rel=STATISTIC)
