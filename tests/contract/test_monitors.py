"""Monitored sums beside the loss are right, have no gradient and take no second pass."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_SUMS, STATISTIC
from torch.utils._pytree import tree_map

from fusedce import LossSum, fused_ce
from fusedce.contract.results import MONITORS, MonitoredLossSum, ScaledLossSum

BACKENDS = ["torch", "triton"]
N, H, V = 9, 8, 13


def inputs():
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng).requires_grad_()
    weight = torch.randn(V, H, generator=rng).requires_grad_()
    labels = torch.randint(V, (N,), generator=rng)
    labels[:4] = F.linear(hidden, weight)[:4].argmax(-1)
    labels[1], labels[6] = -1, -1  # as argmax marks what it leaves out
    return hidden, weight, labels


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("monitor", [("correct",), ("entropy", "z_loss"), MONITORS])
def test_the_sums_are_those_of_the_logits(backend, grad, monitor):
    hidden, weight, labels = inputs()
    token_weight = torch.linspace(0.5, 2, N)
    token_weight[3] = 0
    options = {"ignore_index": -1, "softcap": 4.0, "z_loss": 0.1, "token_weight": token_weight}
    z = 4.0 * torch.tanh(F.linear(hidden.double(), weight.double()) / 4.0)
    used = (labels != -1) & (token_weight != 0)
    log_p = z.log_softmax(-1)
    exact = {
        "correct": ((z.argmax(-1) == labels) & used).sum(),
        "entropy": (-(log_p.exp() * log_p).sum(-1) * used).sum(),
        "z_loss": (0.1 * z.logsumexp(-1).square() * token_weight * used).sum(),
    }
    with torch.set_grad_enabled(grad):
        out = fused_ce(hidden, weight, labels, monitor=monitor, backend=backend, **options)
        plain = fused_ce(hidden, weight, labels, backend=backend, **options)
    assert isinstance(out, LossSum)
    assert len(out) == 2
    assert set(out.monitors) == set(monitor)
    for name, value in out.monitors.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, exact[name].double().detach(), rtol=STATISTIC, atol=0)
    torch.testing.assert_close(tuple(out), tuple(plain))
    if grad:
        for x, y in zip(*(torch.autograd.grad(o.mean(), (hidden, weight)) for o in (out, plain)),
                        strict=True):  # fmt: skip
            torch.testing.assert_close(x, y, rtol=0, atol=SAME_SUMS * float(y.abs().max()))


def test_sums_of_losses_add_their_monitors():
    out = fused_ce(*inputs(), ignore_index=-1, monitor=("correct", "entropy"))
    other = fused_ce(*inputs(), ignore_index=-1, monitor=("correct",))
    for total in (out + other, other + out, sum([out, other])):
        assert isinstance(total, MonitoredLossSum)
        assert total.n_valid == 2 * out.n_valid
        assert total.monitors == {"correct": 2 * other.monitors["correct"]}


@pytest.mark.parametrize("factor", [0.5, torch.tensor([0.5], requires_grad=True)])
def test_a_scaled_loss_keeps_its_monitors(factor):
    out = fused_ce(*inputs(), ignore_index=-1, monitor=MONITORS, z_loss=0.1)
    for scaled, by in ((out * factor, 0.5), (factor * out, 0.5), (out / factor, 2.0), (-out, -1.0)):
        assert scaled.monitors["correct"] == out.monitors["correct"]
        assert scaled.monitors["entropy"] == out.monitors["entropy"]
        # a part of the loss, and no more to be differentiated than before
        torch.testing.assert_close(scaled.monitors["z_loss"], by * out.monitors["z_loss"])
        assert scaled.monitors["z_loss"].shape == ()
    with pytest.raises(TypeError, match="unsupported operand"):
        out * out


def test_what_rebuilds_a_tuple_keeps_its_kind():
    """Wrappers rebuild it of its fields; a share of a loss must not become a whole one."""
    out = fused_ce(*inputs(), ignore_index=-1, monitor=("correct",))
    for loss, scaled in ((out, False), (out / 2, True), (out + out, False), (out + out / 2, True)):
        for made in (
            tree_map(lambda x: x, loss),
            type(loss)(*loss),
            loss._make(loss),
            loss._replace(n_valid=loss.n_valid),
            copy.copy(loss),
        ):
            assert isinstance(made, ScaledLossSum) is scaled
            assert len(made) == 2
    shares = out / 2
    for made in (shares._replace(loss_sum=shares.loss_sum * 3), copy.copy(shares)):
        assert made.monitors == shares.monitors
    assert shares._replace(loss_sum=shares.loss_sum * 3).loss_sum == 3 * shares.loss_sum


def test_names_that_do_not_exist():
    with pytest.raises(ValueError, match=r"monitor must hold names out of .*'accuracy'"):
        fused_ce(*inputs(), monitor=("accuracy",))
    with pytest.raises(TypeError, match="monitor must be a tuple of names"):
        fused_ce(*inputs(), monitor="correct")
