"""A tile of logits: the matrix product, the pointwise steps after it, and their slope.

Exponentials are powers of two: ``exp(z) = 2 ** (z * LOG2E)``, and a running maximum is kept in
that unit, so that subtracting it costs nothing beside the multiplication.
"""

import triton
import triton.language as tl

# log2(e) as float32 has it, so that float64 code undoes exactly what float32 code did.
LOG2E: tl.constexpr = tl.constexpr(1.4426950216293335)
LIKELY: tl.constexpr = tl.constexpr(-0.69)  # log p that only one class can have


@triton.jit
def program_of_grid(pid, N, splits, BLOCK_N: tl.constexpr, GROUP_N: tl.constexpr):
    """``(row block, split of the vocabulary)`` of program ``pid``.

    Row blocks of a group run next to each other on the same split: its weights come from L2.
    """
    first_block = (pid // (GROUP_N * splits)) * GROUP_N
    group = tl.minimum(tl.cdiv(N, BLOCK_N) - first_block, GROUP_N)
    block = first_block + (pid % (GROUP_N * splits)) % group
    return block, (pid % (GROUP_N * splits)) // group


@triton.jit
def logits_tile(
    hidden_rows,  # (BLOCK_N,) pointers to the rows of hidden, all readable
    weight,  # (V, H)
    hidden_tiles,  # tensor descriptor of hidden with blocks (BLOCK_N, BLOCK_H), or None: by rows
    start_n,  # first row of the block, with hidden_tiles
    weight_tiles,  # tensor descriptor of weight with blocks (BLOCK_V, BLOCK_H): TMA, which pads
    # with zeros past V; or None
    bias,  # (V,) or None
    start_v,
    H,
    V,
    stride_wv,
    scale,
    softcap,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,  # divides H
    INPUT_PRECISION: tl.constexpr,  # "ieee" or "tf32": how fp32 inputs are multiplied
    UPCAST: tl.constexpr,  # multiply in fp32: the interpreter's tl.dot gets bf16 wrong
):
    """Logits of ``weight[start_v : start_v + BLOCK_V]`` in fp32, (BLOCK_N, BLOCK_V).

    Addresses come from the loop variable, not from pointers carried along: those would end the
    software pipeline wherever the compiler fuses this loop with the one around it. Columns past V
    are undefined.
    """
    offs_h = tl.arange(0, BLOCK_H)
    offs_v = tl.minimum(start_v + tl.arange(0, BLOCK_V), V - 1)  # reads stay in the matrix
    weight_rows = weight + offs_v.to(tl.int64) * stride_wv
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for start_h in range(0, H, BLOCK_H):
        if hidden_tiles is not None:
            h = hidden_tiles.load([start_n, start_h])
        else:
            h = tl.load(hidden_rows[:, None] + (start_h + offs_h)[None, :])
        if weight_tiles is not None:
            w = weight_tiles.load([start_v, start_h]).T
        else:
            w = tl.load(weight_rows[None, :] + (start_h + offs_h)[:, None])
        if UPCAST:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(h, w, acc, input_precision=INPUT_PRECISION)
    b = None
    if bias is not None:
        b = tl.load(bias + offs_v).to(tl.float32)[None, :]
    return finish_logits(acc, b, scale, softcap)


@triton.jit
def place_of_largest(x, axis: tl.constexpr):
    """Where along an axis the largest number stands, the first of equals; NaN counts as -inf.

    Of a row of NaN Triton's own argmax gives each thread a place of its own, past the last one too.
    """
    return tl.argmax(tl.where(x == x, x, float("-inf")), axis=axis)


@triton.jit
def others_of_tile(z, label, start_v, V, BLOCK_V: tl.constexpr):
    """A tile of logits with -inf at the labels and past V.

    The labels come first: where the first use of a product stood inside the `if`, Triton would wait
    for its wgmma there alone, and ptxas would serialise all of them (warning C7514).
    """
    offs = tl.arange(0, BLOCK_V)
    z = tl.where(offs[None, :] == (label - start_v)[:, None], float("-inf"), z)
    if start_v + BLOCK_V > V:  # only the last tile pays for it
        z = tl.where((start_v + offs < V)[None, :], z, float("-inf"))
    return z


@triton.jit
def label_logits(
    hidden_rows,  # (BLOCK_N,) pointers
    weight,  # (V, H)
    bias,  # (V,) or None
    label,  # (BLOCK_N,) int32, -1 for bad ones
    H,
    stride_wv,
    scale,
    softcap,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The labels' logits in fp32, (BLOCK_N,): a dot product a row; NaN for bad labels.

    Products are added up column by column, and across the row at the end. Where a thread holds one
    product of a row, a sum over products as they come would be contracted to fused multiply-adds,
    and the threads of a row would differ in the last bit.
    """
    known = tl.maximum(label, 0).to(tl.int64)
    weight_rows = weight + known * stride_wv
    offs_h = tl.arange(0, BLOCK_H)
    products = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
    for start_h in range(0, H, BLOCK_H):
        mask_h = (start_h + offs_h < H)[None, :]
        h = tl.load(hidden_rows[:, None] + (start_h + offs_h)[None, :], mask=mask_h, other=0.0)
        w = tl.load(weight_rows[:, None] + (start_h + offs_h)[None, :], mask=mask_h, other=0.0)
        products += h.to(tl.float32) * w.to(tl.float32)
    z = tl.sum(products, axis=1)
    b = None
    if bias is not None:
        b = tl.load(bias + known).to(tl.float32)
    return tl.where(label < 0, float("nan"), finish_logits(z, b, scale, softcap))


@triton.jit
def tanh(x):
    """tanh to a few units of fp32's last place: odd Taylor terms near 0, exponentials elsewhere.

    ``1 - 2 / (1 + exp(2|x|))`` alone would cancel near 0, where most soft-capped logits are.
    libdevice's tanh has a name of its own on each of CUDA, HIP and XPU, none in the interpreter,
    and two branches, of which a warp often executes both; this code has none.
    """
    a = tl.abs(x)
    x2 = x * x
    # x - x^3/3 + 2x^5/15 - 17x^7/315 + 62x^9/2835 - ...: below 2^-25 relative for |x| < 0.3
    near = -1382.0 / 155925.0
    near = near * x2 + 62.0 / 2835.0
    near = near * x2 - 17.0 / 315.0
    near = near * x2 + 2.0 / 15.0
    near = near * x2 - 1.0 / 3.0
    near = a + a * x2 * near
    e = tl.exp2(-2.885390081777927 * a)  # exp(-2|x|), never overflows
    far = (1.0 - e) / (1.0 + e)
    t = tl.where(a < 0.3, near, far)
    return tl.where(x < 0, -t, t)


@triton.jit
def finish_logits(z, bias, scale, softcap):
    """Add the bias to raw products ``z``, scale and cap them; ``None`` leaves a step out."""
    if bias is not None:
        z += bias
    if scale is not None:
        z *= scale
    if softcap is not None:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def logits_slope(z, scale, softcap):
    """Derivative of finished logits ``z`` by the raw products they were made from."""
    slope = tl.full(z.shape, 1.0, dtype=tl.float32)
    if softcap is not None:
        ratio = z / softcap
        slope = 1.0 - ratio * ratio
    if scale is not None:
        slope *= scale
    return slope


@triton.jit
def finite_max(m):
    """``m``, or 0 where it is -inf: ``exp(-inf - 0)`` is 0 where ``exp(-inf + inf)`` is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def exp(z, reference):
    """``exp(z) / 2 ** reference``: one fused multiply-add and the hardware's exp2."""
    # By name: where a compiler chose to fuse, two kernels might round the same logit differently.
    return tl.exp2(tl.fma(z, tl.full(z.shape, LOG2E, tl.float32), -reference))


@triton.jit
def block_reference(m, z_label):
    """The reference ``r`` of a block: its exponentials are stored divided by ``2 ** r``.

    Without ``z_label``, ``r`` is the block's maximum ``m`` times log2(e). With it, ``r`` is a whole
    number, so that a change of reference is exact: the label's logit rounded down, the same for all
    blocks of a row; if that is NaN or -inf, or more than 30 below, the maximum rounded up.
    """
    own = finite_max(m) * LOG2E
    if z_label is None:
        return own
    else:
        own = tl.ceil(own)  # up, so that no exponential relative to it exceeds 1
        label = tl.floor(z_label * LOG2E)
        # Relative to the label's they reach 2^31. Float32 then has room for a token's weight of
        # 1e20 beside them, and for one of 1e-20 (at 2^60 that lost 3% of a row).
        return tl.where(own - label <= 30.0, label, own)


@triton.jit
def token_loss(top, others, z_label):
    """``log(1 + exp(L - z_label))`` in fp64, L the log-sum-exp of the logits but the label's.

    ``others * 2 ** top`` is the sum of their exponentials. The label is left out because
    ``1 + (1 - p)`` in fp32 would round most of the loss away where p -> 1.
    """
    z_label = z_label.to(tl.float64)
    gap = top.to(tl.float64) / LOG2E + tl.log(others.to(tl.float64)) - z_label
    unbounded = tl.maximum(z_label, others.to(tl.float64)) == float("inf")
    return tl.where(unbounded, float("nan"), softplus(gap))  # inf - inf


@triton.jit
def softplus(gap):
    """``log(1 + exp(gap))`` of fp64."""
    return log1p(tl.exp(-tl.abs(gap))) + tl.maximum(gap, 0.0)


@triton.jit
def log1p(x):
    """``log(1 + x)`` for fp64 ``x >= 0``, exact for small ones (Kahan): the rounding of ``1 + x``
    cancels. libdevice's log1p is missing in the interpreter and on HIP."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))
