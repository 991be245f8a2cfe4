"""Mutants of the accumulator."""

from mutants import Mutant

EDGES = "test_edges.py"

MUTANTS = [
    Mutant(
        "window: ranks forgotten",
        "divisor * (ranks if mean else 1)",
        "divisor",
        "test_distributed.py",
    ),
    Mutant(
        "window: empty one divides by 0",
        "total.clamp(min=1).double(), declared",
        "total.double(), declared",
        "test_accumulate.py",
    ),
    Mutant(
        "window: may end early",
        "        window.check_complete()\n        self._close(window)",
        "        self._close(window)",
        "test_guard_rails.py",
    ),
    Mutant(
        "window: may hold more",
        "if self.seen == len(self.declared)",
        "if False",
        "test_guard_rails.py",
    ),
    Mutant(
        "window: looks at declared counts",
        "if _faults.readable(count.device) and count < 0",
        "if count < 0",
        "test_accumulate.py -k waits",
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
        "test_distributed.py -k meshes",
    ),
    Mutant(
        "ranks: whoever comes is added",
        "faults.note(_faults.ranks_elsewhere",
        "(lambda *a: None)(_faults.ranks_elsewhere",
        "test_distributed.py",
    ),
    Mutant(
        "finish: correction upside down",
        "(_faults.moved(window.denominator, total.device) / total.clamp(min=1))",
        "(total.clamp(min=1) / window.denominator)",
        "test_accumulate.py",
    ),
    Mutant(
        "finish: estimate not agreed on",
        "self._ranks.meet(_faults.ESTIMATE, torch.stack([n, 0 * n, 0 * n]), self._faults)",
        "[n.double()]",
        "test_distributed.py",
    ),
    Mutant(
        "finish: twice for a parameter given twice",
        "list({id(p): p for p in parameters if p.grad is not None}.values())",
        "[p for p in parameters if p.grad is not None]",
        "test_accumulate.py -k twice",
    ),
    Mutant(
        "finish: skipped step keeps gradients",
        "                p.grad = None",
        "                pass",
        "test_guard_rails.py -k skipped",
    ),
    Mutant(
        "metrics: mean of window means",
        "loss_sum / n_tokens if n_tokens",
        "loss_sum / n_tokens / max(n_windows, 1) if n_tokens",
        "test_accumulate.py",
    ),
    Mutant(
        "metrics: this rank only", "met.tolist()", "totals.tolist() + [0]", "test_distributed.py"
    ),
    Mutant(
        "metrics: an error stays on its rank",
        "self._faults.count(totals.device).double()",
        "0 * totals[0]",
        "test_distributed.py",
    ),
    Mutant(
        "state: estimate forgotten",
        '"previous_count": None if previous is None else int(previous)',
        '"previous_count": None',
        "test_guard_rails.py -k resume",
    ),
    Mutant(
        "auxiliary: not divided",
        "torch.stack(self.auxiliary).sum() / len(self.declared)",
        "torch.stack(self.auxiliary).sum()",
        "test_accumulate.py",
    ),
    Mutant(
        "auxiliary: not divided by ranks",
        "(divisor / (1 if mean else ranks))",
        "divisor",
        "test_distributed.py",
    ),
    Mutant(
        "edge: first estimate of one token",
        "torch.where(met[0] > 0, met[0], float(_UNKNOWN))",
        "met[0].clamp(min=1)",
        EDGES,
    ),
    Mutant("edge: first window of one token", "torch.tensor(_UNKNOWN)", "torch.tensor(1)", EDGES),
]
