"""Property tests of a loss against the reference: ours, your own head, or a fork.

    from fusedce.testing import assert_matches_reference

    def test_my_loss():
        assert_matches_reference(my_loss)      # my_loss(hidden, weight, labels, **options)

:func:`cases` draws small, awkward inputs with hypothesis: odd shapes, every dtype, strides,
ignored and peaked rows, huge logits, options. :func:`check` compares loss, count and gradients of
one case with :func:`fusedce.reference_ce`, and allows twice the error that torch itself makes in
the same dtype, plus a floor of a few roundings. :func:`pairs` and
:func:`assert_matches_reference_kl` do the same for divergences from a teacher. Needs hypothesis:
``pip install 'fusedce[testing]'``.
"""

from fusedce.testing.cases import (
    OPTIONS,
    Case,
    LogitsKind,
    Loss,
    assert_matches_reference,
    cases,
    check,
)
from fusedce.testing.pairs import Pair, assert_matches_reference_kl, check_pair, pairs

__all__ = [
    "OPTIONS", "Case", "LogitsKind", "Loss", "Pair", "assert_matches_reference",
    "assert_matches_reference_kl", "cases", "check", "check_pair", "pairs",
]  # fmt: skip
