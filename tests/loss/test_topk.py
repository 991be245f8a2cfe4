"""fused_topk equals `torch.topk` of all log-probabilities; test_sharded.py has it over ranks."""

import re

import pytest
import torch
from support.bounds import EXACT, errs_like, in_float64
from support.oracle import finished_logits

from fusedce import TopK, fused_topk
from fusedce.backends import plan

BACKENDS = ["torch", "triton"]
N, H, V, K = 7, 8, 131, 5
OPTIONS = {
    "plain": {},
    "all": {"softcap": 3.0, "logit_scale": -0.7, "temperature": 0.6, "bias": True},
    "temperatures": {"temperature": torch.linspace(0.5, 2, N)},
}


def inputs(options=(), dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    options = dict(options)
    hidden, weight, bias = (
        torch.randn(shape, generator=rng).to(dtype).requires_grad_()
        for shape in ((N, H), (V, H), V)
    )
    options["bias"] = bias if options.get("bias") else None
    return hidden, weight, options


def eager(hidden, weight, k, *, bias=None, temperature=1.0, **options):
    z = finished_logits(hidden, weight, bias, **options)
    t = temperature[:, None].to(z) if isinstance(temperature, torch.Tensor) else temperature
    return (z / t).log_softmax(-1).topk(k)


@pytest.fixture(params=[None, 64])
def tile(request, monkeypatch):
    """Classes of a tile: all, or few, so that candidates are merged."""
    if request.param:
        monkeypatch.setattr(plan, "tile_classes", lambda *_: request.param)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [1, K, V])
def test_classes_values_and_gradients(backend, name, dtype, k, tile):
    if backend == "triton" and (dtype == torch.float64 or k == V):
        pytest.skip("float64 is of the torch backend; the interpreter is slow")
    hidden, weight, options = inputs(OPTIONS[name], dtype)
    leaves = [x for x in (hidden, weight, options["bias"]) if x is not None]
    found = fused_topk(hidden, weight, k, backend=backend, **options)
    assert isinstance(found, TopK)
    with torch.no_grad():
        alone = fused_topk(hidden, weight, k, backend=backend, **options)
    assert torch.equal(found.index, alone.index)

    def values(*leaves):
        bias = {"bias": leaves[2]} if len(leaves) == 3 else {}
        z = eager(*leaves[:2], V, **options | bias)
        log_p = torch.empty_like(z.values).scatter(1, z.indices, z.values)
        return log_p.gather(1, found.index)

    wide = in_float64(*leaves)
    exact, theirs = values(*wide), values(*leaves)
    for got in (found.logprob, alone.logprob):
        errs_like(got, theirs, exact)
    # The classes are the likeliest, but for those that the rounding of a logit exchanges.
    best = eager(*wide[:2], k, **options | ({"bias": wide[2]} if len(wide) == 3 else {})).values
    errs_like(alone.logprob, theirs, best)
    upstream = torch.randn(N, k, generator=torch.Generator().manual_seed(1))
    grads = [
        torch.autograd.grad((x * upstream.to(x)).sum(), of)
        for x, of in ((found.logprob, leaves), (theirs, leaves), (exact, wide))
    ]
    errs_like(*grads)


def test_of_equal_logits_the_first_classes_are_taken(tile):
    weight = torch.zeros(V, 1)
    weight[100:] = 1  # 31 of them, in several tiles
    weight[[30, 120]] = 2
    found = fused_topk(torch.ones(2, 1), weight, 6)
    assert found.index.tolist() == [[30, 120, 100, 101, 102, 103]] * 2
    assert fused_topk(torch.ones(2, 1), weight, 40).index[:, :6].equal(found.index)
    none = fused_topk(torch.zeros(1, 1), weight, V)
    assert none.index.tolist() == [[*range(V)]]


def test_a_sure_token_is_exact_and_infinities_are_torchs(tile):
    weight = torch.tensor([[20.0], [0.0], [-5.0], [-float("inf")]])
    found = fused_topk(torch.ones(1, 1), weight, 4)
    assert found.index.tolist() == [[0, 1, 2, 3]]  # a logit of -inf has a class, too
    exact = weight.double().T.log_softmax(1)
    torch.testing.assert_close(found.logprob.double(), exact, rtol=1e-6, atol=0)  # -2.1e-9 first
    bad = fused_topk(torch.tensor([[float("nan")], [1.0]]), weight[:3], 2).logprob
    assert bad[0].isnan().all()
    assert bad[1].isfinite().all()


def test_shapes_and_no_tokens():
    hidden, weight, _ = inputs()
    for t in (1.0, torch.linspace(0.5, 2, 6)):
        flat = fused_topk(hidden[:6], weight, K, temperature=t)
        t = t.view(2, 3) if isinstance(t, torch.Tensor) else t
        cubic = fused_topk(hidden[:6].view(2, 3, H), weight, K, temperature=t)
        torch.testing.assert_close(cubic.logprob.view(6, K), flat.logprob, **EXACT)
    empty = fused_topk(hidden[:0], weight, K)
    assert empty.logprob.shape == empty.index.shape == (0, K)
    empty.logprob.sum().backward()
    assert weight.grad.eq(0).all()


def test_a_token_has_the_same_bits_in_every_batch():
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(70, H, generator=rng), torch.randn(V, H, generator=rng)
    whole = fused_topk(hidden, weight, K)
    # MKL's kernels for AVX2 add up the last 8 rows of 128 in another order than the others: the
    # rounding of logits of that size, of which a sure class's log-probability is a difference.
    alike = torch.backends.cpu.get_cpu_capability() == "AVX512"
    size = float((hidden @ weight.T).abs().max())
    same = EXACT if alike else {"rtol": 0, "atol": torch.finfo(torch.float32).eps * size}
    for i in (0, 3, 69):
        one = fused_topk(hidden[i : i + 1], weight, K)
        torch.testing.assert_close(one.logprob, whole.logprob[i : i + 1], **same)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("k", [1, 40])
def test_the_least_budget_that_is_named_is_enough(trained, k):
    """With gradients too, whose own pass and backward hold more."""
    hidden = torch.randn(300, 64).requires_grad_(trained)
    weight = torch.randn(5000, 64).requires_grad_(trained)
    with pytest.raises(ValueError, match="memory_budget must be at least") as refused:
        fused_topk(hidden, weight, k, memory_budget=1)
    least = int(re.search(r"at least (\d+) bytes", str(refused.value))[1])
    out = fused_topk(hidden, weight, k, memory_budget=least)
    torch.testing.assert_close(out, fused_topk(hidden, weight, k))
    if trained:
        out.logprob.sum().backward()
        assert hidden.grad is not None
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        fused_topk(hidden, weight, k, memory_budget=least - 1)


@pytest.mark.parametrize("values", [3, 10**6])
@pytest.mark.parametrize("k", [1, 7])
def test_groups_of_classes_hide_none(values, k):
    """A vocabulary of many groups, with and without equal logits, some of them -inf."""
    rng = torch.Generator().manual_seed(0)
    V = 5003  # no multiple of a group
    logits = torch.randint(values, (20, V), generator=rng).float() / values
    logits[:, ::5] = -torch.inf
    logits[0, 0], logits[0, 1:] = 0, -torch.inf
    logits[1, -1] = 20
    for row in logits:
        found = fused_topk(torch.zeros(1, 4), torch.ones(V, 4), k, bias=row)
        expected = row.double().log_softmax(0)
        order = row.sort(descending=True, stable=True).indices[:k]
        assert torch.equal(found.index[0], order)
        torch.testing.assert_close(found.logprob[0].double(), expected[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("wanted", [False, True])
def test_the_least_budget_that_is_named_suffices(backend, wanted):
    """With a gradient there are two passes, and either may need more."""
    hidden, weight = torch.randn(3, 16, requires_grad=wanted), torch.randn(700, 16)
    given = {"backend": backend}
    with pytest.raises(ValueError, match="memory_budget must be at least") as error:
        fused_topk(hidden, weight, 4, memory_budget=1, **given)
    least = int(re.search(r"at least (\d+) bytes", str(error.value))[1])
    fused_topk(hidden, weight, 4, memory_budget=least, **given)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        fused_topk(hidden, weight, 4, memory_budget=least - 1, **given)
