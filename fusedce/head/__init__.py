"""The output head of a model, replaced by one whose loss is fused."""

from fusedce.head.replace import attach, head_report, replace_loss_head, restore_loss_head

__all__ = ["attach", "head_report", "replace_loss_head", "restore_loss_head"]
