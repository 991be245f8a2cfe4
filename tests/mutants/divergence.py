"""Mutants of divergences from a teacher."""

from mutants import Mutant

KL = "test_kl.py"

MUTANTS = [
    Mutant(
        "divergence: of absolute log-probabilities",
        "t.sub_(s).add_(self.shift)  # d",
        "t.sub_(self.lse_t).sub_(torch.sub(s, self.lse))  # d",
        f"{KL} -k nearly_equal",
    ),
    Mutant(
        "divergence: the small side is not corrected",
        "torch.clamp(d, max=0, out=scratch).mul_(e).add_(d)",
        "torch.clamp(d, max=0, out=scratch).mul_(0).add_(d)",
        f"{KL} -k all_options_at_once",
    ),
    Mutant(
        "divergence: no mean in the gradient",
        "torch.addcmul(self.t[begin:end], s, mean.to(s.dtype), out=s)",
        "torch.addcmul(self.t[begin:end], s, 0 * mean.to(s.dtype), out=s)",
        f"{KL} -k all_options_at_once",
    ),
    Mutant(
        "divergence: cross-entropy at the temperature of the divergence",
        "cls(stats.losses(), stats.lse(), stats.y, divergence.ce_weight * t, t)",
        "cls(stats.losses(), stats.lse(), stats.y, divergence.ce_weight * t, 1)",
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
        "amplify = AMPLIFY / size",
        "amplify = AMPLIFY",
        f"{KL} -k all_options_at_once",
    ),
]
