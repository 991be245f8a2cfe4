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
        "divergence: a budget is of one head",
        "heads, H = (1, 0) if teacher_H is None else (2, teacher_H)",
        "heads, H = (1, 0) if teacher_H is None else (1, teacher_H)",
        f"{KL} -k peak",
    ),
    Mutant(
        "reverse kernel: the mean is of probabilities that do not sum to 1",
        "mean /= total",
        "mean /= 1.0",
        "test_kl.py -k scale_the_mean",
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
