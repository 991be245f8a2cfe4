"""Mutants of the replaced head."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "stale: steps of optimizers unseen",
        "register_optimizer_step_post_hook(_after_step)",
        "pass",
        "head/test_stale.py",
    ),
    Mutant(
        "stale: every step is one of the head",
        "return self.of_engine or any(\n            id(p) in ours",
        "return self.of_engine or any(\n            True or id(p) in ours",
        "head/test_stale.py -k unrelated",
    ),
    Mutant(
        "stale: parts of a larger memory are nobody's",
        "part = x.requires_grad and local_of(x).untyped_storage().nbytes() > local_of(x).nbytes",
        "part = False",
        "head/test_stale.py -k larger",
    ),
    Mutant(
        "stale: writes unseen",
        "if self.stale or self._state() != self.before:",
        "if self.stale:",
        "head/test_tensors.py -k refused",
    ),
    Mutant(
        "stale: merged adapters unseen",
        "return [merged, *(",
        "return [*(",
        "head/test_peft.py -k merging",
    ),
    Mutant(
        "head: values hold the graph",
        "else x.clone() if x is hidden and x.is_inference() else x.detach()",
        "else x.clone() if x is hidden and x.is_inference() else x",
        "head/test_memory.py -k hold_no_graph",
    ),
    Mutant(
        "head: inference tensors are not written into",
        "x.clone() if x is hidden and x.is_inference() else",
        "",
        "head/test_modes.py -k as_of",
    ),
    Mutant(
        "head: sharded again, not gathered",
        "        if not self.is_gone():\n            return self.given\n",
        "        return self.given\n",
        "head/test_ranks.py -k fsdp",
    ),
    Mutant(
        "head: an input of another width",
        "weight.shape != (classes_of(x.module), x.shape[-1])",
        "weight.shape[0] != classes_of(x.module)",
        "head/test_heads.py -k width",
    ),
    Mutant(
        "head: function transforms",
        'if torch._C._functorch.maybe_current_level() is not None:\n        return "a transform',
        'if False:\n        return "a transform',
        "head/test_tensors.py -k transforms",
    ),
    Mutant(
        "head: another library's F.linear",
        "if F.linear is not _LINEAR and not",
        "if False and not",
        "head/test_heads.py -k another_library",
    ),
    Mutant(
        "head: LoRA around the layer that is found",
        "return outer if whole else linear",
        "return linear",
        "head/test_heads.py -k product",
    ),
    Mutant(
        "head: a view where there is a bias",
        "bias is not None and hidden.dim() > 2 and _BIASED_IS_A_VIEW",
        "False",
        "head/test_hooks.py -k before_and_after",
    ),
    Mutant(
        "watch: later heads stay",
        "    if named:\n        _watch(model, memory_budget)",
        "",
        "head/test_models.py -k later",
    ),
    Mutant(
        "report: places are not counted",
        "times=place.times + 1",
        "times=place.times",
        "head/test_report.py",
    ),
    Mutant(
        "known denominator: a mean within a window",
        "factor = None if denominator is None else denominator.reciprocal()",
        "factor = expected()",
        "head/test_losses.py -k told",
    ),
    Mutant(
        "known denominator: what a model is told",
        "_items.set(items if number or tensor else None)",
        "_items.set(None)",
        "head/test_losses.py -k told",
    ),
    Mutant(
        "look: gathered by one rank alone",
        "if not by_all_ranks:\n        raise RuntimeError(_SHARDED)",
        "if False:\n        raise RuntimeError(_SHARDED)",
        "head/test_ranks.py -k at_once",
    ),
    Mutant(
        "look: generation of a sharded head",
        "x.dim() > 2 and x.shape[-2] == 1 and not torch.is_grad_enabled()",
        "False",
        "head/test_modes.py -k one_position",
    ),
    Mutant(
        "sharded head: the original runs",
        "        if type(x) is Hidden:\n",
        "        if False:\n",
        "head/test_tensor_parallel.py -k one_rank",
    ),
    Mutant(
        "sharded head: classes beyond those of the loss count",
        "sharded_loss_sum(problem, monitor=monitor, vocab_size=p.classes.stop)",
        "sharded_loss_sum(problem, monitor=monitor)",
        "head/test_tensor_parallel.py -k one_rank",
    ),
    Mutant(
        "sharded head: the first classes in place of others",
        "and (p.classes.start == 0 or not is_vocabulary_shard(p.weight))",
        "",
        "head/test_tensor_parallel.py -k one_rank",
    ),
]
