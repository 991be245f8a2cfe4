"""The measuring engine: turns, failures, and times by a device's events."""

import time

import pytest
import torch
from lib import engine, peaks


def works(seconds):
    """Takes that much processor time, which sleeping does not."""

    def call():
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    return call


def raises():
    raise ValueError("as meant")


def test_calls_are_timed_and_what_goes_wrong_is_a_row():
    calls = {"one": works(0.02), "two": works(0.06), "raises": raises}
    rows = engine.measure(calls, "cpu", rounds=2, burst=2)
    assert rows["raises"] == {"failed": "ValueError: as meant"}
    for row, least in ((rows["one"], 0.02), (rows["two"], 0.06)):
        assert len(row["seconds"]) == 4
        assert len(row["rounds"]) == 2
        assert min(row["seconds"]) >= least
    assert engine.measure({"x": raises}, "cpu", rounds=2) == {
        "x": {"failed": "ValueError: as meant"}
    }


def test_calls_are_made_by_turns_that_start_anywhere():
    made = []
    calls = {name: lambda name=name: made.append(name) for name in "ab"}
    rows = engine.measure(calls, "cpu", rounds=2)
    assert made == ["a", "b", "a", "b", "b", "a"]  # the first calls warm up
    assert all(len(row["rounds"]) == 2 for row in rows.values())


class FakeDevice:
    """Calls take ``call_seconds`` of its clock and ``peak`` bytes beside ``held``."""

    def __init__(self, call_seconds=0.001, held=0, peak=0):
        self.call_seconds, self.held, self.peak = call_seconds, held, peak
        self.clock = 0.0
        self.calls = 0
        self.synchronized_after = []
        self._high = held
        device = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at = device.clock

            def elapsed_time(self, later):
                return 1e3 * (later.at - self.at)

        self.Event = Event

    def call(self):
        self.calls += 1
        self.clock += self.call_seconds
        self._high = max(self._high, self.held + self.peak)

    def synchronize(self, *_):
        self.synchronized_after.append(self.calls)

    def empty_cache(self):
        pass

    def reset_peak_memory_stats(self, *_):
        self._high = self.held

    def memory_allocated(self, *_):
        return self.held

    def max_memory_allocated(self, *_):
        return self._high


@pytest.fixture
def device(monkeypatch):
    """Stands for torch's module of the device, and for the wall clock."""
    fake = FakeDevice(call_seconds=0.25, held=1000, peak=700)
    monkeypatch.setattr(torch, "get_device_module", lambda name: fake)
    monkeypatch.setattr(engine.time, "perf_counter", lambda: fake.clock)
    return fake


def test_on_a_device_calls_follow_each_other_between_events(device):
    found = engine.time_call(device.call, "cuda", 10)
    # Half a second of burst or three calls, none waited for on its own.
    assert found == {"seconds": [0.25] * 3, "wall_seconds": [0.25]}
    assert device.calls == 4
    assert device.synchronized_after == [0, 1, 4]


def test_few_calls_are_made_of_a_slow_one_and_no_more_than_asked_of_a_fast_one(device):
    device.call_seconds = 5.0
    assert len(engine.time_call(device.call, "cuda", 10)["seconds"]) == 3
    device.call_seconds = 0.01
    assert len(engine.time_call(device.call, "cuda", 10)["seconds"]) == 10


def test_peak_of_a_device_is_its_allocators_above_the_level_before(device):
    assert peaks.device_peak(device.call, "cuda") == 700


def test_a_row_on_a_device_has_its_peak_and_the_median_of_each_round(device):
    row = engine.measure({"x": device.call}, "cuda", rounds=2, burst=10, peaks=True)["x"]
    assert row == {
        "first_seconds": 0.25, "extra_peak_bytes": 700, "seconds": [0.25] * 6,
        "wall_seconds": [0.25] * 2, "rounds": [0.25] * 2,
    }  # fmt: skip


def test_the_median_is_of_the_devices_own_seconds():
    assert engine.median({"seconds": [3.0, 1.0, 2.0], "wall_seconds": [9.0]}) == 2.0
    assert engine.median({"failed": "x"}) is None
