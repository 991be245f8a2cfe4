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
        "return p._replace(classes=slice(here.start + start, here.start + stop))",
        "return p._replace(classes=slice(here.start, here.start + stop - start))",
        "head/test_losses.py -k classes",
    ),
    Mutant(
        "lazy: unknown steps are fused",
        "return None\n            found += recorded.steps",
        "continue\n            found += recorded.steps",
        "head/test_losses.py -k real_logits",
    ),
    Mutant(
        "lazy: written logits are fused",
        "        if self.memory.written:\n            return None",
        "        pass",
        "head/test_writes.py",
    ),
    Mutant(
        "lazy: copies see later writes",
        "parent is not None and not parent.written and",
        "parent is not None and",
        "head/test_writes.py",
    ),
    Mutant(
        "lazy: a finer bias rounded",
        "if p.rounded or torch.promote_types(",
        "if False and torch.promote_types(",
        "head/test_tensors.py -k finer",
    ),
    Mutant(
        "lazy: divided the other way round",
        "else 1 / self.number",
        "else self.number",
        "head/test_losses.py -k divide",
    ),
    Mutant(
        "gradient: factors of others dropped",
        "return term._replace(factors=(*term.factors, factor))",
        "return term",
        "head/test_hooks.py -k hook",
    ),
    Mutant(
        "gradient: steps are not checked",
        "if any(t.left or t.call is not call for t in terms):",
        "if False:",
        "head/test_functions.py -k derivative",
    ),
    Mutant(
        "gradient: any slice undoes one",
        "if any(not t.left or t.left[0] != step for t in x.terms):",
        "if any(not t.left for t in x.terms):",
        "head/test_functions.py -k derivative",
    ),
    Mutant(
        "gradient: dense part dropped",
        "dense = other if dense is None else dense + other",
        "pass",
        "head/test_functions.py -k loss_of_the_same",
    ),
    Mutant(
        "gradient: views share nothing",
        "new.base, new.move, new.seen = x, view, x.writes",
        "pass",
        "head/test_hooks.py -k writes_into",
    ),
    Mutant(
        "gradient: second derivatives are zero",
        "if torch.is_grad_enabled():\n            raise",
        "if False:\n            raise",
        "head/test_functions.py -k second_derivative",
    ),
    Mutant(
        "layout: a view of any size",
        "return found if math.prod(found) == n and min(found, default=0) >= 0 else None",
        "return found",
        "head/test_tensors.py -k another_size",
    ),
    Mutant(
        "layout: all are contiguous",
        "meta.stride() == _strides(shape) and meta.storage_offset() == 0",
        "True",
        "head/test_tensors.py",
    ),
    Mutant(
        "apart: rows in another order",
        "if p.hidden is not hidden and not _is_same_rows(p.hidden, hidden):",
        "if False:",
        "head/test_losses.py -k fused",
    ),
    Mutant(
        "apart: the gradient of a sum",
        "upstream = upstream / plan.request.over(found.n_valid)",
        "pass",
        "head/test_losses.py -k fused",
    ),
    Mutant(
        "apart: gradients outlive their use",
        "self.found = found._replace(saved=())",
        "self.found = found",
        "head/test_memory.py -k kept_loss",
    ),
    Mutant(
        "apart: a loss that holds itself",
        "return way.loss.detach()",
        "return way.loss if isinstance(way, Apart) else way.loss.detach()",
        "head/test_memory.py -k nobody_keeps",
    ),
    Mutant(
        "traced: steps not remembered",
        "new._steps = x, (traced,), (*x._steps, *steps)",
        "new._steps = x, (traced,), x._steps",
        "head/test_losses.py -k one_graph",
    ),
    Mutant(
        "traced: time of the run forgotten",
        "report, CLOCK.now,",
        "report, Tick(),",
        "head/test_stale.py -k compiled",
    ),
    Mutant(
        "traced: factors without dimensions forgotten",
        "rows = (rows * p.factor).to(rows.dtype)",
        "pass",
        "head/test_compiled_pieces.py -k without_dimensions",
    ),
    Mutant(
        "traced: a bias escapes the factor",
        "(bias * p.factor).to(bias.dtype)",
        "bias",
        "head/test_compiled_pieces.py -k without_dimensions",
    ),
    Mutant(
        "traced: arguments written into later",
        "return argument.clone() if isinstance(argument, Tensor) else argument",
        "return argument",
        "head/test_compiled_pieces.py -k later",
    ),
    Mutant(
        "traced: a quotient needs logits",
        "func, args = torch.Tensor.__truediv__, (args[1], args[0])",
        "pass",
        "head/test_compiled_pieces.py -k without_dimensions",
    ),
    Mutant(
        "traced: losses not counted",
        "o.report.losses_in_graphs = Once(o.report.losses_in_graphs)",
        "pass",
        "head/test_report.py -k compiled_graphs",
    ),
    Mutant(
        "traced: counts not added up",
        "for report in self.reports:\n            report.collect()",
        "pass",
        "head/test_report.py -k compiled_graphs",
    ),
]
