"""Peak memory, against known allocations and those of the loss."""

import pytest
from lib.peaks import peak_extra_bytes, reset_peak
from support.params import slow

KNOWN = "support.memory:known"
pytestmark = pytest.mark.skipif(not reset_peak(), reason="this system tells no memory")


def mib(target, **kwargs):
    return peak_extra_bytes(target, kwargs) / 2**20


@pytest.mark.parametrize(("kept", "freed"), [slow(8, 0), (0, 24), slow(5, 40), slow(40, 5)])
def test_a_known_allocation_is_measured_kept_or_freed(kept, freed):
    assert mib(KNOWN, kept=kept, freed=freed) == pytest.approx(max(kept, freed), abs=1)  # MiB
