"""`fusedce run`: an unchanged training script with fused losses and one denominator per step.

Two classes of transformers are changed as the script imports them. A model with an output head has
it replaced when it is made (:func:`fusedce.replace_loss_head`). A trainer becomes an instance of a
class of the same name with our mixin before the script's own class. Where the mixin refuses
a setting, the object becomes one of the script's own class again: what we cannot do better stays as
it is, and the report says why.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import fusedce

from . import script

script.OURS.add(__file__)
_REFUSALS = (TypeError, ValueError, RuntimeError)  # of replace_loss_head and the mixin


@dataclass
class Model:
    """A model with an output head."""

    name: str  # of its class
    hooks: Any = None  # a module with the hooks of its head, which hold the counts; no weights
    why_not: str | None = None  # why the head is not replaced

    def report(self) -> dict[str, Any]:
        """What its head did."""
        found: dict[str, Any] = {"class": self.name, "replaced": self.hooks is not None}
        if self.hooks is None:
            return found | {"losses_fused": 0, "logits_made": 0, "why_not": [self.why_not]}
        told = fusedce.head_report(self.hooks)
        places = [place._asdict() for place in told.places]
        why = [f"{p.operation} at {p.line}" for p in told.places] + list(told.notes)
        counts = {"losses_fused": told.losses_fused, "logits_made": told.logits_made}
        return found | counts | {"why_not": why, "places": places}


@dataclass
class Trainer:
    """A trainer, with a mixin or without."""

    name: str
    mixin: str | None
    why_not: str | None = None


@dataclass
class Run:
    """What was touched in this process."""

    models: list[Model] = field(default_factory=list)
    trainers: list[Trainer] = field(default_factory=list)
    loop: script.Loop = field(default_factory=script.Loop)
    loading: int = 0  # depth of `from_pretrained` calls
    heads: Any = field(default_factory=weakref.WeakKeyDictionary)  # output head: its Model

    # ---- models -----------------------------------------------------------------------------

    def change_models(self, modeling: ModuleType) -> None:
        """Replace heads when models are made; ``modeling`` is ``transformers.modeling_utils``."""
        kind = modeling.PreTrainedModel
        post_init, load = kind.post_init, kind.__dict__["from_pretrained"].__func__

        @functools.wraps(post_init)
        def after_init(model: Any) -> None:
            post_init(model)
            if not self.loading:
                self.replace(model)

        @functools.wraps(load)
        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self.loading += 1
            try:
                made = load(cls, *args, **kwargs)
            finally:
                self.loading -= 1
            if not self.loading:
                self.replace(made[0] if isinstance(made, tuple) else made)
            return made

        kind.post_init, kind.from_pretrained = after_init, classmethod(from_pretrained)

    def replace(self, model: Any) -> None:
        """Replace the head of a model that has one."""
        try:
            head = model.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            head = None
        if head is None:
            return
        made = Model(type(model).__name__)
        try:
            fusedce.replace_loss_head(model)
            made.hooks = _hooks_of(head)
        except _REFUSALS as why:
            made.why_not = str(why)
        if (inner := self.heads.get(head)) is not None:  # made a moment ago, of a part of the model
            self.models.remove(inner)
        self.heads[head] = made
        self.models.append(made)

    # ---- trainers ---------------------------------------------------------------------------

    def change_trainers(self, trainer: ModuleType) -> None:
        """Give every ``Trainer`` its mixin; ``trainer`` is ``transformers.trainer``."""

        @functools.cache
        def fitted(cls: Any) -> type | str:
            try:
                return self.fitted(cls)
            except TypeError as why:
                return str(why)

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if issubclass(cls, fusedce.FusedTrainerMixin):  # the script's own line
                return object.__new__(cls)
            found = fitted(cls)
            if isinstance(found, str):
                self.trainers.append(Trainer(cls.__name__, None, found))
                return object.__new__(cls)
            return object.__new__(found)

        trainer.Trainer.__new__ = staticmethod(new)

    def fitted(self, cls: type) -> type:
        """A class of the name of ``cls``, with its mixin before it.

        Raises:
            TypeError: the mixin does not fit the class.
        """
        run, mixin = self, fusedce.FusedTrainerMixin
        for kind in cls.__mro__:
            own = {"training_step", "prediction_step"} & vars(kind).keys()
            if own and kind.__module__.split(".")[0] not in ("transformers", "trl", "axolotl"):
                # It may compute another loss than the one that the mixin counts.
                raise TypeError(f"{kind.__name__} has a {min(own)} of its own")

        @functools.wraps(cls.__init__)  # type: ignore[misc]
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            cls.__init__(self, *args, **kwargs)  # type: ignore[misc]
            accepts = getattr(self, "model_accepts_loss_kwargs", None)
            self._fusedce_entry = entry = Trainer(cls.__name__, mixin.__name__)
            self._fusedce_before = accepts
            run.trainers.append(entry)
            try:
                mixin._set_up(self)
            except _REFUSALS as why:
                leave(self, why)

        def leave(trainer: Any, why: BaseException) -> None:
            entry = trainer._fusedce_entry
            entry.mixin, entry.why_not = None, str(why)
            trainer.model_accepts_loss_kwargs = trainer._fusedce_before
            trainer.__class__ = cls

        def unless_refused(name: str, refusals: tuple[type[Exception], ...]) -> Any:
            """The mixin's method, or the script's once the mixin has refused the model's loss."""

            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    return getattr(mixin, name)(self, *args, **kwargs)
                except refusals as why:
                    leave(self, why)
                    return getattr(self, name)(*args, **kwargs)

            return method

        body: dict[str, Any] = {
            "__init__": __init__, "__module__": cls.__module__, "__doc__": cls.__doc__,
            "__qualname__": cls.__qualname__,
            "_get_num_items_in_batch": unless_refused("_get_num_items_in_batch", _REFUSALS),
            # (Whatever else fails there, memory that is short for one, is the model's own.)
            "prediction_step": unless_refused("prediction_step", (ValueError,)),
        }  # fmt: skip
        return types.new_class(cls.__name__, (mixin, cls), exec_body=lambda ns: ns.update(body))

    # ---- the report -------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The findings, for a JSON file."""
        return {
            "version": fusedce.__version__,
            "models": [model.report() for model in self.models],
            "trainers": [vars(trainer) for trainer in self.trainers],
            "denominator": self.denominator(),
        }

    def denominator(self) -> str | None:
        """What is left to do where a loop of the script's own divides its fused losses."""
        own_loop = not self.trainers and any(m.report()["losses_fused"] for m in self.models)
        remedy = self.loop.remedy() if own_loop else None
        return remedy and (
            f"Losses are fused, but the denominator is still the loop's own: if it averages "
            f"micro-batches, tokens of short ones weigh more (`fusedce audit` measures it). "
            f"{remedy}"
        )


def _hooks_of(head: Any) -> Any:
    from torch import nn

    hooks = nn.Module()
    hooks._forward_pre_hooks = head._forward_pre_hooks
    return hooks


def line(found: dict[str, Any]) -> str:
    """The findings in one line."""
    parts = []
    for (name, replaced), n in Counter(
        (model["class"], model["replaced"]) for model in found["models"]
    ).items():
        group = [m for m in found["models"] if (m["class"], m["replaced"]) == (name, replaced)]
        fused, logits = (sum(m[key] for m in group) for key in ("losses_fused", "logits_made"))
        many = name if n == 1 else f"{n} x {name}"
        why = dict.fromkeys(why for m in group for why in m["why_not"])
        text = f"{many}: {fused} losses fused, logits made {logits} times"
        text = text if replaced else f"{many} keeps its head"
        parts.append(text + (f" ({'; '.join(why)})" if why and (logits or not fused) else ""))
    for trainer in found["trainers"]:
        name, why = trainer["name"], trainer["why_not"]
        parts.append(f"{name} keeps its loss ({why})" if why else f"{name} with {trainer['mixin']}")
    parts += [found["denominator"].rstrip(".")] if found["denominator"] else []
    nothing = "no model with an output head and no Trainer of transformers was made"
    return " ".join(f"fusedce run: {'. '.join(parts) or nothing}".split())


@contextmanager
def _reporting(run: Run, report: str | None) -> Iterator[None]:
    """Write the report when the script ends, however it ends; on rank 0 alone."""
    try:
        yield
    finally:
        if script.is_first_rank():
            found = run.report()
            if report is not None:
                Path(report).write_text(json.dumps(found, indent=1) + "\n")
            print(line(found), file=sys.stderr)


def run(target: str, arguments: Sequence[str], *, module: bool, report: str | None) -> None:
    """Run a script, or a module, with fused losses.

    Raises:
        Raised: what the script raised.
        UserError: there is nothing to run.
    """
    script.check("run", target, module=module)
    if report is not None:
        report = os.path.abspath(report)  # the script may go elsewhere
    found = Run()
    script.AfterImport({
        "transformers.modeling_utils": found.change_models,
        "transformers.trainer": found.change_trainers,
    } | found.loop.changes())  # fmt: skip
    try:
        with _reporting(found, report):
            script.execute(target, arguments, module=module)
    except BaseException as error:
        script.leave_as_it_was_raised(error)
        raise script.Raised(error) from None
