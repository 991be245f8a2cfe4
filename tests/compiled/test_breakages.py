"""Compiled code with a barrier, a wait, a mask or a fence left out: the interpreter notices.

One breakage of each kind here; `python tests/mutate_compiled.py` tries all of them.
"""

from support.compiled import FIRST_ARCH, Broken

# Kinds of which some are harmless: see docs/kernels.md.
SOME_SURVIVE = {
    "bar.sync left out", "fence.proxy.async left out", "a load without its mask",
    "cp.async.commit_group left out", "a copy of rows that are not there",
}  # fmt: skip


@FIRST_ARCH
def test_one_breakage_of_each_kind_is_noticed(on, arch):
    broken = Broken(on(arch))
    kinds = {}
    for breakage in broken.all():
        kinds.setdefault(breakage.kind, breakage)
    assert len(kinds) >= (20 if arch == "sm_90" else 9)
    survived = [x.name for x in kinds.values() if broken.noticed(x) is None]
    assert [name for name in survived if name.split(",")[0] not in SOME_SURVIVE] == []
