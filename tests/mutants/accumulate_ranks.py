"""Mutants of what ranks of an accumulator tell each other, and of the engines between them."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "uneven: a forked process has its parent's open windows",
        "os.register_at_fork(after_in_child=_OPEN.clear)",
        "pass",
        "test_uneven.py -k forked",
    ),
    Mutant(
        "guard: Join of a model nobody told of",
        "weakref.WeakSet(_instances(DistributedDataParallel))",
        "weakref.WeakSet()",
        "test_uneven.py -k join",
    ),
    Mutant(
        "guard: Join hangs",
        'if not alone and any(getattr(x, "enable", False) for x in joined):',
        "if False:",
        "test_uneven.py -k join",
    ),
    Mutant(
        "accelerate: its division forgotten",
        "return self._accelerator.gradient_accumulation_steps",
        "return 1",
        "test_engines.py -k accelerate",
    ),
    Mutant(
        "accelerate: DeepSpeed streams",
        'if kind == "DEEPSPEED":',
        'if kind == "-":',
        "test_engines.py -k accelerate",
    ),
    Mutant(
        "accelerate: replicas counted",
        'if name != "tp"',
        'if name != "-"',
        "test_meshes.py -k accelerate",
    ),
    Mutant(
        "mesh: one of two dimensions",
        "ordered = tuple(name for name in names if name in dims)",
        "ordered = names[:1]",
        "accumulate/test_ranks.py -k test_meshes",
    ),
    Mutant(
        "mesh: flattened dimensions unknown",
        "    if len(dims) == 1:\n        try:",
        "    if len(dims) == 1 and dims[0] in names:\n        try:",
        "accumulate/test_ranks.py -k flattened",
    ),
    Mutant(
        "ranks: places are not compared",
        '"purpose": purpose, **settings',
        "**settings",
        "test_agreement.py -k reads_metrics",
    ),
    Mutant(
        "ranks: settings are not compared",
        '"purpose": purpose, **settings',
        '"purpose": purpose',
        "test_agreement.py -k settings",
    ),
    Mutant(
        "ranks: micro-batches are not compared",
        "    if len(counts) > 1:",
        "    if False:",
        "test_agreement.py -k micro_batches",
    ),
    Mutant(
        "ranks: a failure stays on its rank",
        "            if (error := explain(table.read())) is not None:\n                self.shared",
        "            if (error := None) is not None:\n                self.shared",
        "test_agreement.py -k bad_label",
    ),
    Mutant(
        "ranks: words of different errors are mixed",
        "add_notes(error, failed[1:])",
        "pass",
        "test_agreement.py -k note",
    ),
    Mutant(
        "ranks: what differs on a device is forgotten",
        "return table.is_error() | (numbers[:, VALUES] != 0).any() | differ",
        "return torch.tensor(False)",
        "test_agreement.py -k on_a_device",
    ),
    Mutant(
        "ranks: leaving a window tells nobody twice",
        "if error is not self._exchange.shared_error and not window.was_refused():",
        "if True:",
        "test_agreement.py -k metrics_in_a_window",
    ),
    Mutant(
        "ranks: any accumulator answers",
        'settings["opened"] = self._opened',
        'settings["opened"] = 0',
        "test_rank_scenarios.py -k other_order",
    ),
    Mutant(
        "ranks: a made group waits for torch's default",
        "timeout=timeout_for(group),",
        "timeout=None,",
        "test_rank_scenarios.py -k made",
    ),
    Mutant(
        "mesh: a flattened group waits for torch's default",
        "dist.distributed_c10d._set_pg_timeout(timeout, group)",
        "pass",
        "test_rank_scenarios.py -k made",
    ),
    Mutant(
        "ranks: a group under gloo alone has one of its own",
        'device_for(group, cpu) == cpu and _backend(group, "cpu") == "gloo"',
        'device_for(group, cpu) == cpu and dist.get_backend(group) == "gloo"',
        "test_rank_scenarios.py -k made",
    ),
    Mutant(
        "ranks: nobody says what to look at",
        "            raise self.shared_error from error\n",
        "            raise\n",
        "test_rank_scenarios.py -k uneven",
    ),
    Mutant(
        "ranks: own errors are others' errors",
        "            self.fail(purpose, error)\n            raise\n",
        "            self.fail(purpose, error)\n            raise ValueError from error\n",
        "test_agreement.py -k raise_the_same",
    ),
    Mutant(
        "fsdp2: gradients stay inside",
        "held = [p for p in held_by_fsdp2() if id(p) not in self._held]",
        "held = []",
        "test_rank_scenarios.py -k fsdp2",
    ),
    Mutant(
        "guard: DDP reduces nothing",
        "if grads and before is not None and before == _backward_stats(ddp):",
        "if False:",
        "test_rank_scenarios.py -k forward",
    ),
    Mutant(
        "ranks: an accumulator is any other",
        "several |= sum(ways) > 1",
        "pass",
        "test_meeting.py -k alone",
    ),
    Mutant(
        "ranks: a first error waits for a group",
        "if agreement.has_failed_before_meeting(group, words):",
        "if False:",
        "test_meeting.py -k very_first",
    ),
]
