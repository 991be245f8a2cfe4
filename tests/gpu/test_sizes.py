"""Sums of any size and memory layout, without valid labels and with bad ones."""

import pytest
import torch
from support.sums import EACH_DTYPE, check_sum, sized

import fusedce
from fusedce.testing import Case


@EACH_DTYPE
@pytest.mark.parametrize(
    ("N", "H", "V"),
    [sized((1, 256, 5003), (1, 64, 299)), (2, 64, 127), (64, 64, 1), (64, 64, 2),
     sized((1000, 1088, 50257), (40, 80, 501)), sized((200, 136, 5003), (40, 48, 299))],
)  # fmt: skip
@pytest.mark.parametrize("need", [(), ("hidden", "weight")], ids=["evaluation", "training"])
def test_sizes(device, dtype, N, H, V, need):
    check_sum(None, dtype, device, N=N, H=H, V=V, need=need)


@EACH_DTYPE
@pytest.mark.parametrize("need", [("hidden",), ("weight",)])
def test_a_gradient_of_one_input_alone(device, dtype, need):
    check_sum("one GEMM", dtype, device, N=40, H=64, V=299, need=need)


@pytest.mark.parametrize("name", ["int32", "transposed", "misaligned", "strided"])
def test_memory_of_any_layout(device, name):
    """The values of contiguous inputs, up to the order of sums."""
    case = Case((40,), 128, 300, torch.bfloat16, ignored=0.3)
    hidden, weight, labels, _ = case.tensors(device)

    def step(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs[:2]]
        out = fusedce.fused_ce(*leaves, inputs[2], backend="triton")
        return out.loss_sum.detach(), *torch.autograd.grad(out.loss_sum, leaves)

    wide = hidden.new_empty(len(hidden), 129)
    given = {
        "int32": (hidden, weight, labels.int()),
        "transposed": (hidden, weight.t().contiguous().t(), labels),
        "misaligned": (wide[:, 1:].copy_(hidden), weight, labels),
        "strided": (hidden, weight.repeat_interleave(2, dim=0)[::2], labels.repeat(2)[:40]),
    }[name]
    rounding = 2 * torch.finfo(torch.bfloat16).eps
    for got, expected in zip(step(*given), step(hidden, weight, labels), strict=True):
        torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding / 8)


@pytest.mark.filterwarnings("ignore:fusedce")
def test_a_hidden_size_that_16_does_not_divide(device):
    check_sum(None, torch.bfloat16, device, N=40, H=123, V=299)
    check_sum(None, torch.bfloat16, device, N=40, H=123, V=299, need=())


@pytest.mark.parametrize("labels", ["none", "all ignored"])
def test_nothing_valid_gives_zeros_and_a_graph(device, labels):
    hidden, weight, y, _ = Case((20,), 64, 299, torch.bfloat16, ignored=1.0).tensors(device)
    n = 0 if labels == "none" else 20
    leaves = hidden[:n].clone().requires_grad_(), weight.requires_grad_()
    out = fusedce.fused_ce(*leaves, y[:n], backend="triton")
    out.mean().backward()
    assert out.loss_sum == 0
    assert out.n_valid == 0
    assert not any(x.grad.any() for x in leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("label", [10**9, -7, 5003])
@pytest.mark.parametrize("need", [True, False], ids=["training", "evaluation"])
def test_a_bad_label_is_nan_a_code_and_an_error_of_the_accumulator(device, label, need):
    case = Case((300,), 256, 5003, torch.bfloat16)
    hidden, weight, y, _ = case.tensors(device)
    weight.requires_grad_(need)
    y[7] = label
    out = fusedce.fused_ce(hidden, weight, y)
    assert out.loss_sum.isnan()
    assert out.n_valid < 0
    assert (torch.ones(3, device=device) + 1).sum() == 6  # the context lives
    if not need:
        return
    acc = fusedce.LossAccumulator([weight])
    acc.backward(out)
    with pytest.raises(ValueError, match=str(label)):
        acc.finish()


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "H", "V"), [(64, 9000, 250_000), (70_000, 64, 40_000)])
def test_offsets_past_2_to_31(device, N, H, V):
    """V * H in the first, N * V in the second. A bare product of the size says what is a rounding.

    Tensor cores cut off as they add, so a sum of H products errs more than one of float32.
    """
    torch.manual_seed(0)
    hidden = torch.randn(N, H, device=device, dtype=torch.bfloat16) / H**0.5
    weight = torch.randn(V, H, device=device, dtype=torch.bfloat16)
    labels = torch.randint(V - 100, V, (N,), device=device)
    rows = torch.randperm(N, device=device)[:32]
    found = fusedce.fused_logprobs(hidden[rows], weight, labels[rows], backend="triton")
    exact = hidden[rows].double() @ weight.double().T
    bare = torch.mm(hidden[rows], weight.T, out_dtype=torch.float32)
    error = float((bare.double() - exact).abs().max())
    lse = exact.logsumexp(-1)
    assert float((found.lse.double() - lse).abs().max()) <= 2 * error + 1e-6 * float(lse.max())
    loss = fusedce.fused_ce(hidden, weight, labels, backend="triton").loss_sum
    parts = [fusedce.fused_ce(h, weight, y, backend="triton").loss_sum
             for h, y in zip(hidden.split(7_000), labels.split(7_000), strict=True)]  # fmt: skip
    torch.testing.assert_close(loss, torch.stack(parts).sum(), rtol=1e-6, atol=0)
    if N * V > 2**31:
        one_chunk, chunks = (training_step(hidden, weight, labels, C) for C in (N, 7_000))
        for x, y in zip(one_chunk, chunks, strict=True):
            rounding = torch.finfo(torch.bfloat16).eps
            assert (x.float() - y.float()).norm() <= rounding * y.float().norm()


def training_step(hidden, weight, labels, chunk_tokens):
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    out = fusedce.fused_ce(*leaves, labels, chunk_tokens=chunk_tokens, backend="triton")
    return torch.autograd.grad(out.mean(), leaves)
