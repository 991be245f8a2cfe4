"""One process per implementation: a crash or an out-of-memory error is a row, not the end."""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.connection import Connection
from typing import Any

import implementations
import torch
from implementations import FLOOR, Spec


def _serve(name: str, connection: Connection, threads: int) -> None:
    torch.set_num_threads(threads)
    state: dict[str, Any] = {}
    while True:
        try:
            order, *arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", _ORDERS[order](name, state, *arguments)))
        except Exception as e:
            state.clear()
            kind = "out of memory" if isinstance(e, torch.OutOfMemoryError) else type(e).__name__
            lines = str(e).strip().splitlines() or [""]
            connection.send(("error", f"{kind}: {lines[0][:120]}"))


def _prepare(name: str, state: dict[str, Any], spec: Spec, check: Spec) -> dict[str, float]:
    state.clear()
    _free(spec.device)
    torch.compiler.reset()  # as in a new process: shapes seen before would compile as dynamic ones
    found = {} if name == FLOOR else implementations.errors(name, check)
    torch.compiler.reset()
    _free(spec.device)
    state["spec"], state["call"] = spec, implementations.make_call(name, spec)
    return found


def _seconds(name: str, state: dict[str, Any], repeats: int) -> list[float]:
    """On an accelerator an untimed call first: the allocator was emptied for the others."""
    device, call = state["spec"].device, state["call"]
    if device != "cpu":
        call()
    out = []
    for _ in range(repeats):
        _synchronize(device)
        begin = time.perf_counter()
        result = call()
        _synchronize(device)
        out.append(time.perf_counter() - begin)
        del result
    _free(device)
    return out


def _device_peak(name: str, state: dict[str, Any]) -> int:
    memory = torch.get_device_module(state["spec"].device)
    state["call"]()
    _free(state["spec"].device)
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    state["call"]()
    _synchronize(state["spec"].device)
    return int(memory.max_memory_allocated() - before)


def _drop(name: str, state: dict[str, Any]) -> None:
    device = state["spec"].device if state else "cpu"
    state.clear()
    _free(device)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def _free(device: str) -> None:
    if device != "cpu":
        _synchronize(device)
        torch.get_device_module(device).empty_cache()


_ORDERS = {"prepare": _prepare, "seconds": _seconds, "device_peak": _device_peak, "drop": _drop}


class Pool:
    """Workers by name, started when first asked and again after a crash."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._workers: dict[str, tuple[mp.process.BaseProcess, Connection]] = {}

    def ask(self, name: str, *order: Any) -> tuple[str, Any]:
        """``("ok", answer)`` or ``("error", why)``."""
        if name not in self._workers:
            context = mp.get_context("spawn")
            ours, theirs = context.Pipe()
            arguments = (name, theirs, torch.get_num_threads())
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
        self._end(name)
        return "error", why

    def _end(self, name: str) -> None:
        process, connection = self._workers.pop(name)
        connection.close()
        process.kill()
        process.join()

    def close(self) -> None:
        for name in list(self._workers):
            self._end(name)
