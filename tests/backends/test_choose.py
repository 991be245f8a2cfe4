"""Which backend runs where, by itself and on request."""

from types import SimpleNamespace

import pytest
import torch

from fusedce.backends import choose, devices
from fusedce.backends.triton import archs

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch):
    """Make the first CUDA device one of a compute capability."""

    def of(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        devices.generation_of.cache_clear()
        archs.architecture.cache_clear()

    monkeypatch.setattr(choose, "_kernel_errors", {CUDA: None})  # a kernel has run there
    yield of
    devices.generation_of.cache_clear()
    archs.architecture.cache_clear()


def rows_of(H, dtype):
    """What the choice reads of hidden states on a CUDA device."""
    return SimpleNamespace(device=CUDA, dtype=dtype, shape=torch.Size((3, H)))


@pytest.mark.parametrize(
    ("capability", "row"),
    [((6, 0), None), ((7, 0), None), ((7, 5), None), ((8, 0), "sm_80"), ((8, 6), "sm_86"),
     ((8, 7), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 0), "sm_100"),
     ((10, 3), "sm_100"), ((12, 0), "sm_120"), ((12, 1), "sm_120")],
)  # fmt: skip
def test_newer_cards_take_triton_and_an_old_one_says_why_not(card, capability, row):
    card(*capability)
    rows = rows_of(64, torch.bfloat16)
    if row is not None:
        assert choose.resolve_backend(None, rows) == "triton"
        assert archs.architecture(CUDA).name == row
        return
    assert choose.resolve_backend(None, rows) == "torch"
    with pytest.raises(RuntimeError, match=r"compute capability 8.0 or newer .* cuda:0 has"):
        choose.resolve_backend("triton", rows)


@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950"])
def test_instinct_cards_have_a_row(card, monkeypatch, name):
    card(9, 4)  # of torch for ROCm, which means no card of NVIDIA's
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = SimpleNamespace(gcnArchName=f"{name}:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert archs.architecture(CUDA).name == "gfx942"
    assert choose.resolve_backend(None, rows_of(64, torch.bfloat16)) == "triton"


@pytest.mark.parametrize(
    ("H", "dtype", "name"),
    [(64, torch.bfloat16, "triton"), (72, torch.bfloat16, "torch"),
     (60, torch.bfloat16, "torch"), (48, torch.float32, "triton"),
     (60, torch.float32, "torch")],
)  # fmt: skip
def test_whole_multiples_of_16_alone_go_to_triton(card, H, dtype, name):
    card(9, 0)
    assert choose.resolve_backend(None, rows_of(H, dtype)) == name
    assert choose.resolve_backend("triton", rows_of(H, dtype)) == "triton"


def test_a_device_without_float64_is_refused_by_name():
    mps = SimpleNamespace(device=torch.device("mps"), dtype=torch.float32)
    for backend in (None, "torch", "triton"):
        with pytest.raises(RuntimeError, match=r"float64.* not on mps: move hidden, weight"):
            choose.resolve_backend(backend, mps)


def test_the_processors_of_an_xpu_are_its_subslices(monkeypatch):
    properties = SimpleNamespace(gpu_subslice_count=448)
    module = SimpleNamespace(get_device_properties=lambda device: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    archs.processors.cache_clear()
    assert archs.processors(torch.device("xpu")) == 448
    archs.processors.cache_clear()


def test_one_row_makes_a_new_type_of_device(monkeypatch):
    device = torch.device("privateuseone", 0)
    rows = SimpleNamespace(device=device, dtype=torch.bfloat16, shape=torch.Size((3, 64)))
    assert choose.resolve_backend(None, rows) == "torch"
    properties = SimpleNamespace(total_memory=2**30, cores=24)
    module = SimpleNamespace(
        get_device_properties=lambda device: properties, is_current_stream_capturing=lambda: True
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    row = devices.DeviceType(
        triton=True, processors="cores", generation=lambda device: "gfx942", graphs=True
    )
    caches = (archs.processors, archs.architecture, devices.memory_of, devices.generation_of)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setitem(devices.DEVICE_TYPES, device.type, row)
    assert choose.resolve_backend(None, rows) == "triton"
    assert archs.processors(device) == 24
    assert archs.architecture(device).name == "gfx942"
    assert devices.memory_of(device) == 2**30
    for cache in caches:
        cache.cache_clear()
