"""Replace the output head of a model so that its loss is fused.

How a loss travels::

    hidden ──▶ the head's own code ──▶ logits ──▶ view, float, / t, [:, :-1] ──▶ F.cross_entropy
       │   Hidden       │  F.linear     LazyLogits: noted as an Expr           │  loss.py
       │ (hidden.py)    └──▶ Product   (lazy.py, rules.py), or real             ▼
       │                  (product.py)  logits, once, for code that looks  a rule for each operator:
       │                                                                    fused_ce of the product,
       │                                                                    else torch's own loss
       ◀── LazyGradient: goes back the same way without values, past hooks; ─────┘  backward
           the head unpacks the gradients of hidden, weight and bias from it
"""

from fusedce.head.replace import head_report, replace_loss_head, restore_loss_head

__all__ = ["head_report", "replace_loss_head", "restore_loss_head"]
