"""The way that a plan chooses, and the bytes that it counts and that gradients take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedce.backends import plan
from fusedce.backends.gradients import Gradients, input_dtypes
from fusedce.backends.plan import CHUNKS, FEW_CHUNKS, ONE_CHUNK, TILES, MiB, Sizes
from fusedce.backends.shards import sharded_sizes
from fusedce.backends.triton import archs
from fusedce.contract.problem import Outputs, Problem, Shard

LLAMA = Sizes(8192, 8192, 128256, 4096, element=2, logit=2)
SMOLLM = Sizes(4096, 4096, 49152, 576, element=2, logit=4, on_cpu=True, triton=False)


@pytest.mark.parametrize(
    ("N", "H", "V", "tokens", "mib"),
    [(8192, 4096, 128256, 2048, 690), (8192, 2304, 256000, 2048, 1120),
     (16384, 2048, 128256, 4096, 1200), (4096, 4096, 128256, 2048, 625),
     (32768, 4096, 128256, 8192, 2655), (2048, 896, 151936, 2048, 625)],
)  # fmt: skip
def test_a_gpu_holds_a_quarter_of_the_logits_or_those_of_2048_tokens(N, H, V, tokens, mib):
    """Beside them: 32 MiB of products, and the gradient of hidden states in float32."""
    for weight in (True, False):
        call = Sizes(
            N, N, V, H, 2, 2, weight=weight, budget=plan.LARGE_DEVICE_BUDGET, gemm_block=256
        )
        way = plan.choose_plan(call)
        assert way.tokens == tokens
        assert way.bytes <= mib * MiB
        if weight:
            assert way.name == (ONE_CHUNK if N <= 2048 else FEW_CHUNKS)
            assert "d_weight in float32" not in way.held


def test_a_call_of_very_many_tokens_is_summed_in_float32():
    """A quarter of its logits would take more than a usual chunk and that sum."""
    long = LLAMA._replace(n=2**18, N=2**18)
    way = plan.choose_plan(long)
    assert way.name == CHUNKS
    assert way.tokens % 128 == 0
    assert way.tokens * 128256 * 2 <= plan.DEVICE_BUDGET
    assert plan.choose_plan(LLAMA, chunk_tokens=7).tokens == 7


def test_at_most_four_chunks_are_summed_in_the_dtype_of_the_gradient():
    names = {C: plan.choose_plan(LLAMA, chunk_tokens=C).name for C in (8192, 8191, 2048, 2047)}
    assert list(names.values()) == [ONE_CHUNK, FEW_CHUNKS, FEW_CHUNKS, CHUNKS]
    for call in (LLAMA._replace(on_cpu=True), LLAMA._replace(element=4), LLAMA._replace(fp16=True,
                 wide_weight=True)):  # fmt: skip
        assert plan.choose_plan(call, chunk_tokens=2048).name == CHUNKS


def test_a_tile_on_a_gpu_holds_no_more_than_a_chunk():
    """Its float32 products and its gradient, of as many tokens as fit."""
    tile = plan.plan_tiles(LLAMA._replace(n=100_000, N=100_000))
    assert 0.5 < tile.tokens * tile.classes * (4 + 2) / plan.DEVICE_BUDGET <= 1


def test_chunks_of_a_large_head_on_a_cpu_are_worth_adding_to_its_gradient():
    """They may hold a quarter of the float32 gradient; a frozen head has none."""
    large = Sizes(384, 512, 128256, 2048, element=4, logit=4, on_cpu=True, triton=False)
    assert plan.chunk_size(large) == 384
    many = plan.chunk_size(large._replace(n=8192, N=8192))
    assert many * 4 * 128256 <= 4 * 2048 * 128256 / 4
    assert many == 512
    for call in (large._replace(weight=False), SMOLLM):
        assert plan.chunk_size(call) * call.V * call.logit <= plan.CPU_BUDGET


@given(st.integers(1, 9000), st.integers(1, 9000), st.booleans(), st.booleans())
def test_rows_take_bytes_in_proportion_to_their_width_and_dtype(n, H, triton, fp16):
    """Beside tiles, Triton holds 16 float32 numbers of a token, a CPU 12 float64 of a position."""

    def held(H, element):
        call = Sizes(n, n + 7, 5000, H, element, 4, fp16=fp16, triton=triton, on_cpu=not triton)
        chunked, tiled = plan.chunked(call, 64, 1000).held, plan.by_tiles(call, 64, 1000).held
        assert tiled["statistics"] >= (16 * 4 * n if triton else 12 * 8 * (n + 7))
        every = [*chunked.items(), *tiled.items()]
        return [(name, x) for name, x in every if "hidden" in name or "weight" in name]

    assert held(2 * H, 4) == held(H, 8) == [(name, 2 * bytes_) for name, bytes_ in held(H, 4)]


def test_a_teachers_hidden_states_are_held_beside_a_chunk():
    call = Sizes(100, 100, 5000, 64, element=4, logit=4, triton=True)
    given, taught = (
        plan.choose_plan(call),
        plan.choose_plan(call.with_teacher(48, 4)),
    )
    assert "hidden states of the teacher" not in given.held
    assert taught.held["hidden states of the teacher"] == taught.tokens * 48 * 4


@pytest.mark.parametrize(("student", "teacher"), [(4, 4), (4, 2), (2, 4), (2, 2)])
def test_rows_of_a_head_are_widened_where_they_have_two_bytes(student, teacher):
    call = Sizes(100, 100, 5000, 64, student, 4, on_cpu=True, triton=False)
    way = plan.choose_plan(call.with_teacher(48, teacher))
    for name, H, element in (("weight", 64, student), ("the teacher's weight", 48, teacher)):
        found = way.held.get(f"rows of {name}", 0)
        assert found == (way.classes * H * 4 if element == 2 else 0)


@pytest.mark.parametrize("vocabulary", [512, 2048, 8192, 50257, 256000])
def test_a_chunk_and_its_products_are_bounded(vocabulary):
    """On a GPU; with a small vocabulary, tokens must not make up for it."""
    C = plan.chunk_size(LLAMA._replace(n=10**7, N=10**7, V=vocabulary))
    assert C * vocabulary * 2 <= plan.DEVICE_BUDGET
    assert C <= 8192  # a larger chunk makes the products no faster, and rows have buffers
    arch = archs.BY_NAME["sm_90"]
    for H in (64, 1024, 4096, 16384):
        rows, T = arch.tile_shape(C, vocabulary, H, min(vocabulary, arch.exp_block_v))
        assert rows * T * 4 <= (32 if H >= 4096 else 128) * 2**20


def test_gradients_that_are_not_wanted_are_empty_on_the_device_of_the_inputs():
    """Shapes and dtypes are those of the operators' fake implementations."""
    x = torch.empty(3, 4, device="meta")
    problem = Problem(x, torch.empty(7, 4, device="meta"), x[:, 0].long())
    wanted = Outputs(hidden=False, weight=True, bias=False)
    grads = Gradients(problem, wanted, dtypes=input_dtypes(problem), chunks=1).cast_out()
    assert [grad.device.type for grad in grads] == ["meta"] * 3
    assert [tuple(grad.shape) for grad in grads] == [(0,), (7, 4), (0,)]


@pytest.mark.parametrize(("gib", "budget"), [(None, 1), (24, 1), (32, 1), (39.4, 2), (80, 2)])
def test_a_large_device_has_larger_chunks(gib, budget):
    """The larger budget starts at 40 GB; a card sold as 40 GB reports 39.4 GiB."""
    memory = None if gib is None else int(gib * 2**30)
    assert plan.device_budget(memory) == budget * 2**30
    gemma = LLAMA._replace(n=2**16, V=256000, H=2304, budget=plan.device_budget(memory))
    assert plan.chunk_size(gemma) == {1: 2048, 2: 4096}[budget]


@given(st.integers(1, 40_000), st.integers(1, 300_000), st.integers(1, 16384))
def test_rows_of_tiles_are_equal(C, V, H):
    block = min(1 << (V - 1).bit_length(), plan.EXP_BLOCK_V)
    rows, T = archs.BY_NAME["sm_90"].tile_shape(C, V, H, block)
    parts = -(-C // rows)
    assert rows == C or rows % 128 == 0
    assert parts * rows - C < 128 * parts  # no part is smaller than the others by more
    assert rows * T <= plan.tile_products(H)


@given(st.integers(1, 40_000), st.integers(1, 300_000), st.integers(1, 16384))
def test_rows_of_hidden_gradients_fit_their_buffer(C, V, H):
    way = plan.chunked(LLAMA._replace(n=C, N=C, V=V, H=H), C, V)
    (elements,) = way.buffers["tile of products"].shape
    assert archs.BY_NAME["sm_90"].rows_of_hidden(C, H) * H <= elements


def test_less_memory_takes_the_next_way():
    """bf16 at (8192, 4096, 128256): all logits are 2 GiB, the accumulator as much again."""

    def names(call, *mib):
        return [plan.choose_plan(call, memory_budget=x * MiB).name for x in mib]

    limited = LLAMA._replace(wide_hidden=False, budget=plan.LARGE_DEVICE_BUDGET)
    assert names(limited, 3000, 900, 630, 500, 64) == [ONE_CHUNK, *[FEW_CHUNKS] * 2, *[TILES] * 2]
    long = limited._replace(n=2**16, N=2**16)
    assert names(long, 20_000, 6000, 3000, 600) == [ONE_CHUNK, FEW_CHUNKS, CHUNKS, TILES]
    gemma = limited._replace(V=256000, H=2304, gemm_block=256)
    assert names(gemma, 200, 64) == [TILES, TILES]


calls = st.builds(
    lambda n, more, V, H, element, on_cpu, wide, weight: Sizes(
        n, n + more, V, H, element, 4 if on_cpu else element, wide_weight=wide and element == 2,
        weight=weight, on_cpu=on_cpu, triton=not on_cpu,
    ),
    st.integers(0, 50_000), st.integers(0, 5000), st.integers(1, 300_000), st.integers(1, 10_000),
    st.sampled_from([2, 4]), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip


@given(calls, st.floats(0, 12))
def test_what_a_way_holds_fits_the_budget_and_more_is_never_slower(call, more):
    budget = int(plan.least_bytes(call) * 2**more)
    way = plan.choose_plan(call, memory_budget=budget)
    assert way.bytes <= budget
    assert min(way.held.values()) >= 0
    assert 1 <= way.tokens <= max(call.n, 1)
    assert way.classes >= 1
    if way.name in (FEW_CHUNKS, CHUNKS):  # one chunk less would not fit
        step, chunks = call.limits.multiple, -(-call.n // way.tokens)
        larger = -(-call.n // (chunks - 1) // step) * step
        bytes_ = plan.chunked(call, larger, way.classes).bytes
        assert bytes_ > budget or larger > plan._most_tokens(call)
    richer = plan.choose_plan(call, memory_budget=2 * budget)
    assert plan.STRATEGIES.index(richer.name) <= plan.STRATEGIES.index(way.name)
    if richer.name == way.name == CHUNKS:
        assert richer.tokens >= way.tokens or richer.tokens >= plan.chunk_size(call)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_shard_counts_the_gradient_of_hidden_states_that_another_rank_may_want(wanted):
    hidden = torch.empty(3, 4, requires_grad=wanted)
    problem = Problem(hidden, torch.empty(7, 4), torch.zeros(3, dtype=torch.long))
    call = sharded_sizes(problem, Shard("", first=0, V=14, largest=7), 3)
    assert call.hidden
    assert call.weight


@given(calls)
def test_too_small_a_budget_says_the_least(call):
    least = plan.least_bytes(call)
    assert plan.choose_plan(call, memory_budget=least).bytes <= least
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes") as said:
        plan.choose_plan(call, memory_budget=least // 2)
    named = int(str(said.value).split("at least ")[1].split()[0])
    assert plan.choose_plan(call, memory_budget=named).bytes <= named
    assert least <= named
    with pytest.raises(ValueError, match="at least"):
        plan.choose_plan(call, memory_budget=least - 1)


@given(calls, st.integers(1, 10_000), st.sampled_from([2, 4]))
def test_too_small_a_budget_for_a_divergence_says_the_least(call, teacher_H, element):
    """Fewer bytes make narrower tiles, with which all budgets above the least fit."""
    taught = call.with_teacher(teacher_H, element)
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes") as said:
        plan.choose_plan(taught, memory_budget=1)
    least = int(str(said.value).split("at least ")[1].split()[0])
    for budget in (least, least + 1, least * 9 // 8, least * 3 // 2, 2 * least):
        assert plan.choose_plan(taught, memory_budget=budget).bytes <= budget
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        plan.choose_plan(taught, memory_budget=least - 1)


@given(calls, st.integers(1, 50_000), st.integers(24, 34))
def test_the_width_of_a_tile_is_the_same_in_every_batch(call, n, power):
    """A token's sums are cut at the same classes, whatever the batch around it."""
    widths = set()
    for some in (call, call._replace(n=n, N=n)):
        if plan.plan_tiles(some).held and 4 * plan.least_bytes(some) < 2**power:
            widths.add(plan.plan_tiles(some, memory_budget=2**power).classes)
    assert len(widths) <= 1


@pytest.mark.parametrize("budget", [16, 64, 256])
def test_tiles_of_a_cpu_are_worth_their_memory(budget):
    """Blocks wide enough for products of full speed, from 16 MiB on."""
    way = plan.plan_tiles(SMOLLM, memory_budget=budget * MiB)
    assert way.tokens * way.classes >= 2**15
    assert way.tokens >= 128
