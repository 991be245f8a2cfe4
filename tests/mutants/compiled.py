"""Mutants of the Triton kernels that show only in what the compiler makes of them."""

from mutants import Mutant

FORWARD = "test_ptx_forward.py"
TRAINING = "test_ptx_training.py"
ORDERS = f"{FORWARD} -k order_of_ctas"
VALUES = f"{FORWARD} -k reference"
DIVERGENCE = "test_ptx_divergence.py -k values"
TILES = "test_ptx_tokens.py -k by_tiles_of"

MUTANTS = [
    Mutant(
        "compiled: rows past the last one are read",
        "row = tl.load(rows + offs_n, mask=mask_n, other=0).to(tl.int64)\n    # A bad",
        "row = tl.load(rows + offs_n).to(tl.int64)\n    # A bad",
        f"{FORWARD} -k wherever_it_stands",
    ),
    Mutant(
        "compiled: more tickets are cleared than there are",
        "tl.zeros((BLOCK_N,), dtype=tl.int32), mask=offs < n_tickets)",
        "tl.zeros((BLOCK_N,), dtype=tl.int32))",
        VALUES,
    ),
    Mutant(
        "compiled: a row block's ticket orders nothing",
        'atomic_add(tickets + 1 + block, 1, sem="acq_rel"',
        'atomic_add(tickets + 1 + block, 1, sem="relaxed"',
        ORDERS,
    ),
    Mutant(
        "compiled: the last ticket releases nothing",
        'atomic_add(tickets, 1, sem="acq_rel"',
        'atomic_add(tickets, 1, sem="acquire"',
        ORDERS,
    ),
    Mutant(
        "compiled: threads of a row disagree about its label's logit",
        """    products = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
    for start_h in range(0, H, BLOCK_H):
        mask_h = (start_h + offs_h < H)[None, :]
        h = tl.load(hidden_rows[:, None] + (start_h + offs_h)[None, :], mask=mask_h, other=0.0)
        w = tl.load(weight_rows[:, None] + (start_h + offs_h)[None, :], mask=mask_h, other=0.0)
        products += h.to(tl.float32) * w.to(tl.float32)
    z = tl.sum(products, axis=1)
""",
        """    z = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start_h in range(0, H, BLOCK_H):
        mask_h = (start_h + offs_h < H)[None, :]
        h = tl.load(hidden_rows[:, None] + (start_h + offs_h)[None, :], mask=mask_h, other=0.0)
        w = tl.load(weight_rows[:, None] + (start_h + offs_h)[None, :], mask=mask_h, other=0.0)
        z += tl.sum(h.to(tl.float32) * w.to(tl.float32), axis=1)
""",
        f"{FORWARD} -k wherever_it_stands",
    ),
    Mutant(
        "compiled: one GEMM of rows that are not aligned",
        "return blocks if whole and archs",
        "return blocks if archs",
        f"{TRAINING} -k not_aligned",
    ),
    Mutant(
        "compiled: rows of weight past V are read",
        "tl.minimum(start_v + tl.arange(0, BLOCK_V), V - 1)",
        "start_v + tl.arange(0, BLOCK_V)",
        VALUES,
    ),
    Mutant(
        "compiled: wide loads from addresses that are not aligned",
        "return x.data_ptr() % 16 == 0 and stride > 0",
        "return stride > 0",
        f"{FORWARD} -k odd_addresses",
    ),
    Mutant(
        "compiled: the end of a run is looked for past all entries",
        "tl.load(columns + tl.minimum(start, n - 1))",
        "tl.load(columns + start)",
        f"{TRAINING} -k likeliest",
    ),
    Mutant(
        "compiled: a block of the divergence's gradient is stored before all of it is read",
        'tl.where(inside, float("nan"), 0.0))\n            tl.debug_barrier()\n',
        'tl.where(inside, float("nan"), 0.0))\n',
        DIVERGENCE,
    ),
    Mutant(
        "compiled: both walks over a row's logits read past V",
        "    z = tl.load(products + offs, mask=mask, other=0.0)\n    b = None",
        "    z = tl.load(products + offs)\n    b = None",
        DIVERGENCE,
    ),
    Mutant(
        "compiled: a tile of the vocabulary is read past its width",
        "products += c * stride_pc\n    z = tl.load(products + offs_t, mask=mask_t, other=0.0)",
        "products += c * stride_pc\n    z = tl.load(products + offs_t)",
        TILES,
    ),
]
