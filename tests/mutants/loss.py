"""Mutants of the public functions and the reference."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "tokens: temperature does not reach the cap",
        "problem.softcap / t",
        "problem.softcap",
        "test_logprobs.py -k any_case_torch",
    ),
    Mutant(
        "cross-entropy: mean over tokens, not weights",
        "torch.where(valid, _of_labels(c, problem), 0.0).sum()",
        "valid.sum()",
        "test_cross_entropy.py -k parity",
    ),
    Mutant(
        "edge: reference smooths in float32",
        "(1 - label_smoothing) * given.to(wide)",
        "(1 - label_smoothing) * given",
        "test_reference.py",
    ),
    Mutant(
        "sum: the factor of a mean is expected",
        "dispatch.loss_sum(Task(_as_it_is(problem)))",
        "dispatch.loss_sum(Task(problem))",
        "test_gradient_errors.py -k a_sum_needs",
    ),
]
