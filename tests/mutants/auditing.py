"""Mutants of the audit."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "audit: weights as they are in backward",
        "            micro.weight *= factor",
        "            pass",
        "test_audit.py -k plain_loop",
    ),
    Mutant(
        "audit: ranks that add",
        "averaged_over = 1 if self._adds else len(ranks)",
        "averaged_over = 1",
        "test_audit.py -k two_ranks",
    ),
    Mutant(
        "audit: every position is a token",
        "trained = pull < 0",
        "trained = pull < 1",
        "test_audit.py -k plain_loop",
    ),
]
