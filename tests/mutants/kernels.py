"""Mutants of the Triton kernels."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
OPTIONS = "test_options.py"
TRITON = "test_kernels.py -k odd_shapes"

MUTANTS = [
    Mutant(
        "forward: columns past V count",
        "if start_v + BLOCK_V > V:",
        "if start_v > V:",
        TRITON,
    ),
    Mutant(
        "forward: the label's logit counts twice",
        "(label - start_v)[:, None]",
        "(label - V)[:, None]",
        TRITON,
    ),
    Mutant(
        "forward: no rescaling by the new maximum",
        "return highest, s * tl.exp2(m - highest) + tl.sum",
        "return highest, s + tl.sum",
        "test_forward.py -k far_above",
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
        "b = tl.load(bias + known).to(tl.float32)",
        "b = 0.0 * tl.load(bias + known).to(tl.float32)",
        TRITON,
    ),
    Mutant(
        "walk: rows that are no multiple of a step stay",
        "return pad(x, (0, more)) if more else x.clone",
        "return x if more else x.clone",
        TRITON,
    ),
    Mutant(
        "forward: bits depend on the batch",
        "token_loss(m_safe, s,",
        "token_loss(m_safe, s * tl.where(n > 1, 1.0000002, 1.0),",
        "test_forward.py -k same_bits",
    ),
    Mutant(
        "forward: the log-sum-exp beside +inf is the loss's NaN",
        "total = tl.where(loss == loss, (z + loss).to(tl.float32), infinite)",
        "total = (z + loss).to(tl.float32)",
        "backends/triton/test_forward.py -k infinite",
    ),
    Mutant(
        "forward: a reference of +inf",
        "highest = tl.minimum(highest, HIGHEST)",
        "highest = tl.minimum(highest, 2 * HIGHEST)",
        "backends/triton/test_forward.py -k infinite",
    ),
    Mutant(
        "forward: a reference for empty tiles that other logits lie below",
        "tl.constexpr(-1e30)",
        "tl.constexpr(0.0)",
        "test_forward.py -k far_above",
    ),
    Mutant(
        "forward: ignored rows add up",
        "tl.where(mask_n, loss, 0.0)",
        "tl.where(mask_n, loss, 1.0)",
        TRITON,
    ),
    Mutant(
        "rows: softmax without the one-hot",
        "tl.store(entries + c, g_label)",
        "tl.store(entries + c, g_label + 1.0)",
        TRITON,
    ),
    Mutant(
        "rows: blocks merged without their references",
        "tl.sum(s * tl.exp2(references - top), axis=0)",
        "tl.sum(s, axis=0)",
        TRITON,
    ),
    Mutant(
        "rows: factor without the row's reference",
        "to_p = tl.exp2(reference - top) * inverse",
        "to_p = inverse",
        TRITON,
    ),
    Mutant(
        "rows: padding of a graph counts",
        "tl.store(losses + c, 0.0)",
        "tl.store(losses + c, 1.0)",
        "test_training.py -k inside_a_graph",
    ),
    Mutant(
        "loss: rounded where p -> 1",
        "tl.log(1.0 + tl.exp(-tl.abs(gap)))",
        "tl.log((1.0 + tl.exp(-tl.abs(gap))).to(tl.float32)).to(tl.float64)",
        f"{CONTRACT} -k as_exact_as",
    ),
    Mutant(
        "rows: slope left out",
        "g = e * slope\n    if AMPLIFY != 1.0:\n        g *= AMPLIFY\n    tl.store",
        "g = e\n    if AMPLIFY != 1.0:\n        g *= AMPLIFY\n    tl.store",
        TRITON,
    ),
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
        "best + tl.argmax(m, axis=0) * stride_row + c",
        "best + c",
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
    Mutant(
        "graph: a size that differs inside is specialised on",
        '"first_block", "most",\n',
        '"first_block",\n',
        "test_specialization.py -k few_rows",
    ),
    Mutant(
        "rows: the padding of a tile counts",
        "z = tl.where((offs_t < T) & (offs_t != at), z",
        "z = tl.where(offs_t != at, z",
        TRITON,
    ),
    Mutant(
        "one GEMM: relative to something else than the label",
        "own = tl.load(z_label + row)",
        "own = tl.load(z_label + row) + 1.0",
        "test_exponentials.py -k cublas",
    ),
    Mutant(
        "references: a block far above the label overflows",
        "own - label <= 30.0",
        "own - label <= 1e30",
        "backends/triton/test_training.py -k far_above",
    ),
    Mutant(
        "references: a block with no other class has a say",
        'tl.where(empty, float("-inf"), block_reference(m, own))',
        "block_reference(m, own)",
        "backends/triton/test_training.py -k no_say",
    ),
    Mutant(
        "rows: blocks of other references stay as they are",
        "tl.where(lowest < reference, width, 0)",
        "tl.where(lowest < reference, 0, 0)",
        "backends/triton/test_training.py -k far_above",
    ),
    Mutant(
        "rows: hidden states without the rows' factors",
        "(h * factor).to(scaled",
        "h.to(scaled",
        TRITON,
    ),
    Mutant(
        "hidden_grad: every entry is the first",
        "g += tl.load(entries + entry * stride_row + c) * w",
        "g += tl.load(entries + c) * w",
        "test_several_classes.py -k triton",
    ),
    Mutant(
        "launch: a tile's place is one Triton compiles anew for",
        '"best", "first", "first_block", "most",',
        '"best", "most",',
        "backends/triton/test_specialization.py -k one_compilation",
    ),
    Mutant(
        "softmax_grad: argmax at the chunk's row, not at the batch's",
        "tl.store(argmax + tl.load(rows + first + c), index",
        "tl.store(argmax + first + c, index",
        "loss/test_options.py -k argmax",
    ),
    Mutant(
        "label_grad: every entry of a run adds the rest of it",
        "if goes_on | (column < 0)",
        "if (column < 0)",
        "test_input_grads.py",
    ),
    Mutant(
        "label_grad: a run ends with its first block",
        "more = (start < n) & (tl.load",
        "more = (start < 0) & (tl.load",
        "test_input_grads.py",
    ),
    Mutant(
        "label_grad: the second entries of rows are the first",
        "index // C * stride_row + rows",
        "rows",
        "test_input_grads.py",
    ),
    Mutant(
        "label_grad: entries are not added",
        "    add_entries(grads, gradient.labels, gradient.entries, h, outer)\n",
        "",
        TRITON,
    ),
    Mutant(
        "label_grad: compiled inside a graph that holds more chunks",
        "if weight is not None and weight.element_size() == 2:",
        "if weight is None:",
        "backends/triton/test_specialization.py -k graph",
    ),
    Mutant(
        "label_grad: every block of H adds to the bias",
        "more_of_bias, mask=tl.program_id(1) == 0)",
        "more_of_bias)",
        "test_input_grads.py",
    ),
]
