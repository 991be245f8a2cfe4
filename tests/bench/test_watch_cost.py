"""What watching costs is measured: `bench/watch.py`."""

import watch


def test_each_look_and_finish_take_time():
    for in_place in (True, False):
        assert all(0 < x < 1e6 for x in watch.microseconds(7, in_place=in_place, windows=2))
