"""Each hazard of a CTA that the PTX interpreter looks for is found where planted, not where mended.

Those between CTAs are planted in compiled code: tests/compiled/test_breakages.py.
"""

import numpy as np
import pytest

from ptx import Fault, TensorMap, run

U32 = np.uint32
X = np.arange(64, dtype=U32)
AT = "mul.wide.u32 %rd9, %r0, 4;\nadd.s64 %rd9, %rd9, %rd0;\n"  # %rd9: this thread's word
SHARED_AT = "shl.b32 %r1, %r0, 2;\n"  # %r1: the same in shared memory


def fault(body, *tensors, **how):
    """First line of the fault that ``body`` raises."""
    with pytest.raises(Fault) as error:
        run(body, *tensors, **how)
    assert "PTX line" in str(error.value)
    return str(error.value).splitlines()[0]


# ---- global and shared memory, asynchronous copies ----------------------------------------------

WRITE, READ = AT + "st.global.b32 [%rd9], %r0;\n", AT + "ld.global.b32 %r3, [%rd9];\n"
OTHER = "xor.b32 %r2, %r0, 32;\nmul.wide.u32 %rd8, %r2, 4;\nadd.s64 %rd8, %rd8, %rd0;\n"
STORE = SHARED_AT + "st.shared.b32 [%r1], %r0;\n"
READ_OTHER = "xor.b32 %r2, %r1, 128;\nld.shared.b32 %r3, [%r2];\n"
AGAIN = "cp.async.ca.shared.global [%r1], [%rd9], 4;\ncp.async.commit_group;\n"
COPY, WAIT = SHARED_AT + AT + AGAIN, "cp.async.wait_group 0;\n"
FAULTS = [
    ("out of bounds", AT + "st.global.b32 [%rd9+-4], %r2;", {}),
    ("out of bounds", AT + "ld.global.b32 %r2, [%rd9+4];", {}),
    (None, AT + "setp.lt.u32 %p1, %r0, 31;\n@%p1 ld.global.b32 %r2, [%rd9+4];", {}),
    ("out of the 64 bytes", STORE, {"shared": 64}),
    ("misaligned", AT + "ld.global.b64 %rd10, [%rd9];", {}),
    ("misaligned", AT + "ld.global.b32 %r2, [%rd9+2];", {}),
    ("misaligned", SHARED_AT + "st.shared.v2.b32 [%r1], {%r0, %r0};", {}),
    ("different values", "st.global.b32 [%rd0], %r0;", {}),
    ("different values", "mov.b32 %r1, 0;\nst.shared.b32 [%r1], %r0;", {}),
    (None, "st.global.b32 [%rd0], 7;", {}),
    ("never written", SHARED_AT + "ld.shared.b32 %r2, [%r1];", {}),
    ("part of a warp", "setp.lt.u32 %p1, %r0, 16;\n@%p1 bar.sync 0;", {}),
    ("another copy is on its way", COPY + AGAIN, {}),
    # One warp may write a value that all warps have read before.
    (None, "ld.global.b32 %r3, [%rd0];\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 st.global.b32 [%rd0], %r3;",
     {"threads": 64}),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "body", "how"), FAULTS)
def test_faults_of_accesses(seen, body, how):
    x = X[: how.get("threads", 32)]
    if seen is None:
        run(body, x, **how)
    else:
        assert seen in fault(body, x, **how)


RACES = [  # where a barrier makes it right
    ("race in global memory", WRITE + "{}" + OTHER + "ld.global.b32 %r3, [%rd8];"),
    ("another warp read", READ + "{}" + OTHER + "st.global.b32 [%rd8], %r3;"),
    ("read of what another warp wrote", STORE + "{}" + READ_OTHER),
    ("another warp read", STORE + "bar.sync 0;\n" + READ_OTHER + "{}st.shared.b32 [%r1], %r3;"),
    ("write over what another warp wrote",
     STORE + "xor.b32 %r2, %r1, 128;\n{}st.shared.b32 [%r2], %r0;"),
    ("another warp read",  # two warps, of which one writes
     "mov.b32 %r1, 0;\nst.shared.b32 [%r1], 5;\nbar.sync 0;\nld.shared.b32 %r2, [%r1];\n"
     "{}setp.ge.u32 %p1, %r0, 32;\n@%p1 st.shared.b32 [%r1], 6;"),
    ("another warp read", STORE + "bar.sync 0;\n" + READ_OTHER + AT + "{}" + AGAIN),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "body"), RACES)
def test_races_of_warps(seen, body):
    assert seen in fault(body.format(""), X, threads=64)
    run(body.format("bar.sync 0;\n"), X, threads=64)


@pytest.mark.parametrize("timing", ["late", "early", "random"])
def test_a_copy_is_read_after_its_wait_and_by_others_after_a_barrier(timing):
    read = "ld.shared.b32 %r2, [%r1];\n"
    assert "still fills" in fault(COPY + read, X, timing=timing)
    assert "still fills" in fault(COPY + "cp.async.wait_group 1;\n" + read, X, timing=timing)
    run(COPY + WAIT + read, X, timing=timing)
    assert "another warp wrote" in fault(COPY + WAIT + READ_OTHER, X, threads=64, timing=timing)
    run(COPY + WAIT + "bar.sync 0;\n" + READ_OTHER, X, threads=64, timing=timing)
    assert "out of bounds" in fault(COPY, X[:16], timing=timing)


# ---- TMA and mbarriers --------------------------------------------------------------------------

MATRIX = np.arange(16 * 32, dtype=np.uint16).reshape(16, 32)


def maps(places):
    """Handle 64: tiles of (8, 16) of MATRIX, not swizzled."""
    return {64: TensorMap(places[0], 0, 2, (8, 16), (16, 32), 64)}


TILE = """
    mov.b32 %r20, 1024;
    mov.b64 %rd10, 64;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r20], {count};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    {before}
    mov.b32 %r21, {column};
    mov.b32 %r22, 4;
    mov.b32 %r23, 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {bytes};
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [%r23], [%rd10, {{%r21, %r22}}], [%r20];
    {wait}
    shl.b32 %r1, %r0, 3;
    {read}
    bar.sync 0;
    {again}
    @%p1 mbarrier.inval.shared::cta.b64 [%r20];"""
TRY = """
{{
.reg .pred done;
again:
mbarrier.try_wait.parity.shared::cta.b64 done, [%r20], {parity};
@!done bra.uni again;
}}"""
GOOD = {"count": 1, "before": "", "column": 8, "bytes": 256, "wait": TRY.format(parity=0),
        "read": "ld.shared.b64 %rd11, [%r1];", "again": ""}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"wait": ""}, "still fills"),
        ({"wait": TRY.format(parity=1)}, "a phase of an mbarrier missed"),  # over from the start
        ({"bytes": 128}, "more bytes than its mbarrier expects"),
        ({"bytes": 512}, "never ends"),
        ({"count": 2}, "never ends"),
        ({"before": "shl.b32 %r1, %r0, 3;\nst.shared.b64 [%r1], %rd0;"}, "no fence.proxy.async"),
        ({"again": "@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;"}, "initialised twice"),
        ({"again": "@%p1 mbarrier.inval.shared::cta.b64 [%r20];"}, "was not initialised"),
        ({"again": "ld.shared.b64 %rd11, [%r20];"}, "an mbarrier by an ordinary instruction"),
        ({"again": TRY.format(parity=1)}, "never ends"),
    ],
)
def test_faults_of_mbarriers(change, seen):
    assert seen in fault(TILE.format(**GOOD | change), MATRIX, maps=maps)


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


# ---- wgmma --------------------------------------------------------------------------------------

ACCUMULATORS = ", ".join(f"%r{i}" for i in range(100, 104))
WGMMA = """
    shl.b32 %r1, %r0, 4;
    st.shared.v4.b32 [%r1], {{%r50, %r50, %r50, %r50}};
    st.shared.v4.b32 [%r1+2048], {{%r50, %r50, %r50, %r50}};
    st.shared.v4.b32 [%r1+4096], {{%r50, %r50, %r50, %r50}};
    st.shared.v4.b32 [%r1+6144], {{%r50, %r50, %r50, %r50}};
    {fence}
    {barrier}
    mov.b64 %rd10, 4611686293305294848;
    mov.pred %p1, -1;
    {order}
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {{{accumulators}}}, %rd10, %rd10, %p1, 1, 1, 0, 0;
    {commit}
    {between}
    {wait}
    {after}
    add.f32 %r60, %r100, %r101;"""
RIGHT = {"fence": "fence.proxy.async.shared::cta;", "barrier": "bar.sync 0;",
         "order": "wgmma.fence.sync.aligned;", "accumulators": ACCUMULATORS,
         "commit": "wgmma.commit_group.sync.aligned;", "between": "",
         "wait": "wgmma.wait_group.sync.aligned 0;", "after": ""}  # fmt: skip


def wgmma(**change):
    return WGMMA.format(**RIGHT | change)


@pytest.mark.parametrize("timing", ["late", "early", "random"])
@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({}, None),
        ({"fence": ""}, "no fence.proxy.async"),
        ({"barrier": ""}, "since the last barrier"),
        ({"order": ""}, None),  # nothing was written to the accumulators
        ({"order": "wgmma.fence.sync.aligned;\nmov.b32 %r100, 0;"}, "after the last wgmma.fence"),
        ({"wait": ""}, "C7514"),
        ({"wait": "wgmma.wait_group.sync.aligned 1;"}, "C7514"),
        ({"commit": ""}, "C7514"),
        ({"between": "mov.b32 %r61, %r102;"}, "C7514"),
        ({"between": "mov.b32 %r102, 0;"}, "C7514"),
        ({"between": "bar.sync 0;\nst.shared.b32 [%r1], %r0;"}, "wgmma still reads"),
        ({"after": "bar.sync 0;\nst.shared.b32 [%r1], %r0;"}, None),
        ({"between": "add.s64 %rd10, %rd10, %rd10;"}, None),
    ],
)  # fmt: skip
def test_faults_of_wgmma(change, seen, timing):
    body, how = wgmma(**change), {"threads": 128, "shared": 8192, "timing": timing}
    if seen is None:
        run(body, X, **how)
    else:
        assert seen in fault(body, X, **how)
