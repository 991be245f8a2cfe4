"""Break the code on purpose, one place at a time, and show that the tests notice.

    python tests/mutate.py              # all, two at a time: about ten minutes
    python tests/mutate.py ticket       # those whose name contains a word

Each mutant is a copy of the package with one piece of text replaced. Its tests must fail by
failing tests: a mutant that survives, or that cannot even be collected, ends the script with 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    name: str
    file: str  # inside fusedce/
    old: str  # must occur exactly once
    new: str
    tests: str  # what must turn red


TILES, TOKENS = "backends/chunked_tiles.py", "backends/chunked_tokens.py"
CHUNKED, FORWARD, ROWS = "backends/chunked.py", "kernels/forward.py", "kernels/softmax_grad.py"
PROPERTIES, CONTRACT, OPTIONS = "test_properties.py", "test_fused_ce.py", "test_options.py"
ACCUMULATE, STREAMING, INTERVAL, RANKS = (
    "accumulate.py",
    "_streaming.py",
    "_interval.py",
    "_ranks.py",
)
SHARDED, SHARDS = "backends/sharded.py", "test_sharded.py"
TORCH = f"{PROPERTIES} -k torch_backend"
TRITON = "test_kernels.py -k odd_shapes"
EDGES = "test_edges.py"
LAZY, STEPS, LOSSES = "head/lazy/", "head/lazy/steps.py", "head/test_losses.py"

MUTANTS = [
    # ---- torch backend
    Mutant(
        "mask: ignored means negative", CHUNKED, "valid = labels != ignore_index",
        "valid = labels >= 0", TORCH,
    ),
    Mutant("count: every position", CHUNKED, "n_valid = valid.sum()",
           "n_valid = (labels == labels).sum()", TORCH),
    Mutant("target term: p instead of p - 1", CHUNKED, "torch.expm1(-nll)",
           "torch.exp(-nll)", TORCH),
    Mutant("target term: left in the tile too", TILES, ".masked_fill_(inside, 0)", "", TORCH),
    Mutant("rescaling: tiles keep their own maximum", TILES,
           "(maxima - top).exp_()", "(maxima - maxima).exp_()", TORCH),
    Mutant("chunk edge: last chunk dropped", CHUNKED, "enumerate(chunks)",
           "enumerate(chunks[: max(len(chunks) - 1, 1)])", TORCH),
    Mutant("weight gradient: chunks overwrite each other", CHUNKED, "first=number == 0",
           "first=True", TORCH),
    Mutant("tile edge: one row short", TILES, "yield begin, min(begin + step, V)",
           "yield begin, min(begin + step, max(V - 1, 1))", CONTRACT),
    Mutant("bias gradient: without the target's term", CHUNKED,
           "            add_rows(d_bias_sum, y, coefficient)", "            pass", TORCH),
    Mutant("bias gradient: not divided by the softmax sum", CHUNKED,
           "torch.mv(tile.to(acc), factor)", "tile.to(acc).sum(1)", TORCH),
    Mutant("soft-cap: slope of the tile not squared", CHUNKED, "1 - (z / softcap).square_()",
           "1 - (z / softcap)", TORCH),
    Mutant("soft-cap: no slope at the target", CHUNKED,
           "1 - (stats.z_label.double() / softcap).square()", "1.0", TORCH),
    Mutant("scale: missing in the tile's gradient", CHUNKED,
           "mul_(logit_scale * (u_nll + u_lse))", "mul_(u_nll + u_lse)", TORCH),
    Mutant("repeated labels: the last one wins", CHUNKED, "total.index_add_(0, y, rows)",
           "total[y] += rows", TORCH),
    # ---- backward
    Mutant("backward: the upstream gradient is dropped", "autograd.py",
           "_scaled(grad, grad_loss).to(ctx.dtype)", "grad.to(ctx.dtype)", TORCH),
    Mutant("backward: always in place", "autograd.py",
           "not torch._C._autograd._get_current_graph_task_keep_graph()", "True",
           f"{CONTRACT} -k second_backward"),
    Mutant("backward: fp16 waits in fp16", "autograd.py",
           "torch.float32 if dtype == torch.float16 else dtype", "dtype",
           f"{CONTRACT} -k may_overflow"),
    Mutant("backward: factor rounded to bf16", "_inplace.py", "part.float().mul_(factor)",
           "part.mul(factor.to(part.dtype))", f"{CONTRACT} -k not_rounded"),
    # ---- Triton kernels
    Mutant("forward: columns past V count", FORWARD, "mask_v[None, :] & (offs_v[None, :]",
           "(offs_v[None, :]", TRITON),
    Mutant("forward: the label's logit counts twice", FORWARD,
           "mask_v[None, :] & (offs_v[None, :] != label[:, None])", "mask_v[None, :]", TRITON),
    Mutant("forward: no rescaling by the new maximum", FORWARD, "s = s * tl.exp2(m - m_safe) +",
           "s = s +", TRITON),
    Mutant("forward: splits merged without their maxima", FORWARD,
           "s += s_i * tl.exp2(m_i - m_safe)", "s += s_i", TRITON),
    Mutant("forward: the first ticket merges", FORWARD, "ticket != splits - 1", "ticket != 0",
           TRITON),
    Mutant("forward: label logit without its bias", FORWARD,
           "b = tl.load(bias + at).to(tl.float32) if HAS_BIAS else 0.0", "b = 0.0", TRITON),
    Mutant("forward: the tail of H is dropped", "kernels/tile.py",
           "range(0, H, BLOCK_H):\n        mask_h = offs_h < H - start_h\n        if",
           "range(0, H - BLOCK_H + 1, BLOCK_H):\n        mask_h = offs_h < H - start_h\n        if",
           TRITON),
    Mutant("forward: bits depend on the batch", FORWARD, "token_loss(m_safe, s,",
           "token_loss(m_safe, s * tl.where(n_valid > 1, 1.0000002, 1.0),",
           "test_one_pass.py -k same_bits"),
    Mutant("forward: ignored rows add up", FORWARD, "tl.where(mask_n, loss, 0.0)",
           "tl.where(mask_n, loss, 1.0)", TRITON),
    Mutant("rows: softmax without the one-hot", ROWS,
           "g = tl.where(offs_v == label, rounded, g)", "g = g + 0.0", TRITON),
    Mutant("rows: blocks merged without their maxima", ROWS,
           "tl.sum(s * tl.exp2(m - m_safe), axis=0)", "tl.sum(s, axis=0)", TRITON),
    Mutant("rows: block factor without its maximum", ROWS,
           "tl.exp2(tl.load(maxima + block * C + c) - top) * inverse", "inverse", TRITON),
    Mutant("rows: padding of a graph is trained", ROWS, "first + c >= tl.load(count)",
           "first + c < 0", "test_one_pass.py -k inside_a_graph"),
    Mutant("rows: fp16 without amplification", "backends/launch_chunks.py",
           "return 2.0 ** (14", "return 1.0 * 0 ** 0 * 2.0 ** (0 * 14",
           f"{CONTRACT} -k fp16"),
    Mutant("loss: rounded where p -> 1", "kernels/tile.py",
           "tl.log(1.0 + tl.exp(-tl.abs(gap)))",
           "tl.log((1.0 + tl.exp(-tl.abs(gap))).to(tl.float32)).to(tl.float64)",
           f"{CONTRACT} -k accuracy"),
    Mutant("rows: slope left out", ROWS, "g = e * slope", "g = e", TRITON),
    Mutant("compaction: ignored rows stay", "kernels/compact.py",
           "mask_n & (y != ignore_index)", "mask_n", TRITON),
    Mutant("compaction: label V passes", "kernels/compact.py", "valid & ((y < 0) | (y >= V))",
           "valid & ((y < 0) | (y > V))",
           "test_kernels.py -k bad_label"),
    Mutant("scale kernel: never scales", "kernels/scale.py", "factor == 1.0", "factor == factor",
           "test_kernels.py -k scale"),
    Mutant("tanh: one series coefficient", "kernels/tile.py", "2.0 / 15.0", "2.0 / 16.0", TRITON),
    # ---- options, and what is wanted token by token
    Mutant("options: smoothing without its share of the label", "objective.py",
           "(1 - smoothing) * loss + smoothing", "loss + smoothing", f"{OPTIONS} -k pair"),
    Mutant("options: slope of the z-loss halved", "objective.py", "2 * z_loss * lse",
           "z_loss * lse", f"{OPTIONS} -k pair"),
    Mutant("options: 0 times inf", CHUNKED, "(token_weight != 0) | bad", "(labels == labels) | bad",
           f"{OPTIONS} -k left_out"),
    Mutant("options: weight 0 is not counted", "kernels/compact.py", "        found = counted",
           "        found = found", f"{OPTIONS} -k left_out"),
    Mutant("options: smoothing spread by tokens alone", TILES, "dh.addr_((self.scale * u)",
           "dh.addr_((0 * u)", f"{OPTIONS} -k pair"),
    Mutant("options: row factors not on the weight gradient", "backends/launch_chunks.py",
           "h = (h.float() * factors[:, None]).to(h.dtype)", "h = h.clone()",
           f"{OPTIONS} -k pair"),
    Mutant("options: fp16 factors in fp16", "backends/launch_chunks.py",
           "h.dtype == torch.float16", "h.dtype == torch.int8", f"{OPTIONS} -k fp16_factors"),
    Mutant("options: argmax of the first block", ROWS, "tl.argmax(m, axis=0) * C", "0 * C",
           f"{OPTIONS} -k argmax"),
    Mutant("tokens: upstream of the entropy dropped at the label", "token_stats.py",
           "at_label += u_entropy * surprise", "at_label += 0 * surprise",
           "test_logprobs.py -k gradcheck"),
    Mutant("tokens: entropy cancels at p -> 1", TOKENS, "e.scatter_(0, place[None], 0)", "pass",
           "test_logprobs.py -k cancel"),
    Mutant("tokens: kernel's entropy without what lies below", "kernels/stats.py",
           "tl.where(t == 0.0, 0.0, m_safe - m_tile)", "tl.where(t == 0.0, 0.0, 0.0)",
           "test_logprobs.py -k vocabulary"),
    Mutant("tokens: gradient of the entropy in the kernel", "kernels/token_grad.py",
           "factor - tl.load(beta + c)", "factor + tl.load(beta + c)",
           "test_logprobs.py -k vocabulary"),
    Mutant("tokens: temperature does not reach the cap", "logprobs.py", "softcap / temperature",
           "softcap", "test_logprobs.py -k any_case_torch"),
    Mutant("cross-entropy: mean over tokens, not weights", "cross_entropy.py",
           "torch.where(valid, chosen, 0.0).sum()", "valid.sum()",
           "test_cross_entropy.py -k parity"),
    # ---- labels
    Mutant("shift: labels stay", "labels.py", "shifted[..., :keep] = targets",
           "shifted[..., :keep] = labels[..., :keep]", "test_labels.py"),
    Mutant("count: before the shift", "labels.py", "(shifted != ignore_index).sum()",
           "(labels != ignore_index).sum()", "test_labels.py"),
    Mutant("documents: trained across the border", "labels.py", "document[offset:] ==",
           "document[:keep] ==", "test_labels.py"),
    # ---- denominators
    Mutant("mean: nothing valid divides by 0", "loss.py", ".clamp(min=1)\n", "\n",
           f"{CONTRACT} -k nothing_valid"),
    Mutant("window: ranks forgotten", ACCUMULATE, "divisor * (ranks if mean else 1)", "divisor",
           "test_distributed.py"),
    Mutant("window: empty one divides by 0", ACCUMULATE,
           "total.clamp(min=1).double(), declared", "total.double(), declared",
           "test_accumulate.py"),
    Mutant("window: may end early", ACCUMULATE,
           "        window.check_complete()\n        self._close(window)",
           "        self._close(window)", "test_guard_rails.py"),
    Mutant("window: may hold more", "_window.py", "if self.seen == len(self.declared)", "if False",
           "test_guard_rails.py"),
    Mutant("window: looks at declared counts", "_window.py",
           "if _faults.readable(count.device) and count < 0", "if count < 0",
           "test_accumulate.py -k waits"),
    Mutant("accelerate: its division forgotten", "_engines.py",
           "return self._accelerator.gradient_accumulation_steps", "return 1",
           "test_engines.py -k accelerate"),
    Mutant("accelerate: DeepSpeed streams", "_engines.py", 'if kind == "DEEPSPEED":',
           'if kind == "-":', "test_engines.py -k accelerate"),
    Mutant("accelerate: replicas counted", "_engines.py", 'if name != "tp"', 'if name != "-"',
           "test_meshes.py -k accelerate"),
    Mutant("mesh: one of two dimensions", RANKS,
           "ordered = tuple(name for name in names if name in dims)", "ordered = names[:1]",
           "test_distributed.py -k meshes"),
    Mutant("ranks: whoever comes is added", RANKS, "faults.note(_faults.ranks_elsewhere",
           "(lambda *a: None)(_faults.ranks_elsewhere", "test_distributed.py"),
    Mutant("finish: correction upside down", STREAMING,
           "(_faults.moved(window.denominator, total.device) / total.clamp(min=1))",
           "(total.clamp(min=1) / window.denominator)", "test_accumulate.py"),
    Mutant("finish: estimate not agreed on", STREAMING,
           "self._ranks.meet(_faults.ESTIMATE, torch.stack([n, 0 * n, 0 * n]), self._faults)",
           "[n.double()]", "test_distributed.py"),
    Mutant("finish: twice for a parameter given twice", STREAMING,
           "list({id(p): p for p in parameters if p.grad is not None}.values())",
           "[p for p in parameters if p.grad is not None]", "test_accumulate.py -k twice"),
    Mutant("finish: skipped step keeps gradients", STREAMING, "                p.grad = None",
           "                pass", "test_guard_rails.py -k skipped"),
    Mutant("metrics: mean of window means", INTERVAL, "loss_sum / n_tokens if n_tokens",
           "loss_sum / n_tokens / max(n_windows, 1) if n_tokens", "test_accumulate.py"),
    Mutant("metrics: this rank only", INTERVAL, "met.tolist()", "totals.tolist() + [0]",
           "test_distributed.py"),
    Mutant("metrics: an error stays on its rank", INTERVAL,
           "self._faults.count(totals.device).double()", "0 * totals[0]", "test_distributed.py"),
    Mutant("state: estimate forgotten", INTERVAL,
           '"previous_count": None if previous is None else int(previous)',
           '"previous_count": None', "test_guard_rails.py -k resume"),
    Mutant("auxiliary: not divided", "_window.py",
           "torch.stack(self.auxiliary).sum() / len(self.declared)",
           "torch.stack(self.auxiliary).sum()", "test_accumulate.py"),
    Mutant("auxiliary: not divided by ranks", ACCUMULATE, "(divisor / (1 if mean else ranks))",
           "divisor", "test_distributed.py"),
    # ---- sharded vocabulary
    Mutant("shards: merged without their maxima", SHARDED, "(sums * (ks - top).exp())", "sums",
           SHARDS),
    Mutant("shards: d_hidden of this rank only", SHARDED,
           "dist.all_reduce(d_rows, group=shard.group)", "pass", SHARDS),
    Mutant("shards: the label counts twice", SHARDED, "self._set_label(torch.zeros_like(k))",
           "pass", SHARDS),
    Mutant("shards: padding has a probability", SHARDED,
           "min(max(shard.V - shard.first, 0), len(weight))", "len(weight)", SHARDS),
    Mutant("shards: all of one size", "_layout.py",
           "first=sum(rows[: dist.get_rank(layout.group)])",
           "first=len(layout.weight) * dist.get_rank(layout.group)", SHARDS),
    Mutant("shards: each its own chunks", SHARDED, "max(shard.largest, 1)", "max(len(weight), 1)",
           SHARDS),
    Mutant("shards: one chunk", SHARDED, "for chunk in rows.split(C) if len(rows)",
           "for chunk in rows.split(len(rows)) if len(rows)", SHARDS),
    Mutant("shards: chunks overwrite each other", SHARDED, "d_weight[: head.real] +=",
           "d_weight[: head.real] =", SHARDS),
    Mutant("shards: labels may differ", "_layout.py", "or len(set(checksums)) > 1", "", SHARDS),
    Mutant("shards: tokens get each other's gradients", SHARDED,
           "getattr(dist, REDUCE_SCATTER)(mine, d_hidden, group=shard.group)",
           "mine.copy_(d_hidden[: len(mine)])", SHARDS),
    Mutant("shards: smoothing left out of the gradient", SHARDED, "g -= (outer", "g -= 0 * (outer",
           SHARDS),
    Mutant("shards: z-loss left out at the label", SHARDED,
           "+ (of_p - 1) * (-self.nll).exp()", "", SHARDS),
    Mutant("shards: no slope", SHARDED, "return g if self.slope is None else g.mul_(self.slope)",
           "return g", SHARDS),
    Mutant("shards: tokens of weight 0 are read", SHARDED, "valid & ((token_weight != 0) | bad)",
           "valid", SHARDS),
    Mutant("shards: rounded where p -> 1", SHARDED, "torch.expm1(-self.nll)",
           "((-self.nll).float().exp() - 1)", SHARDS),
    # ---- at the edge
    Mutant("edge: weights of ignored positions", "token_stats.py",
           "losses.masked_fill(labels == ignore_index, 0)", "losses", EDGES),
    Mutant("edge: nothing valid is computed", CHUNKED, "rows.split(size) if len(rows) else ()",
           "rows.split(size)", EDGES),
    Mutant("edge: forward mode gives nothing", "autograd.py",
           "if forward_ad._current_level >= 0 and any(", "if False and any(", EDGES),
    Mutant("edge: a soft-cap that is 0 in float32", "_checks.py",
           "if not _TINY <= softcap <= _HUGE:", "if not 0 < softcap <= _HUGE:", EDGES),
    Mutant("edge: chunks of any number of tokens", "backends/plan.py",
           "most = min(most, _DEVICE_TOKENS)", "pass", EDGES),
    Mutant("edge: first estimate of one token", STREAMING,
           "torch.where(met[0] > 0, met[0], float(_UNKNOWN))", "met[0].clamp(min=1)", EDGES),
    Mutant("edge: first window of one token", STREAMING, "torch.tensor(_UNKNOWN)",
           "torch.tensor(1)", EDGES),
    Mutant("edge: -inf at the label of a shard", SHARDED,
           "torch.logaddexp(log_others, z_label)", "z_label + self.nll", EDGES),
    Mutant("edge: denominator 0", "loss.py", "(max(number, 1) if number else own)",
           "max(number, 1)", EDGES),
    Mutant("edge: reference smooths in float32", "reference.py",
           "F.one_hot(labels, V).double()", "F.one_hot(labels, V)", EDGES),
    Mutant("edge: tuning draws from the user's generator", "backends/launch_forward.py",
           "H, device=hidden.device, generator=rng)", "H, device=hidden.device)", EDGES),
    # ---- the replaced head
    Mutant("lazy: scale forgotten", STEPS, "p._replace(scale=p.scale * factor)", "p",
           f"{LOSSES} -k fused"),
    Mutant("lazy: cap without its scale", STEPS, "return (scale, abs(p.cap))",
           "return (p.scale, abs(p.cap))", f"{LOSSES} -k cap"),
    Mutant("lazy: vocabulary slice from 0", STEPS,
           "return p._replace(classes=slice(here.start + start, here.start + stop))",
           "return p._replace(classes=slice(here.start, here.start + stop - start))",
           f"{LOSSES} -k classes"),
    Mutant("lazy: unknown steps are fused", LAZY + "logits.py",
           "if self.memory.written or any(r.steps is None for r in self.known):",
           "if self.memory.written:", f"{LOSSES} -k real_logits"),
    Mutant("lazy: written logits are fused", LAZY + "logits.py",
           "if self.memory.written or any(", "if any(", "head/test_writes.py"),
    Mutant("lazy: copies see later writes", LAZY + "logits.py",
           "parent is not None and not parent.written and", "parent is not None and",
           "head/test_writes.py"),
    Mutant("lazy: a finer bias rounded", STEPS, "if p.rounded or torch.promote_types(",
           "if False and torch.promote_types(", "head/test_tensors.py -k finer"),
    Mutant("lazy: divided the other way round", STEPS, "else 1 / self.number",
           "else self.number", f"{LOSSES} -k divide"),
    Mutant("gradient: factors of others dropped", LAZY + "grad.py",
           "return term._replace(factors=(*term.factors, factor))", "return term",
           "head/test_hooks.py -k hook"),
    Mutant("gradient: steps are not checked", LAZY + "make.py",
           "if any(t.left or t.call is not call for t in terms):", "if False:",
           "head/test_functions.py -k derivative"),
    Mutant("gradient: any slice undoes one", LAZY + "grad.py",
           "if any(not t.left or t.left[0] != step for t in x.terms):",
           "if any(not t.left for t in x.terms):", "head/test_functions.py -k derivative"),
    Mutant("gradient: dense part dropped", LAZY + "grad.py",
           "dense = other if dense is None else dense + other", "pass",
           "head/test_functions.py -k loss_of_the_same"),
    Mutant("gradient: views share nothing", LAZY + "grad.py",
           "new.base, new.move, new.seen = x, view, x.writes", "pass",
           "head/test_hooks.py -k writes_into"),
    Mutant("gradient: kept ones are lost with a step", "head/clock.py",
           "register_optimizer_step_pre_hook(CLOCK.before)", "pass",
           "head/test_hooks.py -k after_the_optimizer"),
    Mutant("gradient: second derivatives are zero", LAZY + "loss.py",
           "if torch.is_grad_enabled():\n            raise", "if False:\n            raise",
           "head/test_functions.py -k second_derivative"),
    Mutant("stale: steps of optimizers unseen", "head/clock.py",
           "register_optimizer_step_post_hook(CLOCK.after)", "pass", "head/test_stale.py"),
    Mutant("stale: every step is one of the head", "head/call.py",
           "if not ours <= known or any(", "if True or any(", "head/test_stale.py -k unrelated"),
    Mutant("stale: writes unseen", "head/call.py", "changed or merged or self._has_stepped()",
           "merged or self._has_stepped()", "head/test_tensors.py -k change"),
    Mutant("stale: merged adapters unseen", "head/call.py",
           "changed or merged or self._has_stepped()", "changed or self._has_stepped()",
           "head/test_peft_trl.py -k merging"),
    Mutant("head: values hold the graph", "head/call.py", "self.hidden = hidden.detach()",
           "self.hidden = hidden", "head/test_memory.py -k graph"),
    Mutant("head: sharded again, not gathered", "head/call.py",
           "if any(_is_gone(x) for x in tensors):", "if False:", "head/test_ranks.py -k fsdp"),
    Mutant("head: dropout drawn anew", "head/forward.py", "if recipe.dropouts():", "if False:",
           "head/test_peft_trl.py -k dropout"),
    Mutant("head: LoRA's factor", "head/recipe.py", "(adapter.scaling * x)", "(x)",
           "head/test_peft_trl.py -k lora_is_fused"),
    Mutant("head: function transforms", "head/forward.py",
           "torch._C._functorch.maybe_current_level() is not None", "False",
           "head/test_tensors.py -k transforms"),
    Mutant("head: a view where there is a bias", "head/forward.py",
           "recipe.bias is not None and not recipe.adapters and len(leading) > 1", "False",
           "head/test_hooks.py -k before_and_after"),
    Mutant("probe: in evaluation alone", "head/replace.py",
           "(True, False) if can_probe", "(False,) if can_probe", "head/test_probe.py -k one_mode"),
    Mutant("probe: in training alone", "head/replace.py",
           "(True, False) if can_probe", "(True,) if can_probe", "head/test_probe.py -k one_mode"),
    Mutant("probe: buffers stay changed", "head/probe.py", "b.copy_(before)", "pass",
           "head/test_probe.py -k parametrized"),
    Mutant("probe: dtype of its logits", "head/probe.py", "return native.dtype", "return dtype",
           "head/test_probe.py -k upcasts"),
    Mutant("watch: later heads stay", "head/replace.py", "    if named:\n        _watch(model)",
           "", "head/test_heads.py -k later"),
    Mutant("report: places are not counted", "head/report.py", "times=place.times + 1",
           "times=place.times", "head/test_report.py"),
    Mutant("traced: steps not remembered", LAZY + "traced.py",
           "new._steps = x, (traced,), (*x._steps, *steps)", "new._steps = x, (traced,), x._steps",
           f"{LOSSES} -k one_graph"),
    Mutant("traced: time of the run forgotten", LAZY + "traced.py", "report, CLOCK.now,",
           "report, Tick(),", "head/test_stale.py -k compiled"),
    Mutant("trainer: another's loss replaced", "trainer.py",
           'own = "compute_loss" in vars(kind)', "own = False", "trainer/test_compute_loss.py"),
    Mutant("trainer: behind the Trainer", "trainer.py",
           "if any(_is_trainer(kind) for kind in before):", "if False:",
           "trainer/test_compute_loss.py"),
    Mutant("trainer: own count", LAZY + "loss.py",
           "n_valid.clamp(min=1) if self.denominator is None else self.denominator",
           "n_valid.clamp(min=1)",
           "trainer/test_mixin.py"),
    Mutant("trainer: steps forgotten", "trainer.py", "/ (steps * self._n_ranks())",
           "/ self._n_ranks()", "trainer/test_mixin.py"),
    Mutant("trainer: ranks forgotten", "trainer.py", "/ (steps * self._n_ranks())", "/ steps",
           "head/test_ranks.py -k mixin"),
    Mutant("trainer: borders trained", "trainer.py",
           "batch[name].masked_fill(where, -100)", "batch[name]",
           "trainer/test_mixin.py"),
    Mutant("trainer: counted before the shift", "trainer.py",
           "int(tap.losses[0][1])", "row[name].numel()", "trainer/test_mixin.py"),
    Mutant("trainer: repeated samples evaluated", "trainer.py", "inputs[\"labels\"][real:] = -100",
           "pass", "head/test_ranks.py -k mixin"),
    Mutant("trainer: rewrites what others log", "trainer.py",
           "of_interval = \"loss\" in logs and \"learning_rate\" in logs",
           "of_interval = \"loss\" in logs", "trainer/test_mixin.py -k rewritten"),
    Mutant("trainer: counts what is not trained", "trainer.py",
           "if self._eval_totals is not None or denominator is not None:", "if True:",
           "trainer/test_mixin.py -k rewritten"),
    Mutant("trainer: counts a run that failed", "trainer.py",
           "self._begin_run()\n        return", "return", "trainer/test_mixin.py -k memory"),
    Mutant("trainer: any reduction", "trainer.py",
           "[reduction for *_, reduction in tap.losses] != [\"mean\"]", "len(tap.losses) != 1",
           "trainer/test_mixin.py -k refused"),
    Mutant("trainer: shifted labels over borders", "trainer.py", "starts.roll(-1, 1)", "starts",
           "trainer/test_mixin.py -k across"),
]  # fmt: skip


def kill(mutant: Mutant) -> str:
    """A line about the mutant; it starts with "killed" if the tests noticed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "fusedce"
        shutil.copytree(ROOT / "fusedce", copy, symlinks=False)
        file = copy / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return f"STALE    {mutant.name}: {text.count(mutant.old)} places in {mutant.file}"
        file.write_text(text.replace(mutant.old, mutant.new))
        tests, *selection = mutant.tests.split(" ", 1)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
                *(str(ROOT / "tests" / tests), *" ".join(selection).split()),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    failed = [x for x in done.stdout.splitlines() if x.startswith("FAILED")]
    if done.returncode != 1 or not failed:
        return f"SURVIVED {mutant.name}: {mutant.tests}\n{done.stdout[-1500:]}{done.stderr[-500:]}"
    return f"killed   {mutant.name}: {failed[0].split(' - ')[0].removeprefix('FAILED ')}"


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if not words or any(w in m.name for w in words)]
    killed = 0
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(kill, chosen):
            print(line, flush=True)
            killed += line.startswith("killed")
    print(f"{killed} of {len(chosen)} mutants killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
