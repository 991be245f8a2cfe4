"""Replace the output head of a model so that its loss is fused.

How a loss travels::

    hidden ──▶ the head's own code ──▶ logits ──▶ view, float, / t, [:, :-1] ──▶ F.cross_entropy
       │   Hidden       │  F.linear     LazyLogits: noted as an Expr           │  loss.py
       │ (hidden.py)    └──▶ Product   (lazy.py, rules.py), or real             ▼
       │                  (product.py)  logits, once, for code that looks   expression and autograd
       │                                                                    nodes agree? fused_ce
       │                                                                    of the Product: else
       │                                                                    torch's own loss
       ◀── Route: the gradient goes straight to hidden, weight and bias ────────┘  backward
           or along the logits: as a Passenger past hooks, or as it is, where code asks for it
"""

from fusedce.head.replace import head_report, replace_loss_head, restore_loss_head

__all__ = ["head_report", "replace_loss_head", "restore_loss_head"]
