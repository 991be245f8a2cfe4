"""Mutants of the replaced head."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "gradient: kept ones are lost with a step",
        "register_optimizer_step_pre_hook(CLOCK.before)",
        "pass",
        "head/test_hooks.py -k after_the_optimizer",
    ),
    Mutant(
        "stale: steps of optimizers unseen",
        "register_optimizer_step_post_hook(CLOCK.after)",
        "pass",
        "head/test_stale.py",
    ),
    Mutant(
        "stale: every step is one of the head",
        "return any(_memory(p) in ours for",
        "return any(True for",
        "head/test_stale.py -k unrelated",
    ),
    Mutant(
        "stale: parts of a larger memory are nobody's",
        "return x.untyped_storage().nbytes() > x.numel() * x.element_size()",
        "return False",
        "head/test_stale.py -k larger",
    ),
    Mutant(
        "stale: writes unseen",
        "if self._fingerprints() != self.fingerprints:",
        "if False:",
        "head/test_tensors.py -k change",
    ),
    Mutant(
        "stale: merged adapters unseen",
        "if self.recipe.merged != merged_into(self.module):",
        "if False:",
        "head/test_peft.py -k merging",
    ),
    Mutant(
        "gradient: made for the steps of others",
        "if self.values is None and call.changes_with(optimizer) and not",
        "if self.values is None and not",
        "head/test_stale.py -k own_parameters",
    ),
    Mutant(
        "gradient: what is stale stops a step",
        "call.changes_with(optimizer) and not call.has_changed():",
        "call.changes_with(optimizer):",
        "head/test_stale.py -k stops_no_step",
    ),
    Mutant(
        "gradient: holds itself",
        "move = lambda t: func(t, *args, **kwargs)  # noqa: E731\n    view =",
        "move = lambda t, x=x: func(t, *args, **kwargs)\n    view =",
        "head/test_stale.py -k garbage",
    ),
    Mutant(
        "head: values hold the graph",
        "self.hidden = hidden.detach()",
        "self.hidden = hidden",
        "head/test_memory.py -k graph",
    ),
    Mutant(
        "head: sharded again, not gathered",
        "if self.is_gone():\n            return self._gathered(self.held, by_all_ranks)",
        "pass",
        "head/test_ranks.py -k fsdp",
    ),
    Mutant(
        "head: an input of another width",
        "weight.shape[-1] != hidden.shape[-1] or",
        "",
        "head/test_heads.py -k width",
    ),
    Mutant(
        "head: dropout drawn anew",
        "if recipe.adapters and recipe.dropouts():",
        "if False:",
        "head/test_peft.py -k dropout",
    ),
    Mutant(
        "head: LoRA's factor",
        "(adapter.scaling * x)",
        "(x)",
        "head/test_peft.py -k lora_is_fused",
    ),
    Mutant(
        "head: function transforms",
        'if torch._C._functorch.maybe_current_level() is not None:\n        return "a transform',
        'if False:\n        return "a transform',
        "head/test_tensors.py -k transforms",
    ),
    Mutant(
        "head: a view where there is a bias",
        "recipe.bias is not None and not recipe.adapters and len(leading) > 1",
        "False",
        "head/test_hooks.py -k before_and_after",
    ),
    Mutant(
        "probe: in evaluation alone",
        "(True, False) if can_probe",
        "(False,) if can_probe",
        "head/test_probe.py -k one_mode",
    ),
    Mutant(
        "probe: in training alone",
        "(True, False) if can_probe",
        "(True,) if can_probe",
        "head/test_probe.py -k one_mode",
    ),
    Mutant(
        "probe: buffers stay changed",
        "b.copy_(before)",
        "pass",
        "head/test_probe.py -k parametrized",
    ),
    Mutant(
        "probe: dtype of its logits",
        "return Products(fused.dtype, native.dtype)",
        "return Products(fused.dtype, fused.dtype)",
        "head/test_probe.py -k upcasts",
    ),
    Mutant(
        "watch: later heads stay",
        "    if named:\n        _watch(model, memory_budget)",
        "",
        "head/test_heads.py -k later",
    ),
    Mutant(
        "report: places are not counted",
        "times=place.times + 1",
        "times=place.times",
        "head/test_report.py",
    ),
    Mutant(
        "known denominator: a mean within a window",
        "return None if self.denominator is None else self.denominator.reciprocal()",
        "return expected()",
        "head/test_losses.py -k told",
    ),
    Mutant(
        "known denominator: what a model is told",
        "_items.set(items if number or tensor else None)",
        "_items.set(None)",
        "head/test_losses.py -k told",
    ),
    Mutant(
        "probe: the loss in the dtype of the hidden state",
        "fused = min(results, key=",
        "fused = max(results[:1], key=",
        "head/test_probe.py -k multiplies",
    ),
    Mutant(
        "look: gathered by one rank alone",
        "if not by_all_ranks:\n                raise RuntimeError(_SHARDED)",
        "if False:\n                raise RuntimeError(_SHARDED)",
        "head/test_sharded_looks.py -k at_once",
    ),
    Mutant(
        "look: generation of a sharded head",
        "hidden.dim() > 2 and hidden.shape[-2] == 1 and not torch.is_grad_enabled()",
        "False",
        "head/test_sharded_looks.py -k generation",
    ),
]
