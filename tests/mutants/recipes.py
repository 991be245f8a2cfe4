"""Mutants of losses made of log-probabilities, and of what is monitored."""

from mutants import Mutant

RECIPES = "test_recipes.py"
MONITORS = "test_monitors.py"

MUTANTS = [
    Mutant(
        "grpo: clipped on one side",
        "ratio.clamp(1 - clip[0], 1 + clip[1])\n",
        "ratio.clamp(0, 1 + clip[1])\n",
        f"{RECIPES} -k grpo",
    ),
    Mutant(
        "grpo: clipped after the exponential",
        "log_ratio.masked_fill(clipped, 0).exp()",
        "log_ratio.exp()",
        f"{RECIPES} -k far_apart",
    ),
    Mutant("grpo: other estimate", "torch.expm1(d) - d", "torch.expm1(d)", f"{RECIPES} -k grpo"),
    Mutant(
        "dpo: smoothing on one side",
        "- label_smoothing * F.logsigmoid(-margin)",
        "- 0 * F.logsigmoid(-margin)",
        f"{RECIPES} -k dpo",
    ),
    Mutant(
        "kto: negative divergence",
        "divergence.detach().clamp(min=0)",
        "divergence.detach()",
        f"{RECIPES} -k kto",
    ),
    Mutant(
        "scaled: the factor trains",
        "factor = logprob.detach().exp()",
        "factor = logprob.exp()",
        f"{RECIPES} -k scaled",
    ),
    Mutant(
        "distillation: what sums to 0 is left out",
        "(half * (tanh - 1) + tanh)",
        "(half * (tanh - 1))",
        f"{RECIPES} -k below_0",
    ),
    Mutant(
        "distillation: no tail",
        "forward_terms(torch.cat([log_p, p_tail], -1), torch.cat([log_q, q_tail], -1))",
        "forward_terms(log_p, log_q)",
        f"{RECIPES} -k distillation",
    ),
    Mutant(
        "distillation: a raised tail has no gradient",
        "value.log() + (tail - tail.detach()) / value",
        "value.log()",
        f"{RECIPES} -k sure_student",
    ),
    Mutant(
        "distillation: a tail of noise",
        "torch.maximum(tail, noise)",
        "tail",
        f"{RECIPES} -k noise",
    ),
    Mutant(
        "log-probabilities: the likeliest class less itself",
        "gap = gap.scatter(1, best, 0)",
        "gap = gap + 0",
        f"{RECIPES} -k noise",
    ),
    Mutant(
        "monitors: ignored labels are correct",
        "(argmax == problem.labels) & problem.valid()",
        "(argmax == problem.labels)",
        MONITORS,
    ),
    Mutant(
        "temperature: gradient without its slope",
        "sharp = 1 / problem.temperature.double().masked_fill(~used, 1)",
        "sharp = torch.ones_like(alpha)",
        "test_temperature.py -k gradcheck",
    ),
    Mutant(
        "temperature: the label's logit as it was",
        "z /= t_row\n                z = ",
        "z /= 1.0\n                z = ",
        "test_temperature.py -k gradients",
    ),
    Mutant(
        "monitors: a share is a whole sum",
        "MonitoredLossSum if out.is_whole else",
        "MonitoredLossSum if True else",
        MONITORS,
    ),
    Mutant("monitors: z-loss unweighted", "z = z * problem.token_weight", "z = z * 1", MONITORS),
    Mutant("monitors: lost in a sum", "x + theirs[name] for name", "x for name", MONITORS),
    Mutant(
        "trainers: other temperature",
        "temperature=float(temperature),\n                mean_logit=mean_logit",
        "temperature=1.0,\n                mean_logit=mean_logit",
        "test_policy_trainers.py -k grpo",
    ),
    Mutant(
        "trainers: TRL's function stays",
        "setattr(module, name, ours)",
        "pass",
        "test_policy_trainers.py -k same",
    ),
]
