"""Mutants of divergences from a teacher, and of class probabilities as labels."""

from mutants import Mutant

KL = "test_kl.py"
GIVEN = "test_class_probabilities.py"

MUTANTS = [
    Mutant(
        "targets: class weights with gaps",
        "c.float().contiguous(),",
        "c.float(),",
        "test_class_probabilities.py -k any_order",
    ),
    Mutant(
        "divergence: of absolute log-probabilities",
        "half = torch.sub(s, t, out=first)\n"
        "        torch.add(self.half_shift, half, alpha=0.5, out=half)",
        "half = ((s - self.lse) - (t - self.lse_t)) / 2",
        f"{KL} -k differences_of_logits",
    ),
    Mutant(
        "divergence: what sums to 0 is left out",
        "torch.addcmul(g, half, part, out=part)",
        "torch.mul(half, part, out=part)",
        f"{KL} -k nearly_equal",
    ),
    Mutant(
        "divergence: the first tile's reference is kept where it is too low",
        "if not self.add(z, self.k, scratch):",
        "if self.add(z, self.k, scratch) is None:",
        f"{KL} -k far_above_the_first_tile",
    ),
    Mutant(
        "divergence: no mean in the gradient",
        "torch.addcmul(t, s, self.mean.to(s.dtype), value=-1, out=s)",
        "torch.addcmul(t, s, self.mean.to(s.dtype), value=0, out=s)",
        f"{KL} -k all_options_at_once",
    ),
    Mutant(
        "divergence: cross-entropy at the temperature of the divergence",
        "h.dtype), y, weight, temperature)",
        "h.dtype), y, weight, 1)",
        f"{KL} -k all_options_at_once",
    ),
    Mutant(
        "divergence: limits of beta are the other ones",
        "kind = REVERSE if beta else FORWARD",
        "kind = FORWARD if beta else REVERSE",
        f"{KL} -k limits_of_beta",
    ),
    Mutant(
        "divergence: a masked class of both is infinite",
        "bias = bias.clamp(min=-NEVER) if scale > 0 else bias",
        "bias = bias",
        f"{KL} -k masked_class",
    ),
    Mutant(
        "divergence kernel: no series near equality",
        "tl.where(small, near, size + far)",
        "size + far",
        f"{KL} -k nearly_equal",
    ),
    Mutant(
        "divergence kernel: bad labels pass",
        'tl.store(losses + c, tl.where(known, loss, float("nan")).to(tl.float32))',
        "tl.store(losses + c, loss.to(tl.float32))",
        f"{KL} -k bad_label_on_a_device",
    ),
    Mutant(
        "divergence kernel: no barrier of float16's range",
        "size = largest + tl.abs(mean) + tl.maximum(of_ce, -of_ce) * to_plain",
        "size = 1e-6 + 0 * largest",
        f"{KL} -k all_options_at_once",
    ),
    Mutant(
        "divergence: reverse takes the other side's complement",
        "both.add_(part)",
        "both.sub_(part)",
        f"{KL} -k all_options_at_once",
    ),
    Mutant(
        "divergence: a budget is of one head",
        "heads, H = (1, 0) if teacher_H is None else (2, teacher_H)",
        "heads, H = (1, 0) if teacher_H is None else (1, teacher_H)",
        f"{KL} -k peak",
    ),
    Mutant(
        "probabilities: the label's gradient from p - 1",
        "(of_all * (-nll).expm1() + total + of_lse * (-nll).exp()).to(h.dtype)",
        "(of_all * ((-nll).exp().float() - 1) + total + of_lse * (-nll).exp()).to(h.dtype)",
        f"{GIVEN} -k does_not_cancel",
    ),
    Mutant(
        "probabilities: no other class in the loss",
        "self.apart += behind.mul_(t).sum(0)",
        "behind.mul_(t).sum(0)",
        f"{GIVEN} -k torchs",
    ),
    Mutant(
        "probabilities: mean over the class weights",
        "return dispatch.loss_sum(task)[0].loss_sum / positions",
        "return dispatch.loss_sum(task)[0].loss_sum / (2 * positions)",
        f"{GIVEN} -k torchs",
    ),
    Mutant(
        "probabilities: smoothing is left out",
        "t.mul_(1 - smoothing).add_(smoothing / V)",
        "t.mul_(1 - smoothing)",
        f"{GIVEN} -k torchs",
    ),
    Mutant(
        "reverse: the mean is of probabilities that do not sum to 1",
        "self.mean *= (taken - lse).clamp_(-1, 1).exp_()",
        "pass",
        "test_kl.py -k scale_the_mean",
    ),
    Mutant(
        "divergence: a log-sum-exp far from 0 is rounded",
        "low if bool((high.abs() > FAR).any()) else None",
        "None",
        f"{KL} -k tied_classes",
    ),
    Mutant(
        "divergence: an excluded class adds a finite number",
        "self.kl.masked_fill_(given > 0, math.inf)",
        "pass",
        f"{KL} -k excluded_by_one_head",
    ),
    Mutant(
        "reverse kernel: the mean is of probabilities that do not sum to 1",
        "mean /= total",
        "mean /= 1.0",
        "test_kl.py -k scale_the_mean",
    ),
    Mutant(
        "jsd: the mean is of probabilities that do not sum to 1",
        "self.mean /= self.total",
        "pass",
        "test_kl.py -k far_apart",
    ),
    Mutant(
        "jsd: a mixture with hardly any of one distribution is lost",
        "if self.divergence.is_uneven():",
        "if False:",
        "test_kl.py -k hardly",
    ),
    Mutant(
        "jsd kernel: a mixture with hardly any of one distribution is lost",
        "far = w * e < -0.5",
        "far = w * e < -2.0",
        "test_kl.py -k hardly",
    ),
    Mutant(
        "probabilities: a tangent is dropped",
        "if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():",
        "if False:",
        "test_derivatives.py -k tangent_of_class",
    ),
    Mutant(
        "probabilities: they may ask for a gradient",
        "differentiated = probabilities.requires_grad and torch.is_grad_enabled()",
        "differentiated = False",
        f"{GIVEN} -k what_is_wrong",
    ),
    Mutant(
        "probabilities kernel: class weights are left out",
        "t *= tl.load(class_weight + offs, mask=mask, other=0.0)",
        "t *= 1.0",
        f"{GIVEN} -k torchs",
    ),
    Mutant(
        "probabilities kernel: no z-loss in the gradient",
        "alpha = (of_all + of_lse).to(tl.float32)",
        "alpha = of_all.to(tl.float32)",
        f"{GIVEN} -k all_options_at_once",
    ),
    Mutant(
        "probabilities kernel: no barrier of float16's range",
        "size = size + tl.abs(alpha) + tl.abs(at_label)",
        "size = 1e-6 + 0 * size",
        f"{GIVEN} -k all_options_at_once",
    ),
]
