"""Mutants of the Triton kernels."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
OPTIONS = "test_options.py"
TRITON = "test_kernels.py -k odd_shapes"

MUTANTS = [
    Mutant(
        "forward: columns past V count",
        'mask_v[None, :] & (offs_v[None, :] != label[:, None]), z, float("-inf"))\n        m_new',
        '(offs_v[None, :] != label[:, None]), z, float("-inf"))\n        m_new',
        TRITON,
    ),
    Mutant(
        "forward: the label's logit counts twice",
        'mask_v[None, :] & (offs_v[None, :] != label[:, None]), z, float("-inf"))\n        m_new',
        'mask_v[None, :], z, float("-inf"))\n        m_new',
        TRITON,
    ),
    Mutant(
        "forward: no rescaling by the new maximum",
        "s = s * tl.exp2(m - m_safe) +",
        "s = s +",
        TRITON,
    ),
    Mutant(
        "forward: splits merged without their maxima",
        "s += s_i * tl.exp2(m_i - m_safe)",
        "s += s_i",
        TRITON,
    ),
    Mutant("forward: the first ticket merges", "ticket != splits - 1", "ticket != 0", TRITON),
    Mutant(
        "forward: label logit without its bias",
        "b = tl.load(bias + at).to(tl.float32) if HAS_BIAS else 0.0",
        "b = 0.0",
        TRITON,
    ),
    Mutant(
        "forward: the tail of H is dropped",
        "range(0, H, BLOCK_H):\n        mask_h = offs_h < H - start_h\n        if",
        "range(0, H - BLOCK_H + 1, BLOCK_H):\n        mask_h = offs_h < H - start_h\n        if",
        TRITON,
    ),
    Mutant(
        "forward: bits depend on the batch",
        "token_loss(m_safe, s,",
        "token_loss(m_safe, s * tl.where(n_valid > 1, 1.0000002, 1.0),",
        "test_forward.py -k same_bits",
    ),
    Mutant(
        "forward: ignored rows add up",
        "tl.where(mask_n, loss, 0.0)",
        "tl.where(mask_n, loss, 1.0)",
        TRITON,
    ),
    Mutant(
        "rows: softmax without the one-hot",
        "g = tl.where(offs_v == label, rounded, g)",
        "g = g + 0.0",
        TRITON,
    ),
    Mutant(
        "rows: blocks merged without their maxima",
        "tl.sum(s * tl.exp2(m - m_safe), axis=0)",
        "tl.sum(s, axis=0)",
        TRITON,
    ),
    Mutant(
        "rows: block factor without its maximum",
        "tl.exp2(tl.load(maxima + block * C + c) - top) * inverse",
        "inverse",
        TRITON,
    ),
    Mutant(
        "rows: padding of a graph is trained",
        "if first + c >= tl.load(count):\n        tl.store(out, tl.zeros((BLOCK_V,), dtype=grads",
        "if first + c < 0:\n        tl.store(out, tl.zeros((BLOCK_V,), dtype=grads",
        "test_forward.py -k inside_a_graph",
    ),
    Mutant(
        "loss: rounded where p -> 1",
        "tl.log(1.0 + tl.exp(-tl.abs(gap)))",
        "tl.log((1.0 + tl.exp(-tl.abs(gap))).to(tl.float32)).to(tl.float64)",
        f"{CONTRACT} -k accuracy",
    ),
    Mutant("rows: slope left out", "g = e * slope", "g = e", TRITON),
    Mutant("compaction: ignored rows stay", "mask_n & (y != ignore_index)", "mask_n", TRITON),
    Mutant(
        "compaction: label V passes",
        "valid & ((y < 0) | (y >= V))",
        "valid & ((y < 0) | (y > V))",
        "test_kernels.py -k bad_label",
    ),
    Mutant(
        "scale kernel: never scales",
        "factor == 1.0",
        "factor == factor",
        "test_kernels.py -k scale",
    ),
    Mutant("tanh: one series coefficient", "2.0 / 15.0", "2.0 / 16.0", TRITON),
    Mutant(
        "options: weight 0 is not counted",
        "        found = counted",
        "        found = found",
        f"{OPTIONS} -k left_out",
    ),
    Mutant(
        "options: argmax of the first block",
        "tl.argmax(m, axis=0) * C",
        "0 * C",
        f"{OPTIONS} -k argmax",
    ),
    Mutant(
        "tokens: kernel's entropy without what lies below",
        "tl.where(t == 0.0, 0.0, m_safe - m_tile)",
        "tl.where(t == 0.0, 0.0, 0.0)",
        "test_logprobs.py -k vocabulary",
    ),
    Mutant(
        "tokens: gradient of the entropy in the kernel",
        "factor - tl.load(beta + c)",
        "factor + tl.load(beta + c)",
        "test_logprobs.py -k vocabulary",
    ),
    Mutant(
        "smoothing: its shift missing beside the label",
        "            else:\n                g += shift * AMPLIFY",
        "            else:\n                g += 0 * shift",
        "test_smoothing.py",
    ),
]
