"""What only a device has: streams, graphs, capture, memory, and its own order of sums."""

import functools
import warnings

import pytest
import torch
from support.device import current, exponentials_by
from support.loops import check_correction
from torch.utils.checkpoint import checkpoint

import fusedce
from fusedce.testing import Case

pytestmark = pytest.mark.gpu
BOTH_WAYS = pytest.mark.parametrize("one_gemm", [True, False], ids=["one GEMM", "tiles"])


def inputs(N=2048, H=2048, V=32000, dtype=torch.bfloat16, ignored=0.25):
    """Hidden states of ignored rows are numbers: those of a graph may count later."""
    hidden, weight, labels, _ = Case((N,), H, V, dtype, logits="peaked", ignored=ignored).tensors(
        current()
    )
    return hidden.nan_to_num(), weight, labels


def step(hidden, weight, labels, **options):
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    loss = fusedce.fused_ce(*leaves, labels, **options).loss_sum
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def bare_error(hidden, weight, labels):
    """Relative errors of d_hidden and d_weight as bare products make them from exact coefficients.

    In the inputs' dtype, with float32 sums: what no kernel around these products can better.
    """
    h, w = hidden.double(), weight.double()
    valid = labels != -100
    g = (h @ w.T).softmax(-1)
    g[valid, labels[valid]] -= 1
    g[~valid] = 0
    rounded = g.to(hidden.dtype)
    pairs = (rounded @ weight, g @ w), (rounded.T @ hidden, g.T @ h)
    return [float((x.double() - y).norm() / y.norm()) for x, y in pairs]


def gap(x, y):
    return float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30))


def same(first, second):
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


@BOTH_WAYS
def test_a_hundred_runs_have_the_same_bits(one_gemm):
    x = inputs()
    with exponentials_by(one_gemm):
        first = step(*x)
        with torch.no_grad():
            alone = fusedce.fused_ce(*x).loss_sum
        for _ in range(99):
            assert same(first, step(*x))
            with torch.no_grad():
                assert fusedce.fused_ce(*x).loss_sum.equal(alone)


def test_a_token_has_the_same_bits_in_every_batch():
    hidden, weight, labels = inputs(N=700)
    whole = fusedce.fused_cross_entropy(hidden, weight, labels, reduction="none")
    for begin, end in ((0, 1), (3, 130), (129, 257), (500, 700)):
        part = fusedce.fused_cross_entropy(
            hidden[begin:end], weight, labels[begin:end], reduction="none"
        )
        assert part.equal(whole[begin:end])


@BOTH_WAYS
def test_a_graph_replays_with_other_inputs(one_gemm):
    """Up to a few times what bare products err: a graph's products have the ignored rows as well.

    cuBLAS may add those in another order.
    """
    static = inputs()
    with exponentials_by(one_gemm):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(*static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(*static)
        for share in (0.0, 0.2, 0.9, 1.0):
            hidden, weight, labels = inputs(ignored=share)
            for target, value in zip(static, (hidden.flip(0), weight, labels.flip(0)), strict=True):
                target.copy_(value)
            graph.replay()
            first = [x.clone() for x in captured]
            graph.replay()
            assert same(first, captured)
            loss, *grads = step(*static)
            torch.testing.assert_close(first[0], loss, rtol=1e-6, atol=0)
            for x, y, error in zip(first[1:], grads, bare_error(*static), strict=True):
                assert gap(x, y) <= 2 * error if error == error else not y.any()


def test_evaluation_in_a_graph():
    hidden, weight, labels = inputs()
    with torch.no_grad():
        fusedce.fused_ce(hidden, weight, labels)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fusedce.fused_ce(hidden, weight, labels)
        for share in (0.9, 0.0, 1.0):
            labels.copy_(inputs(ignored=share)[2])
            graph.replay()
            again = fusedce.fused_ce(hidden, weight, labels)
            torch.testing.assert_close(tuple(captured), tuple(again), rtol=0, atol=0)


@BOTH_WAYS
def test_another_stream_gives_the_same_bits_beside_other_work(one_gemm):
    x = inputs()
    with exponentials_by(one_gemm):
        first = step(*x)
        torch.cuda.synchronize()
        side, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device=current())
        for _ in range(10):
            for _ in range(8):
                busy = torch.tanh(busy @ busy)
            with torch.cuda.stream(side):
                found = step(*x)
            torch.cuda.synchronize()
            assert same(first, found)


@pytest.mark.parametrize(("trains", "N"), [(False, 2048), (True, 2048), (True, 1000)])
def test_the_host_waits_once_in_training_of_many_tokens_and_never_else(trains, N):
    x = inputs(N=N)
    with torch.set_grad_enabled(trains):
        call = functools.partial(step if trains else fusedce.fused_ce, *x)
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in seen if "called a synchronizing" in str(w.message)]
    assert len(waits) == (trains and N > 1024)


@pytest.mark.parametrize("budget", [None, 64, 256, 900])
@pytest.mark.parametrize(("N", "H", "V"), [(8192, 4096, 128256), (8192, 2304, 256000)])
def test_memory_keeps_to_the_plan_and_to_a_budget(N, H, V, budget):
    from fusedce.backends.plan import choose_plan
    from fusedce.backends.triton import archs
    from fusedce.tools.plan import Device, call

    shapes = (N, H), (V, H)
    x = [torch.randn(*shape, dtype=torch.bfloat16, device=current()) for shape in shapes]
    x.append(torch.randint(V, (N,), device=current()))
    options = {} if budget is None else {"memory_budget": budget * 2**20}
    step(*x, **options)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = step(*x, **options)
    peak = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in kept)
    walks = archs.architecture(current()).walks(2)
    memory = torch.cuda.get_device_properties(current()).total_memory
    here = Device(memory, walks.gemm.BLOCK_V, walks.gemm_up_to)
    if budget is not None:
        assert peak <= options["memory_budget"] + 2**20  # (the allocator rounds up)
        return
    planned = choose_plan(call(N, H, V, 2, here)).bytes
    assert peak <= 1.05 * planned + 16 * 2**20
    assert peak <= N * V * 2 / 4 + N * H * 4 + 64 * 2**20
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fusedce.fused_ce(*x)
    assert torch.cuda.max_memory_allocated() - before <= 16 * 2**20


@pytest.mark.parametrize("draw", ["flat", "peaked", "Zipf", "shared mean"])
def test_few_chunks_err_no_more_than_eager(draw):
    """Of d_weight in bfloat16, in units of rounding the exact gradient once: at most 1.5."""
    N, H, V = 2048, 512, 16000
    rng = torch.Generator(current()).manual_seed(0)
    random = functools.partial(torch.randn, generator=rng, device=current())
    weight, hidden = random(V, H) / H**0.5, random(N, H)
    labels = torch.randint(V, (N,), generator=rng, device=current())
    if draw == "Zipf":
        share = 1 / torch.arange(1, V + 1, device=current()).float()
        labels = torch.multinomial(share, N, replacement=True, generator=rng)
    if draw in ("peaked", "Zipf"):
        hidden += 15 * weight[labels] / weight[labels].square().sum(-1, keepdim=True)
    elif draw == "shared mean":
        hidden += 2 * random(H)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    wide = step(hidden.double(), weight.double(), labels, backend="torch")[2] / N
    once = (wide.bfloat16().double() - wide).norm()

    def error(grad):
        return float((grad.double() - wide).norm() / once)

    leaf = weight.clone().requires_grad_()
    logits = torch.nn.functional.linear(hidden, leaf).float()
    (eager,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), leaf)
    for chunks in (1, 2, 4):
        leaf = weight.clone().requires_grad_()
        loss = fusedce.fused_ce(hidden, leaf, labels, chunk_tokens=N // chunks).mean()
        found = error(*torch.autograd.grad(loss, leaf))
        print(f"{draw}: {chunks} chunks {found:.2f}, eager {error(eager):.2f} roundings")
        assert found <= max(1.5 if draw == "shared mean" else 1.1, error(eager))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_code(mode):
    hidden, weight, labels = inputs(300, 256, 5003)
    want = step(hidden, weight, labels)
    n = (labels != -100).sum()
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.compiler.reset()

    @torch.compile(mode=mode, fullgraph=True)
    def loss(h, w, y):
        return fusedce.fused_ce(h * 1.0, w, y).mean()

    for _ in range(3):
        for x in leaves:
            x.grad = None
        torch.compiler.cudagraph_mark_step_begin()
        value = loss(*leaves, labels)
        value.backward()
        torch.testing.assert_close(value * n, want[0], rtol=1e-5, atol=0)
        for x, y in zip(leaves, want[1:], strict=True):
            assert gap(x.grad * n, y) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    hidden, weight, labels = inputs(300, 256, 5003)
    leaf = hidden.clone().requires_grad_()
    checkpoint(
        lambda h: fusedce.fused_ce(h, weight, labels).loss_sum, leaf, use_reentrant=reentrant
    ).backward()
    assert leaf.grad.equal(step(hidden, weight, labels)[1])


def test_a_second_backward():
    hidden, weight, labels = inputs(300, 256, 5003)
    leaf = hidden.clone().requires_grad_()
    loss = fusedce.fused_ce(leaf, weight, labels).mean()
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0].clone()
    assert torch.autograd.grad(loss, leaf)[0].equal(first)


def test_autocast():
    hidden, weight, labels = inputs(300, 256, 5003, torch.float32)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        fusedce.fused_ce(*leaves, labels).loss_sum.backward()
    want = step(hidden.bfloat16(), weight.bfloat16(), labels)
    for x, y in zip(leaves, want[1:], strict=True):
        assert x.grad.dtype == torch.float32
        assert gap(x.grad, y) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_correction_of_streamed_gradients_is_not_rounded(dtype):
    check_correction(dtype, current())
