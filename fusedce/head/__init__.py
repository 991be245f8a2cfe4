"""Replace the output head of a model so that its loss is fused.

How a loss travels::

    hidden ──▶ the head's own code ──▶ logits ──▶ view, float, / t, [:, :-1] ──▶ F.cross_entropy
       │   LentInput     │  F.linear    LazyLogits: noted as an Expr           │  loss.py
       │ (lent_input.py) └──▶ LinearCall (lazy.py, rules.py), or real          ▼
       │               (linear_call.py)  logits, once, for code that    a rule for each operator:
       │                                 looks                          fused_ce of the operands,
       │                                                                else torch's own loss
       ◀── LazyGradient (gradient.py): goes back the same way without ─────────┘  backward
           values, past hooks; the head takes the operands' gradients from it
"""

from .replace import head_report, replace_loss_head, restore_loss_head

__all__ = ["head_report", "replace_loss_head", "restore_loss_head"]
