"""Mutants of the torch backend."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
OPTIONS = "test_options.py"
TORCH = "test_properties.py -k torch_backend"
EDGES = "test_edges.py"
PRODUCTS = "backends/torch/test_products.py"
REFERENCE = "test_gradient_errors.py -k first_reference"

MUTANTS = [
    Mutant(
        "entropy: a tile's own maximum counts twice when sums are moved",
        "(moment + (1 + others) * (top - k))",
        "(moment + (2 + others) * (top - k))",
        "test_logprobs.py -k several_tiles",
    ),
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
        "target term: p instead of p - 1",
        "g = by.nll * torch.expm1(-nll)",
        "g = by.nll * torch.exp(-nll)",
        TORCH,
    ),
    Mutant(
        "target term: left in the tile too",
        "z[rows, tokens] = -math.inf",
        "pass",
        TORCH,
    ),
    Mutant(
        "argmax: the likeliest but the label",
        "return torch.where(self.z_label > top, self.y, bests.gather(0, tile[None])[0])",
        "return bests.gather(0, tile[None])[0]",
        OPTIONS + " -k argmax",
    ),
    Mutant(
        "chunk edge: last chunk dropped",
        "chunks = chunks_of(rows, way.tokens)",
        "chunks = chunks_of(rows[: max(len(rows) - way.tokens, way.tokens)], way.tokens)",
        TORCH,
    ),
    Mutant(
        "weight gradient: chunks overwrite each other",
        "self._scaled(h, factors), grads.weight, add=not first",
        "self._scaled(h, factors), grads.weight",
        TORCH,
    ),
    Mutant(
        "tile edge: one row short",
        "yield begin, min(begin + step, V)",
        "yield begin, min(begin + step, max(V - 1, 1))",
        CONTRACT,
    ),
    Mutant(
        "bias gradient: without the target's term",
        "add_rows(self.bias, y, coefficient)",
        "pass",
        TORCH,
    ),
    Mutant(
        "bias gradient: not divided by the softmax sum",
        "torch.mv(exps, factors)",
        "exps.sum(1)",
        TORCH,
    ),
    Mutant(
        "soft-cap: slope of the tile not squared",
        "1 - (z / self.softcap).square_()",
        "1 - (z / self.softcap)",
        TORCH,
    ),
    Mutant(
        "soft-cap: no slope at the target",
        "return g if slope is None else g * slope",
        "return g",
        TORCH,
    ),
    Mutant(
        "scale: missing in the tile's gradient",
        "factors = (outer * (by.nll",
        "factors = (factor * (by.nll",
        TORCH,
    ),
    Mutant(
        "repeated labels: the last one wins",
        "total.index_add_(0, y, rows)",
        "total[y] += rows",
        TORCH,
    ),
    Mutant(
        "options: 0 times inf",
        "(token_weight != 0) | bad",
        "(labels == labels) | bad",
        f"{OPTIONS} -k left_out",
    ),
    Mutant(
        "options: smoothing spread by tokens alone",
        "g.add_(shift)",
        "g.add_(0 * shift)",
        f"{OPTIONS} -k pair",
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
        "smoothing: of rounded probabilities",
        "stored = acc if problem.label_smoothing else products.gradients",
        "stored = products.gradients",
        "test_smoothing.py",
    ),
    Mutant(
        "smoothing: the label's share left out",
        "g = g + by.zmean * c / problem.weight.shape[0]",
        "g = g",
        "test_smoothing.py",
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
        "test_gradient_errors.py -k torch_errs",
    ),
    Mutant(
        "products: a result between other columns",
        "given = out if rows else out.new_empty(m, n).copy_(out)\n    (of_a",
        "given = out\n    (of_a",
        f"{PRODUCTS} -k written_or_added",
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
    Mutant(
        "reference: it stays where a logit is far above it",
        "fits = not bool((sums > HIGHEST).any())",
        "fits = True",
        REFERENCE,
    ),
    Mutant(
        "large head: the labels' rows are added to a rounded product",
        "add_product(classes, rows)\n            self.weight[classes] = rows.to(self.weight.dtype)",
        "self.weight[classes] = (self.weight[classes] + rows).to(self.weight.dtype)",
        "test_gradient_errors.py -k share_a_mean_do_no_harm",
    ),
]
