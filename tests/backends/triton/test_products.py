"""Products, a tile at a time, are those of the whole."""

import pytest
import torch

from fusedce.backends.triton import archs
from fusedce.backends.triton import products as of_cublas
from fusedce.backends.triton.products import Tiles, product

H = 24
ROW = archs.BY_NAME["interpreter"]


def inputs(C, V):
    rng = torch.Generator().manual_seed(0)
    return (torch.randn(n, H, generator=rng).bfloat16() for n in (C, V))


@pytest.mark.parametrize("elements", [2**8, 2**17])  # of a tile: of some rows; of all of them
@pytest.mark.parametrize("V", [100, 256, 777])
@pytest.mark.parametrize("C", [150, 256])
def test_logits_of_every_row_and_class_come_once(elements, V, C):
    """This holds for a chunk shorter than the buffer, too."""
    h, weight = inputs(C, V)
    tiles = Tiles(weight, 256, ROW._replace(tile_elements=(elements, elements)))
    whole = torch.full((C, V), torch.nan)
    for first, rows, begin, T, products in tiles.logits(h):
        assert products.dtype == torch.float32
        assert begin % tiles.block == 0
        assert products.stride(0) % 16 == 0
        part = whole[first : first + rows, begin : begin + T]
        assert part.isnan().all()
        part.copy_(products)
    torch.testing.assert_close(whole, h.float() @ weight.float().T)


@pytest.mark.parametrize("C", [100, 128, 300])
def test_gradients_of_hidden_states_come_once(C):
    rng = torch.Generator().manual_seed(0)
    g = torch.randn(C, 50, generator=rng).bfloat16()
    weight = torch.randn(50, H, generator=rng).bfloat16()
    tiles = Tiles(weight, 300, ROW._replace(tile_elements=(128 * H, 128 * H)))
    found = []
    for begin, n in tiles.of_hidden(g):
        assert begin == sum(map(len, found))
        found.append(tiles.products[: n * H].view(n, H).clone())
    assert max(map(len, found)) <= 128
    torch.testing.assert_close(torch.cat(found), g.float() @ weight.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_not_rounded_to_their_inputs(dtype):
    a, b = (x.to(dtype) for x in torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)))
    out = torch.empty(8, 8)
    product(a.device, dtype)(a, b, out=out)
    torch.testing.assert_close(out, a.float() @ b.float())


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
    name = getattr(torch, operation)
    assert of_cublas.widens(name, torch.device("cuda"), torch.bfloat16) == (wrong is None)
    of_cublas.widens.cache_clear()


def test_products_that_are_widened_are_said_to_be(monkeypatch):
    said = []
    monkeypatch.setattr(of_cublas, "widens", lambda *_: False)
    monkeypatch.setattr(of_cublas, "say_once", said.append)
    of_cublas.product.cache_clear()
    of_cublas.product(torch.device("cuda", 1), torch.bfloat16)
    of_cublas.product(torch.device("cpu"), torch.bfloat16)  # the interpreter's, for debugging
    of_cublas.product.cache_clear()
    assert said == ["torch multiplies bfloat16 on cuda:1 into no float32: it multiplies in float32"]
