"""A device module with a clock and an allocator of its own, for code that times a GPU."""


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
