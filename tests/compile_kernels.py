"""Compile every kernel for the architecture named on the command line; no GPU needed."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedce.backends import configs
from fusedce.kernels.compact import compact_kernel
from fusedce.kernels.forward import forward_kernel
from fusedce.kernels.grad_rows import grad_rows_kernel
from fusedce.kernels.scale import scale_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 65536}
INTEGERS = ("N", "H", "V", "stride_", "tiles_per_split", "splits", "ignore_index", "n", "n_tickets")
POINTERS = {
    "labels": "*i64", "rows": "*i32", "count": "*i32", "n_valid": "*i64", "tickets": "*i32",
    "block_losses": "*fp64", "partials": "*fp32", "lse": "*fp32", "loss_sum": "*fp32",
    "losses": "*fp32", "logits": "*fp32", "g": "*fp32",
}  # fmt: skip


def compile_kernel(label, kernel, dtype, arch, constants, aligned=(), **options):
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in POINTERS:
            signature[name] = POINTERS[name]
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        elif name.startswith("stride_") or name in INTEGERS:
            signature[name] = "i32"
        else:
            signature[name] = f"*{dtype}"
    place = kernel.arg_names.index
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(place(k),): v for k, v in constants.items()},
        attrs={(place(k),): [["tt.divisibility", 16]] for k in aligned},
    )
    compiled = triton.compile(source, target=TARGETS[arch], options=options)
    shared = compiled.metadata.shared
    assert shared <= SHARED_LIMIT[arch], f"{label}: {shared} B of shared memory on {arch}"
    asm = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    used = [x for x in ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "mfma") if x in asm]
    print(f"{label} {arch}: shared {shared} B, {' '.join(used) or 'no matrix unit'}")


def main(arch):
    family = arch if arch in ("sm_80", "sm_90", "sm_100") else "other"
    for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        config = configs.FORWARD[family, size]
        for option in (False, True):
            constants = config._asdict() | {
                "HAS_BIAS": option, "HAS_SCALE": option, "HAS_SOFTCAP": option,
                "EVEN_H": not option, "INPUT_PRECISION": "ieee", "UPCAST": False,
            }  # fmt: skip
            options = {k: constants.pop(k) for k in ("num_warps", "num_stages")}
            aligned = ("hidden", "weight", "H", "stride_hn", "stride_wv", "partials")
            label = f"forward {dtype}" + (" with options" if option else "")
            compile_kernel(label, forward_kernel, dtype, arch, constants, aligned, **options)
            constants = {
                "HAS_BIAS": option, "HAS_SCALE": option, "HAS_SOFTCAP": option,
                "PACKED": size < 4, "BLOCK_V": configs.GRAD_ROWS_BLOCK_V,
            }  # fmt: skip
            warps = configs.GRAD_ROWS_WARPS
            compile_kernel(
                f"grad_rows {dtype}", grad_rows_kernel, dtype, arch, constants, num_warps=warps
            )
        block = {"BLOCK": configs.SCALE_BLOCK}
        compile_kernel(f"scale {dtype}", scale_kernel, dtype, arch, block, num_warps=8)
    compile_kernel(
        "compact int64", compact_kernel, "i64", arch, {"BLOCK_N": configs.COMPACT_BLOCK_N}
    )


if __name__ == "__main__":
    main(sys.argv[1])
