"""Every `memory_budget` gives the loss and gradients of the reference, and is not exceeded."""

import dataclasses
import itertools
import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import EXACT, SAME_SUMS
from support.memory import H, N, V  # of the measuring process
from support.params import slow
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedce
from fusedce import fused_ce, fused_cross_entropy, fused_logprobs
from fusedce.backends import held, plan
from fusedce.backends.torch import products, stats_and_grads, training
from fusedce.backends.triton import training as triton_training
from fusedce.backends.triton import vocab_tiles
from fusedce.loss.names_of_peers import FusedLinearCrossEntropyLoss
from fusedce.measure import peak_extra_bytes
from fusedce.testing import OPTIONS, Case, cases, check

BACKENDS = ["torch", "triton"]
SMALL_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EVERY = (*OPTIONS, "class_weight")


def summed(hidden, weight, labels, reduction="sum", **options):
    n_valid = (labels != options.get("ignore_index", -100)).sum()
    loss = fused_cross_entropy(hidden, weight, labels, reduction=reduction, **options)
    return loss.sum(), n_valid


by_token = partial(summed, reduction="none")


@pytest.fixture
def taken(monkeypatch):
    """Names of the ways that were taken; no memory of libraries is counted."""
    names = []

    def watched(*args, **kwargs):
        names.append(plan.way_of(*args, **kwargs).name)
        return plan.way_of(*args, **kwargs)

    monkeypatch.setattr(held, "SCRATCH_CPU", 0)
    for module in (training, triton_training):
        monkeypatch.setattr(module, "way_of", watched)
    return names


def tiles_alone(monkeypatch, R, T):
    """Make both backends take tiles of ``T`` classes for blocks of ``R`` tokens."""

    def way(call, **asked):
        return held.by_tiles(call, R, T)

    for module in (training, triton_training):
        monkeypatch.setattr(module, "way_of", way)
    for module in (stats_and_grads, vocab_tiles):
        monkeypatch.setattr(module, "tiles_of", way)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    case=cases(options=EVERY, max_vocabulary=2000, max_tokens=150),
    more=st.floats(0, 6),
    loss=st.sampled_from([summed, by_token]),
)
def test_any_budget_gives_what_the_reference_gives(case, more, loss):
    n = int(torch.Size(case.leading).numel())
    call = held.Call(n, n, case.V, case.H, case.dtype.itemsize, 8, on_cpu=True, triton=False)
    least = 2 * plan.least_bytes(call) + 4 * case.V * case.H
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held, "SCRATCH_CPU", 0)
        check(partial(loss, backend="torch", memory_budget=int(least * 2**more)), case)


@settings(max_examples=60, deadline=None)
@given(
    case=cases(options=EVERY),
    R=st.sampled_from([7, 64, 128]),
    T=st.integers(5, 300),
)
def test_any_tile_torch_matches_the_reference(case, R, T):
    with pytest.MonkeyPatch.context() as patch:
        tiles_alone(patch, R, T)
        for loss in (summed, by_token):
            check(partial(loss, backend="torch"), case)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    case=cases(dtypes=SMALL_FLOATS, options=EVERY, max_tokens=20, max_vocabulary=150),
    R=st.sampled_from([3, 16, 128]),
    T=st.integers(20, 150),
)
def test_any_tile_triton_matches_the_reference(case, R, T):
    with pytest.MonkeyPatch.context() as patch:
        tiles_alone(patch, R, T)
        for loss in (summed, by_token):
            check(partial(loss, backend="triton"), case)


@pytest.mark.parametrize(
    ("backend", "logits", "dtype"),
    [
        *itertools.product(["torch"], ["flat", "peaked"], [torch.float32, torch.bfloat16]),
        ("triton", "flat", torch.float32),
        ("triton", "flat", torch.bfloat16),
        slow("triton", "peaked", torch.float32),
        slow("triton", "peaked", torch.bfloat16),
    ],
)
def test_tiles_on_both_backends(monkeypatch, backend, logits, dtype):
    """Several blocks and tiles, none of which divides the sizes; every option at once."""
    case = Case(
        (50,), 20, 230, dtype, logits=logits, ignored=0.2, with_bias=True, class_weight=True,
        token_weight=True, options={"label_smoothing": 0.1, "z_loss": 0.1, "logit_scale": -0.7},
    )  # fmt: skip
    tiles_alone(monkeypatch, 16, 100)
    check(partial(summed, backend=backend), case)
    capped = dataclasses.replace(case, options={"softcap": 5.0}, class_weight=False)
    check(partial(by_token, backend=backend), capped)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_factors_of_float16_reach_every_gradient(monkeypatch, frozen):
    """Rows wait for powers of two there: token weights of 1e-3 to 1e3."""
    tiles_alone(monkeypatch, 16, 100)
    hidden, weight, labels, _ = Case((40,), 20, 230, torch.float16).tensors()
    w = 10.0 ** torch.linspace(-3, 3, 40)

    def gradient(dtype, **options):
        leaves = {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}
        wanted = leaves["weight" if frozen == "hidden" else "hidden"].requires_grad_()
        loss = fused_ce(**leaves, labels=labels, token_weight=w, **options).loss_sum
        return torch.autograd.grad(loss / 1e3, wanted)[0].double()

    exact = gradient(torch.float64)
    error = (gradient(torch.float16, backend="triton") - exact).norm()
    # two roundings of an entry: as it waits, and of the result
    assert error <= 2 * torch.finfo(torch.float16).eps * exact.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sure_and_wrong_token_errs_as_eagers(monkeypatch, backend):
    tiles_alone(monkeypatch, 64, 100)
    rng = torch.Generator().manual_seed(0)
    hidden = (40 * torch.randn(60, 32, generator=rng)).to(torch.bfloat16).requires_grad_()
    weight = (torch.randn(300, 32, generator=rng) / 8).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(300, (60,), generator=rng)
    inputs = (hidden, weight)
    got = torch.autograd.grad(fused_cross_entropy(*inputs, labels, backend=backend), inputs)
    eager = F.cross_entropy(F.linear(*inputs).float(), labels)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(fused_cross_entropy(*wide, labels), wide)
    for x, y, e in zip(got, torch.autograd.grad(eager, inputs), exact, strict=True):
        assert (x.double() - e).norm() <= 1.05 * (y.double() - e).norm()  # 5%: as two draws differ


def test_less_memory_takes_other_ways(taken):
    hidden, weight, labels, _ = Case((300,), 24, 3000, torch.bfloat16).tensors()
    hidden.requires_grad_(), weight.requires_grad_()
    for budget in (10**8, 2 * 10**6, 3 * 10**5):
        fused_ce(hidden, weight, labels, memory_budget=budget)
    assert taken == list(held.WAYS)
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes for 300 tok"):
        fused_ce(hidden, weight, labels, memory_budget=10**4)


@pytest.mark.parametrize("function", [fused_cross_entropy, fused_logprobs])
@pytest.mark.parametrize("backend", BACKENDS)
def test_too_small_is_an_error_without_a_gradient_too(function, backend):
    hidden, weight, labels, _ = Case((30,), 16, 100).tensors()
    with pytest.raises(ValueError, match="memory_budget must be at least"):
        function(hidden, weight, labels, memory_budget=1000, backend=backend)


def least_budget(loss):
    """The least budget that the error of ``loss(1)`` names."""
    with pytest.raises(ValueError, match="memory_budget must be at least") as raised:
        loss(1)
    return int(str(raised.value).split("at least ")[1].split()[0])


BY_TOKENS = {
    "none": lambda *given, **options: fused_cross_entropy(*given, reduction="none", **options),
    "logprobs": lambda *given, **options: fused_logprobs(*given, **options).logprob,
    "monitored": lambda *given, **options: fused_ce(*given, monitor=("entropy",), **options)[0],
    "capped": lambda *given, **options: fused_ce(
        *given, softcap=5.0, label_smoothing=0.1, **options
    )[0],
}


@pytest.mark.parametrize("name", BY_TOKENS)
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_that_forward_accepts_suffices_for_backward(name, backend, dtype):
    """Backward holds more, and Triton gathers the tokens where some have a gradient of 0."""
    hidden, weight, labels, _ = Case((20,), 96, 100, dtype).tensors()
    hidden.requires_grad_(), weight.requires_grad_()

    def loss(budget):
        return BY_TOKENS[name](hidden, weight, labels, memory_budget=budget, backend=backend)

    least = least_budget(loss)
    with torch.no_grad():
        without_graph = least_budget(loss)
        loss(without_graph)
    assert (without_graph < least) == (backend == "triton" or dtype == torch.bfloat16)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        loss(least - 1)
    for ignored in (0, 12):
        labels[:ignored] = -100
        out = loss(least)
        out.sum().backward()
        if out.dim():
            loss(least)[5:].sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_budget_suffices_for_the_gradient_of_the_bias_alone(backend):
    hidden, weight, labels, _ = Case((40,), 32, 64).tensors()
    labels[:20] = -100
    bias = torch.zeros(64, requires_grad=True)

    def loss(budget):
        return fused_ce(hidden, weight, labels, bias=bias, label_smoothing=0.1,
                        memory_budget=budget, backend=backend).loss_sum  # fmt: skip

    loss(least_budget(loss)).backward()


def test_a_frozen_weight_has_more_room(taken, monkeypatch):
    """A frozen weight needs no gradient and no accumulator. Exponentials are in float32 here."""
    monkeypatch.setattr(products, "bf16_gemm", lambda: None)
    hidden, weight, labels, _ = Case((300,), 24, 3000, torch.bfloat16).tensors()
    for frozen in (True, False):
        weight.requires_grad_(not frozen)
        fused_ce(hidden.requires_grad_(), weight, labels, memory_budget=1_000_000)
    assert taken == [held.CHUNKS, held.TILES]


def test_the_environment_says_the_default(taken, monkeypatch):
    hidden, weight, labels, _ = Case((300,), 24, 3000).tensors()
    hidden.requires_grad_()
    monkeypatch.setenv("FUSEDCE_MEMORY_BUDGET", str(3 * 10**5))
    fused_ce(hidden, weight, labels)
    fused_ce(hidden, weight, labels, memory_budget=10**8)
    fused_ce(hidden, weight, labels, chunk_tokens=100)
    FusedLinearCrossEntropyLoss()(weight, hidden, labels)
    FusedLinearCrossEntropyLoss(memory_budget=10**8)(weight, hidden, labels)
    assert taken == [held.TILES, held.ONE_CHUNK, held.CHUNKS, held.TILES, held.ONE_CHUNK]
    monkeypatch.setenv("FUSEDCE_MEMORY_BUDGET", "64 MiB")
    with pytest.raises(ValueError, match=r"must be a whole number of bytes .* got '64 MiB'"):
        fused_ce(hidden, weight, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("backend", "budget"),
    [
        *(("torch", budget) for budget in (None, 4 * 10**5, 10**6)),
        *(slow("triton", budget) for budget in (None, 6 * 10**5, 2 * 10**6)),
    ],
)
def test_a_token_has_the_same_bits_in_every_batch(taken, backend, dtype, budget):
    """Losses, and the gradient of its hidden state.

    Triton's product for the hidden states is a library's, which may sum a row otherwise in another
    batch (of one token alone, a vector, the labels' logits too): rounding, and no more.
    """
    N, V = (300, 3000) if backend == "torch" else (200, 700)
    hidden, weight, labels, _ = Case((N,), 24, V, dtype).tensors()

    def found(rows):
        h = hidden[rows].clone().requires_grad_()
        w = weight.clone().requires_grad_()
        loss = fused_cross_entropy(
            h, w, labels[rows], reduction="none", memory_budget=budget, backend=backend
        )
        return loss.detach(), *torch.autograd.grad(loss.sum(), h)

    whole = found(slice(0, N))
    eps = max(torch.finfo(dtype).eps, SAME_SUMS)
    rounded = {"rtol": eps, "atol": eps * float(whole[1].abs().max())}
    batches = [slice(0, 70), slice(37, N), torch.tensor([4, 17, 18, 19, 130, N - 10])]
    for rows in [*batches, *([slice(5, 6)] if backend == "torch" else [])]:
        (loss, grad), (of_whole, grad_of_whole) = found(rows), (x[rows] for x in whole)
        assert loss.equal(of_whole)
        same = EXACT if backend == "torch" else rounded
        torch.testing.assert_close(grad, grad_of_whole, **same)


@pytest.mark.parametrize("budget", [3 * 10**5, 2 * 10**6])
def test_the_same_budget_gives_the_same_bits_of_a_sum(taken, budget):
    """The bits of one token in two batches computed the same way, and from call to call."""
    hidden, weight, labels, _ = Case((300,), 24, 3000, torch.bfloat16).tensors()

    def gradients(n):
        leaves = [hidden[:n].clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = fused_ce(*leaves, labels[:n], memory_budget=budget).mean(300)
        with_factor = loss * 1.0
        return torch.autograd.grad(with_factor, leaves)

    first, again = gradients(300), gradients(300)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert len(set(taken)) == 1


def test_a_budget_inside_a_compiled_program(taken):
    counter = CompileCounter()

    def loss(hidden, weight, labels):
        return fused_ce(hidden, weight, labels, memory_budget=4 * 10**5).mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    weight = torch.randn(3000, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for n in (300, 411, 57, 1000):
        hidden, _, labels, _ = Case((n,), 24, 3000).tensors()
        hidden.requires_grad_()
        got = torch.autograd.grad(compiled(hidden, weight, labels), (hidden, weight))
        torch.testing.assert_close(
            got, torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))
        )
    assert counter.frame_count <= 3
    assert held.TILES in taken


def test_a_budget_of_fake_tensors():
    with FakeTensorMode():
        hidden = torch.empty(4096, 576, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(49152, 576, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(4096, dtype=torch.int64)
        fused_ce(hidden, weight, labels, memory_budget=2**24).mean().backward()
        losses = fused_cross_entropy(hidden, weight, labels, reduction="none",
                                     memory_budget=2**24)  # fmt: skip
        losses.sum().backward()
        assert weight.grad.shape == weight.shape
        assert losses.shape == labels.shape


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("budget", "way"), [(6, held.TILES), (24, held.CHUNKS)])
def test_the_peak_of_a_process_is_within_the_budget(dtype, budget, way):
    """The peak is below that of all logits, which would be 64 MiB in float32."""
    kind = getattr(torch, dtype)
    call = held.Call(N, N, V, H, kind.itemsize, 4, on_cpu=True, triton=False)
    assert plan.way_of(call, memory_budget=budget << 20).name == way
    peak = peak_extra_bytes(
        "support.memory:step", {"dtype": dtype, "grad": True, "memory_budget": budget << 20}
    )
    assert peak - kind.itemsize * (N + V) * H <= budget << 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("K", [4, 64])
def test_the_peak_with_several_classes_is_within_the_budget(dtype, K):
    """All rows of the head that are asked for would be 16 MiB of float32 with 64 classes."""
    size = getattr(torch, dtype).itemsize
    budget = (10 << 20) + size * V * H
    peak = peak_extra_bytes(
        "support.memory:several_classes", {"dtype": dtype, "K": K, "memory_budget": budget}
    )
    assert peak - size * (N + V) * H <= budget


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_token_by_token_on_a_sharded_vocabulary_is_within_the_budget(dtype):
    """The largest tiles, without a budget, hold more than 10 MiB of the 64 that all logits are."""
    size, budget = getattr(torch, dtype).itemsize, 10 << 20
    peaks = [
        peak_extra_bytes("support.memory:sharded_tokens", {"dtype": dtype, "memory_budget": given})
        - size * (N + V) * H
        for given in (budget, None)
    ]
    assert peaks[0] <= budget < peaks[1]


def test_too_small_for_several_classes_says_the_whole():
    hidden, weight, _, _ = Case((300,), 24, 3000).tensors()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    needed = []
    for K in (5, 205):
        labels = torch.zeros(300, K, dtype=torch.int64)
        with pytest.raises(ValueError, match="memory_budget must be at least") as raised:
            fused_logprobs(*leaves, labels, memory_budget=10**6)
        least = int(str(raised.value).split("at least ")[1].split()[0])
        fused_logprobs(*leaves, labels, memory_budget=least).logprob.sum().backward()
        with pytest.raises(ValueError, match=f"at least {least} bytes"):
            fused_logprobs(*leaves, labels, memory_budget=least - 1)
        needed.append(least)
    assert needed[1] - needed[0] == 300 * 200 * (3 * 8 + 2 * 4)  # three int64, two float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_classes_have_the_same_gradients_under_a_budget(dtype):
    """Tiles have some hundred classes, and many tokens share some of them."""
    rng = torch.Generator().manual_seed(0)
    hidden, weight, _, _ = Case((400,), 200, 3000, dtype).tensors()
    labels = torch.randint(3000, (400, 7), generator=rng)
    labels[:, 0] = 17
    labels[::3, 4] = -100
    labels[5] = -100
    hidden[5] = math.nan
    upstream = torch.randn(400, 7, generator=rng)

    def gradients(budget, kind=dtype):
        leaves = [hidden.to(kind).requires_grad_(), weight.to(kind).requires_grad_()]
        stats = fused_logprobs(*leaves, labels, memory_budget=budget)
        return torch.autograd.grad((stats.logprob * upstream).sum(), leaves)

    exact = gradients(None, torch.float64)
    for budget in (None, 12 * 2**20):
        for x, e in zip(gradients(budget), exact, strict=True):
            error = (x.double() - e).norm() / e.norm()
            # 8 roundings in float32, one of the result and one of its terms in bfloat16
            roundings = 8 if dtype == torch.float32 else 0.5
            assert error <= roundings * torch.finfo(dtype).eps


def test_every_public_function_takes_a_budget():
    """Every function that chooses a chunk takes one, with the same errors."""
    import inspect

    functions = [getattr(fusedce, name) for name in fusedce.__all__]
    functions += [getattr(fusedce.sharded, name) for name in dir(fusedce.sharded)]
    for function, (name, other) in itertools.product(
        [f for f in functions if callable(f)], [("chunk_tokens", "memory_budget")]
    ):
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:
            continue
        if name in parameters:
            assert parameters[other].default is None, function


@pytest.mark.parametrize(
    ("given", "backend"), [("teacher", "torch"), ("teacher", "triton"), ("probabilities", "torch")]
)
def test_the_least_budget_of_token_losses_has_room_for_backward(given, backend, monkeypatch):
    """The least that an error names is enough for both passes, where tokens are left out too."""
    monkeypatch.setattr(held, "SCRATCH_CPU", 0)
    rng = torch.Generator().manual_seed(0)
    n, H, V = 40, 12, 300
    hidden = torch.randn(n, H, generator=rng).bfloat16().requires_grad_()
    weight = torch.randn(V, H, generator=rng).bfloat16().requires_grad_()

    def losses(budget):
        if given == "teacher":
            of_teacher = hidden.detach() + 1, weight.detach()
            return fusedce.fused_kl_tokens(
                hidden, weight, *of_teacher, memory_budget=budget, backend=backend
            )
        return fusedce.fused_cross_entropy(
            hidden, weight, torch.ones(n, V).bfloat16() / V, reduction="none",
            memory_budget=budget, backend=backend,
        )  # fmt: skip

    with pytest.raises(ValueError, match="at least") as caught:
        losses(1)
    least = int(re.search(r"at least (\d+) bytes", str(caught.value))[1])
    for kept in (n, n - 1):
        losses(least)[:kept].sum().backward()
