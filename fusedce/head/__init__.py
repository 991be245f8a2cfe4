"""Replace the output head of a model so that its loss is fused."""

from fusedce.head.replace import attach, head_report, replace_loss_head, restore_loss_head

__all__ = ["attach", "head_report", "replace_loss_head", "restore_loss_head"]
