"""The measuring engine: processes, failures, and times by a device's events."""

import pytest
import torch
from lib import engine
from lib.engine import Call, Engine


@pytest.mark.slow
def test_calls_are_timed_in_processes_and_what_goes_wrong_is_a_row():
    calls = {
        "one": Call("support.calls:worker", {"seconds": 0.02}, "sound"),
        "two": Call("support.calls:worker", {"seconds": 0.06}, "sound"),
        "raises": Call("support.calls:raises", {}, "sound"),
        "dies": Call("support.calls:dies", {}, "dies"),
    }
    with Engine("cpu", rounds=2, calls=2, timeout=300) as made:
        assert made.ask("sound", "os:getpid", {})[1] != made.ask("dies", "os:getpid", {})[1]
        rows = made.measure(calls)
        assert rows["dies"] == {"failed": "process ended with status 7"}
        assert rows["raises"] == {"failed": "ValueError: as meant"}
        for row, least in ((rows["one"], 0.02), (rows["two"], 0.06)):
            assert len(row["seconds"]) == 4
            assert row["seconds"] == sorted(row["seconds"])
            assert row["seconds"][0] >= least

        made.timeout = 3  # the process is up: only what never ends takes that long
        status, why = made.ask("sound", "time:sleep", {})
        assert (status, why.split(":")[0]) == ("error", "TypeError")
        hangs = Call("support.calls:worker", {"seconds": 3600}, "sound")
        assert made.measure({"x": hangs}) == {"x": {"failed": "no answer in 3 s"}}
    assert made._workers == {}


@pytest.mark.slow
def test_rounds_that_were_measured_before_are_not_measured_again():
    call = Call("support.calls:worker", {"seconds": 0.01}, "sound", leaves=7)
    grown = []
    with Engine("cpu", rounds=3, calls=1, timeout=300) as made:
        held = {"x": {"seconds": [9.0], "rounds": [9.0], "name": "x"}}
        row = made.measure({"x": call}, held=held, on_row=lambda *a: grown.append(a))["x"]
        assert len(row["rounds"]) == len(row["seconds"]) == 3
        assert row["rounds"][0] == row["seconds"][-1] == 9.0
        assert len(grown) == 2  # a burst each
        assert made.measure({"x": call}, held={"x": row}) == {"x": row}


@pytest.mark.slow
def test_memory_on_a_cpu_comes_from_a_fresh_process():
    target = Call("support.memory:known", {"kept": 24, "freed": 0}, "memory")
    with Engine("cpu") as made:
        rows = made.measure({"x": target}, time=False, memory=("x",))
        assert made._workers == {}
    # what the process itself allocates meanwhile is about a MiB
    assert rows["x"]["extra_peak_bytes"] == pytest.approx(24 * 2**20, rel=0.1)


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
    assert engine.peak_of_call(device.call, "cuda") == 700


def test_the_median_is_of_the_devices_own_seconds():
    assert engine.median({"seconds": [3.0, 1.0, 2.0], "wall_seconds": [9.0]}) == 2.0
    assert engine.median({"failed": "x"}) is None
