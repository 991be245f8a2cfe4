"""`fusedce audit SCRIPT`: :func:`fusedce.audit` around the model of an unchanged script.

The audit begins when a model is first called with gradients, and ends with the script, with its
process group, or after enough optimizer steps. Modules are changed as the script imports them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

import fusedce

from . import script
from .model_sizes import UserError

if TYPE_CHECKING:
    from ..auditing import Audit

script.OURS.add(__file__)
_WIDTH = 40  # characters of the longest bar


class _Enough(BaseException):
    """Ends the script after the steps that were asked for."""


class _Watch:
    """The hooks of one audit."""

    def __init__(self, model: str | None, steps: int) -> None:
        self.name, self.steps = model, steps
        self.called: list[str] = []  # classes of models that could be meant
        self.report: Audit | None = None
        self.ended = False
        self.scaler: Any = None
        self.loop = script.Loop()

    def changes(self) -> dict[str, Callable[[ModuleType], None]]:
        """What to do with modules that the script imports."""
        return {
            "torch.nn.modules.module": self._watch_calls,
            "torch.amp.grad_scaler": self._watch_scalers,
            "torch.distributed.distributed_c10d": self._end_with_the_group,
            "transformers.trainer": self._read_logs,
            "torch._dynamo": self._leave_uncompiled,
            **self.loop.changes(),
        }

    def _leave_uncompiled(self, dynamo: ModuleType) -> None:
        """Run compiled code uncompiled: in its graphs no hook of the audit would run."""
        dynamo.set_stance("force_eager")
        warnings.filterwarnings(
            "ignore", "Using `torch.compile.module.` when there are global hooks"
        )

    def _watch_calls(self, of_modules: ModuleType) -> None:
        self._handle = of_modules.register_module_forward_pre_hook(self._begin)

    def _begin(self, module: Any, args: Any) -> None:
        import torch

        name = type(module).__name__
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        if self.name not in (None, name):
            self.called += [] if name in self.called else [name]
            return
        self._handle.remove()
        scale = lambda: 1.0 if self.scaler is None else self.scaler.get_scale()  # noqa: E731
        self.report = fusedce.audit(module, loss_scale=scale)
        self.report.__enter__()
        self.report.include(module)
        module.register_forward_pre_hook(self._stop)

    def _stop(self, module: Any, args: Any) -> None:
        """End the script at the first forward after the last step, whose loss is logged by then."""
        if self.report is not None and self.report.n_steps() >= self.steps:
            raise _Enough

    def _watch_scalers(self, amp: ModuleType) -> None:
        script.when_made(amp.GradScaler, lambda scaler: setattr(self, "scaler", scaler))

    def _end_with_the_group(self, c10d: ModuleType) -> None:
        destroy = c10d.destroy_process_group

        @functools.wraps(destroy)
        def destroy_process_group(*args: Any, **kwargs: Any) -> None:
            self.end()
            destroy(*args, **kwargs)

        c10d.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]

    def _read_logs(self, trainer: ModuleType) -> None:
        log = trainer.Trainer.log

        @functools.wraps(log)
        def logged(trainer: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            self.loop.trainer = True
            if self.report is not None and "loss" in logs and trainer.args.logging_steps == 1:
                self.report.log(float(logs["loss"]))
            log(trainer, logs, *args, **kwargs)

        trainer.Trainer.log = logged

    def end(self) -> None:
        """Add up what was seen, once."""
        if self.report is not None and not self.ended:
            self.ended = True
            self.report.__exit__(None, None, None)


def audit(
    target: str, arguments: Sequence[str], *, module: bool, model: str | None, steps: int,
    output: TextIO,
) -> tuple[Audit, str | None]:  # fmt: skip
    """Run a script, or a module, and audit its model for so many optimizer steps.

    Collectives: one ``all_gather_object``, on all ranks.

    Args:
        target, arguments, module: as for ``python``, and whether ``-m`` was given.
        model: class of the model; ``None``: the first that is called with gradients.
        steps: the script ends after so many.
        output: where the script prints.

    Returns:
        The report, and what to write where the loop is wrong and is no trainer's.

    Raises:
        Raised: what the script raised.
        UserError: there is nothing to run, or no such model was called, or it returns no logits.
    """
    script.check("audit", target, module=module)
    watch = _Watch(model, steps)
    script.AfterImport(watch.changes())
    try:
        with contextlib.redirect_stdout(output):
            script.execute(target, arguments, module=module)
    except _Enough:
        pass
    except BaseException as error:
        from ..audited_logits import NotAuditable  # not before the script has imported torch

        if isinstance(error, NotAuditable):
            raise UserError(f"{error}; --model CLASS chooses another") from None
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            script.leave_as_it_was_raised(error)
            raise script.Raised(error) from None
    watch.end()
    if watch.report is None:
        called = f"; called were {', '.join(watch.called)}" if watch.called else ""
        wanted = "model" if model is None else f"model of a class {model}"
        raise UserError(f"no {wanted} was called with gradients{called}")
    return watch.report, watch.loop.remedy() if watch.report.weighs_right() is False else None


def value(report: Audit) -> dict[str, Any]:
    """The findings, for JSON."""
    steps = [asdict(step) for step in report.steps]
    return {
        "right": report.right(), "verdict": report.verdict(), "leak": report.leak, "steps": steps
    }  # fmt: skip


def picture(report: Audit) -> str:
    """A bar for the weight of a token in each micro-batch; in a right loop all are as long as 1."""
    lines = []
    for i, step in enumerate(report.steps):
        most = max(1.0, *(abs(weight) for _, weight in step.micro_batches))
        one = round(_WIDTH / most)
        lines.append(f"step {i}: weight of a token in each micro-batch, | at the right one")
        for n, weight in step.micro_batches:
            bar = "#" * round(_WIDTH * max(weight, 0.0) / most)
            bar = bar[:one].ljust(one) + "|" + bar[one:]
            lines.append(f"  {n:8} tokens  {weight:8.3f}  {bar}")
    return "\n".join([*lines, ""])
