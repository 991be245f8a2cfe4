"""Mutants of the torch backend."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
OPTIONS = "test_options.py"
TORCH = "test_properties.py -k torch_backend"
EDGES = "test_edges.py"

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
        "target term: p instead of p - 1",
        "g = by.nll * torch.expm1(-nll)",
        "g = by.nll * torch.exp(-nll)",
        TORCH,
    ),
    Mutant(
        "target term: left in the tile too",
        "clear_labels(z, at, inside, -math.inf)\n        if self.likeliest is None",
        "if self.likeliest is None",
        TORCH,
    ),
    Mutant(
        "largest: rounded with its tile",
        "APART = 0.125",
        "APART = 2.0",
        "test_denominator.py -k however_sure",
    ),
    Mutant(
        "largest: left in the tile, too",
        "exps[classes, tokens] = 0",
        "exps[classes, tokens] *= 1",
        "test_denominator.py -k however_sure",
    ),
    Mutant(
        "largest: of a capped logit without its slope",
        "return tokens, classes, p[tokens] * slope[tokens]",
        "return tokens, classes, p[tokens]",
        "test_denominator.py -k however_sure",
    ),
    Mutant(
        "largest: rounded apart from the labels' rows",
        "torch.cat(x) for x in ((y, classes), (h, h[tokens]), (at_label, apart))",
        "x for x in (y, h, at_label)",
        "test_denominator.py -k however_sure",
    ),
    Mutant(
        "argmax: the likeliest but the label",
        "return torch.where(self.z_label > top, self.y, best)",
        "return best",
        OPTIONS + " -k argmax",
    ),
    Mutant(
        "rescaling: tiles keep their own maximum",
        "(k - top).exp_()).sum(0).log()",
        "(k - k).exp_()).sum(0).log()",
        TORCH,
    ),
    Mutant(
        "chunk edge: last chunk dropped",
        "chunks = chunks_of(rows, way.tokens)",
        "chunks = chunks_of(rows[: max(len(rows) - way.tokens, way.tokens)], way.tokens)",
        TORCH,
    ),
    Mutant(
        "weight gradient: chunks overwrite each other",
        "scaled, first=number == 0",
        "scaled, first=True",
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
        "torch.mv(tile.to(acc), row_factors[:, 0])",
        "tile.to(acc).sum(1)",
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
        "of_p = outer * (by.nll + by.lse)  #",
        "of_p = factor * (by.nll + by.lse)  #",
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
        "stored = acc if problem.label_smoothing else gemm",
        "stored = gemm",
        "test_smoothing.py",
    ),
    Mutant(
        "smoothing: the label's share left out",
        "g = g + by.zmean * c / problem.weight.shape[0]",
        "g = g",
        "test_smoothing.py",
    ),
]
