"""Axolotl's plug-in: ``plugins: [fusedce.integrations.axolotl.FusedCEPlugin]`` in the YAML."""

from typing import Any

from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.logging import get_logger
from pydantic import BaseModel

from .. import FusedTrainerMixin, audit, head_report, replace_loss_head

LOG = get_logger(f"axolotl.{__name__}")  # under other names, Axolotl shows warnings alone
OTHER_LOSSES = ("rl", "reward_model", "process_reward_model")


class FusedCEArgs(BaseModel):
    """Keys of the YAML: bytes that the loss may hold; whether to audit the run (a few steps)."""

    fusedce_memory_budget: int | None = None
    fusedce_audit: bool = False


class FusedCEPlugin(BasePlugin):
    """The model's loss without logits, and one denominator for an optimizer step.

    The head is replaced after adapters are loaded. Axolotl's trainer gets
    :class:`fusedce.FusedTrainerMixin`, unless the YAML or another plug-in names a trainer. With
    ``rl``, ``reward_model`` or ``process_reward_model`` the plug-in does nothing.
    """

    is_reported = True  # Axolotl calls post_train twice

    def get_input_args(self) -> str:
        return f"{__name__}.{FusedCEArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        if not any(map(cfg.get, OTHER_LOSSES)):
            try:
                replace_loss_head(model, memory_budget=cfg.fusedce_memory_budget)
                self.is_reported = False
            except (TypeError, ValueError) as why:
                LOG.warning("fusedce leaves the head of %s as it is: %s", type(model).__name__, why)

    def get_trainer_cls(self, cfg: Any) -> type | None:
        others = [p for p in PluginManager.get_instance().plugins.values() if p is not self]
        named = cfg.trainer_cls or any(p.get_trainer_cls(cfg) for p in others)
        if named or cfg.model_config_type == "mamba" or any(map(cfg.get, OTHER_LOSSES)):
            return None
        from axolotl.core.trainers import AxolotlTrainer

        budget = {"memory_budget": cfg.fusedce_memory_budget}
        return type("FusedCETrainer", (FusedTrainerMixin, AxolotlTrainer), budget)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [audit(trainer.model).callback()] if cfg.fusedce_audit else []

    def post_train(self, cfg: Any, model: Any) -> None:
        if not self.is_reported:
            LOG.info("%s", head_report(model))
        self.is_reported = True
