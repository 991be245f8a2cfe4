"""A tile of logits: the matrix product, the pointwise steps after it, and their slope.

Exponentials are powers of two: ``exp(z) = 2 ** (z * LOG2E)``, and a running maximum is kept in
that unit, so that subtracting it costs nothing beside the multiplication.
"""

import triton
import triton.language as tl

# log2(e) as float32 has it, so that float64 code undoes exactly what float32 code did.
LOG2E: tl.constexpr = tl.constexpr(1.4426950216293335)


@triton.jit
def logits_tile(
    hidden_rows,  # (BLOCK_N,) pointers to the rows of hidden, all readable
    weight,  # (V, H)
    weight_tiles,  # tensor descriptor of weight with blocks (BLOCK_V, BLOCK_H), if DESCRIPTOR
    start_v,
    H,
    V,
    stride_wv,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EVEN_H: tl.constexpr,  # H is a multiple of BLOCK_H
    DESCRIPTOR: tl.constexpr,  # read weight by TMA, which pads with zeros past V and H
    INPUT_PRECISION: tl.constexpr,  # "ieee" or "tf32": how fp32 inputs are multiplied
    UPCAST: tl.constexpr,  # multiply in fp32: the interpreter's tl.dot gets bf16 wrong
):
    """``hidden_rows @ weight[start_v : start_v + BLOCK_V].T`` in fp32, (BLOCK_N, BLOCK_V)."""
    offs_h = tl.arange(0, BLOCK_H)
    h_ptrs = hidden_rows[:, None] + offs_h[None, :]
    offs_v = tl.minimum(start_v + tl.arange(0, BLOCK_V), V - 1)  # reads stay in the matrix
    w_ptrs = weight + offs_v.to(tl.int64)[None, :] * stride_wv + offs_h[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for start_h in range(0, H, BLOCK_H):
        mask_h = offs_h < H - start_h
        if EVEN_H:
            h = tl.load(h_ptrs)
        else:
            h = tl.load(h_ptrs, mask=mask_h[None, :], other=0.0)
        if DESCRIPTOR:
            w = weight_tiles.load([start_v, start_h]).T
        elif EVEN_H:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=mask_h[:, None], other=0.0)
        if UPCAST:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(h, w, acc, input_precision=INPUT_PRECISION)
        h_ptrs += BLOCK_H
        w_ptrs += BLOCK_H
    return acc


@triton.jit
def label_products(
    hidden_rows,  # (BLOCK_N,) pointers
    weight_rows,  # (BLOCK_N,) pointers to the rows of weight that belong to the labels
    H,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """``sum(hidden_rows * weight_rows, axis=1)`` in fp32, (BLOCK_N,)."""
    offs_h = tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start_h in range(0, H, BLOCK_H):
        mask_h = (offs_h < H - start_h)[None, :]
        h = tl.load(hidden_rows[:, None] + (start_h + offs_h)[None, :], mask=mask_h, other=0.0)
        w = tl.load(weight_rows[:, None] + (start_h + offs_h)[None, :], mask=mask_h, other=0.0)
        acc += tl.sum(h.to(tl.float32) * w.to(tl.float32), axis=1)
    return acc


@triton.jit
def tanh(x):
    """tanh to a few units of fp32's last place: odd Taylor terms near 0, exponentials elsewhere.

    ``1 - 2 / (1 + exp(2|x|))`` alone would cancel near 0, where most soft-capped logits are.
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
def finish_logits(
    z,
    bias,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Scale and cap raw products ``z``; ``bias`` is already broadcastable to them."""
    if HAS_BIAS:
        z += bias
    if HAS_SCALE:
        z *= scale
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def logits_slope(z, scale, softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Derivative of a finished logit ``z`` by the raw product it was made from."""
    slope = tl.full(z.shape, 1.0, dtype=tl.float32)
    if HAS_SOFTCAP:
        ratio = z / softcap
        slope = 1.0 - ratio * ratio
    if HAS_SCALE:
        slope *= scale
    return slope


@triton.jit
def finite_max(m):
    """``m``, or 0 where it is -inf: ``exp(-inf - 0)`` is 0 where ``exp(-inf + inf)`` is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def exp(z, reference):
    """``exp(z) / 2 ** reference``: one fused multiply-add and the hardware's exp2."""
    return tl.exp2(tl.fma(z, tl.full(z.shape, LOG2E, tl.float32), -reference))


@triton.jit
def token_loss(top, others, z_label):
    """``log(1 + exp(L - z_label))`` in fp64, L the log-sum-exp of the logits but the label's.

    ``others * 2 ** top`` is the sum of their exponentials. The label is left out because
    ``1 + (1 - p)`` in fp32 would round most of the loss away where p -> 1.
    """
    z_label = z_label.to(tl.float64)
    gap = top.to(tl.float64) / LOG2E + tl.log(others.to(tl.float64)) - z_label
    loss = tl.log(1.0 + tl.exp(-tl.abs(gap)))
    loss = tl.where(gap > 0, gap + loss, loss)
    return tl.where(z_label == float("inf"), float("nan"), loss)  # inf - inf
