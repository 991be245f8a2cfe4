"""Mutants of lazy logits and their gradients."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "lazy: scale forgotten",
        "p._replace(scale=p.scale * factor)",
        "p",
        "head/test_losses.py -k fused",
    ),
    Mutant(
        "lazy: cap without its scale",
        "p._replace(scale=p.scale * p.cap, cap=abs(p.cap))",
        "p._replace(cap=abs(p.cap))",
        "head/test_losses.py -k cap",
    ),
    Mutant(
        "lazy: vocabulary slice from 0",
        "classes=slice(p.classes.start + start, p.classes.start + stop)",
        "classes=slice(p.classes.start, p.classes.start + stop - start)",
        "head/test_losses.py -k classes",
    ),
    Mutant(
        "lazy: written logits are fused",
        "plain and not x.memory.written",
        "plain",
        "head/test_writes.py",
    ),
    Mutant(
        "lazy: a finer bias rounded",
        "finer = torch.promote_types(p.hidden.dtype, other.dtype) != p.hidden.dtype",
        "finer = False",
        "head/test_tensors.py -k finer",
    ),
    Mutant(
        "lazy: divided the other way round",
        "_times(p, after, 1 / number)",
        "_times(p, after, number)",
        "head/test_losses.py -k divide",
    ),
    Mutant(
        "lazy: a bias is added after a scale",
        "self.scale == 1.0 and self.cap is None",
        "self.cap is None",
        "head/test_losses.py -k half",
    ),
    Mutant(
        "lazy: LoRA's factor",
        "(other.hidden * other.scale)",
        "(other.hidden)",
        "head/test_peft.py -k lora_is_fused",
    ),
    Mutant(
        "lazy: operands written into later",
        "return x.detach().clone().requires_grad_(x.requires_grad)",
        "return x",
        "head/test_writes.py -k operand",
    ),
    Mutant(
        "witness: nodes are not asked",
        "or not NODES.issuperset(kinds)",
        "",
        "head/test_functions.py -k leaf",
    ),
    Mutant(
        "witness: a product twice",
        "max(len(products), len(made)) > len(set(products))",
        "False",
        "head/test_functions.py -k detached",
    ),
    Mutant(
        "witness: a function may compute",
        "if number_of_steps(kinds) != number_of_steps(x.expr.names()):",
        "if False:",
        "head/test_functions.py -k hands_on",
    ),
    Mutant(
        "gradient: hooks get none",
        "if all_run and not any(p.hooked for p in products):",
        "if all_run:",
        "head/test_hooks.py -k hook",
    ),
    Mutant(
        "gradient: asked for, and not computed",
        "        if any(p.watched for p in products):\n            return make()",
        "        if False:\n            return make()",
        "head/test_hooks.py -k kept",
    ),
    Mutant(
        "gradient: what a hook has read is carried on",
        "if _reading.get() or not carries or any(x.memory.made is not None for x in given):",
        "if not carries:",
        "head/test_hooks.py -k hook",
    ),
    Mutant(
        "gradient: a read passenger still carries",
        "if isinstance(grad, Passenger) and grad.memory.made is None:",
        "if isinstance(grad, Passenger):",
        "head/test_hooks.py -k writes_into",
    ),
    Mutant(
        "gradient: of one loss alone",
        "for x in given for y in x.loads]",
        "for x in given[:1] for y in x.loads]",
        "head/test_programs.py",
    ),
    Mutant(
        "gradient: gradients outlive their use",
        "ctx.logits = ctx.given = ctx.fused = None",
        "pass",
        "head/test_memory.py -k kept_loss",
    ),
    Mutant(
        "gradient: rows in another order",
        "same = x is leaf or (x._base is leaf and x.is_contiguous() and leaf.is_contiguous())",
        "same = True",
        "head/test_losses.py -k time",
    ),
    Mutant(
        "gradient: that of a sum",
        "upstream = upstream / self.divisor",
        "pass",
        "head/test_losses.py -k fused",
    ),
    Mutant(
        "gradient: strides of the logits",
        'meta = torch.empty(expr.after, dtype=z.dtype, device="meta")',
        "meta = z.meta",
        "head/test_hooks.py -k transposed",
    ),
    Mutant(
        "gradient: that of labels written later",
        "target, weight = target.clone(), None if weight is None else weight.detach().clone()",
        "pass",
        "head/test_writes.py -k written_after",
    ),
    Mutant(
        "modes: composite operators are noted whole",
        "if facts.is_composite:",
        "if False:",
        "head/test_modes.py -k use_of_logits",
    ),
    Mutant(
        "writers: schemas of others are trusted",
        "if not pure or (",
        "if (",
        "head/test_writes.py -k counts",
    ),
    Mutant(
        "writers: set_ shares nothing",
        " and func.overloadpacket is not aten.set_",
        "",
        "head/test_writes.py -k counts",
    ),
    Mutant(
        "writers: new data is ignored",
        "LazyLogits.above[T.data.__set__] = _set_data\n",
        "",
        "head/test_writes.py -k refused",
    ),
]
