"""A kernel launched again gets the arguments of the first launch, but for those that change."""

import pytest

from fusedce.backends.triton.relaunch import Relaunch


class Kernel:
    """Called by keyword, as Triton's are; what it compiles is called by place."""

    arg_names = ("x", "n", "y", "BLOCK")

    def __init__(self, compiles):
        self.compiles, self.launches = compiles, []

    def __getitem__(self, grid):
        def first(**given):
            options = {k: given.pop(k) for k in ("num_warps",)}
            assert options == {"num_warps": 4}
            self.launches.append(("asked", grid, *(given[k] for k in self.arg_names)))
            return Compiled(self) if self.compiles else None

        return first


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *given: self.kernel.launches.append(("again", grid, *given))


@pytest.mark.parametrize("compiles", [True, False])
def test_later_launches_differ_in_what_changes_alone(compiles):
    kernel = Kernel(compiles)
    launch = Relaunch(kernel, y=None, x=7, BLOCK=64, num_warps=4)
    for n in (3, 5, 9):
        launch((n, 1, 1), n=n)
    how = "again" if compiles else "asked"
    assert kernel.launches == [
        ("asked", (3, 1, 1), 7, 3, None, 64),
        (how, (5, 1, 1), 7, 5, None, 64),
        (how, (9, 1, 1), 7, 9, None, 64),
    ]
