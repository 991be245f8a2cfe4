"""Mutants of losses made of log-probabilities, and of what is monitored."""

from mutants import Mutant

RECIPES = "test_recipes.py"
MONITORS = "test_monitors.py"

MUTANTS = [
    Mutant(
        "grpo: clipped on one side",
        "r.clamp(1 - clip[0], 1 + clip[1])",
        "r.clamp(0, 1 + clip[1])",
        f"{RECIPES} -k grpo",
    ),
    Mutant("cispo: unbounded", "r.clamp(max=1 + clip[1])", "r", f"{RECIPES} -k grpo"),
    Mutant(
        "gspo: divided by the padded length",
        "mean = log_ratio.sum(-1, keepdim=True) / used.sum(-1, keepdim=True).clamp(min=1)",
        "mean = log_ratio.mean(-1, keepdim=True)",
        f"{RECIPES} -k grpo",
    ),
    Mutant(
        "grpo: sequences weigh as much as they are long",
        'if by == "sequence":\n        loss = loss',
        'if by == "never":\n        loss = loss',
        f"{RECIPES} -k grpo",
    ),
    Mutant(
        "dr_grpo: divided by the longest answer there is",
        "len(used) * (max_length or 1)",
        "len(used) * (used.shape[1] if max_length else 1)",
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
        "loss = (1 - label_smoothing) * loss + label_smoothing * swapped",
        "loss = (1 - label_smoothing) * loss",
        f"{RECIPES} -k pairs",
    ),
    Mutant(
        "apo: as good as the model's own",
        "torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)",
        "torch.sigmoid(chosen) + torch.sigmoid(-rejected)",
        f"{RECIPES} -k pairs",
    ),
    Mutant(
        "cpo: no margin",
        "margin = beta * (chosen - rejected) - gamma",
        "margin = beta * (chosen - rejected)",
        f"{RECIPES} -k pairs",
    ),
    Mutant(
        "orpo: probabilities for odds",
        "log_p - (-torch.expm1(log_p)).log()",
        "log_p",
        f"{RECIPES} -k pairs",
    ),
    Mutant(
        "orpo: infinite odds",
        "log_p = policy.clamp(max=-torch.finfo(policy.dtype).tiny)",
        "log_p = policy.clamp(max=0)",
        f"{RECIPES} -k sure_answer",
    ),
    Mutant(
        "reverse KL: forward",
        "forward_terms(log_q, log_p)",
        "forward_terms(log_p, log_q)",
        f"{RECIPES} -k reverse",
    ),
    Mutant(
        "filtered: top-p of all classes",
        "log_p if top_k is None else log_p.log_softmax(-1)",
        "log_p",
        f"{RECIPES} -k filtered",
    ),
    Mutant("filtered: one class more", "reached - p < top_p", "reached - p <= 1", RECIPES),
    Mutant(
        "filtered: a set that is not known",
        "reached[..., -1] < top_p",
        "reached[..., -1] < 0",
        f"{RECIPES} -k known",
    ),
    Mutant(
        "filtered: a class beyond the kept",
        "torch.where(known, normaliser, torch.logaddexp(normaliser, logprob))",
        "normaliser",
        f"{RECIPES} -k known",
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
