"""Processes that build calls and run them, so that a crash or an endless loop ends only one."""

from __future__ import annotations

import importlib
import multiprocessing as mp
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from . import timing


def _serve(connection: Connection, threads: int) -> None:
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


def _named(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def _run(calls: dict[str, Any], target: str, kwargs: dict[str, Any]) -> Any:
    return _named(target)(**kwargs)


def _prepare(calls: dict[str, Any], name: str, target: str, kwargs: dict[str, Any]) -> None:
    calls[name] = _named(target)(**kwargs)


def _time(
    calls: dict[str, Any], name: str, device: str, number: int, warm_up: bool
) -> dict[str, list[float]]:
    found = timing.time_call(calls[name], device, number, warm_up)
    timing.free(device)
    return found


def _peak(calls: dict[str, Any], name: str, device: str) -> int:
    return timing.peak_of_call(calls[name], device)


def _drop(calls: dict[str, Any], name: str, device: str) -> None:
    calls.pop(name, None)
    timing.free(device)


_ORDERS = {"run": _run, "prepare": _prepare, "time": _time, "peak": _peak, "drop": _drop}


class Pool:
    """Worker processes by name, started at their first order and again after a crash."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout  # seconds for one order
        self._workers: dict[str, tuple[mp.process.BaseProcess, Connection]] = {}

    def ask(self, name: str, *order: Any) -> tuple[str, Any]:
        """``("ok", answer)`` or ``("error", why)``."""
        if name not in self._workers:
            context = mp.get_context("spawn")
            ours, theirs = context.Pipe()
            arguments = (theirs, torch.get_num_threads())
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
        """End a process: one whose connection closes exits by itself, one that hangs is killed."""
        process, connection = self._workers.pop(name)
        connection.close()
        process.join(grace)
        process.kill()
        process.join()

    def close(self) -> None:
        for name in list(self._workers):
            self._end(name)
