"""The public address of the mixins for TRL's trainers of policies and of distillation."""

from fusedce.trainer.policy import FusedDistillationMixin, FusedPolicyMixin

__all__ = ["FusedDistillationMixin", "FusedPolicyMixin"]
