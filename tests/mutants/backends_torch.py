"""Mutants of the torch backend."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
OPTIONS = "test_options.py"
TORCH = "test_properties.py -k torch_backend"
EDGES = "test_edges.py"
PRODUCTS = "backends/torch/test_products.py"

MUTANTS = [
    Mutant(
        "mask: ignored means negative",
        "self.labels.ne(cast(int, self.ignore_index))",
        "self.labels >= 0",
        TORCH,
    ),
    Mutant(
        "count: every position",
        "n_valid = valid.sum()",
        "n_valid = (labels == labels).sum()",
        TORCH,
    ),
    Mutant(
        "tile edge: one row short",
        "yield begin, min(begin + step, V)",
        "yield begin, min(begin + step, max(V - 1, 1))",
        CONTRACT,
    ),
    Mutant(
        "soft-cap: slope of the tile not squared",
        "1 - (z / self.softcap).square_()",
        "1 - (z / self.softcap)",
        TORCH,
    ),
    Mutant(
        "options: 0 times inf",
        "(token_weight != 0) | bad",
        "(labels == labels) | bad",
        f"{OPTIONS} -k left_out",
    ),
    Mutant(
        "tokens: entropy cancels at p -> 1",
        "e.scatter_(0, best[None], 0)",
        "pass",
        "test_logprobs.py -k cancel",
    ),
    Mutant(
        "edge: nothing valid is computed",
        "rows.split(size) if len(rows) else ()",
        "rows.split(size)",
        EDGES,
    ),
    Mutant(
        "products: widened operands follow the user's precision",
        "widened = self.inputs != a.dtype == self.acc and out.is_cpu",
        "widened = False",
        f"{PRODUCTS} -k go_to_blas",
    ),
    Mutant(
        "products: without AMX bf16 operands, results rounded to bf16",
        "return cls(dtype, acc, acc, acc)",
        "return cls(dtype, acc, dtype, acc)",
        "test_one_rounding.py -k without_amx",
    ),
    Mutant(
        "products: limits of MKL are not asked for",
        "return all(re.fullmatch(",
        "return True or all(re.fullmatch(",
        f"{PRODUCTS} -k limit",
    ),
    Mutant(
        "brgemm: a later block of inner entries overwrites the sum",
        "add=add or first > 0)",
        "add=add)",
        "backends/torch/test_products.py -k blocks_of_onednns",
    ),
    Mutant(
        "brgemm: asked where oneDNN may not use the instructions",
        'r"|ALL|DEFAULT|AVX512_CORE_(BF16|FP16|AMX.*)|AVX10.*"',
        'r".*"',
        "backends/torch/test_products.py -k asked_only",
    ),
    Mutant(
        "products: MKL's is taken unseen",
        "if not torch.allclose(found.double(), exact, 1e-5, 1e-4):",
        "if False:",
        f"{PRODUCTS} -k is_not_taken",
    ),
]
