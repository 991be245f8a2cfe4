"""Inside a CUDA graph nothing may be compiled: whatever runs there has run before it."""

import pytest
import torch
from support.operators import Calls
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedce.backends import plan
from fusedce.backends import triton as backend
from fusedce.backends.gradients import input_dtypes
from fusedce.backends.triton import archs, head_gradients, small_sums, sum_grads, vocab_tiles
from fusedce.contract.objective import LogitGrad
from fusedce.contract.problem import Outputs, Problem, Task
from fusedce.testing import Case

pytestmark = pytest.mark.usefixtures("no_small_calls")


def key_of(name, value, special):
    """The key for which Triton compiles again: types, and a few properties of values."""
    if isinstance(value, torch.Tensor):
        return name, value.dtype, special and value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return name, "int", special and (value == 1, value % 16 == 0)
    if isinstance(value, float):
        return name, "float"
    if isinstance(value, TensorDescriptor):  # its shape is an argument, without properties
        return name, value.base.dtype, tuple(value.block_shape)
    return name, str(value)


@pytest.fixture
def launches(monkeypatch):
    """Specialisation keys of what is launched, in order."""
    if not hasattr(interpreter.InterpretedFunction, "run"):
        pytest.skip("the interpreter of Triton 3.4 launches by no method that could be watched")
    seen = []
    run = interpreter.InterpretedFunction.run

    def recorded(self, *args, grid, warmup, **kwargs):
        assert not args, "kernels are launched by keyword"
        exempt = self.kwargs.get("do_not_specialize") or ()
        hints = self.fn.__annotations__
        constants = {"num_warps", "num_stages", *(k for k in hints if "constexpr" in str(hints[k]))}
        key = tuple(
            (k, v) if k in constants else key_of(k, v, k not in exempt)
            for k, v in sorted(kwargs.items())
        )
        seen.append((self.fn.__name__, key))
        if self.fn.__name__ == "compact_kernel":  # the one whose result decides what is launched
            run(self, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", recorded)
    monkeypatch.setattr(small_sums, "fits", lambda problem: False)  # the way of large batches
    return seen


@pytest.fixture
def inside_a_graph(monkeypatch, launches):
    """A step's kernels outside of a CUDA graph, and what it compiles anew inside one."""

    def compare(step, inside=None):
        head_gradients.compile_for_sums.cache_clear()
        step()
        warm = set(launches)
        launches.clear()
        for module in (sum_grads, vocab_tiles):
            monkeypatch.setattr(module, "capturing", lambda device: True)
        (inside or step)()
        assert launches
        return {name for name, _ in warm}, set(launches) - warm

    return compare


OPTIONS = {
    "plain": {},
    "pointwise": {"softcap": 5.0, "logit_scale": 0.7},
    "terms": {"z_loss": 0.1},
    "smoothing": {"label_smoothing": 0.1},
}
BOTH = Outputs(hidden=True, weight=True)


def problem_of(V=333, name="plain", ignored=31, N=96, **more):
    """65 tokens are left of 96, which is no multiple of 16."""
    case = Case((N,), 32, V, torch.bfloat16, with_bias=name == "pointwise")
    hidden, weight, labels, bias = case.tensors()
    labels[:ignored] = -100
    return Problem(hidden, weight, labels, bias=bias, **OPTIONS[name], **more)


def by_gemm(monkeypatch, one_gemm):
    row = archs.BY_NAME["interpreter"]
    row = row._replace(two_bytes=row.two_bytes._replace(gemm_up_to=2**31 if one_gemm else 0))
    monkeypatch.setattr(archs, "architecture", lambda device: row)


def train(problem, argmax=None, wanted=BOTH):
    backend.loss_and_grads(Task(problem, wanted), argmax)


def token_grads(problem, chosen=(None, None)):
    used, one = problem.valid(), torch.ones(96, dtype=torch.float64)
    upstream = LogitGrad(one, one, one / 333, -one / 2, used, *chosen)
    backend.token_grads(problem, BOTH, torch.full((96,), 6.0), upstream, input_dtypes(problem))


@pytest.mark.parametrize("options", OPTIONS)
# 18: four chunks, inside a graph six, which are summed in float32; 70: one, inside two
@pytest.mark.parametrize("chunk_tokens", [None, 18, 70])
@pytest.mark.parametrize("V", [320, 333])
@pytest.mark.parametrize("gemm", [False, True])  # exponentials by cuBLAS, or by one GEMM
def test_training_compiles_nothing_inside_a_graph(
    monkeypatch, inside_a_graph, options, chunk_tokens, V, gemm
):
    by_gemm(monkeypatch, gemm)
    problem = problem_of(V, options, chunk_tokens=chunk_tokens)
    argmax = torch.empty(96, dtype=torch.int64) if options == "terms" else None
    kernels, new = inside_a_graph(lambda: train(problem, argmax))
    assert new == set()
    exponentials = "walk_kernel" if gemm else "exp_tile_kernel"
    assert {"label_logit_kernel", exponentials, "softmax_rows_kernel"} <= kernels


def test_rows_of_any_stride_are_trained_by_the_same_kernels(monkeypatch, inside_a_graph):
    """Inside a graph rows are gathered, though all of them count."""
    by_gemm(monkeypatch, one_gemm=True)
    problem = problem_of(ignored=0)
    wide = torch.zeros(96, 40, dtype=torch.bfloat16)  # rows begin at multiples of 16 bytes
    kernels, new = inside_a_graph(lambda: train(problem.replace(hidden=wide[:, :32])))
    assert "walk_kernel" in kernels
    assert new == set()


@pytest.mark.parametrize("V", [320, 333])
@pytest.mark.parametrize("options", OPTIONS)
def test_forward_only_compiles_nothing_inside_a_graph(inside_a_graph, options, V):
    """Warmed up with a batch of few valid tokens, as a graph's warm-up may be."""

    def step(ignored):
        problem = problem_of(V, options, ignored)
        backend.loss(problem.replace(z_loss=0.0, label_smoothing=0.0))
        everything = Outputs(lse=True, entropy=True, zmean=problem.label_smoothing > 0)
        backend.token_stats(problem, everything, torch.empty(96, dtype=torch.int64))

    kernels, new = inside_a_graph(lambda: step(31), lambda: step(0))
    assert new == set()
    assert {"walk_kernel", "merge_stats_kernel"} <= kernels


def test_few_rows_outside_a_graph_and_all_of_them_inside(monkeypatch, inside_a_graph):
    """Tiles of few rows hold more classes than those of many."""
    monkeypatch.setattr(plan, "TILE_ELEMENTS", (2**15, 2**15))
    problem = problem_of(ignored=80)
    assert inside_a_graph(lambda: train(problem))[1] == set()


@pytest.mark.parametrize("chunk_tokens", [None, 39, 70])
def test_token_gradients_compile_nothing_inside_a_graph(inside_a_graph, chunk_tokens):
    problem = problem_of(chunk_tokens=chunk_tokens)
    assert inside_a_graph(lambda: token_grads(problem))[1] == set()


@pytest.mark.parametrize("chunk_tokens", [None, 39])
@pytest.mark.parametrize("V", [320, 333, 1111])
def test_one_compilation_fits_all_tiles_of_a_chunk(monkeypatch, launches, V, chunk_tokens):
    monkeypatch.setattr(plan, "TILE_ELEMENTS", (2**12, 2**12))
    train(problem_of(V, "terms", N=196, chunk_tokens=chunk_tokens))
    for kernel in ("exp_tile_kernel", "hidden_grad_kernel"):
        keys = [key for name, key in launches if name == kernel]
        assert len(keys) > 1
        assert len(set(keys)) == 1


@pytest.mark.parametrize("K", [0, 3])  # further classes of a token
@pytest.mark.usefixtures("launches")
def test_token_gradients_wait_for_nothing_inside_a_graph(monkeypatch, K):
    chosen = None, None
    if K:
        chosen = torch.randint(333, (96, K)), torch.ones(96, K, dtype=torch.float64)
    monkeypatch.setattr(vocab_tiles, "capturing", lambda device: True)
    with Calls() as calls:
        token_grads(problem_of(), chosen)
    called = {operator.overloadpacket.__name__ for operator, *_ in calls.seen}
    assert not called & {"_local_scalar_dense", "nonzero", "unique_dim", "_unique2"}


@pytest.mark.parametrize("one_gemm", [0, 1])
def test_few_kernels_are_launched(monkeypatch, launches, one_gemm):
    """Each costs the host as much as a small tile's work."""
    by_gemm(monkeypatch, one_gemm)
    train(problem_of(), wanted=Outputs(weight=True))  # compiles for later sums

    def launched(step):
        launches.clear()
        step()
        return [name.removesuffix("_kernel") for name, _ in launches]

    assert launched(lambda: backend.loss(problem_of())) == ["compact", "walk"]
    assert launched(lambda: train(problem_of())) == [
        "compact", "label_logit", "walk" if one_gemm else "exp_tile", "softmax_rows",
        "hidden_grad", "label_grad", "label_grad",
    ]  # fmt: skip
    of_hidden = launched(lambda: train(problem_of(), wanted=Outputs(hidden=True)))
    assert "label_grad" not in of_hidden
