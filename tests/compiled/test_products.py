"""Matrix products of the PTX interpreter, of every form that the kernels use.

Triton lays out what it copies and stores; if the interpreter took one layout for another, numbers
would differ from torch's.
"""

import pytest
import torch
import triton
import triton.language as tl
from ptx import TensorMap, on_device
from support.versions import TRITON
from triton.tools.tensor_descriptor import TensorDescriptor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@triton.jit
def product_kernel(
    a, b, c, K, stride_am, stride_ak, stride_bk, stride_bn,
    M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(a + m[:, None] * stride_am + (start + k)[None, :] * stride_ak)
        y = tl.load(b + (start + k)[:, None] * stride_bk + n[None, :] * stride_bn)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def tile_product_kernel(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK):
        total = tl.dot(a.load([0, start]), b.load([0, start]).T, total)
    tl.store(c + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], total)


def rounded(x, precision):
    """The value that a tensor core reads."""
    return (x.view(torch.int32) & ~0x1FFF).view(FP32) if precision == "tf32" else x


def assert_product(a, b, c, instruction, gpu, kernel):
    exact = a.double() @ b.double()
    found = c[: a.shape[0], : b.shape[1]].double()
    # float32 sums of K products, whose partial sums are of the size of the largest result
    assert (found - exact).abs().max() <= 16 * torch.finfo(FP32).eps * exact.abs().max()
    assert instruction in gpu.texts[kernel]


FORMS = [
    # dtype, M, N, block of K, warps, precision, instruction
    (BF16, 128, 128, 64, 8, "ieee", "m64n128k16.f32.bf16"),
    (FP16, 128, 128, 64, 8, "ieee", "m64n128k16.f32.f16"),
    (BF16, 64, 64, 16, 4, "ieee", "m64n64k16"),  # swizzle of 32 bytes
    (BF16, 64, 64, 32, 4, "ieee", "m64n64k16"),  # of 64
    (BF16, 64, 8, 32, 4, "ieee", "m64n8k16" if TRITON == (3, 9) else "m16n8k16"),
    (BF16, 64, 128, 128, 4, "ieee", "m64n128k16"),  # two atoms wide
    (FP32, 128, 64, 32, 8, "tf32", "m64n64k8.f32.tf32"),
    (FP32, 32, 32, 32, 4, "ieee", "fma.rn.f32"),
    (BF16, 32, 32, 32, 4, "ieee", "m16n8k16.row.col.f32.bf16"),
    (FP16, 16, 64, 64, 4, "ieee", "m16n8k16.row.col.f32.f16"),
    (FP32, 32, 32, 32, 4, "tf32", "m16n8k8.row.col.f32.tf32"),
]


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_of_every_form(arch, form):
    """Rows of both operands lie along K, as hidden states and the head's weight do."""
    dtype, M, N, block, warps, precision, name = form
    if N < 16 and TRITON == (3, 4):
        pytest.skip("Triton 3.4 multiplies 16 columns or more")
    K = 3 * block
    a, b = torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype).T
    c = torch.zeros(M, N)
    with on_device(arch) as gpu:
        product_kernel[(1,)](
            a, b, c, K, *a.stride(), *b.stride(), M, N, block, precision,
            num_warps=warps, num_stages=3,
        )  # fmt: skip
    instruction = name if arch == 90 else "mma.sync" if "fma" not in name else "fma.rn.f32"
    assert_product(
        rounded(a, precision), rounded(b, precision), c, instruction, gpu, "product_kernel"
    )


@pytest.mark.parametrize(
    ("dtype", "M", "N", "block", "warps"),
    [(BF16, 128, 256, 64, 8), (BF16, 64, 64, 32, 4), (FP16, 64, 32, 16, 4),
     (BF16, 64, 128, 128, 4)],
)  # fmt: skip
def test_products_of_tiles_by_tma(dtype, M, N, block, warps):
    """Tiles of one box and of several, of all swizzles; rows and columns outside are zeros."""
    K = 3 * block - 8
    a, b = torch.randn(M - 5, K).to(dtype), torch.randn(N - 3, K).to(dtype)
    c = torch.zeros(M, N)
    with on_device(90) as gpu:
        tile_product_kernel[(1,)](
            TensorDescriptor.from_tensor(a, [M, block]),
            TensorDescriptor.from_tensor(b, [N, block]),
            c, K, M, N, block, num_warps=warps, num_stages=3,
        )  # fmt: skip
    assert_product(a, b.T, c, "cp.async.bulk.tensor.2d", gpu, "tile_product_kernel")


@pytest.mark.parametrize(
    "change",
    [{"base": 8}, {"box": (257, 64)}, {"box": (64, 68)}, {"strides": (68, 1)},
     {"strides": (128, 2)}, {"shape": (0, 64)}],
    ids=str,
)  # fmt: skip
def test_what_cutensormapencode_refuses_is_refused(change):
    fine = {"base": 4096, "swizzle": 3, "size": 2, "box": (64, 64), "shape": (100, 128),
            "strides": (128, 1)}  # fmt: skip
    TensorMap.encode(**fine)
    with pytest.raises(ValueError, match="no tensor map can have"):
        TensorMap.encode(**fine | change)
