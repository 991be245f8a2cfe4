"""Mutants of lazy logits."""

from mutants import Mutant

LAZY = "test_lazy_logits.py"
WRITES = "test_lazy_writes.py"

MUTANTS = [
    Mutant("lazy: scale forgotten", "scale *= factor", "scale *= 1.0", "test_head.py"),
    Mutant(
        "lazy: cap without its scale",
        "return (scale * outer, abs(outer))",
        "return (scale, abs(outer))",
        "test_head.py",
    ),
    Mutant(
        "lazy: vocabulary slice from 0",
        "slice(here.start + start,",
        "slice(here.start,",
        "test_head.py",
    ),
    Mutant("lazy: detached logits train", "bias=bias, detached=True, gate=None", "bias=bias", LAZY),
    Mutant(
        "lazy: detached of DDP trains",
        "bias=bias, detached=True, gate=None",
        "bias=bias",
        "head/test_ranks.py -k ddp",
    ),
    Mutant(
        "lazy: added bias lost",
        "            bias=state.bias,",
        "            bias=None,",
        "test_head.py",
    ),
    Mutant("lazy: views share nothing", "_share(strided, x.strided())", "False", WRITES),
    Mutant("lazy: copies are views", "_share(strided, x.strided())", "True", WRITES),
    Mutant(
        "lazy: written logits not used",
        "return self._is_output() or super().looked_at()",
        "return self._is_output()",
        WRITES,
    ),
    Mutant(
        "lazy: own backward skipped",
        "return self._is_output() or super().looked_at()",
        "return super().looked_at()",
        WRITES,
    ),
    Mutant(
        "lazy: own backward of the derivative",
        "real = Reveal.apply(self, real.detach())",
        "pass",
        WRITES,
    ),
    Mutant("lazy: what was written is not differentiated", "node.real = real", "pass", WRITES),
    Mutant("lazy: what was scaled is not differentiated", "node.state = state", "pass", WRITES),
    Mutant(
        "lazy: DDP's node not visited by the loss",
        "if gate is not None and loss.requires_grad:",
        "if False:",
        "head/test_ranks.py -k ddp",
    ),
    Mutant("lazy: traced copies made late", "parent._traced_views.append(self)", "pass", WRITES),
    Mutant(
        "lazy: cap overwritten", 'if s.steps and s.steps[-1][0] == "tanh":', "if False:", WRITES
    ),
    Mutant(
        "lazy: real logits in inference mode",
        "if torch.compiler.is_compiling() or hidden.is_inference():",
        "if True:",
        LAZY,
    ),
    Mutant(
        "lazy: scaled in place for oneself",
        "x._parent is not None or x._has_views or x._real is not None",
        "False",
        WRITES,
    ),
    Mutant(
        "lazy: a finer bias rounded",
        "torch.promote_types(s.hidden.dtype, other.dtype) != s.hidden.dtype",
        "False",
        LAZY,
    ),
    Mutant(
        "lazy: any bias is of the vocabulary",
        "or other.numel() != V",
        "",
        "test_head.py -k real_logits",
    ),
    Mutant("lazy: any column is a bias", "or other.shape[-1:] != (V,)", "", LAZY),
    Mutant(
        "lazy: steps without grad keep it",
        "x.is_detached() or not torch.is_grad_enabled()",
        "x.is_detached()",
        LAZY,
    ),
]
