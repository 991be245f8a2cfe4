"""Time and peak memory, against known allocations and those of the loss."""

import pytest
from support.params import slow

from fusedce.measure import median_seconds, memory_method, peak_extra_bytes

KNOWN = "support.memory:known"
pytestmark = pytest.mark.skipif(memory_method() is None, reason="this system tells no memory")


def mib(target, **kwargs):
    return peak_extra_bytes(target, kwargs) / 2**20


@pytest.mark.parametrize(("kept", "freed"), [slow(8, 0), (0, 24), slow(5, 40), slow(40, 5)])
def test_a_known_allocation_is_measured_kept_or_freed(kept, freed):
    assert mib(KNOWN, kept=kept, freed=freed) == pytest.approx(max(kept, freed), abs=1)  # MiB


def test_pages_of_files_do_not_count(tmp_path):
    file = tmp_path / "library"
    file.write_bytes(bytes(48 << 20))
    assert mib(KNOWN, kept=4, freed=10, read=str(file)) == pytest.approx(10, abs=1)  # MiB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "grad", "most_mib"),
    [
        # gradients of weight and hidden, chunk of logits, tiles and their temporaries
        ("float32", True, 4.3 + 4 + 10),
        ("float32", False, 12),
        ("bfloat16", True, 2.2 + 4 + 2 + 14),  # and the float32 accumulator
    ],
)
def test_a_training_step_holds_no_logits(dtype, grad, most_mib):
    assert 0 < mib("support.memory:step", dtype=dtype, grad=grad) < most_mib


def test_a_call_that_fails_says_how():
    with pytest.raises(RuntimeError, match="no_such_function"):
        peak_extra_bytes("support.memory:no_such_function")


def test_times_are_taken_in_rounds_that_start_anywhere():
    calls = []
    times = median_seconds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b", "b", "a", "a", "b"]  # the first round warms up
    assert all(len(x) == 2 and x == sorted(x) for x in times.values())
    with pytest.raises(ValueError, match="repeats must be >= 1, got 0"):
        median_seconds({}, 0)
