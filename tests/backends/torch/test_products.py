"""Matrix products of the torch backend: exact, of full precision, alike in every thread."""

import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_SUMS, logit_rounding
from support.operators import Calls

from fusedce import fused_ce, fused_cross_entropy, fused_kl, fused_logprobs
from fusedce.backends.torch import products
from fusedce.backends.torch.logit_tiles import Logits
from fusedce.backends.torch.products import Products
from fusedce.contract.problem import Projection

H = 96
WAYS = {"MKL": products.MKL, "oneDNN": products.ONEDNN, "widened bf16": None}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture
def any_maker(monkeypatch):
    """oneDNN's kernel wherever the CPU has its instructions, slow ones too."""
    monkeypatch.setattr(products, "of_amd", lambda: True)
    if not products._allowed() or products.of_torch(products._BRGEMM) is None:
        pytest.skip("oneDNN has no kernel for this CPU")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Each way to multiply bfloat16, on any CPU."""
    gemm = WAYS[request.param]
    if gemm is products.MKL and products.of_torch(products._MKL) is None:
        pytest.skip("this torch has no MKL")
    if gemm is products.ONEDNN:
        request.getfixturevalue("any_maker")
    off = products.ONEDNN  # where a test switches oneDNN off
    monkeypatch.setattr(
        products,
        "bf16_gemm",
        lambda: None if gemm is off and not products.onednn_usable() else gemm,
    )
    return request.param


@pytest.fixture
def onednn(request):
    """Whether torch may ask oneDNN; a context, since torch's own test helpers freeze the flag."""
    with torch.backends.mkldnn.flags(enabled=request.param):
        yield


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
@pytest.mark.parametrize("onednn", [True, False], indirect=True)
@pytest.mark.usefixtures("way", "onednn")
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
@pytest.mark.usefixtures("way")
def test_products_are_written_or_added(dtype, how, shape):
    m, k, n = shape
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(m, k, generator=rng).to(dtype), torch.randn(k, n, generator=rng).to(dtype)
    products_of = Products.of(a)
    a, b = (stored(x.to(products_of.gradients), how) for x in (a, b))
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
    """It is added 16 MiB at a time; all of it would be 38."""
    monkeypatch.setattr(products, "bf16_gemm", lambda: None)
    a, b, total = torch.ones(5000, 1).bfloat16(), torch.ones(1, 2000).bfloat16(), torch.ones(10**7)
    with Calls() as calls:
        Products(a.dtype, *[torch.float32] * 3)(a, b, total.view(5000, 2000), add=True)
    made = [out.numel() for operator, _, out in calls.seen if "mm" in str(operator)]
    assert max(made) <= 2**22 < sum(made) == 10**7
    assert total.unique().tolist() == [2]


def test_a_limit_on_mkl_is_obeyed(monkeypatch):
    monkeypatch.setattr(products, "cpu_has", lambda name: True)
    for name in ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"):
        monkeypatch.delenv(name, raising=False)
    assert products._amx_for_mkl()
    for name, limit, allowed in (
        ("MKL_ENABLE_INSTRUCTIONS", "AVX2", False),
        ("MKL_ENABLE_INSTRUCTIONS", "avx512_e3", False),
        ("MKL_ENABLE_INSTRUCTIONS", "AVX512_E4", True),
        ("MKL_CBWR", "COMPATIBLE", False),
        ("MKL_CBWR", "AUTO", True),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, limit)
            assert products._amx_for_mkl() == allowed, (name, limit)


def test_a_product_that_is_wrong_is_not_taken(monkeypatch):
    if products.of_torch(products._MKL) is None:
        pytest.skip("this torch has no MKL")
    monkeypatch.setattr(products, "_amx_for_mkl", lambda: True)
    products._checked.cache_clear()
    try:
        assert products.bf16_gemm() is products.MKL
        products._checked.cache_clear()
        monkeypatch.setattr(products, "of_torch", lambda name: lambda *args: None)
        assert products.bf16_gemm() is None
    finally:
        products._checked.cache_clear()


def test_onednns_kernel_is_asked_only_where_it_can_run(monkeypatch):
    """Where it cannot, it ends the process instead of raising."""
    found = {"_is_avx512_bf16_supported": True, "_is_amx_tile_supported": False}
    monkeypatch.setattr(products, "cpu_has", lambda name: found[name])
    monkeypatch.setattr(products, "library", lambda: (None, None))
    monkeypatch.setattr(products, "of_amd", lambda: True)
    monkeypatch.setattr(products, "_TRIED", "2.0")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        for limit, allowed in (("AVX2", False), ("avx512_core_vnni", False), ("all", True),
                               ("AVX512_CORE_BF16", True), ("AVX2_VNNI_2", False)):  # fmt: skip
            with monkeypatch.context() as patch:
                patch.setenv(name, limit)
                assert products.onednn_usable() == allowed, (name, limit)
    assert products.onednn_usable()
    with torch.backends.mkldnn.flags(enabled=False):
        assert not products.onednn_usable()
    found["_is_amx_tile_supported"] = True
    assert not products.onednn_usable()
    found["_is_amx_tile_supported"] = False
    monkeypatch.setattr(products, "of_amd", lambda: False)
    assert not products.onednn_usable()  # Intel's instructions are slower than those of float32
    found.update(dict.fromkeys(found, False))
    assert not products.onednn_usable()


@pytest.mark.usefixtures("any_maker")
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_of_onednns_products_meet(threads):
    """Rows, columns and inner entries of several blocks and a rest; an odd number of pairs."""
    rng = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for m, k, n in ((600, 1541, 1030), (257, 513, 1025), (1, 1025, 7)):
            a, b = (torch.randn(x, generator=rng).bfloat16() for x in ((m, k), (k, n)))
            exact = a.double() @ b.double()
            for x, y in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t())):
                out = torch.full((m, n), torch.nan)
                products.ONEDNN.multiply(x, y, out)
                products.ONEDNN.multiply(x, y, out, add=True)
                bound = 2 * logit_rounding(a, y.t())
                torch.testing.assert_close(out.double(), 2 * exact, rtol=0, atol=bound)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()),
    reason="needs oneDNN and MKL",
)
def test_onednn_multiplies_for_widened_bfloat16_unless_it_is_switched_off(monkeypatch):
    def asked(dtype):
        x = torch.ones(70, H, dtype=dtype)
        logits = Logits(Projection(x, None, 1.0, None))
        with torch.profiler.profile() as trace:
            logits.tile(logits.operand(x), 0, 70)
        return any("mkldnn" in event.name for event in trace.events())

    monkeypatch.setattr(products, "bf16_gemm", lambda: None)
    assert asked(torch.bfloat16)
    assert not asked(torch.float32)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not asked(torch.bfloat16)


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
@pytest.mark.usefixtures("way")
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
