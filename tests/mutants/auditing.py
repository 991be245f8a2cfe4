"""Mutants of the audit."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "audit: weights as they are in backward",
        "            micro.multiply(factor)\n",
        "            pass\n",
        "test_audit.py -k plain_loop",
    ),
    Mutant(
        "audit: ranks that add",
        "averaged_over = 1 if self._adds else len(ranks)",
        "averaged_over = 1",
        "test_audit.py -k two_ranks",
    ),
    Mutant(
        "audit: every position is a token",
        "trained = g.min(-1).values < 0",
        "trained = g.min(-1).values < 1",
        "test_audit.py -k plain_loop",
    ),
    Mutant(
        "audit: smoothing is a weight",
        "smooth = -offset * g.shape[-1] > _SMOOTHED * slope.clamp(min=0)",
        "smooth = offset.isinf()",
        "test_audit.py -k right",
    ),
    Mutant(
        "audit: class weights are an alarm",
        "    micro = _without_class_weights(micro)\n",
        "",
        "test_audit.py -k right",
    ),
    Mutant(
        "audit: factors on .grad unseen",
        "            self._now.afterwards = self._factor_on_gradients()\n",
        "",
        "test_audit.py -k right",
    ),
    Mutant(
        "audit: lost gradients unseen",
        "            self._now.lost = len(self._now.micro)",
        "            pass",
        "test_audit.py -k lost",
    ),
    Mutant(
        "audit: every second micro-batch has lost the first",
        "if had and not have:",
        "if had:",
        "test_audit.py -k right",
    ),
    Mutant(
        "audit: what an engine keeps elsewhere counts as lost",
        "if had and not have:",
        "if not have:",
        "test_audit.py -k engine",
    ),
    Mutant(
        "audit: gradients lost just before the step unseen",
        "            self._count_lost()\n            self._now.afterwards",
        "            self._now.afterwards",
        "test_audit.py -k before_the_step",
    ),
    Mutant(
        "audit: auxiliary losses weigh tokens",
        "if len(results) == 1 and results[0].edge is not None:",
        "if False:",
        "test_audit.py -k auxiliary_loss_is_no",
    ),
    Mutant(
        "audit: a loss is read after the model has changed it",
        "return cls(loss.detach().clone(), edge)",
        "return cls(loss.detach(), edge)",
        "test_audit.py -k in_place",
    ),
    Mutant(
        "audit: a sum of losses is read after the model has changed it",
        "out.loss_sum.detach().clone(), out.n_valid",
        "out.loss_sum.detach(), out.n_valid",
        "test_audit.py -k in_place",
    ),
    Mutant(
        "audit: a step that is skipped for its gradients is a mistake",
        "not self._finite or self._loss_scale() < self._scale",
        "self._loss_scale() < self._scale",
        "test_audit.py -k skipped",
    ),
    Mutant(
        "audit: a lower scale says nothing of an overflow",
        "not self._finite or self._loss_scale() < self._scale",
        "not self._finite",
        "test_audit.py -k skipped",
    ),
    Mutant(
        "audit: every lost gradient is one that overflowed",
        "not self._finite or self._loss_scale() < self._scale",
        "True",
        "test_audit.py -k lost",
    ),
    Mutant(
        "audit: skipped micro-batches count",
        "one.micro[one.lost if skipped else 0 :]",
        "one.micro",
        "test_audit.py -k skipped",
    ),
    Mutant(
        "audit: a step that a fused optimizer skips counts",
        'if not getattr(optimizer, "found_inf", None):',
        "if True:",
        "test_audit.py -k fused_optimizer",
    ),
    Mutant(
        "audit: copies of the logits have all of their gradient",
        "return GradientEdge(node, nr) if node in behind else edge",
        "return edge",
        "test_audit.py -k copies",
    ),
]
