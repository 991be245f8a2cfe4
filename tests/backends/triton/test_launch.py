"""Arguments of kernels: layouts of inputs, precision of products, repeated launches."""

from types import SimpleNamespace

import pytest
import torch

from fusedce.backends.triton.launch import CachedLaunch, input_precision, run, span


class Older:
    """Torch's interface up to 2.8."""

    def __init__(self, allow):
        self.allow_tf32 = allow


class Newer:
    """Torch's interface since 2.9, once it was used."""

    def __init__(self, precision):
        self.fp32_precision = precision

    @property
    def allow_tf32(self):
        raise RuntimeError("you have used mix of the legacy and new APIs")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Older(True), "tf32"),
        (Older(False), "ieee"),
        (Newer("tf32"), "tf32"),
        (Newer("ieee"), "ieee"),
        (Newer("none"), "ieee"),
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


def test_a_span_of_all_is_no_view_and_any_other_one_is_cut():
    x = torch.arange(12).view(3, 4)
    assert span(x, 0, 3) is x
    assert span(x, 0, 4, dim=1) is x
    assert torch.equal(span(x, 0, 2), x[:2])
    assert torch.equal(span(x, 1, 3), x[1:])
    assert torch.equal(span(x, 0, 3, dim=1), x[:, :3])


class Kernel:
    """Called by keyword, as Triton's are; what it compiles is called by place."""

    arg_names = ("x", "n", "y", "BLOCK")

    def __init__(self, compiles):
        self.compiles, self.launches = compiles, []

    def __getitem__(self, grid):
        def first(**given):
            options = {k: given.pop(k) for k in ("num_warps",)}
            assert options == {"num_warps": 4}
            self.launches.append(("asked", grid, *(given[k] for k in self.arg_names)))
            return Compiled(self) if self.compiles else None

        return first


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *given: self.kernel.launches.append(("again", grid, *given))


@pytest.mark.parametrize("compiles", [True, False])
def test_later_launches_differ_in_what_changes_alone(compiles):
    kernel = Kernel(compiles)
    launch = CachedLaunch(kernel, y=None, x=7, BLOCK=64, num_warps=4)
    for n in (3, 5, 9):
        launch((n, 1, 1), n=n)
    how = "again" if compiles else "asked"
    assert kernel.launches == [
        ("asked", (3, 1, 1), 7, 3, None, 64),
        (how, (5, 1, 1), 7, 5, None, 64),
        (how, (9, 1, 1), 7, 9, None, 64),
    ]


def test_products_and_sums_are_fused_whatever_the_compilers_default():
    asked = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: asked.append((grid, arguments))

    run(Kernel(), (3, 1, 1), x=1)
    assert asked == [((3, 1, 1), {"x": 1, "enable_fp_fusion": True})]
