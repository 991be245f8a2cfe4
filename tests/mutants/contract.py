"""Mutants of checks, labels, projection, objective, results and monitors."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
OPTIONS = "test_options.py"
EDGES = "test_edges.py"

MUTANTS = [
    Mutant(
        "backward: factor of float64 rounded to float32",
        "if x.element_size() >= 4:",
        "if x.element_size() == 4:",
        "test_derivatives.py -k not_rounded_to_float32",
    ),
    Mutant(
        "projection: a bf16 product rounded to bf16",
        'pointwise(w, h, None, "none", [], "")',
        'pointwise(w.bfloat16(), h.bfloat16(), None, "none", [], "").float()',
        "backends/torch/test_products.py -k exact",
    ),
    Mutant(
        "projection: what is asked for in a buffer is returned beside it",
        "return z if out is None else out.copy_(z)",
        "return z",
        "backends/torch/test_products.py -k exact",
    ),
    Mutant(
        "projection: oneDNN although it is switched off",
        "is_available() and bool(torch.backends.mkldnn.enabled)",
        "is_available()",
        "backends/torch/test_products.py -k switched",
    ),
    Mutant(
        "backward: factor rounded to bf16",
        "part.float().mul_(factor)",
        "part.mul(factor.to(part.dtype))",
        "test_derivatives.py -k not_rounded",
    ),
    Mutant(
        "options: smoothing without its share of the label",
        "(1 - smoothing) * loss + smoothing",
        "loss + smoothing",
        f"{OPTIONS} -k pair",
    ),
    Mutant(
        "options: slope of the z-loss halved",
        "2 * problem.z_loss * lse",
        "problem.z_loss * lse",
        f"{OPTIONS} -k pair",
    ),
    Mutant(
        "options: z-loss is taken for cross-entropy",
        "return not (self.label_smoothing or ",
        "return not (self.label_smoothing and ",
        f"{OPTIONS} -k pair",
    ),
    Mutant(
        "options: a range is not checked",
        "least, most = RANGES.get(name, (value, value))",
        "least, most = value, value",
        "test_checks.py",
    ),
    Mutant(
        "shift: labels stay",
        "return labels.roll(-offset, -1).masked_fill",
        "return labels.masked_fill",
        "test_labels.py",
    ),
    Mutant(
        "count: before the shift",
        "(shifted != ignore_index).sum()",
        "(labels != ignore_index).sum()",
        "test_labels.py",
    ),
    Mutant(
        "documents: trained across the border",
        "(document.roll(-offset) == document)",
        "(document == document)",
        "test_labels.py",
    ),
    Mutant(
        "mean: nothing valid divides by 0",
        "own = self.n_valid.clamp(min=1)",
        "own = self.n_valid",
        f"{CONTRACT} -k nothing_valid",
    ),
    Mutant(
        "edge: a soft-cap that is 0 in float32",
        "if not _TINY <= softcap <= _HUGE:",
        "if not 0 < softcap <= _HUGE:",
        EDGES,
    ),
    Mutant("edge: denominator 0", "(max(number, 1) if number else own)", "max(number, 1)", EDGES),
    Mutant(
        "sum: counts are not added",
        "self.n_valid + other.n_valid",
        "self.n_valid",
        "contract/test_results.py",
    ),
    Mutant(
        "sum: differentiated as it is",
        '        raise _no_loss("backward()")',
        "        self.loss_sum.backward()",
        "contract/test_results.py",
    ),
    Mutant(
        "sums: equal to no number",
        '        if isinstance(other, (int, float, Tensor)):\n            raise _no_loss("a comp',
        '        if False:\n            raise _no_loss("a comp',
        "contract/test_results.py -k asks",
    ),
    Mutant(
        "monitors: lost by a factor",
        "return MonitoredLossSum.of(out, monitors)",
        "return out",
        "test_monitors.py -k scaled",
    ),
    Mutant(
        "monitors: z-loss as it was",
        'monitors["z_loss"] = scale(monitors["z_loss"])',
        'monitors["z_loss"] = monitors["z_loss"]',
        "test_monitors.py -k scaled",
    ),
]
