"""Sums of losses and their gradients by each way of the Triton backend, beside float64."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.device import current, exponentials_by
from support.params import slow

import fusedce
from fusedce.testing import Case, check

COMPILED = current().type != "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LOGITS = ["flat", "peaked", "huge"]
OPTIONS = [
    {"bias": True}, {"softcap": 5.0}, {"logit_scale": 0.7}, {"label_smoothing": 0.1},
    {"z_loss": 0.01}, {"token_weight": True},
]  # fmt: skip
ALL_OPTIONS = {name: value for option in OPTIONS for name, value in option.items()}

WAYS = {
    "one GEMM": (True, {}),
    "tiles": (False, {}),
    "chunks by one GEMM": (True, {"chunk_tokens": 128 if COMPILED else 32}),
    "chunks by tiles": (False, {"chunk_tokens": 128 if COMPILED else 32}),
    "least budget": (False, {"memory_budget": "least"}),
}


def sized(large, small):
    return large if COMPILED else small


def least_budget(case, device):
    """The least budget, from the words of the error about a smaller one."""
    hidden, weight, labels, _ = case.tensors(device)
    weight.requires_grad_()
    with pytest.raises(ValueError, match="memory_budget must be at least") as error:
        fusedce.fused_ce(hidden.requires_grad_(), weight, labels, backend="triton", memory_budget=1)
    return int(str(error.value).split("at least ")[1].split()[0])


def run(way, dtype, device, *, N, H, V, logits="flat", need=("hidden", "weight"), **options):
    options = dict(options)
    bias, token_weight = options.pop("bias", False), options.pop("token_weight", False)
    need = (*need, "bias") if bias and need else need
    case = Case(
        (N,), H, V, dtype, logits=logits, ignored=0.3, with_bias=bias, requires_grad=need,
        options=options, token_weight=token_weight,
    )  # fmt: skip
    one_gemm, given = WAYS[way] if way else (None, {})
    if given.get("memory_budget") == "least":
        given = {"memory_budget": least_budget(case, device)}
    with exponentials_by(one_gemm) if way else nullcontext():
        check(partial(fusedce.fused_ce, backend="triton", **given), case, device)


def quick(*values, on_interpreter):
    """A case that the interpreter leaves to `make test-slow` unless it is of those named."""
    return values if COMPILED or on_interpreter else slow(*values)


def names(case):
    return "+".join(case) if isinstance(case, dict) else None


@pytest.mark.parametrize(
    ("dtype", "way", "logits"),
    [
        quick(dtype, way, logits, on_interpreter=dtype is torch.bfloat16 and logits == "peaked")
        for dtype in DTYPES for way in WAYS for logits in LOGITS
    ],
)  # fmt: skip
def test_each_way_trains_as_float64(device, dtype, way, logits):
    H, V = sized((256, 5008), (64, 304))
    run(way, dtype, device, N=sized(300, 40), H=H, V=V, logits=logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["one GEMM", "tiles"])
def test_a_vocabulary_of_odd_size(device, dtype, way):
    run(way, dtype, device, N=sized(300, 40), H=64, V=sized(5003, 299))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [2304, 2560, 4096])
def test_sizes_that_choose_a_way_by_themselves(device, dtype, H):
    run(None, dtype, device, N=300, H=H, V=5003, logits="peaked")


@pytest.mark.parametrize(
    ("dtype", "way", "need", "options"),
    [
        quick(dtype, way, need, options, on_interpreter=False)
        for dtype in DTYPES for way in ("one GEMM", "tiles")
        for need in (("hidden", "weight"), ())
        for options in (*OPTIONS, ALL_OPTIONS)
        if dtype is not torch.float16 or options is ALL_OPTIONS
    ],
    ids=names,
)  # fmt: skip
def test_options_alone_and_all_together(device, dtype, way, need, options):
    H, V = sized((256, 3001), (64, 299))
    run(way, dtype, device, N=sized(200, 40), H=H, V=V, need=need, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "H", "V"),
    [sized((1, 256, 5003), (1, 64, 299)), (2, 64, 127), (64, 64, 1), (64, 64, 2),
     sized((1000, 1088, 50257), (40, 80, 501)), sized((200, 136, 5003), (40, 48, 299))],
)  # fmt: skip
@pytest.mark.parametrize("need", [(), ("hidden", "weight")], ids=["evaluation", "training"])
def test_sizes(device, dtype, N, H, V, need):
    run(None, dtype, device, N=N, H=H, V=V, need=need)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("need", [("hidden",), ("weight",)])
def test_a_gradient_of_one_input_alone(device, dtype, need):
    run("one GEMM", dtype, device, N=40, H=64, V=299, need=need)


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
    run(None, torch.bfloat16, device, N=40, H=123, V=299)
    run(None, torch.bfloat16, device, N=40, H=123, V=299, need=())


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
    with pytest.raises(ValueError, match=str(label)):
        fusedce.fused_cross_entropy(hidden.cpu(), weight.detach().cpu(), y.cpu())


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
