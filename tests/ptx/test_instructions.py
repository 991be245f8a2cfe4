"""The PTX interpreter: each family of instructions against numpy, and its errors."""

import numpy as np
import pytest

from ptx import run
from ptx.decode import decode
from ptx.parse import NotUnderstood, parse

INTS = np.array([0, 1, -1, 7, -7, 31, 100, -100, 2**31 - 1, -(2**31), 12345, -54321] + [3] * 20,
                np.int32)  # fmt: skip
FLOATS = np.array([0.0, -0.0, 1.0, -1.5, 3e38, -3e38, 1e-40, np.inf, -np.inf, np.nan, 0.1, 2.5]
                  + [0.7] * 20, np.float32)  # fmt: skip


def lanes(dtype, seed=0):
    """32 values of a kind, edges among them."""
    rng = np.random.default_rng(seed)
    values = FLOATS if np.dtype(dtype).kind == "f" else INTS
    return rng.permutation(values).astype(dtype)


REGISTERS = {2: "rs", 4: "r", 8: "rd"}


def compute(line, result, *arrays):
    """32 lanes of register 9 after ``line``, given those of registers 10, 11, ..."""
    out = np.zeros(32, result)
    body = []
    for i, x in enumerate(arrays):
        body += [
            f"mul.wide.u32 %rd{20 + i}, %r0, {x.itemsize};",
            f"add.s64 %rd{20 + i}, %rd{20 + i}, %rd{i + 1};",
            f"ld.global.b{8 * x.itemsize} %{REGISTERS[x.itemsize]}{10 + i}, [%rd{20 + i}];",
        ]
    body += [
        line,
        f"mul.wide.u32 %rd30, %r0, {out.itemsize};",
        "add.s64 %rd30, %rd30, %rd0;",
        f"st.global.b{8 * out.itemsize} [%rd30], %{REGISTERS[out.itemsize]}9;",
    ]
    return run("\n".join(body), out, *arrays)[0]


def same(found, wanted):
    np.testing.assert_array_equal(found, wanted.astype(found.dtype))


def normal(x):
    """Subnormal float32 as 0."""
    return np.where(np.abs(x) < 2**-126, x * 0, x)


I32, U32, F32, F64, I64 = np.int32, np.uint32, np.float32, np.float64, np.int64


@pytest.mark.parametrize(
    ("line", "kind", "function"),
    [
        ("add.s32 %r9, %r10, %r11;", I32, lambda a, b: a + b),
        ("sub.s32 %r9, %r10, %r11;", I32, lambda a, b: a - b),
        ("mul.lo.s32 %r9, %r10, %r11;", I32, lambda a, b: a * b),
        ("min.s32 %r9, %r10, %r11;", I32, np.minimum),
        ("max.u32 %r9, %r10, %r11;", U32, np.maximum),
        ("div.s32 %r9, %r10, %r11;", I32,
         lambda a, b: np.where(b == 0, -1, np.trunc(a / np.where(b == 0, 1, b).astype(F64)))),
        ("and.b32 %r9, %r10, %r11;", U32, lambda a, b: a & b),
        ("xor.b32 %r9, %r10, %r11;", U32, lambda a, b: a ^ b),
        ("shl.b32 %r9, %r10, 5;", U32, lambda a, b: a << U32(5)),
        ("shl.b32 %r9, %r10, 32;", U32, lambda a, b: a * 0),
        ("shr.s32 %r9, %r10, 40;", I32, lambda a, b: a >> 31),
        ("shr.u32 %r9, %r10, 3;", U32, lambda a, b: a >> U32(3)),
        ("bfe.u32 %r9, %r10, 4, 14;", U32, lambda a, b: (a >> U32(4)) & U32(0x3FFF)),
        ("bfe.s32 %r9, %r10, 0, 8;", I32, lambda a, b: a.astype(np.int8)),
        ("prmt.b32 %r9, %r10, %r11, 0x3475U;", U32, lambda a, b:
         (b >> 8 & 255) | (b >> 24) << 8 | (b & 255) << 16 | (a >> 24) << 24),
        ("popc.b32 %r9, %r10;", U32, lambda a, b: np.array([bin(x).count("1") for x in a])),
        ("neg.s32 %r9, %r10;", I32, lambda a, b: -a),
        ("not.b32 %r9, %r10;", U32, lambda a, b: ~a),
        ("add.f32 %r9, %r10, %r11;", F32, lambda a, b: a + b),
        ("mul.f32 %r9, %r10, %r11;", F32, lambda a, b: a * b),
        ("div.full.f32 %r9, %r10, %r11;", F32, lambda a, b: a / b),
        ("div.rn.ftz.f32 %r9, %r10, %r11;", F32, lambda a, b: normal(normal(a) / normal(b))),
        ("min.f32 %r9, %r10, %r11;", F32, np.fmin),
        ("max.NaN.f32 %r9, %r10, %r11;", F32, np.maximum),
        ("fma.rn.f32 %r9, %r10, %r11, %r10;", F32,
         lambda a, b: a.astype(np.longdouble) * b + a),
        ("abs.f32 %r9, %r10;", F32, lambda a, b: np.abs(a)),
        ("ex2.approx.ftz.f32 %r9, %r10;", F32,
         lambda a, b: np.exp2(np.where(np.abs(a) < 2**-126, 0, a).astype(F64))),
        ("cvt.rpi.ftz.f32.f32 %r9, %r10;", F32,
         lambda a, b: np.ceil(np.where(np.abs(a) < 2**-126, a * 0, a))),
        ("add.f64 %rd9, %rd10, %rd11;", F64, lambda a, b: a + b),
        ("div.rn.f64 %rd9, %rd10, %rd11;", F64, lambda a, b: a / b),
        ("mad.lo.s64 %rd9, %rd10, %rd11, %rd10;", I64, lambda a, b: a * b + a),
    ],
)  # fmt: skip
def test_arithmetic(line, kind, function):
    a, b = lanes(kind, 1), lanes(kind, 2)
    with np.errstate(all="ignore"):
        same(compute(line, kind, a, b), np.asarray(function(a, b)).astype(kind))


def test_bf16_is_rounded_to_nearest_even_as_torch_does():
    import torch

    rng = np.random.default_rng(0)
    a = rng.standard_normal(32).astype(F32)
    a[:3] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf  # two ties
    wanted = torch.from_numpy(a).bfloat16().view(torch.uint16).numpy()
    same(compute("cvt.rn.bf16.f32 %rs9, %r10;", np.uint16, a), wanted)
    same(compute("cvt.f32.bf16 %r9, %rs10;", F32, wanted),
         torch.from_numpy(wanted.copy()).view(torch.bfloat16).float().numpy())  # fmt: skip
    both = compute("cvt.rn.bf16x2.f32 %r9, %r10, %r11;", U32, a, a[::-1].copy())
    same(both, (wanted.astype(U32) << U32(16)) | wanted[::-1])


@pytest.mark.parametrize("relation", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("unordered", [False, True])
def test_comparisons_with_nan(relation, unordered):
    a, b = lanes(F32, 1), lanes(F32, 2)
    line = (
        f"setp.{relation}{'u' if unordered else ''}.f32 %p1, %r10, %r11;\nselp.b32 %r9, 1, 0, %p1;"
    )
    nan = np.isnan(a) | np.isnan(b)
    of = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
          "gt": np.greater, "ge": np.greater_equal}  # fmt: skip
    wanted = of[relation](a, b)
    same(compute(line, U32, a, b), wanted | nan if unordered else wanted & ~nan)


def test_lanes_part_at_a_branch_and_meet_again():
    """Lane i goes round its loop i times."""
    body = """
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
$AGAIN:
    setp.ge.u32 %p1, %r1, %r0;
    @%p1 bra $DONE;
    add.s32 %r2, %r2, %r1;
    add.s32 %r1, %r1, 1;
    bra.uni $AGAIN;
$DONE:
    mul.wide.u32 %rd1, %r0, 4;
    add.s64 %rd1, %rd1, %rd0;
    st.global.b32 [%rd1], %r2;"""
    i = np.arange(32)
    same(run(body, np.zeros(32, U32))[0], i * (i - 1) // 2)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("add.sat.s32 %r1, %r2, %r3;", "0 forms of add.sat.s32"),
        ("add.s32 %r1, %r2;", "2 operands"),
        ("add.s32 %rd1, %r2, %r3;", "%rd1 holds uint64"),
        ("add.s32 %r1, %r2, %nothing;", "no register %nothing"),
        ("bar.sync 1;", "a barrier of a part of the CTA"),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 0x1c1f, -1;", "segments of a warp"),
        ("ld.global.nc.b32 %r1, [%rd1];", "0 forms of ld.global.nc.b32"),
        ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r2}, {%r3}, {%r4};", "0 forms"),
        ("bra $NOWHERE;", "no label"),
        (".shared .b32 x;", ".shared .b32 x"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_an_error_with_its_line(line, why):
    with pytest.raises(NotUnderstood, match=r"line \d+") as error:
        run(line, np.zeros(1, U32))
    assert why in str(error.value)


def test_text_without_a_kernel_is_refused():
    with pytest.raises(NotUnderstood, match="no kernel"):
        decode(parse(".version 8.7"))
