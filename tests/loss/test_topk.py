"""fused_topk equals `torch.topk` of all log-probabilities, also over ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import EXACT, errs_like, in_float64
from support.coverage import counted

from fusedce import TopK, fused_logprobs, fused_topk
from fusedce.backends import plan

BACKENDS = ["torch", "triton"]
N, H, V, K = 7, 8, 131, 5
UNEQUAL = {2: (2, 129), 4: (1, 60, 0, 70)}  # rows of each rank; two have fewer than K
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


def eager(hidden, weight, k, *, bias=None, softcap=None, logit_scale=1.0, temperature=1.0):
    z = F.linear(hidden, weight, bias)
    z = (z if z.dtype == torch.float64 else z.float()) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
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
    found = counted(fused_topk)(hidden, weight, k, backend=backend, **options)
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
    exact = weight.double().T.log_softmax(1)
    torch.testing.assert_close(found.logprob.double(), exact, rtol=1e-6, atol=0)  # -2.1e-9 first
    bad = fused_topk(torch.tensor([[float("nan")], [1.0]]), weight[:3], 2).logprob
    assert bad[0].isnan().all()
    assert bad[1].isfinite().all()


def test_shapes_and_no_tokens():
    hidden, weight, _ = inputs()
    whole = fused_topk(hidden, weight, K)
    cubic = fused_topk(hidden[:6].view(2, 3, H), weight, K)
    torch.testing.assert_close(cubic.logprob.view(6, K), whole.logprob[:6], **EXACT)
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


def test_memory_is_the_budgets():
    hidden, weight, _ = inputs()
    with torch.no_grad():
        small = fused_topk(hidden, weight, K, memory_budget=5 * 2**20)
        torch.testing.assert_close(small, fused_topk(hidden, weight, K))
        with pytest.raises(ValueError, match="memory_budget must be at least"):
            fused_topk(hidden, weight, K, memory_budget=1000)


@pytest.mark.parametrize(
    ("k", "error", "words"),
    [(0, ValueError, r"k must be in \[1, V\] with V=131"), (V + 1, ValueError, "got 132"),
     (2.0, TypeError, "k must be an int, got float"), (True, TypeError, "k must be an int")],
)  # fmt: skip
def test_a_wrong_k(k, error, words):
    hidden, weight, _ = inputs()
    with pytest.raises(error, match=words):
        fused_topk(hidden, weight, k)


# ---- over ranks ---------------------------------------------------------------------------------


def shards(name, dtype, rank, backend="torch", tokens_sharded=False):
    hidden, weight, options = inputs(OPTIONS[name], dtype)
    sizes = UNEQUAL[dist.get_world_size()]
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    mine = slice(None)
    if tokens_sharded:
        mine = slice(rank * 2, rank * 2 + 2) if rank else slice(0, 2)
    local, part = (x[s].detach().requires_grad_() for x, s in ((hidden, mine), (weight, rows)))
    if options["bias"] is not None:
        options["bias"] = options["bias"][rows].detach()
    found = fused_topk(
        local, part, K, backend=backend, process_group=dist.group.WORLD,
        tokens_sharded=tokens_sharded, **options,
    )  # fmt: skip
    with torch.no_grad():
        alone = fused_topk(
            local, part, K, process_group=dist.group.WORLD, tokens_sharded=tokens_sharded, **options
        )
    assert torch.equal(alone.index, found.index)
    torch.testing.assert_close(alone.logprob, found.logprob.detach())
    found.logprob.sum().backward()
    return alone.logprob, found.index, local.grad, part.grad


def wrong(rank):
    hidden, weight, _ = inputs()
    part = weight[: UNEQUAL[dist.get_world_size()][rank]].detach()
    call = functools.partial(fused_topk, hidden.detach(), part, process_group=dist.group.WORLD)
    return [
        ranks.anywhere(ranks.error_of(call, k)) for k in (V + 1, "2"[: 1 - rank] or 2, 2 + rank)
    ]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sharded_vocabulary(world):
    cases = {
        (name, dtype): functools.partial(shards, name, dtype)
        for name in OPTIONS for dtype in (torch.float32, torch.bfloat16)
    } | {
        ("plain", "triton"): functools.partial(shards, "plain", torch.float32, backend="triton"),
        ("plain", "tokens"): functools.partial(
            shards, "plain", torch.float32, tokens_sharded=True
        ),
        ("wrong", None): wrong,
    }  # fmt: skip
    results = ranks.run({str(name): case for name, case in cases.items()}, world)
    for name, dtype in list(cases)[:-1]:
        got = ranks.of(results, str((name, dtype)))
        precise = dtype if isinstance(dtype, torch.dtype) else torch.float32
        hidden, weight, options = inputs(OPTIONS[name], precise)
        whole = fused_topk(hidden, weight, K, **options)
        if dtype == "tokens":
            index = torch.cat([x[1] for x in got])
            assert index.equal(whole.index[: 2 * world][: len(index)])
            continue
        whole.logprob.sum().backward()
        for x in got[1:]:
            torch.testing.assert_close(x[:3], got[0][:3], **EXACT)
        assert got[0][1].equal(whole.index)
        torch.testing.assert_close(got[0][0], whole.logprob.detach())
        # two addends of a gradient in bfloat16, and its own rounding
        eps = torch.finfo(precise).eps
        for x, y in ((got[0][2], hidden.grad), (torch.cat([x[3] for x in got]), weight.grad)):
            assert (x - y).double().norm() <= 16 * eps * y.double().norm()
    first, *others = ranks.of(results, str(("wrong", None)))
    assert all(x == first for x in others)
    assert "k must be in [1, V] with V=131" in first[0]
    assert "k must be an int, got str" in first[1]
    assert "k" in first[2]
    assert "must be the same on all ranks" in first[2] or "differ" in first[2]


def test_logprobs_of_the_classes_found_are_the_same():
    hidden, weight, _ = inputs()
    found = fused_topk(hidden, weight, K)
    torch.testing.assert_close(
        found.logprob, fused_logprobs(hidden, weight, found.index).logprob, **EXACT
    )


def test_a_temperature_has_the_shape_of_the_tokens():
    hidden, weight, _ = inputs()
    t = torch.linspace(0.5, 2, 6)
    flat = fused_topk(hidden[:6], weight, K, temperature=t)
    found = fused_topk(hidden[:6].view(2, 3, H), weight, K, temperature=t.view(2, 3))
    assert torch.equal(found.logprob.flatten(0, 1), flat.logprob)
