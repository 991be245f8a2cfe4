"""The engine that measures time and memory for every script.

A call is named as in :mod:`fusedce.measure`: ``"module:function"`` builds it from keywords. It runs
in a worker process, so that a crash, an endless loop or an out-of-memory error is a row of the
table. Rounds go from one call to the next, so that a drifting machine favours none.

On a CPU one worker holds all calls; ``seconds`` are processor time where torch has one thread,
which leaves out the neighbours on a shared machine, and wall time otherwise. Memory comes from
:func:`fusedce.measure.peak_extra_bytes`. On an accelerator a round is a burst of calls between
events, without waiting between them, as a training loop runs: ``seconds`` is the device's time of
each, ``wall_seconds`` the burst's wall clock by the number of calls (more where Python is the
bottleneck); memory is read from the device's allocator. ``rounds`` holds the median of each round.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from fusedce.measure import device_peak, peak_extra_bytes

# The fields that measuring a call adds to its row.
MEASURED = ("seconds", "wall_seconds", "rounds", "extra_peak_bytes", "failed")
_BURST_SECONDS = 0.5  # slow calls are made fewer times


class Call(NamedTuple):
    """One thing to measure."""

    target: str  # "module:function", importable with this process's sys.path
    kwargs: dict[str, Any]
    process: str  # calls of the same name share a worker
    leaves: int = 0  # bytes of results that are no extra memory, such as gradients


class Engine:
    """Measures calls on one device; close it, or use it in a ``with``."""

    def __init__(
        self,
        device: str,
        *,
        rounds: int | None = None,
        calls: int | None = None,
        timeout: float = 120,  # seconds for one order
    ) -> None:
        self.device = device
        self.on_cpu = torch.device(device).type == "cpu"
        self.rounds = rounds or (3 if self.on_cpu else 5)
        self.calls = calls or (1 if self.on_cpu else 10)  # of a round
        self.timeout = timeout
        self._workers: dict[str, tuple[mp.process.BaseProcess, Connection]] = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self._workers):
            self._end(name)

    def ask(self, process: str, target: str, kwargs: Mapping[str, Any]) -> tuple[str, Any]:
        """``("ok", target(**kwargs))`` from that worker, or ``("error", why)``."""
        return self._ask(process, "run", target, dict(kwargs))

    def measure(
        self,
        calls: Mapping[str, Call],
        *,
        time: bool = True,
        memory: tuple[str, ...] = (),
        held: Mapping[str, dict[str, Any]] | None = None,
        on_row: Callable[[str, dict[str, Any]], object] = lambda name, row: None,
    ) -> dict[str, dict[str, Any]]:
        """Measure each call: ``seconds``, ``wall_seconds`` and ``rounds``, or why it ``failed``.

        ``memory`` names the calls whose ``extra_peak_bytes`` is measured: beyond what was there
        before the call, and what the call leaves. ``held`` is what was measured before: its rounds
        and peaks are not measured again. ``on_row`` is told a call's row whenever it has grown.
        """
        earlier = held or {}
        rows = {
            name: {k: v for k, v in earlier.get(name, {}).items() if k in MEASURED}
            for name in calls
        }
        timed = [n for n in calls if time and len(rows[n].get("rounds", ())) < self.rounds]
        weighed = [n for n in memory if rows[n].get("extra_peak_bytes") is None]
        prepared = [n for n in calls if n in timed or (n in weighed and not self.on_cpu)]
        for name in prepared:
            call = calls[name]
            self._order(rows[name], call.process, "prepare", name, call.target, call.kwargs)
        for i in range(self.rounds):
            first = i % max(len(timed), 1)
            for name in timed[first:] + timed[:first]:
                if len(rows[name].get("rounds", ())) <= i:
                    self._round(rows[name], calls[name], name)
                    on_row(name, rows[name])
        for name in weighed:
            self._peak(rows[name], calls[name], name)
            on_row(name, rows[name])
        for name in prepared:
            self._ask(calls[name].process, "drop", name)
        return rows

    def _order(self, row: dict[str, Any], process: str, *order: Any) -> Any:
        """The answer, or None with ``failed`` in the row."""
        if "failed" in row:
            return None
        status, answer = self._ask(process, *order)
        if status != "ok":
            row.clear()
            row["failed"] = answer
            return None
        return answer

    def _round(self, row: dict[str, Any], call: Call, name: str) -> None:
        answer = self._order(row, call.process, "time", name, self.device, self.calls)
        if answer is not None:
            for kind, values in answer.items():
                row[kind] = sorted([*row.get(kind, ()), *values])
            row.setdefault("rounds", []).append(statistics.median(answer["seconds"]))

    def _peak(self, row: dict[str, Any], call: Call, name: str) -> None:
        if "failed" in row:
            return
        if not self.on_cpu:
            peak = self._order(row, call.process, "peak", name, self.device)
            if peak is None:
                return
        else:
            try:
                peak = peak_extra_bytes(call.target, call.kwargs)
            except RuntimeError as e:
                row["failed"] = str(e).strip().splitlines()[-1]
                return
        row["extra_peak_bytes"] = peak - call.leaves

    # ---- the workers: started at their first order, and again after a crash -----------------

    def _ask(self, name: str, *order: Any) -> tuple[str, Any]:
        """``("ok", answer)`` or ``("error", why)``."""
        if name not in self._workers:
            context = mp.get_context("spawn")
            ours, theirs = context.Pipe()
            arguments = (theirs, torch.get_num_threads(), self.device)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers[name] = (process, ours)
        process, connection = self._workers[name]
        try:
            connection.send(order)
            if not connection.poll(self.timeout):
                raise TimeoutError
            return tuple(connection.recv())  # type: ignore[return-value]
        except TimeoutError:
            why = f"no answer in {self.timeout:.0f} s"
        except (EOFError, OSError):
            process.join(5)
            why = f"process ended with status {process.exitcode}"
        self._end(name, grace=0)
        return "error", why

    def _end(self, name: str, grace: float = 5) -> None:
        """End a worker: one whose connection closes exits by itself, one that hangs is killed."""
        process, connection = self._workers.pop(name)
        connection.close()
        process.join(grace)
        process.kill()
        process.join()


def median(row: Mapping[str, Any]) -> float | None:
    """Median of the row's seconds; ``None`` if it failed."""
    return statistics.median(row["seconds"]) if row.get("seconds") else None


# ---- in a worker ----------------------------------------------------------------------------


def _serve(connection: Connection, threads: int, device: str) -> None:
    torch.set_num_threads(threads)
    calls: dict[str, Callable[[], object]] = {}
    while True:
        try:
            order, *arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", _ORDERS[order](calls, *arguments)))
        except Exception as e:  # whatever a peer raises is its row
            kind = "out of memory" if isinstance(e, torch.OutOfMemoryError) else type(e).__name__
            lines = str(e).strip().splitlines() or [""]
            connection.send(("error", f"{kind}: {lines[0][:120]}"))
        _free(device)


def _named(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def _run(calls: dict[str, Any], target: str, kwargs: dict[str, Any]) -> Any:
    return _named(target)(**kwargs)


def _prepare(calls: dict[str, Any], name: str, target: str, kwargs: dict[str, Any]) -> None:
    calls[name] = call = _named(target)(**kwargs)
    call()  # warm; on an accelerator it may compile


def _time(calls: dict[str, Any], name: str, device: str, number: int) -> dict[str, Any]:
    return time_call(calls[name], device, number)


def _peak(calls: dict[str, Any], name: str, device: str) -> int:
    return peak_of_call(calls[name], device)


def _drop(calls: dict[str, Any], name: str) -> None:
    calls.pop(name, None)


_ORDERS = {"run": _run, "prepare": _prepare, "time": _time, "peak": _peak, "drop": _drop}


def time_call(call: Callable[[], object], device: str, calls: int) -> dict[str, Any]:
    """Time a burst of at most ``calls`` calls of a warm function.

    Returns ``seconds`` of each call. On an accelerator also ``wall_seconds``, the burst's by the
    number of its calls. A call that does not count decides how many calls a burst has there.
    """
    if torch.device(device).type == "cpu":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        seconds = []
        for _ in range(calls):
            begin = clock()
            call()
            seconds.append(clock() - begin)
        return {"seconds": seconds}
    module = torch.get_device_module(device)
    module.synchronize()
    begin = time.perf_counter()
    call()
    module.synchronize()
    once = time.perf_counter() - begin
    calls = max(min(calls, int(_BURST_SECONDS / max(once, 1e-9))), 3)
    events = [[module.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    begin = time.perf_counter()
    for first, last in events:
        first.record()
        call()
        last.record()
    module.synchronize()
    wall = (time.perf_counter() - begin) / calls
    return {
        "seconds": [first.elapsed_time(last) / 1e3 for first, last in events],
        "wall_seconds": [wall],
    }


def peak_of_call(call: Callable[[], object], device: str) -> int:
    """Peak of the device's allocator during one warm call, in bytes above the level before it."""
    call()
    _free(device)
    return device_peak(call, torch.device(device))


def _free(device: str) -> None:
    """Return the memory that the allocator keeps, which other processes need."""
    if torch.device(device).type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()
