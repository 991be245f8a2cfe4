"""Compiled code with a barrier, a wait, a mask or a fence left out: the interpreter notices.

The breakages are in the PTX that Triton made, not in a source. One is noticed where the run ends
with an error or gives other numbers. tests/ptx/README.md explains those that survive.
"""

import pytest
from support.compiled import FIRST_ARCH, Broken
from support.params import slow
from support.versions import TRITON

from fusedce.backends.triton import launch

# Kinds of which some are harmless: see tests/ptx/README.md.
SOME_SURVIVE = {
    "bar.sync left out", "fence.proxy.async left out", "a load without its mask",
    "cp.async.commit_group left out", "a copy of rows that are not there",
}  # fmt: skip
if TRITON >= (3, 8):  # writes some waits twice
    SOME_SURVIVE |= {"cp.async.wait_group left out", "cp.async.wait_group of one more"}


@FIRST_ARCH
@pytest.mark.parametrize("of_a_kind", [1, slow(99)])
def test_breakages_are_noticed(on, arch, of_a_kind):
    """With -rP, pytest prints how each was noticed."""
    broken = Broken(on(arch))
    kinds = {}
    for breakage in broken.all():
        kinds.setdefault(breakage.kind, []).append(breakage)
    assert len(kinds) >= (20 if arch == "sm_90" and launch.TMA else 9)
    survived = []
    for kind, breakages in kinds.items():
        for breakage in breakages[:of_a_kind]:
            how = broken.noticed(breakage)
            print(f"{arch} {breakage.name}: {how or 'SURVIVED'}")
            survived += [breakage.name] * (how is None and kind not in SOME_SURVIVE)
    assert survived == []
