"""Mutants of the replaced head."""

from mutants import Mutant

LAZY = "test_lazy_logits.py"

MUTANTS = [
    Mutant(
        "head: logits without grad keep it",
        "detached=not torch.is_grad_enabled(),",
        "detached=False,",
        LAZY,
    ),
    Mutant(
        "head: changed in place unseen",
        "_fingerprint(x) != before for x, before in self.seen",
        "False for _ in ()",
        LAZY,
    ),
    Mutant(
        "head: merged unseen",
        "recipe.merged != recipe_of(self.module).merged",
        "False",
        "test_peft_trl.py -k merging",
    ),
    Mutant(
        "head: other data unseen",
        "return version, x.dtype, x.untyped_storage()._cdata",
        "return version",
        LAZY,
    ),
    Mutant(
        "head: dropout drawn anew",
        "if self.recipe.dropouts() else hidden",
        "if False else hidden",
        "test_peft_trl.py -k dropout",
    ),
    Mutant(
        "head: kept alive by itself",
        "self.of = weakref.ref(module)",
        "self.of = lambda: module",
        LAZY,
    ),
    Mutant(
        "head: tensors of the look",
        "recipe = self.recipe",
        "recipe = recipe_of(self.module)",
        f"{LAZY} -k functional_call",
    ),
    Mutant(
        "head: adapters of the look",
        "recipe = self.recipe",
        "recipe = recipe_of(self.module)",
        "test_peft_trl.py -k reference_policy",
    ),
    Mutant(
        "head: autocast of the look",
        "enabled=False):\n            terms",
        "enabled=True):\n            terms",
        LAZY,
    ),
    Mutant(
        "head: function transforms",
        "or torch._C._functorch.maybe_current_level() is not None",
        "or False",
        LAZY,
    ),
    Mutant("head: dtype of its logits", "attached.dtype = logits.dtype", "pass", LAZY),
    Mutant("head: LoRA's factor", "(adapter.scaling * x)", "(x)", "test_peft_trl.py -k lora"),
    Mutant(
        "head: FSDP unit not entered",
        "if is_fsdp_unit(self.module):",
        "if False:",
        "head/test_ranks.py -k fsdp",
    ),
    Mutant(
        "head: nothing for DDP to follow",
        "if not (torch.is_grad_enabled() and new.wants_graph()):",
        "if True:",
        "head/test_ranks.py -k ddp",
    ),
]
