"""Every `memory_budget` gives the loss and gradients of the reference, and is not exceeded."""

import dataclasses
import inspect
import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.peaks import peak_extra_bytes
from support.bounds import EXACT, SAME_SUMS
from support.memory import H, N, V  # of the measuring process
from support.oracle import by_token, summed
from support.params import slow
from torch._dynamo.testing import CompileCounter

import fusedce
from fusedce import fused_ce, fused_cross_entropy, fused_kl_tokens, fused_logprobs
from fusedce.backends import plan
from fusedce.backends.torch import stats_and_grads, sum_grads
from fusedce.backends.triton import sum_grads as triton_sum_grads
from fusedce.backends.triton import vocab_tiles
from fusedce.loss.cross_entropy import FusedLinearCrossEntropyLoss
from fusedce.testing import OPTIONS, Case, cases, check

BACKENDS = ["torch", "triton"]
SMALL_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EVERY = (*OPTIONS, "class_weight")


@pytest.fixture
def taken(monkeypatch):
    """Names of the ways that were taken; no memory of libraries is counted."""
    names = []

    def watched(*args, **kwargs):
        names.append(plan.choose_plan(*args, **kwargs).name)
        return plan.choose_plan(*args, **kwargs)

    monkeypatch.setattr(plan, "SCRATCH_CPU", 0)
    for module in (sum_grads, triton_sum_grads):
        monkeypatch.setattr(module, "choose_plan", watched)
    return names


def tiles_alone(monkeypatch, R, T):
    """Make both backends take tiles of ``T`` classes for blocks of ``R`` tokens."""

    def way(call, **asked):
        return plan.by_tiles(call, R, T)

    monkeypatch.setattr(sum_grads, "choose_plan", way)
    monkeypatch.setattr(
        triton_sum_grads, "choose_plan", lambda call, **_: plan.tiled_chunks(call, R, T)
    )
    for module in (stats_and_grads, vocab_tiles):
        monkeypatch.setattr(module, "plan_tiles", way)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    case=cases(options=EVERY, max_vocabulary=2000, max_tokens=150),
    more=st.floats(0, 6),
    loss=st.sampled_from([summed, by_token]),
)
def test_any_budget_gives_what_the_reference_gives(case, more, loss):
    n = int(torch.Size(case.leading).numel())
    call = plan.Sizes(n, n, case.V, case.H, case.dtype.itemsize, 8, on_cpu=True, triton=False)
    # Without gradients, tiles are the only way.
    least = 2 * max(plan.least_bytes(call), plan.by_tiles(call, 64, 64).bytes)
    least += 4 * case.V * case.H
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SCRATCH_CPU", 0)
        check(partial(loss, backend="torch", memory_budget=int(least * 2**more)), case)


@settings(max_examples=60, deadline=None)
@given(case=cases(options=EVERY), R=st.sampled_from([7, 64, 128]), T=st.integers(5, 300))
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


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_factors_of_float16_reach_every_gradient(monkeypatch, frozen, tiles):
    """Rows wait for powers of two there: token weights of 1e-3 to 1e3, and a subnormal one."""
    if tiles:
        tiles_alone(monkeypatch, 16, 100)
    hidden, weight, labels, _ = Case((40,), 20, 230, torch.float16).tensors()
    w = 10.0 ** torch.linspace(-3, 3, 40)
    w[7] = 1e-39

    def gradient(dtype, **options):
        leaves = {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}
        wanted = leaves["weight" if frozen == "hidden" else "hidden"].requires_grad_()
        loss = fused_ce(**leaves, labels=labels, token_weight=w, **options).loss_sum
        return torch.autograd.grad(loss / 1e3, wanted)[0].double()

    exact = gradient(torch.float64)
    error = (gradient(torch.float16, backend="triton") - exact).norm()
    # two roundings of an entry: as it waits, and of the result
    assert error <= 2 * torch.finfo(torch.float16).eps * exact.norm()


def test_less_memory_takes_other_ways(taken):
    hidden, weight, labels, _ = Case((300,), 24, 3000, torch.bfloat16).tensors()
    hidden.requires_grad_(), weight.requires_grad_()
    for budget in (10**8, 2 * 10**6, 3 * 10**5):
        fused_ce(hidden, weight, labels, memory_budget=budget)
    assert taken == [plan.ONE_CHUNK, plan.CHUNKS, plan.TILES]
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


LEAST = {
    "sum": lambda *x, **o: fused_ce(*x, **o)[0],
    "none": lambda *x, **o: fused_cross_entropy(*x, reduction="none", **o),
    "logprobs": lambda *x, **o: fused_logprobs(*x, **o).logprob,
    "several": lambda h, w, y, **o: fused_logprobs(h, w, y[:, None].expand(-1, 7), **o).logprob,
    "monitored": lambda *x, **o: fused_ce(*x, monitor=("entropy",), **o)[0],
    "capped": lambda *x, **o: fused_ce(*x, softcap=5.0, label_smoothing=0.1, **o)[0],
    "a bias alone": lambda h, w, y, **o: fused_ce(
        h.detach(), w.detach(), y, bias=w[:, 0], label_smoothing=0.1, **o
    )[0],
    "teacher": lambda h, w, y, **o: fused_kl_tokens(h, w, h.detach() + 1, w.detach(), y, **o),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "torch") for name in LEAST), slow("none", "triton"), slow("capped", "triton"),
     slow("several", "triton"), ("a bias alone", "triton"), ("teacher", "triton")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_least_budget_of_an_error_has_room_for_both_passes(monkeypatch, name, backend, dtype):
    """Backward holds more, and Triton gathers the tokens where some have a gradient of 0."""
    monkeypatch.setattr(plan, "SCRATCH_CPU", 0)
    hidden, weight, labels, _ = Case((20,), 96, 100, dtype).tensors()
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def loss(budget):
        return LEAST[name](*leaves, labels, memory_budget=budget, backend=backend)

    least = least_budget(loss)
    with torch.no_grad():
        loss(least_budget(loss))  # which may be less
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        loss(least - 1)
    for ignored in (0, 12):
        labels[:ignored] = -100
        of_tokens = loss(least).dim()
        for rows in (..., slice(5, None)) if of_tokens else (...,):  # some losses may be unused
            found, exact = (
                torch.autograd.grad(x[rows].sum(), leaves, allow_unused=True)
                for x in (loss(least), loss(None))
            )
            for x, y in zip(found, exact, strict=True):
                if name == "a bias alone" and x is None:
                    continue
                roundings = 8 if dtype == torch.float32 else 1
                assert (x - y).norm() <= roundings * torch.finfo(dtype).eps * y.norm()


def shifted(weight):
    """The same weight, which does not begin at a multiple of 16 bytes."""
    return torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view_as(weight)


LAYOUTS = {
    "columns in memory": lambda weight: weight.t().contiguous().t(),
    "rows not aligned": shifted,
    "rows of no whole steps": lambda weight: weight[:, :-8].contiguous(),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_a_weight_that_the_kernels_cannot_read_are_in_the_budget(layout, train):
    hidden, weight, labels, _ = Case((40,), 64, 3000, torch.bfloat16).tensors()

    def least(weight):
        weight = weight.requires_grad_(train)
        return least_budget(lambda budget: fused_ce(
            hidden[:, : weight.shape[1]].contiguous(), weight, labels, backend="triton",
            memory_budget=budget,
        ))  # fmt: skip

    of_copy = weight.numel() * weight.element_size()
    assert least(weight) < of_copy
    assert least(LAYOUTS[layout](weight.detach())) >= of_copy


def test_a_frozen_weight_has_more_room(taken):
    """A frozen weight needs no gradient and no accumulator. Exponentials are in float32 here."""
    hidden, weight, labels, _ = Case((300,), 24, 3000, torch.bfloat16).tensors()
    for frozen in (True, False):
        weight.requires_grad_(not frozen)
        fused_ce(hidden.requires_grad_(), weight, labels, memory_budget=1_000_000)
    assert taken == [plan.CHUNKS, plan.TILES]


def test_the_environment_says_the_default(taken, monkeypatch):
    hidden, weight, labels, _ = Case((300,), 24, 3000).tensors()
    hidden.requires_grad_()
    monkeypatch.setenv("FUSEDCE_MEMORY_BUDGET", str(3 * 10**5))
    fused_ce(hidden, weight, labels)
    fused_ce(hidden, weight, labels, memory_budget=10**8)
    fused_ce(hidden, weight, labels, chunk_tokens=100)
    FusedLinearCrossEntropyLoss()(weight, hidden, labels)
    FusedLinearCrossEntropyLoss(memory_budget=10**8)(weight, hidden, labels)
    assert taken == [plan.TILES, plan.ONE_CHUNK, plan.CHUNKS, plan.TILES, plan.ONE_CHUNK]
    monkeypatch.setenv("FUSEDCE_MEMORY_BUDGET", "64 MiB")
    with pytest.raises(ValueError, match=r"must be a whole number of bytes .* got '64 MiB'"):
        fused_ce(hidden, weight, labels)


@pytest.mark.parametrize(
    ("backend", "dtype", "budget"),
    [
        *itertools.product(["torch"], [torch.float32, torch.bfloat16], [None, 4 * 10**5, 10**6]),
        slow("triton", torch.bfloat16, None),
        slow("triton", torch.float32, 6 * 10**5),
        slow("triton", torch.bfloat16, 2 * 10**6),
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
    assert plan.TILES in taken


PEAKS = [  # what a process does, and the budget in MiB
    *(slow("step", {"grad": True}, budget) for budget in (6, 24)),
    ("compared", {"divergence": "forward"}, 16),
    *(slow("compared", {"divergence": kind}, 16) for kind in ("reverse", "jsd")),
    slow("compared", {"divergence": "forward"}, 40),
    *(slow("several_classes", {"K": K}, 14) for K in (4, 64)),
    slow("sharded_tokens", {}, 10),
]


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@pytest.mark.parametrize(("name", "options", "budget"), PEAKS)
def test_the_peak_of_a_process_is_within_the_budget(dtype, name, options, budget):
    """The logits of one head would be 64 MiB."""
    options = {"dtype": dtype, "memory_budget": budget << 20} | options
    peak = peak_extra_bytes(f"support.memory:{name}", options)
    assert peak - getattr(torch, dtype).itemsize * (N + V) * H <= budget << 20


def test_every_function_that_takes_chunks_takes_a_budget():
    public = [getattr(fusedce, x) for x in fusedce.__all__] + list(vars(fusedce.sharded).values())
    for function in filter(inspect.isfunction, public):
        parameters = inspect.signature(function).parameters
        if "chunk_tokens" in parameters:
            assert parameters["memory_budget"].default is None, function


def test_a_small_call_needs_no_more_than_its_size():
    """Libraries pack copies of operands, which are small here; the message has no 0.0 MiB."""
    hidden = torch.randn(64, 32, requires_grad=True)
    weight, labels = torch.randn(500, 32, requires_grad=True), torch.randint(500, (64,))
    right = fused_ce(hidden, weight, labels)
    small = fused_ce(hidden, weight, labels, memory_budget=2**20, backend="torch")
    torch.testing.assert_close(small.loss_sum, right.loss_sum, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"at least \d{4,6} bytes for 64 tokens") as error:
        fused_ce(hidden, weight, labels, memory_budget=1, backend="torch")
    assert " 0.0 " not in str(error.value)
    assert "KiB" in str(error.value)
