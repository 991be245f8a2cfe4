"""The mixin that makes the Trainer of transformers and TRL's SFTTrainer count tokens right."""

from fusedce.trainer.mixin import FusedTrainerMixin

__all__ = ["FusedTrainerMixin"]
