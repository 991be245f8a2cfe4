"""Products: a tile at a time, of sizes that keep a GPU busy, in the precision torch is told."""

import functools
from types import SimpleNamespace

import pytest
import torch
from support.operators import Calls
from support.params import slow

from fusedce import fused_ce
from fusedce.backends import plan
from fusedce.backends import triton as backend
from fusedce.backends.triton import archs
from fusedce.backends.triton import products as of_cublas
from fusedce.backends.triton.launch import input_precision, launch_grid
from fusedce.contract.problem import Outputs, Problem, Task
from fusedce.testing import Case, check

pytestmark = pytest.mark.usefixtures("no_small_calls")


@pytest.mark.parametrize("elements", [2**8, 2**17])  # of a tile: of some rows; of all of them
@pytest.mark.parametrize(("N", "V"), [(100, 100), (128, 777), (300, 256), (300, 777)])
def test_gradients_from_several_tiles_are_those_of_the_whole(monkeypatch, elements, N, V):
    row = archs.BY_NAME["interpreter"]
    row = row._replace(two_bytes=row.two_bytes._replace(gemm_up_to=0))
    monkeypatch.setattr(plan, "TILE_ELEMENTS", (elements, elements))
    monkeypatch.setattr(archs, "architecture", lambda device: row)
    case = Case((N,), 24, V, torch.bfloat16, requires_grad=("hidden", "weight"))
    check(functools.partial(fused_ce, backend="triton"), case)


@pytest.mark.parametrize("H", [64, 896, 1024, 4096, 16384])
def test_tiles_are_wider_where_they_are_less_work(H):
    """Enough for the host to be ahead: 15 us of it beside at least 40 of an H200's products."""
    C, V = 8192, 151936
    rows, T = archs.BY_NAME["sm_90"].tile_shape(C, V, H, 2048)
    assert rows * T >= 2**23
    work = 2 * rows * T * H / 700e12
    assert work >= 40e-6 or rows * T == 2**25
    assert rows * T * 4 <= 2**27


@pytest.mark.parametrize(
    ("processors", "least"), [(108, 0.94), (114, 0.89), (132, 0.96), (128, 1.0), (148, 0.86)]
)
def test_rows_of_tiles_fill_the_processors(processors, least):
    """Of an A100, H100 PCIe, H200, RTX 4090 and B200; 4096 rows fill 0.79 of the A100."""
    C, V = 8192, 128256
    rows, T = archs.BY_NAME["sm_90"].tile_shape(C, V, 4096, 2048, processors)
    parts = [rows] * (C // rows) + [C % rows] * (C % rows > 0)
    blocks = [-(-n // 128) * -(-T // 256) for n in parts]
    assert sum(blocks) >= least * sum(-(-n // processors) for n in blocks) * processors
    assert archs.rows_in_waves(100, V, 4096, processors) == 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_a_chunk_is_widened_for_the_bias_in_the_buffer_of_the_plan(monkeypatch, dtype):
    """The chunk in float32 would be 3.6 MB; the head in float32, for a CPU's product, is 1.5 MB."""
    monkeypatch.setattr(plan, "TILE_ELEMENTS", (2**16, 2**16))
    hidden, weight, labels, bias = Case((300,), 128, 3000, dtype, with_bias=True).tensors()
    problem = Problem(hidden, weight, labels, bias=bias, backend="triton")
    with Calls() as calls:
        backend.loss_and_grads(Task(problem, Outputs(weight=True, bias=True)))
    made = [out for *_, out in calls.seen if isinstance(out, torch.Tensor)]
    sizes = [x.untyped_storage().nbytes() for x in made if x.dtype == torch.float32]
    assert 0 < max(sizes) <= 2**21


@pytest.mark.parametrize("arch", archs.ARCHITECTURES, ids=lambda row: row.name)
def test_blocks_and_warps_are_powers_of_two(arch):
    blocks = [x for walks in (arch.two_bytes, arch.four_bytes) for x in walks[:-1] if x]
    sizes = [arch.exp_block_v, arch.token_warps, arch.divergence_block_v]
    assert all(x.bit_count() == 1 for x in [*sizes, *(x for b in blocks for x in b[:4])])


@pytest.mark.parametrize("operation", ["mm", "addmm"])
@pytest.mark.parametrize("wrong", [None, "a factor", "raises"])
def test_an_interface_that_gives_something_wrong_is_not_taken(monkeypatch, operation, wrong):
    """A stand-in for CUDA's products of bf16 with a float32 result."""

    def stand_in(*given, out_dtype, out):
        if wrong == "raises":
            raise RuntimeError("no such product")
        *addend, a, b = given
        product = a.float() @ b.float() * (2 if wrong else 1)
        return out.copy_(product + addend[0] if addend else product)

    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda n, device: arange(n))
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *n, device, dtype: ones(*n, dtype=dtype))
    monkeypatch.setattr(torch, operation, stand_in)
    of_cublas.widens.cache_clear()
    assert of_cublas.widens(operation, torch.device("cuda"), torch.bfloat16) == (wrong is None)
    of_cublas.widens.cache_clear()


def test_products_that_are_widened_are_said_to_be(monkeypatch):
    said = []
    monkeypatch.setattr(of_cublas, "widens", lambda *_: False)
    monkeypatch.setattr(of_cublas, "warn_once", said.append)
    of_cublas.product.cache_clear()
    of_cublas.product(torch.device("cuda", 1), torch.bfloat16)
    of_cublas.product(torch.device("cpu"), torch.bfloat16)  # the interpreter's, for debugging
    of_cublas.product.cache_clear()
    assert said == ["torch has no bfloat16 product with float32 result on cuda:1: float32 is used"]


class Used(SimpleNamespace):
    """Torch's interface since 2.9, once it was used."""

    @property
    def allow_tf32(self):
        raise RuntimeError("you have used mix of the legacy and new APIs")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (SimpleNamespace(allow_tf32=True), "tf32"),  # torch's interface up to 2.8
        (SimpleNamespace(allow_tf32=False), "ieee"),
        (Used(fp32_precision="tf32"), "tf32"),
        (Used(fp32_precision="ieee"), "ieee"),
        (Used(fp32_precision="none"), "ieee"),
    ],
)
def test_float32_is_multiplied_as_torch_is_told_to(monkeypatch, setting, expected):
    monkeypatch.setattr(torch.backends.cuda, "matmul", setting)
    monkeypatch.setattr(torch.version, "hip", None)
    x = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    assert input_precision(x) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nobody_asks_for_tf32_beside_other_dtypes(monkeypatch, dtype):
    monkeypatch.setattr(torch.backends.cuda, "matmul", object())  # any look-up raises
    assert input_precision(SimpleNamespace(dtype=dtype, device=torch.device("cuda"))) == "ieee"
    x = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
    assert input_precision(x) == "ieee"


def test_products_and_sums_are_fused_whatever_the_compilers_default():
    asked = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: asked.append((grid, arguments))

    launch_grid(Kernel(), (3, 1, 1), x=1)
    assert asked == [((3, 1, 1), {"x": 1, "enable_fp_fusion": True})]
