"""The loss of an evaluation does not depend on its batches and ranks, and trains nothing."""

import math

import pytest
import torch
from support import ranks
from support.bounds import STATISTIC
from support.loops import a_loss, batches, new_weight, run_window

from fusedce import LossAccumulator, LossMeter, fused_ce

on_two_ranks = ranks.together()


def loss(rank, n, **options):
    hidden, labels = batches([n], rank)[0]
    return fused_ce(hidden, new_weight().detach(), labels, **options)


@on_two_ranks
def test_ranks_with_other_numbers_of_batches_are_added_up(rank):
    meter, sizes = LossMeter(), [[3, 0, 20], [7]]
    for n in sizes[rank]:
        meter.update(loss(rank, n, monitor=("correct",)))
    exact = [loss(r, n) for r in range(2) for n in sizes[r]]
    for _ in range(2):  # computing it changes nothing
        found = meter.compute()
        assert found["loss"] == pytest.approx(float(sum(exact).mean()), rel=STATISTIC)
        assert found["n_tokens"] == 30
        assert found["mean_token_accuracy"] == found["correct_tokens"] / 30
    again = LossMeter()
    again.load_state_dict(meter.state_dict())  # each rank its own
    assert again.compute() == found
    meter.reset()
    assert math.isnan(meter.compute()["loss"])


@on_two_ranks
def test_evaluation_inside_training_mixes_with_nothing(rank):
    acc, weight, meter = LossAccumulator(), new_weight(), LossMeter()
    with acc.window([3]):
        meter.update(a_loss(5))
        assert meter.compute()["n_tokens"] == 10
        acc.backward(a_loss(3, weight))
    run_window(acc, weight, batches([4]))
    meter.update(a_loss(5))
    if rank == 0:  # logging is a matter of one rank
        assert acc.metrics(reset=True)["n_tokens"] == 14
    assert acc.metrics()["n_windows"] == (2 if rank else 0)
    assert meter.compute()["n_tokens"] == 20


@ranks.together(timeout=20)
def test_meters_in_another_order_on_another_rank_are_refused(rank):
    """Without names each would get sums of two data sets."""
    meters = [LossMeter(name=name) for name in ("wiki", "code")]
    for meter in meters[:: -1 if rank else 1]:
        meter.update((torch.tensor(2.0), torch.tensor(1)))
        with pytest.raises(RuntimeError, match=r"have met, or of LossMeters, those named"):
            meter.compute()
