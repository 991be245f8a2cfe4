"""Mutants of what ranks of an accumulator tell each other, and of the engines between them."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "uneven: a forked process has its parent's open windows",
        "os.register_at_fork(after_in_child=_STREAMING.clear)",
        "pass",
        "test_uneven.py -k forked",
    ),
    Mutant(
        "guard: Join of a model nobody told of",
        "self._replicas = weakref.WeakSet(found)",
        "self._replicas = weakref.WeakSet()",
        "test_uneven.py -k join",
    ),
    Mutant(
        "guard: Join hangs",
        '            if getattr(getattr(module, "_join_config", None), "enable", False):',
        "            if False:",
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
        "accelerate: repeats counted",
        "            labels[mine:] = -100\n",
        "            pass\n",
        "test_uneven.py -k counted_once",
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
        'if max(part["places"]) != ranks:',
        "if False:",
        "test_agreement.py -k reads_metrics",
    ),
    Mutant(
        "ranks: settings are not compared",
        "    if added % ranks:",
        "    if False:",
        "test_agreement.py -k settings",
    ),
    Mutant(
        "ranks: micro-batches are not compared",
        "        if with_loss * squares[i] != sums[i] ** 2:",
        "        if False:",
        "test_agreement.py -k micro_batches",
    ),
    Mutant(
        "ranks: a failure stays on its rank",
        "            self.told = self.explain(message)\n",
        "            self.told = None\n",
        "test_agreement.py -k bad_label",
    ),
    Mutant(
        "ranks: words of different errors are mixed",
        "if failed * square != words * words:",
        "if False:",
        "test_agreement.py -k different_errors",
    ),
    Mutant(
        "ranks: what differs on a device is forgotten",
        "return differ | mixed | (failed != 0)",
        "return failed > 1e9",
        "test_agreement.py -k on_a_device",
    ),
    Mutant(
        "ranks: faults of different ranks are mixed",
        "any(failed * y != x * x for x, y in zip(sums, squares, strict=True))",
        "False",
        "test_agreement.py -k other_faults",
    ),
    Mutant(
        "ranks: leaving a window tells nobody twice",
        "known = error is self.meeting.told or window.was_refused()",
        "known = False",
        "test_agreement.py -k metrics_in_a_window",
    ),
    Mutant(
        "finish: estimate not agreed on",
        "met = self.tokens.send(ESTIMATE, n, terms).wait()[0]",
        "met = n[0].double()",
        "accumulate/test_ranks.py -k any_split",
    ),
    Mutant(
        "finish: estimates of other states",
        "hash_of(int(previous))",
        "0",
        "test_agreement.py -k estimates",
    ),
    Mutant(
        "finish: a stage without a loss has an estimate",
        "speaks = torch.full_like(estimate, float(seen > 0))",
        "speaks = torch.ones_like(estimate)",
        "test_pipeline.py -k stages_without",
    ),
    Mutant(
        "ended windows: the rank that goes on does not look",
        "ended is not None and ended <= seen",
        "ended is not None and ended < seen",
        "test_uneven.py -k runs_out",
    ),
    Mutant(
        "ended windows: of any accumulator",
        "if not streams or not self.guard.others_stream():",
        "if True:",
        "test_uneven.py -k two_accumulators",
    ),
    Mutant(
        "known denominator: an error of other ranks is raised once",
        "            self.meeting.heard(self.message)\n            self._done = True",
        "            self._done = True\n            self.meeting.heard(self.message)",
        "accumulate/test_agreement.py",
    ),
]
