"""Axolotl's plug-in: ``plugins: [fusedce.integrations.axolotl.FusedCEPlugin]`` in the YAML."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.logging import get_logger
from pydantic import BaseModel

from fusedce import FusedTrainerMixin, audit, head_report, replace_loss_head

LOG = get_logger(__name__)


class FusedCEArgs(BaseModel):
    """What the YAML may set; ``fusedce_audit`` is for a few steps, as :func:`fusedce.audit`."""

    fusedce_memory_budget: int | None = None  # bytes
    fusedce_audit: bool = False


class FusedCEPlugin(BasePlugin):
    """The model's loss without logits, and one denominator for an optimizer step.

    The head is replaced once adapters are loaded, and a report of it is logged after training. The
    trainer is Axolotl's own behind :class:`fusedce.FusedTrainerMixin`, unless the YAML or another
    plug-in names one. Preferences, reinforcement and rewards (``rl``, ``reward_model``,
    ``process_reward_model``) are left alone.
    """

    has_report = False

    def get_input_args(self) -> str:
        return f"{__name__}.{FusedCEArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        if not _has_other_loss(cfg):
            try:
                replace_loss_head(model, memory_budget=cfg.fusedce_memory_budget)
                self.has_report = True
            except (TypeError, ValueError) as why:
                LOG.warning("fusedce leaves the head of %s as it is: %s", type(model).__name__, why)

    def get_trainer_cls(self, cfg: Any) -> Any:
        others = [p for p in PluginManager.get_instance().plugins.values() if p is not self]
        named = cfg.trainer_cls or any(p.get_trainer_cls(cfg) for p in others)
        if named or _has_other_loss(cfg) or cfg.model_config_type == "mamba":
            return None
        from axolotl.core.trainers import AxolotlTrainer

        budget = {"memory_budget": cfg.fusedce_memory_budget}
        return type("FusedCETrainer", (FusedTrainerMixin, AxolotlTrainer), budget)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [audit(trainer.model).callback()] if cfg.fusedce_audit else []

    def post_train(self, cfg: Any, model: Any) -> None:  # Axolotl calls it twice
        if self.has_report:
            LOG.info("%s", head_report(model))
        self.has_report = False


def _has_other_loss(cfg: Any) -> bool:
    return bool(cfg.rl or cfg.reward_model or cfg.process_reward_model)
