"""Matrix products of the torch backend: exact, of full precision, alike in every thread."""

import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_SUMS
from support.operators import Calls

from fusedce import fused_ce, fused_cross_entropy, fused_kl, fused_logprobs
from fusedce.backends.torch import products
from fusedce.backends.torch.logit_tiles import Logits
from fusedce.backends.torch.products import Products
from fusedce.contract.problem import Projection

H = 96
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def stored(x, how):
    """The same values as they are, transposed, or as every third of a wider matrix's columns."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "strided":
        wide = torch.full((2 * x.shape[0], 3 * x.shape[1]), torch.nan, dtype=x.dtype)
        wide[::2, ::3] = x
        return wide[::2, ::3]
    if how == "one row":  # again and again
        return x[:1].expand(x.shape)
    return x


@pytest.mark.parametrize("how", ["plain", "transposed", "strided", "one row"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_sums_of_exact_products(dtype, how):
    rng = torch.Generator().manual_seed(0)
    weight = stored(torch.randn(70, H, generator=rng).to(dtype), how)
    hidden = stored(torch.randn(23, H, generator=rng).to(dtype), how)
    logits = Logits(Projection(weight, None, 1.0, None))
    exact = weight[5:66].double() @ hidden.double().t()
    given = torch.empty(61, 23, dtype=logits.head.acc)
    h = logits.operand(hidden)
    z = logits.tile(h, 5, 66).clone()
    assert logits.tile(h, 5, 66, out=given) is given
    wide = z.dtype
    assert wide == (torch.float64 if dtype == torch.float64 else torch.float32)
    # H products of size 1, whose partial sums are of the size of the result
    bound = 4 * torch.finfo(wide).eps * H**0.5 * exact.abs().mean().item()
    torch.testing.assert_close(z.double(), exact, rtol=0, atol=bound)
    torch.testing.assert_close(given.double(), exact, rtol=0, atol=bound)
    some = torch.tensor([3, 60, 7])
    of_some = weight[some].double() @ hidden.double().t()
    torch.testing.assert_close(logits.of_classes(h, some).double(), of_some, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "shape", [(5, 7, 3), (1, 1, 1), (1, 9, 4), (0, 4, 3), (3, 0, 4), (3, 4, 0)]
)
@pytest.mark.parametrize("how", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_written_or_added(dtype, how, shape):
    m, k, n = shape
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(m, k, generator=rng).to(dtype), torch.randn(k, n, generator=rng).to(dtype)
    products_of = Products.of(a)
    a, b = (stored(x.to(products_of.operands), how) for x in (a, b))
    total = torch.randn(m, n, generator=rng).to(products_of.acc)
    before, exact = total.double().clone(), a.double() @ b.double()
    # k + 1 additions, of terms that may cancel
    bound = (k + 1) * torch.finfo(products_of.acc).eps
    terms = a.double().abs() @ b.double().abs()
    assert products_of(a, b, total, add=True) is total
    error = (total.double() - before - exact).abs()
    assert (error <= bound * (before.abs() + terms)).all()
    total.fill_(torch.nan)
    assert ((products_of(a, b, total).double() - exact).abs() <= bound * terms).all()


def test_a_product_waits_in_little_memory_of_its_own(monkeypatch):
    """In float64 it is added 32 MiB at a time; all of it would be 76."""
    monkeypatch.setattr(products, "_reduced_precision", lambda: True)
    a, b, total = torch.ones(5000, 1), torch.ones(1, 2000), torch.ones(10**7)
    with Calls() as calls:
        Products.of(a.bfloat16())(a, b, total.view(5000, 2000), add=True)
    made = [out.numel() for operator, _, out in calls.seen if "mm" in str(operator)]
    assert max(made) <= 2**22 < sum(made) == 10**7
    assert total.unique().tolist() == [2]


def test_few_rows_are_padded_for_logits_and_hidden_states_alone():
    """Both have the same bits in every batch; the weight's gradient is of 8 tokens, not of 64."""
    hidden, weight = torch.randn(8, H).requires_grad_(), torch.randn(700, H).requires_grad_()
    labels = torch.randint(700, (8,))
    loss = fused_cross_entropy(hidden, weight, labels, reduction="none", backend="torch").sum()
    with torch.profiler.profile(record_shapes=True) as trace:
        loss.backward()
    seen = {tuple(map(tuple, e.input_shapes[:2])) for e in trace.events() if e.name == "aten::mm"}
    assert seen == {((64, 700), (700, H)), ((700, 8), (8, H))}


# ---- settings of the process ----------------------------------------------------------------


def everything(dtype):
    """Losses and gradients of every public function, with options that change the way."""
    rng = torch.Generator().manual_seed(0)
    hidden = (2 * torch.randn(80, H, generator=rng)).to(dtype).requires_grad_()
    weight = (torch.randn(700, H, generator=rng) / 8).to(dtype).requires_grad_()
    labels = torch.randint(700, (80,), generator=rng)
    several = torch.randint(700, (80, 5), generator=rng)
    losses = (
        lambda: fused_ce(hidden, weight, labels, backend="torch").mean(),
        lambda: fused_ce(hidden, weight, labels, label_smoothing=0.1, backend="torch").mean(),
        lambda: fused_ce(hidden, weight, labels, memory_budget=6 * 2**20, backend="torch").mean(),
        lambda: fused_cross_entropy(
            hidden, weight, labels, reduction="none", backend="torch"
        ).square().sum(),
        lambda: fused_logprobs(hidden, weight, labels, backend="torch").entropy.sum(),
        lambda: fused_logprobs(hidden, weight, several, backend="torch").logprob.sum(),
        lambda: fused_kl(hidden, weight, hidden.detach() / 2, weight.detach(), backend="torch")
        .mean(),
    )  # fmt: skip
    found = []
    for loss in losses:
        with torch.no_grad():
            found.append(loss())
        found += [loss().detach(), *torch.autograd.grad(loss(), (hidden, weight))]
    return found


@pytest.fixture
def lossy_float32(monkeypatch):
    """Sizes it to have float32 products lose bits; other threads' do, so nothing may change it."""

    def refuse(precision):
        raise AssertionError("a setting of the process")

    def start():
        torch.set_float32_matmul_precision("medium")
        monkeypatch.setattr(torch, "set_float32_matmul_precision", refuse)

    yield start
    monkeypatch.undo()
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_do_not_follow_the_precision_of_float32(dtype, lossy_float32):
    """float16 has 11 significant bits, "medium" leaves 8 of them."""
    expected = everything(dtype)
    lossy_float32()
    for x, e in zip(everything(dtype), expected, strict=True):  # by float64, if widened
        assert (x - e).norm() <= max(SAME_SUMS, torch.finfo(x.dtype).eps) * e.norm()


def test_float32_inputs_follow_it_as_torchs_do(lossy_float32):
    lossy_float32()
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, H, generator=rng), torch.randn(300, H, generator=rng)
    labels = torch.randint(300, (64,), generator=rng)
    exact = F.cross_entropy(F.linear(hidden.double(), weight.double()), labels, reduction="none")
    of_torch = F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")
    ours = fused_cross_entropy(hidden, weight, labels, reduction="none", backend="torch")
    rounds = (of_torch - exact).abs().max() > 1e-4  # the loss of bits is 1e-2, float32's own 1e-6
    assert ((ours - exact).abs().max() > 1e-4) == rounds


def test_widened_operands_are_multiplied_in_float64_where_float32_may_lose_bits(monkeypatch):
    monkeypatch.setattr(products, "_reduced_precision", lambda: True)
    rng = torch.Generator().manual_seed(0)
    a, b, before = (torch.randn(x, generator=rng) for x in ((90, H), (H, 40), (90, 40)))
    exact, out = a.double() @ b.double(), before.clone()
    of_fp16, of_fp32 = (Products.of(x) for x in (a.half(), a))
    assert of_fp16(a, b, out, add=True).equal((before + exact).float())
    assert of_fp16(a, b, out).equal(exact.float())
    assert of_fp32(a, b, out).equal(a @ b)
    assert not out.equal(exact.float())
