"""Inside a CUDA graph nothing may be compiled: whatever runs there has run before it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from fusedce.backends import triton as backend
from fusedce.backends.gradients import of_inputs
from fusedce.backends.triton import archs, head_gradients, training, vocab_tiles
from fusedce.contract.objective import Upstream
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.task import Task
from fusedce.testing import Case


def key_of(name, value, special):
    """The key for which Triton compiles again: types, and a few properties of values."""
    if isinstance(value, torch.Tensor):
        return name, value.dtype, special and value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return name, "int", special and (value == 1, value % 16 == 0)
    if isinstance(value, float):
        return name, "float"
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
    return seen


OPTIONS = {
    "plain": {},
    "pointwise": {"softcap": 5.0, "logit_scale": 0.7},
    "terms": {"z_loss": 0.1},
    "smoothing": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk_tokens", [None, 39, 70])  # 70: a chunk, inside a graph two
@pytest.mark.parametrize("V", [320, 333])
@pytest.mark.parametrize("gemm", ["0", "1"])  # exponentials by products of cuBLAS, or by one GEMM
def test_training_compiles_nothing_inside_a_graph(
    monkeypatch, launches, options, chunk_tokens, V, gemm
):
    monkeypatch.setenv("FUSEDCE_EXP_GEMM", gemm)
    hidden, weight, labels, bias = Case(
        (96,), 32, V, torch.bfloat16, with_bias=options == "pointwise"
    ).tensors()
    labels[:31] = -100  # 65 are left, which is no multiple of 16
    problem = Problem(
        hidden, weight, labels, bias=bias, chunk_tokens=chunk_tokens, **OPTIONS[options]
    )
    argmax = torch.empty(96, dtype=torch.int64) if options == "terms" else None
    head_gradients.compile_for_sums.cache_clear()

    def step():
        backend.loss_and_grads(Task(problem, Wanted(hidden=True, weight=True)), argmax)
        keys = set(launches)
        launches.clear()
        return keys

    warm = step()
    monkeypatch.setattr(training, "capturing", lambda device: True)
    assert step() - warm == set()
    exponentials = "walk_kernel" if gemm == "1" else "exp_tile_kernel"
    kernels = {"label_logit_kernel", exponentials, "softmax_rows_kernel", "label_grad_kernel"}
    assert kernels <= {name for name, _ in warm}


@pytest.mark.parametrize("V", [320, 333])
@pytest.mark.parametrize("options", OPTIONS)
def test_forward_only_compiles_nothing_inside_a_graph(monkeypatch, launches, options, V):
    """Warmed up with a batch of few valid tokens, as a graph's warm-up may be."""
    hidden, weight, labels, bias = Case(
        (96,), 32, V, torch.bfloat16, with_bias=options == "pointwise"
    ).tensors()

    def step(first):
        own = labels.masked_fill(torch.arange(96) < first, -100)
        problem = Problem(hidden, weight, own, bias=bias, **OPTIONS[options])
        plain = problem.but(z_loss=0.0, label_smoothing=0.0)
        backend.loss(plain)
        everything = Wanted(lse=True, entropy=True, zmean=problem.label_smoothing > 0)
        backend.token_stats(problem, everything, torch.empty(96, dtype=torch.int64))
        keys = set(launches)
        launches.clear()
        return keys

    warm = step(31)
    monkeypatch.setattr(training, "capturing", lambda device: True)
    assert step(0) == warm
    assert {"walk_kernel", "merge_stats_kernel"} <= {name for name, _ in warm}


def test_few_rows_outside_a_graph_and_all_of_them_inside(monkeypatch, launches):
    """Tiles of few rows hold more classes than those of many."""
    small = archs.BY_NAME["interpreter"]._replace(tile_elements=(2**15, 2**15))
    monkeypatch.setattr(archs, "architecture", lambda device: small)
    hidden, weight, labels, _ = Case((96,), 32, 333, torch.bfloat16).tensors()
    labels[16:] = -100
    problem = Problem(hidden, weight, labels)

    def step():
        backend.loss_and_grads(Task(problem, Wanted(hidden=True, weight=True)), None)
        keys = set(launches)
        launches.clear()
        return keys

    head_gradients.compile_for_sums.cache_clear()
    warm = step()
    monkeypatch.setattr(training, "capturing", lambda device: True)
    assert step() - warm == set()


@pytest.mark.parametrize("chunk_tokens", [None, 39])
@pytest.mark.parametrize("V", [320, 333, 1111])
def test_one_compilation_fits_all_tiles_of_a_chunk(monkeypatch, launches, V, chunk_tokens):
    """All launches but the first skip the choice of a compiled kernel."""
    tiny = archs.BY_NAME["interpreter"]._replace(tile_elements=(2**12, 2**12))
    monkeypatch.setattr(archs, "architecture", lambda device: tiny)
    hidden, weight, labels, _ = Case((196,), 32, V, torch.bfloat16).tensors()
    labels[:31] = -100
    problem = Problem(hidden, weight, labels, chunk_tokens=chunk_tokens, z_loss=0.1)
    backend.loss_and_grads(Task(problem, Wanted(hidden=True, weight=True)), None)
    for kernel in ("exp_tile_kernel", "hidden_grad_kernel"):
        keys = [key for name, key in launches if name == kernel]
        assert len(keys) > 1
        assert len(set(keys)) == 1


@pytest.mark.parametrize("chunk_tokens", [None, 39, 70])
def test_token_gradients_compile_nothing_inside_a_graph(monkeypatch, launches, chunk_tokens):
    head_gradients.compile_for_sums.cache_clear()
    hidden, weight, labels, _ = Case((96,), 32, 333, torch.bfloat16).tensors()
    labels[:31] = -100
    used = labels != -100
    one = used.double()
    upstream = Upstream(one, one, one / 333, -one / 2, used, one / 2)
    problem = Problem(hidden, weight, labels, chunk_tokens=chunk_tokens)

    def step():
        backend.token_grads(
            problem,
            Wanted(hidden=True, weight=True),
            torch.full((96,), 6.0),
            upstream,
            of_inputs(problem),
        )
        keys = set(launches)
        launches.clear()
        return keys

    warm = step()
    monkeypatch.setattr(vocab_tiles, "capturing", lambda device: True)
    assert step() - warm == set()


@pytest.mark.parametrize("K", [0, 3])  # further classes of a token
def test_token_gradients_wait_for_nothing_inside_a_graph(monkeypatch, launches, K):
    hidden, weight, labels, _ = Case((96,), 32, 333, torch.bfloat16).tensors()
    one = torch.ones(96, dtype=torch.float64)
    chosen = None, None
    if K:
        chosen = torch.randint(333, (96, K)), torch.ones(96, K, dtype=torch.float64)
    upstream = Upstream(one, one, one / 333, -one / 2, labels != -100, one / 2, *chosen)
    problem = Problem(hidden, weight, labels)
    monkeypatch.setattr(vocab_tiles, "capturing", lambda device: True)
    with Called() as called:
        backend.token_grads(
            problem, Wanted(hidden=True, weight=True), one * 6, upstream, of_inputs(problem)
        )
    assert not called.names & {"_local_scalar_dense", "nonzero", "unique_dim", "_unique2"}


def test_few_kernels_are_launched(launches):
    """Each costs the host as much as a small tile's work."""
    hidden, weight, labels, _ = Case((96,), 32, 1111, torch.bfloat16).tensors()
    problem = Problem(hidden, weight, labels)
    backend.loss_and_grads(Task(problem, Wanted(weight=True)), None)  # compiles for later sums
    launches.clear()
    backend.loss(problem)
    assert [name for name, _ in launches] == ["compact_kernel", "walk_kernel"]
    launches.clear()
    backend.loss_and_grads(Task(problem, Wanted(hidden=True, weight=True)), None)
    assert [name for name, _ in launches] == [
        "compact_kernel", "label_logit_kernel", "exp_tile_kernel", "softmax_rows_kernel",
        "hidden_grad_kernel", "label_grad_kernel",
    ]  # fmt: skip
    launches.clear()
    backend.loss_and_grads(Task(problem, Wanted(hidden=True)), None)
    assert "label_grad_kernel" not in {name for name, _ in launches}


class Called(TorchDispatchMode):
    """Names of torch's operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk_tokens", [None, 40])
def test_nothing_is_cut_out_of_what_is_whole(launches, chunk_tokens):
    """A view costs the host 1 to 3 us, and the call has 300."""
    hidden, weight, labels, _ = Case((96,), 32, 320).tensors()
    problem = Problem(hidden, weight, labels, chunk_tokens=chunk_tokens)
    with Called() as called:
        backend.loss_and_grads(Task(problem, Wanted(hidden=True, weight=True)), None)
    assert bool(called.names & {"slice", "select", "index"}) == (chunk_tokens is not None)
