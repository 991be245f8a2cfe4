"""Matrix products of the PTX interpreter: layouts as the PTX ISA has them, and Triton's against it.

Triton compiles products of every form that the kernels use, and some more; if the interpreter took
one layout for another, numbers would differ from numpy's.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ptx.device import on_device
from ptx.matrices import fragment
from ptx.tensor_map import ATOM, Descriptor, TensorMap, swizzled
from triton.tools.tensor_descriptor import TensorDescriptor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@triton.jit
def product_kernel(
    a, b, c, K, stride_am, stride_ak, stride_bk, stride_bn,
    M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, DOUBLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(a + m[:, None] * stride_am + (start + k)[None, :] * stride_ak)
        y = tl.load(b + (start + k)[:, None] * stride_bk + n[None, :] * stride_bn)
        if DOUBLE:
            x = (x * 2.0).to(x.dtype)  # then A comes from registers
        total = tl.dot(x, y, total, input_precision=PRECISION)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def tile_product_kernel(
    a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr
):
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK):
        x = a.load([0, start])
        if TRANSPOSED:
            y = b.load([0, start]).T
        else:
            y = b.load([start, 0])
        total = tl.dot(x, y, total)
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
    # dtype, M, N, block of K, A and B transposed, A in registers, warps, precision, instruction
    (BF16, 128, 128, 64, 0, 0, 0, 8, "ieee", "m64n128k16.f32.bf16"),
    (BF16, 128, 128, 64, 0, 1, 0, 8, "ieee", "m64n128k16.f32.bf16"),
    (BF16, 128, 128, 64, 1, 0, 0, 8, "ieee", "m64n128k16.f32.bf16"),
    (FP16, 128, 128, 64, 1, 1, 0, 8, "ieee", "m64n128k16.f32.f16"),
    (BF16, 64, 64, 16, 0, 1, 0, 4, "ieee", "m64n64k16"),  # swizzle of 32 bytes
    (BF16, 64, 64, 32, 0, 1, 0, 4, "ieee", "m64n64k16"),  # of 64
    (BF16, 64, 16, 64, 0, 0, 0, 4, "ieee", "m64n16k16"),
    (BF16, 64, 8, 32, 0, 0, 0, 4, "ieee", "m16n8k16"),
    (BF16, 64, 128, 128, 0, 1, 0, 4, "ieee", "m64n128k16"),  # two atoms wide
    (BF16, 256, 64, 64, 1, 0, 0, 4, "ieee", "m64n64k16"),
    (BF16, 128, 128, 64, 0, 1, 1, 8, "ieee", "m64n128k16"),
    (FP16, 64, 64, 32, 1, 0, 1, 4, "ieee", "m64n64k16"),
    (FP32, 128, 64, 32, 0, 1, 0, 8, "tf32", "m64n64k8.f32.tf32"),
    (FP32, 64, 64, 32, 0, 0, 0, 4, "tf32", "tf32"),
    (FP32, 64, 64, 16, 1, 1, 0, 4, "tf32", "tf32"),
    (FP32, 32, 32, 32, 0, 0, 0, 4, "ieee", "fma.rn.f32"),
    (BF16, 32, 32, 32, 0, 0, 0, 4, "ieee", "m16n8k16.row.col.f32.bf16"),
    (FP16, 16, 64, 64, 1, 1, 0, 4, "ieee", "m16n8k16.row.col.f32.f16"),
    (FP32, 32, 32, 32, 0, 0, 0, 4, "tf32", "m16n8k8.row.col.f32.tf32"),
]


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_of_every_form(arch, form):
    dtype, M, N, block, a_transposed, b_transposed, in_registers, warps, precision, name = form
    K = 3 * block
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    if a_transposed:
        a = a.T.contiguous().T
    if b_transposed:
        b = b.T.contiguous().T
    c = torch.zeros(M, N)
    with on_device(arch) as gpu:
        gpu.serialised = bool(in_registers)  # Triton touches these early, and ptxas waits
        product_kernel[(1,)](
            a, b, c, K, *a.stride(), *b.stride(), M, N, block, in_registers, precision,
            num_warps=warps, num_stages=3,
        )  # fmt: skip
    instruction = name if arch == 90 else "mma.sync" if "fma" not in name else "fma.rn.f32"
    x = rounded(a, precision) * (2 if in_registers else 1)
    assert_product(x, rounded(b, precision), c, instruction, gpu, "product_kernel")


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("dtype", "M", "N", "block", "warps"),
    [
        (BF16, 128, 256, 64, 8),
        (BF16, 64, 64, 32, 4),
        (FP16, 64, 32, 16, 4),
        (BF16, 64, 128, 128, 4),
    ],
)
def test_products_of_tiles_by_tma(transposed, dtype, M, N, block, warps):
    """Tiles of one box and of several, of all swizzles; rows and columns outside are zeros."""
    K = 3 * block - 8
    a = torch.randn(M - 5, K).to(dtype)
    b = torch.randn(*((N - 3, K) if transposed else (K, N))).to(dtype)
    c = torch.zeros(M, N)
    with on_device(90) as gpu:
        tile_product_kernel[(1,)](
            TensorDescriptor.from_tensor(a, [M, block]),
            TensorDescriptor.from_tensor(b, [N, block] if transposed else [block, N]),
            c, K, M, N, block, transposed, num_warps=warps, num_stages=3,
        )  # fmt: skip
    exact = b.T if transposed else b
    assert_product(a, exact, c, "cp.async.bulk.tensor.2d", gpu, "tile_product_kernel")


# ---- layouts, as written in the PTX ISA ---------------------------------------------------------


def test_fragments_are_those_of_the_ptx_isa():
    """ "Matrix Fragments for mma.m16n8k16 with floating point type" and "... mma.m16n8k8" (tf32).

    groupID = lane / 4, threadID_in_group = lane % 4.
    """
    for lane in (0, 5, 31):
        group, thread = lane // 4, lane % 4
        # A, .bf16: row = groupID for a_i where i < 2 or 4 <= i < 6, else groupID + 8;
        # col = threadID_in_group * 2 + (i & 1), + 8 for i >= 4.
        row, column = fragment(16, 16, 2)
        for i in range(8):
            assert row[lane, i] == (group if i < 2 or 4 <= i < 6 else group + 8)
            assert column[lane, i] == thread * 2 + (i & 1) + (8 if i >= 4 else 0)
        # B, .bf16: row (K) = threadID_in_group * 2 + (i & 1), + 8 for i >= 2; col = groupID.
        row, column = fragment(8, 16, 2)
        for i in range(4):
            assert column[lane, i] == thread * 2 + (i & 1) + (8 if i >= 2 else 0)
            assert row[lane, i] == group
        # C: row = groupID for c0 and c1, groupID + 8 for c2 and c3;
        # col = threadID_in_group * 2 + (i & 1).
        row, column = fragment(16, 8, 8)
        for i in range(4):
            assert row[lane, i] == (group if i < 2 else group + 8)
            assert column[lane, i] == thread * 2 + (i & 1)
        # A, .tf32 (m16n8k8): row = groupID for a0 and a2, else + 8; col = thread, + 4 for a2, a3.
        row, column = fragment(16, 8, 4)
        for i in range(4):
            assert row[lane, i] == (group if i in (0, 2) else group + 8)
            assert column[lane, i] == (thread if i < 2 else thread + 4)


def test_accumulators_of_a_warp_group_are_those_of_the_ptx_isa():
    """ "Register Fragments for wgmma.mma_async.m64nNk16", D: of a warp, for d_i of lane t:
    row = 16 * warp + t / 4 + 8 * ((i / 2) % 2), column = 8 * (i / 4) + 2 * (t % 4) + i % 2."""
    row, column = fragment(16, 256, 8)
    for lane in (0, 6, 31):
        for i in (0, 1, 2, 3, 4, 7, 100, 127):
            assert row[lane, i] == lane // 4 + 8 * (i // 2 % 2)
            assert column[lane, i] == 8 * (i // 4) + 2 * (lane % 4) + i % 2


@pytest.mark.parametrize(("mode", "period"), [(1, 1024), (2, 512), (3, 256)])
def test_swizzles_exchange_units_of_16_bytes(mode, period):
    """PTX ISA, "Swizzling Modes": 128 bytes, row r's unit u stands at u ^ r; 64 bytes, rows in
    pairs, at u ^ (r / 2); 32 bytes, at u ^ (r / 4)."""
    wide = ATOM[mode]
    for r in range(8):
        for unit in range(wide // 16):
            linear = r * wide + unit * 16
            per_row = {1: r, 2: r // 2, 3: r // 4}[mode] % (wide // 16)
            assert swizzled(np.array(linear), mode) == r * wide + (unit ^ per_row) * 16
    every = swizzled(np.arange(0, period, 16), mode)
    assert sorted(every) == list(range(0, period, 16))


def test_descriptors_are_read_as_the_ptx_isa_packs_them():
    """ "Matrix Descriptor Format": start 0-13, leading 16-29, stride 32-45, base 49-51, mode 62."""
    bits = 0x40 | 0x1 << 16 | 0x40 << 32 | 1 << 62
    assert Descriptor.read(bits) == (0x400, 16, 1024, 0, 1)


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
