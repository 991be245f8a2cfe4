"""Run a user's script as Python would, for the commands that watch it.

The script finds its own ``sys.argv``, ``sys.path[0]`` and ``__main__``. What it raises leaves the
process as without us: with its traceback, through its ``sys.excepthook``, with its exit status.
Modules are changed as the script imports them, so that it may set environment variables first.
"""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.machinery
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from .model_sizes import UserError

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "torch.distributed.run", "accelerate.commands")
OURS = {__file__}  # files whose frames are no part of a script's traceback


class Raised(BaseException):
    """An exception of a script, on its way past the command line's own handlers."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def is_first_rank() -> bool:
    """Whether this process is the one that writes, of those that a launcher has started."""
    return os.environ.get("RANK", "0") == "0"


def is_launched() -> bool:
    """Whether torchrun, or accelerate by it, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Loop:
    """What the loop of a script is made of, as far as it decides what its author may write."""

    def __init__(self) -> None:
        self.accelerate = self.accumulator = self.trainer = False

    def changes(self) -> dict[str, Callable[[ModuleType], None]]:
        """What to do with modules that the script imports."""

        def note(name: str, kind: str) -> Callable[[ModuleType], None]:
            return lambda module: when_made(
                getattr(module, kind), lambda made: setattr(self, name, True)
            )

        return {
            "accelerate.accelerator": note("accelerate", "Accelerator"),
            "fusedce.accumulate.accumulator": note("accumulator", "LossAccumulator"),
        }

    def remedy(self) -> str | None:
        """What to write for the denominator of an optimizer step; ``None`` if it is written."""
        if self.accumulator:
            return None
        if self.trainer:
            return "`fusedce run SCRIPT`, or FusedTrainerMixin, divides by the tokens of a step."
        made = ".from_accelerator(accelerator, model)" if self.accelerate else "(model)"
        return (
            f"To divide by the tokens of a step, write acc = fusedce.LossAccumulator{made}; "
            f"acc.backward(fusedce.model_loss(model, batch)) for each micro-batch; acc.finish() "
            f"before clipping and the step."
        )


def when_made(kind: Any, call: Callable[[Any], None]) -> None:
    """Call ``call`` with each object of a class once it is made."""
    made = kind.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        call(self)

    kind.__init__ = __init__


def check(command: str, target: str, *, module: bool) -> None:
    """Check that there is something to run.

    Raises:
        UserError: there is no such file, or it is a launcher of processes.
    """
    name = Path(target).name
    if name in _LAUNCHERS or (module and target.startswith(_LAUNCHERS)):
        raise UserError(
            f"{target} starts other processes: let it start this command in each of them, as in "
            f"`torchrun --nproc_per_node 2 -m fusedce {command} train.py` or `accelerate launch -m "
            f"fusedce {command} train.py`"
        )
    if not module and not Path(target).is_file():
        hint = f"; for a module: fusedce {command} -m {target}" if target.isidentifier() else ""
        raise UserError(f"there is no script {target!r}{hint}")


def execute(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run a script, or a module, with these arguments, as ``python`` and ``python -m`` do."""
    sys.argv = [target, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        sys.path[0] = os.getcwd() if module else str(Path(target).resolve().parent)
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(target)
    main: Any = ModuleType("__main__")
    main.__file__, main.__builtins__ = path, builtins
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102  the script that the user asked for


def leave_as_it_was_raised(error: BaseException) -> None:
    """Have the interpreter show only the script's frames when ``error`` ends it."""
    hook = sys.excepthook  # the script may have set its own

    def shown(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        trace = _of_script(trace)
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = shown


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames before the script's, and without :data:`OURS`."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    started = [i for i, one in enumerate(entries) if one.tb_frame.f_code is execute.__code__]
    entries = entries[started[-1] + 1 :] if started else entries
    while entries and entries[0].tb_frame.f_globals.get("__name__") == "runpy":
        del entries[0]
    entries = [one for one in entries if one.tb_frame.f_code.co_filename not in OURS]
    following = None
    for one in reversed(entries):
        one.tb_next = following
        following = one
    return following


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with each named module once that is imported, or now if it is already."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self.changes = dict(changes)
        for name in [name for name in changes if name in sys.modules]:
            self.changes.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module's own spec, whose loader also makes the change."""
        change = self.changes.pop(name, None)
        if change is None:
            return None
        others = (f for f in sys.meta_path if f is not self)
        spec = next((s for f in others if (s := f.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
