"""The PTX interpreter: each family of instructions against numpy, and its errors."""

import numpy as np
import pytest
from ptx import grid  # noqa: F401  all forms
from ptx.assembly import run
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
        ("popc.b32 %r9, %r10;", U32, lambda a, b: np.array([bin(x).count("1") for x in a])),
        ("neg.s32 %r9, %r10;", I32, lambda a, b: -a),
        ("not.b32 %r9, %r10;", U32, lambda a, b: ~a),
        ("add.f32 %r9, %r10, %r11;", F32, lambda a, b: a + b),
        ("mul.f32 %r9, %r10, %r11;", F32, lambda a, b: a * b),
        ("div.full.f32 %r9, %r10, %r11;", F32, lambda a, b: a / b),
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


@pytest.mark.parametrize(
    ("line", "of", "to", "function"),
    [
        ("cvt.s64.s32 %rd9, %r10;", I32, I64, lambda a: a),
        ("cvt.u32.u64 %r9, %rd10;", np.uint64, U32, lambda a: a & np.uint64(0xFFFFFFFF)),
        ("cvt.u16.u32 %rs9, %r10;", U32, np.uint16, lambda a: a & U32(0xFFFF)),
        ("cvt.rn.f32.s32 %r9, %r10;", I32, F32, lambda a: a),
        ("cvt.f64.f32 %rd9, %r10;", F32, F64, lambda a: a),
        ("cvt.rn.f32.f64 %r9, %rd10;", F64, F32, lambda a: a),
        ("cvt.rn.f16.f32 %rs9, %r10;", F32, np.float16, lambda a: a),
        ("cvt.f32.f16 %r9, %rs10;", np.float16, F32, lambda a: a),
    ],
)  # fmt: skip
def test_conversions(line, of, to, function):
    a = lanes(of)
    with np.errstate(all="ignore"):
        wanted = np.asarray(function(a))
        same(compute(line, to, a), wanted.astype(to))


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


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("shfl.sync.bfly.b32 %r9, %r10, 5, 31, -1;", lambda i: i ^ 5),
        ("shfl.sync.idx.b32 %r9, %r10, 7, 31, -1;", lambda i: i * 0 + 7),
        ("shfl.sync.up.b32 %r9, %r10, 3, 0, -1;", lambda i: np.where(i < 3, i, i - 3)),
    ],
)
def test_shuffles(line, source):
    a = lanes(U32)
    same(compute(line, U32, a), a[source(np.arange(32))])


def test_warps_agree():
    a = lanes(I32)
    same(compute("redux.sync.add.s32 %r9, %r10, -1;", I32, a), np.full(32, a.sum(dtype=I32)))
    chosen = "elect.sync %r1|%p1, -1;\nselp.b32 %r9, 1, 0, %p1;"
    assert compute(chosen, U32, a).sum() == 1


def test_registers_are_packed_and_unpacked_from_the_lowest_bits():
    a = lanes(U32)
    line = "mov.b32 {%rs1, %rs2}, %r10;\nmov.b32 %r9, {%rs2, %rs1};"
    same(compute(line, U32, a), (a >> U32(16)) | (a << U32(16)))


def test_a_narrow_load_fills_a_wide_register():
    a = np.array([-1, 5] * 16, np.int16)
    body = """
    mul.wide.u32 %rd9, %r0, 2;
    add.s64 %rd9, %rd9, %rd1;
    ld.global.{} %r1, [%rd9];
    mul.wide.u32 %rd8, %r0, 4;
    add.s64 %rd8, %rd8, %rd0;
    st.global.b32 [%rd8], %r1;"""
    same(run(body.format("s16"), np.zeros(32, I32), a)[0], a)
    same(run(body.format("u16"), np.zeros(32, I32), a)[0], a.view(np.uint16))


def test_bytes_are_stored_from_registers_of_16_bits_and_constants():
    body = """
    cvt.u16.u32 %rs1, %r0;
    shl.b32 %r1, %r0, 1;
    st.shared.v2.b8 [%r1], {%rs1, 7};
    ld.shared.b16 %rs2, [%r1];
    mul.wide.u32 %rd9, %r0, 2;
    add.s64 %rd9, %rd9, %rd0;
    st.global.b16 [%rd9], %rs2;"""
    same(run(body, np.zeros(32, np.uint16))[0], np.arange(32) + 7 * 256)


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


def test_constants_of_floats_are_bits():
    same(compute("mov.b32 %r9, 0f3F800000;", F32), np.ones(32))


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
