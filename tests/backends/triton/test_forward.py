"""The forward-only pass: bits and range. (`tests/gpu` has it on a GPU.)"""

import pytest
import torch
from support.bounds import STATISTIC

import fusedce
from fusedce.contract.problem import Problem
from fusedce.testing import Case

PLACE = torch.device("cpu"), 150, 24, 700  # device, N, H, V: several tiles in each split


def make(dtype=torch.bfloat16, ignored=0.0, seed=0):
    device, N, H, V = PLACE
    case = Case((N,), H, V, dtype, ignored=ignored, seed=seed)
    return case.tensors(device)[:3]


def one_pass(hidden, weight, labels, **options):
    """``loss_sum``, ``n_valid`` and ``lse``, 0 where no label is valid."""
    from fusedce.backends.triton.forward import loss

    lse = torch.zeros(len(labels), device=labels.device)
    return *loss(Problem(hidden, weight, labels, **options), lse=lse), lse


def test_rocm_merges_in_a_launch_of_its_own(monkeypatch):
    """Its barriers order no stores of other waves."""
    inputs = make(ignored=0.3)
    expected = one_pass(*inputs)[:2]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr("fusedce.backends.triton.forward.SUMS", None)  # in which a ticket is taken
    torch.testing.assert_close(one_pass(*inputs)[:2], expected, rtol=STATISTIC, atol=0)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def far_from_their_first_tiles():
    """``weight`` whose column n holds the logits of token n, and labels: 4 splits of 3 tiles."""
    weight = torch.randn(700, 16, generator=torch.Generator().manual_seed(0))
    weight -= weight.logsumexp(0)  # near 0 a float32 shows most of a sum's bits
    weight[-200, 1] = 200.0
    weight[150::192, 2] = 14.0  # about 2^27 in units of the first tile
    weight[150::192, 3] = 18.0  # 2^33
    weight[:, 4] += torch.arange(700) * 0.5
    weight[:, 5] -= torch.arange(700) * 0.5
    weight[:64, 6] -= 300.0
    weight[192:, 7] += 1000.0
    weight[10, 8] = 500.0  # its label
    weight[:, 9] = 0.0
    weight[150::192, 9] = 87.9  # 2^126.8, too much for float32 three times
    weight[150::192, 10] = 60.0  # 2^94
    labels = torch.arange(16)
    labels[8] = 10
    return weight, labels


@pytest.mark.parametrize("masked", [False, True])
def test_logits_far_above_the_first_ones_are_in_range(masked):
    weight, labels = far_from_their_first_tiles()
    bias = None
    if masked:  # the first tiles of all splits but the last are empty, the others far below 0
        bias = torch.full((700,), -200.0)
        bias[:64] = bias[192:256] = bias[384:448] = -torch.inf
        labels = labels + 600
    lse = one_pass(torch.eye(16), weight, labels, bias=bias)[2]
    logits = weight.T.double() + (0 if bias is None else bias)
    exact = logits.logsumexp(1)
    # logits are exact; those of 1 to 8 nats are sums of an exponential and its reference
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(lse.double(), exact, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_logits_have_the_log_sum_exp_of_torch(dtype):
    """+inf at the label, elsewhere, both beside NaN and -inf; nothing but -inf."""
    logits = torch.randn(8, 700)
    logits[0, 300] = logits[1, 1] = logits[2, 690] = logits[3, 3] = torch.inf
    logits[3, 650] = logits[4, 600] = torch.nan
    logits[2, 2] = -torch.inf
    logits[5] = -torch.inf
    # One token after another, its logits as the bias: inf * 0 is NaN in a product.
    for n, row in enumerate(logits.to(dtype)):
        token = slice(n, n + 1)
        zeros = torch.zeros(8, 16, dtype=dtype), torch.zeros(700, 16, dtype=dtype)
        loss, _, lse = one_pass(zeros[0][token], zeros[1], torch.arange(8)[token], bias=row)
        torch.testing.assert_close(lse[0], row.double().logsumexp(0).float(), equal_nan=True)
        torch.testing.assert_close(
            loss.isnan(), (row.isnan() | (row == torch.inf)).any() | (n == 5)
        )


def test_a_token_beside_one_out_of_range_has_the_same_bits():
    weight, labels = far_from_their_first_tiles()
    together = one_pass(torch.eye(16), weight, labels)[2]
    for n in range(16):
        token = slice(n, n + 1)
        alone = one_pass(torch.eye(16)[token], weight, labels[token])[2]
        assert alone.equal(together[token]), n


@pytest.mark.parametrize(("loss", "forgotten"), [("sum", "loss_sum"), ("none", "moments")])
def test_a_forgotten_argument_of_the_walk_is_an_error(monkeypatch, loss, forgotten):
    """It would be None, which some branch of the kernel takes for something left out."""
    from fusedce.backends.triton import forward, launch

    def walk(*given, **named):
        launch.walk(*given, **{name: x for name, x in named.items() if name != forgotten})

    monkeypatch.setattr(forward, "walk", walk)
    with pytest.raises(TypeError, match=forgotten):
        fusedce.fused_cross_entropy(*make(), reduction=loss, backend="triton")
