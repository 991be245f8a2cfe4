"""Losses and statistics token by token, divergences and classes of the Triton backend."""

from functools import partial

import pytest
import torch
from support.oracle import by_token, summed
from support.pairs import Pair, check_pair
from support.sums import EACH_DTYPE, quick, sized
from support.token_stats import compare

import fusedce
from fusedce.testing import Case, check

N, H, V = sized((300, 256, 5003), (24, 64, 299))
CASE = partial(Case, (N,), H, V, requires_grad=("hidden", "weight"), ignored=0.25)
POINTWISE = {"bias": True, "softcap": 5.0, "logit_scale": 0.7}
OPTIONS = [*({name: x} for name, x in POINTWISE.items()), POINTWISE]


def case_of(dtype, options):
    """A case whose ``options`` may ask for a bias."""
    given = {k: x for k, x in options.items() if k != "bias"}
    bias = ("bias",) if "bias" in options else ()
    needed = ("hidden", "weight", *bias)
    return CASE(dtype, options=given, with_bias=bool(bias), requires_grad=needed)


@EACH_DTYPE
@pytest.mark.parametrize("loss", [by_token, summed])
def test_losses_by_token_and_class_weights(device, dtype, loss):
    case = CASE(dtype, class_weight=True)
    check(partial(loss, backend="triton"), case, device)


@EACH_DTYPE
@pytest.mark.parametrize("K", [None, 3])
@pytest.mark.parametrize("temperature", [1.0, "each"])
def test_statistics(device, dtype, temperature, K):
    compare(CASE(dtype), "triton", temperature, K=K, device=device)


@EACH_DTYPE
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "ce_weight": 0.5}])
def test_divergences(device, dtype, kind, options):
    options = options | {"divergence": kind}
    pair = Pair(N, H, H // 2, V, dtype, ignored=0.25, spread=2.0, options=options)
    check_pair(partial(fusedce.fused_kl, backend="triton"), pair, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        quick(loss, options, on_interpreter=loss == "jsd" and list(options) == ["softcap"])
        for loss in ("none", "statistics", "forward", "jsd")
        for options in OPTIONS
    ],
)
def test_options_alone_and_all_together(device, dtype, loss, options):
    if loss == "none":
        check(partial(by_token, backend="triton"), case_of(dtype, options), device)
    elif loss == "statistics":
        compare(case_of(dtype, options), "triton", device=device)
    else:
        given = {k: x for k, x in options.items() if k != "bias"} | {"divergence": loss}
        pair = Pair(N, H, H // 2, V, dtype, spread=2.0, bias="bias" in options, options=given)
        check_pair(partial(fusedce.fused_kl, backend="triton"), pair, device)


def test_the_likeliest_classes(device):
    hidden, weight, _, _ = Case((N,), H, V).tensors(device)
    exact = hidden.double() @ weight.double().T
    assert fusedce.fused_argmax(hidden, weight, backend="triton").equal(exact.argmax(1))
    top = fusedce.fused_topk(hidden, weight, 5, backend="triton")
    assert top.index.equal(exact.topk(5).indices)
    torch.testing.assert_close(
        top.logprob.double(), exact.log_softmax(-1).topk(5).values, rtol=1e-5, atol=1e-5
    )


def test_the_likeliest_classes_beside_a_sum(device):
    """They come from the pass that makes the sum."""
    hidden, weight, labels, _ = CASE().tensors(device)
    found = torch.empty_like(labels)
    out = fusedce.fused_ce(
        hidden, weight.requires_grad_(), labels, argmax_out=found, backend="triton"
    )
    out.mean().backward()
    exact = (hidden.nan_to_num().double() @ weight.detach().double().T).argmax(1)
    assert found.equal(exact.masked_fill(labels == -100, -1))
