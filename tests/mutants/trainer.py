"""Mutants of the trainer's mixin."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "trainer: another's loss replaced",
        'if "compute_loss" not in vars(kind) or (library, kind.__name__) in _CROSS_ENTROPY:',
        "if True:",
        "trainer/test_compute_loss.py",
    ),
    Mutant(
        "trainer: behind the Trainer",
        "if any(_is_trainer(kind) for kind in before):",
        "if False:",
        "trainer/test_compute_loss.py",
    ),
    Mutant(
        "trainer: own count",
        "divisor = out.n_valid.clamp(min=1) if denominator is None else denominator",
        "divisor = out.n_valid.clamp(min=1)",
        "trainer/test_mixin.py",
    ),
    Mutant(
        "trainer: steps forgotten",
        "/ (steps * self._n_ranks())",
        "/ self._n_ranks()",
        "trainer/test_mixin.py",
    ),
    Mutant(
        "trainer: ranks forgotten",
        "/ (steps * self._n_ranks())",
        "/ steps",
        "trainer/test_ranks.py -k mixin",
    ),
    Mutant(
        "trainer: borders trained",
        "batch[name].masked_fill(where, -100)",
        "batch[name]",
        "trainer/test_mixin.py",
    ),
    Mutant(
        "trainer: counted before the shift",
        "int(observer.losses[0][1])",
        "inputs[name].numel()",
        "trainer/test_mixin.py",
    ),
    Mutant(
        "trainer: repeated samples evaluated",
        "dict(self._eval_totals.without_repeats(inputs))",
        "inputs",
        "trainer/test_mixin.py -k repeated",
    ),
    Mutant(
        "trainer: rewrites what others log",
        'of_interval = "loss" in logs and "learning_rate" in logs',
        'of_interval = "loss" in logs',
        "trainer/test_mixin.py -k rewritten",
    ),
    Mutant(
        "trainer: counts what is not trained",
        "if self._eval_totals is not None or denominator is not None:",
        "if True:",
        "trainer/test_mixin.py -k rewritten",
    ),
    Mutant(
        "trainer: counts a run that failed",
        "self._begin_run()\n        return",
        "return",
        "trainer/test_mixin.py -k memory",
    ),
    Mutant(
        "trainer: any reduction",
        '            if [reduction for *_, reduction in observer.losses] != ["mean"]:\n',
        "            if not observer.losses:\n",
        "trainer/test_mixin.py -k refused",
    ),
    Mutant(
        "trainer: shifted labels over borders",
        "starts.roll(-1, 1)",
        "starts",
        "trainer/test_mixin.py -k across",
    ),
    Mutant(
        "stats: a mean of means",
        "self.sums = sums if self.sums is None else self.sums + sums",
        "self.sums = sums",
        "trainer/test_token_stats.py",
    ),
    Mutant(
        "stats: padding is seen",
        "tokens = mask.sum()",
        "tokens = mask.new_tensor(mask.numel())",
        "trainer/test_sft.py -k test_sft",
    ),
    Mutant(
        "stats: tokens of the last step",
        "self.sums, self.n_tokens = None, self.n_tokens + int(tokens)",
        "self.sums, self.n_tokens = None, int(tokens)",
        "trainer/test_token_stats.py",
    ),
    Mutant(
        "stats: of this rank",
        'return total / trainer._parallel_size("tp")',
        "return sums",
        "trainer/test_ranks.py -k mixin",
    ),
    Mutant(
        "stats: evaluation among the training",
        "self._stats, self._has_evaluated = stats_of(self), False",
        "self._has_evaluated = False",
        "trainer/test_token_stats.py",
    ),
    Mutant(
        "stats: trained tokens twice",
        "trainer._total_train_tokens + tokens",
        "trainer._total_train_tokens + 2 * tokens",
        "trainer/test_sft.py -k test_sft",
    ),
    Mutant(
        "stats: entropy over all tokens",
        'metrics["entropy"].append(entropy / n.clamp(min=1))',
        'metrics["entropy"].append(entropy / tokens)',
        "trainer/test_sft.py -k test_sft",
    ),
    Mutant(
        "a prediction step of the user's own is training",
        "if self._eval_totals is None:  # called by a loop of the user's own",
        "if False:",
        "trainer/test_mixin.py -k users_own",
    ),
    Mutant(
        "evaluation: a loss that was not counted is NaN",
        "in output.metrics and self._has_evaluated:",
        "in output.metrics:",
        "trainer/test_mixin.py -k not_counted",
    ),
    Mutant(
        "an observer sees other threads",
        "return cls.current if ours else None",
        "return cls.current",
        "head/test_losses.py -k of_its_thread",
    ),
]
