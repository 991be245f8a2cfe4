"""Mutants of chunks, launches and plans of the backends."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
OPTIONS = "test_options.py"

MUTANTS = [
    Mutant(
        "rows: fp16 without amplification",
        "return 2.0 ** (14",
        "return 1.0 * 0 ** 0 * 2.0 ** (0 * 14",
        f"{CONTRACT} -k fp16",
    ),
    Mutant(
        "options: row factors not on the weight gradient",
        "h = (h.float() * factors[:, None]).to(h.dtype)",
        "h = h.clone()",
        f"{OPTIONS} -k pair",
    ),
    Mutant(
        "options: fp16 factors in fp16",
        "h.dtype == torch.float16",
        "h.dtype == torch.int8",
        f"{OPTIONS} -k fp16_factors",
    ),
    Mutant(
        "edge: chunks of any number of tokens",
        "        return min(most, _DEVICE_TOKENS)",
        "        return most",
        "test_plan.py",
    ),
    Mutant(
        "plan: rows of tiles in unequal parts",
        "rows = min(C, equal_parts(C, max(count // block // 128 * 128, 128), 128))",
        "rows = min(C, max(count // block, 128))",
        "test_plan.py -k rows",
    ),
    Mutant(
        "plan: a large device has chunks as a small one",
        "return LARGE_DEVICE_BUDGET if large else DEVICE_BUDGET",
        "return DEVICE_BUDGET",
        "test_plan.py -k large_device",
    ),
    Mutant(
        "plan: a block of a maximum is narrower than a row's padding",
        "return min(max(1 << (V - 1).bit_length(), 16), most)",
        "return min(1 << (V - 1).bit_length(), most)",
        "test_ptx_training.py -k less_than_16",
    ),
    Mutant(
        "exponentials: one GEMM whatever H is",
        'return walks.gemm_up_to >= H if asked == "" else asked == "1"',
        'return walks.gemm_up_to > 0 if asked == "" else asked == "1"',
        "test_exponentials.py -k hidden_size",
    ),
    Mutant(
        "exponentials: the plan counts tiles that one GEMM does not hold",
        "triton=True, gemm_block=block)",
        "triton=True)",
        "test_exponentials.py -k overrules",
    ),
    Mutant(
        "choose: cards without tensor cores for bf16",
        "capability < OLDEST",
        "capability < (7, 0)",
        "test_choose.py -k old_card",
    ),
    Mutant(
        "choose: rows of any length",
        "% 16 == 0 else",
        "% 2 == 0 else",
        "test_choose.py -k whole",
    ),
    Mutant(
        "products: an interface that gives something else is trusted",
        "return out.equal(exact)",
        "return True",
        "triton/test_products.py -k wrong",
    ),
    Mutant(
        "launch: fusing is left to the compiler's default",
        ", enable_fp_fusion=True)",
        ")",
        "test_launch.py -k fused",
    ),
    Mutant(
        "walk: compiled again where the number of valid rows is a multiple of 16",
        '"z_label", "stride_split"]',
        '"z_label"]',
        "test_specialization.py -k inside_a_graph",
    ),
    Mutant(
        "operands: TF32 is asked for by the older interface first",
        "return bool(matmul.allow_tf32) if precision is None",
        "return bool(matmul.allow_tf32) if matmul.allow_tf32",
        "test_launch.py -k float32",
    ),
    Mutant(
        "launch: with the first launch's arguments",
        "        self._arguments.update(changing)\n",
        "",
        "backends/triton/test_launch.py -k later",
    ),
    Mutant(
        "span: any view from the begin is the whole",
        "x if end - begin == x.shape[dim]",
        "x if begin == 0",
        "backends/triton/test_launch.py -k span",
    ),
    Mutant(
        "span: the whole is cut, too",
        "return x if end - begin == x.shape[dim] else x.narrow",
        "return x.narrow",
        "backends/triton/test_specialization.py -k cut",
    ),
    Mutant(
        "tiles: rows beyond the first tile's are the first's",
        "self._product(some, w, out=products)",
        "self._product(h[:rows], w, out=products)",
        "backends/triton/test_products.py -k logits",
    ),
    Mutant(
        "tiles: hidden states beyond the first rows are the first's",
        "self._product(rows, self.weight, out=products)",
        "self._product(g[:n], self.weight, out=products)",
        "backends/triton/test_products.py -k hidden",
    ),
    Mutant(
        "training: the factor of no valid token is infinite",
        "outer = 1.0 / max(n_valid, 1)",
        "outer = 1.0 / (n_valid or 1e-300)",
        "backends/triton/test_training.py -k factor",
    ),
    Mutant(
        "training: losses of a chunk's options are left out",
        "nll.copy_(factors.losses(nll))",
        "factors.losses(nll)",
        "loss/test_options.py",
    ),
    Mutant(
        "gradients: what is not wanted is on the CPU",
        "torch.empty(0, dtype=dtype, device=self.device)",
        "torch.empty(0, dtype=dtype)",
        "test_gradients.py",
    ),
]
