"""``x *= g`` in place with a factor on the device, untouched when the factor is 1."""

import triton
import triton.language as tl


@triton.jit
def scale_kernel(
    x,  # (n,) any floating dtype, in place
    g,  # () fp32
    n,
    BLOCK: tl.constexpr,
):
    """A program takes one block after another: few of them have to find that the factor is 1."""
    factor = tl.load(g).to(tl.float32)
    if factor == 1.0:
        return
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, tl.cast(n, tl.int64), tl.num_programs(0).to(tl.int64) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < n
        value = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(x + offs, (value * factor).to(x.dtype.element_ty), mask=mask)
