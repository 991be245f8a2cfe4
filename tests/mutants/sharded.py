"""Mutants of a vocabulary spread over ranks."""

from mutants import Mutant

SHARDS = "test_sharded.py"

AGREE = "test_sharded_agreement.py"

MUTANTS = [
    Mutant(
        "errors: peers are told of three kinds alone",
        "    except Exception as error:\n        if not groups:",
        "    except (TypeError, ValueError, RuntimeError) as error:\n        if not groups:",
        "test_sharded_agreement.py -k before_they_meet",
    ),
    Mutant(
        "errors: sent from where the labels lie",
        'device = device_for(groups[-1], torch.device("cpu"))',
        "pass",
        "test_sharded_agreement.py -k can_send",
    ),
    Mutant(
        "shards: weights travel in the dtype of each rank",
        "gather_tokens(token_weight.double(), most",
        "gather_tokens(token_weight, most",
        f"{AGREE} -k labels_and_weights",
    ),
    Mutant(
        "shards: labels travel in the dtype of each rank",
        "problem.but(labels=problem.labels.long())",
        "problem",
        f"{AGREE} -k labels_and_weights",
    ),
    Mutant(
        "shards: hidden states of any dtype meet",
        "str(problem.hidden.dtype),",
        '"",',
        "test_sharded_agreement.py -k hidden_states_of_another",
    ),
    Mutant(
        "shards: a rank that is gone is told in gloo's words",
        "        with waiting_for_ranks(group):\n            table, work",
        "        if True:\n            table, work",
        "test_faults_between_ranks.py -k dies",
    ),
    Mutant(
        "shards: a rank that is gone in backward is told in gloo's words",
        "with waiting_for_ranks(self._group):",
        "if True:",
        "test_faults_between_ranks.py -k between_forward_and_backward",
    ),
    Mutant(
        "shards: checksums with small weights",
        "torch.arange(_FIRST, _FIRST + _STEP * len(x), _STEP, device=x.device)",
        "torch.arange(3, 2 * len(x) + 3, 2, device=x.device)",
        f"{AGREE} -k checksums",
    ),
    Mutant(
        "shards: checksums do not depend on the order",
        "x * weights, 0, out=out",
        "x * _FIRST, 0, out=out",
        f"{AGREE} -k checksums",
    ),
    Mutant(
        "shards: settings that do not fit are told to no rank",
        "    with tell_peers_on_error(layout.groups, labels.device):\n        mine",
        "    if True:\n        mine",
        f"{AGREE} -k before_they_meet",
    ),
    Mutant(
        "shards: d_hidden of this rank only",
        "self._works.append(dist.all_reduce(rows, group=self._group, async_op=True))",
        "pass",
        SHARDS,
    ),
    Mutant(
        "shards: the last chunk's d_hidden of this rank only",
        "self.start(len(self._d_rows))",
        "pass",
        SHARDS,
    ),
    Mutant(
        "shards: nothing overlaps",
        "        sums.start(begin)  #",
        "        # ",
        f"{SHARDS} -k coll",
    ),
    Mutant(
        "shards: the label counts twice",
        "            clear_labels(self.e, self.at, self.inside)\n",
        "",
        SHARDS,
    ),
    Mutant(
        "shards: padding has a probability",
        "min(max(self.V - self.first, 0), len(problem.weight))",
        "len(problem.weight)",
        SHARDS,
    ),
    Mutant(
        "shards: all of one size",
        "first=sum(rows[: dist.get_rank(group)])",
        "first=len(problem.weight) * dist.get_rank(group)",
        SHARDS,
    ),
    Mutant("shards: each its own chunks", "max(shard.largest, 1)", "max(len(weight), 1)", SHARDS),
    Mutant(
        "shards: one chunk",
        "by_chunk = chunks_of(here.rows, way.tokens)",
        "by_chunk = chunks_of(here.rows, max(len(here.rows), 1))",
        SHARDS,
    ),
    Mutant(
        "shards: chunks overwrite each other",
        "of_head.weight, add=number > 0)",
        "of_head.weight, add=False)",
        SHARDS,
    ),
    Mutant(
        "shards: labels may differ",
        " or len({*checksums[0]}) > 1",
        "",
        "test_sharded.py",
    ),
    Mutant(
        "shards: tokens get each other's gradients",
        "getattr(dist, REDUCE_SCATTER)(mine, d_hidden, group=shard.group)",
        "mine.copy_(d_hidden[: len(mine)])",
        "test_sharded_dtensors.py",
    ),
    Mutant(
        "shards: smoothing left out of the gradient", "g += shift.to", "g += 0 * shift.to", SHARDS
    ),
    Mutant("shards: z-loss left out at the label", "+ by.lse * (-self.nll).exp()", "", SHARDS),
    Mutant(
        "shards: no slope",
        "return g if self.slope is None else g.mul_(self.slope)",
        "return g",
        SHARDS,
    ),
    Mutant(
        "shards: tokens of weight 0 are read",
        "valid & ((token_weight != 0) | bad)",
        "valid",
        SHARDS,
    ),
    Mutant(
        "shards: rounded where p -> 1",
        "torch.expm1(-self.nll)",
        "((-self.nll).float().exp() - 1)",
        SHARDS,
    ),
    Mutant(
        "edge: -inf at the label of a shard",
        "return nll, torch.logaddexp(z_label, others)",
        "return nll, z_label + torch.logaddexp(gap, 0 * gap)",
        "test_sharded_agreement.py -k masked_label",
    ),
    Mutant(
        "shards: numbers are not compared",
        'for name in ("ignore_index", "chunk_tokens", "memory_budget", *NUMBERS)',
        'for name in ("ignore_index", "chunk_tokens", "memory_budget")',
        "test_sharded_agreement.py",
    ),
    Mutant(
        "replicas: hidden states may differ",
        "if len(layout.groups) > 1 or (GUARDS and",
        "if (GUARDS and",
        "test_sharded_agreement.py -k replicated",
    ),
    Mutant(
        "replicas: ignored positions are looked at",
        "wide = wide.masked_fill(~_valid(problem)[:, None], 0)",
        "pass",
        "test_sharded_agreement.py -k replicated",
    ),
    Mutant(
        "replicas: an error stays in one dimension of the mesh",
        "mine = row(words, 0 * mine[TEXT:])",
        "pass",
        "test_sharded_agreement.py -k replicated",
    ),
    Mutant(
        "shards: rows are found by waiting",
        "None if on_cpu else shard.counted",
        "None",
        "test_sharded_waits.py",
    ),
    Mutant(
        "shards: a bad label's place is lost on a device",
        "bad_label_codes(first, labels",
        "bad_label_codes(0 * first, labels",
        "test_sharded_waits.py -k bad_label",
    ),
    Mutant(
        "shards: tokens of one rank meet those of all",
        '"tokens_sharded": layout.tokens_sharded,',
        '"tokens_sharded": None,',
        "test_sharded_agreement.py -k other_things",
    ),
    Mutant(
        "shards: weights of tokens may differ",
        "            if len({*checksum}) > 1:",
        "            if False:",
        "test_sharded_agreement.py -k other_things",
    ),
    Mutant(
        "shards: vocab_size may not be all rows",
        "0 < vocab_size <= sum(rows)",
        "0 < vocab_size < sum(rows)",
        "test_sharded.py -k padd",
    ),
    Mutant(
        "shards: the label's logit of the first rank",
        "z_labels.amax(0).masked_fill(~known, math.nan)",
        "z_labels[0].masked_fill(~known, math.nan)",
        "test_sharded.py -k equals",
    ),
    Mutant(
        "divergences over shards: of one rank's classes",
        "of_all = sums([self.kl, self.mean, self.total], self.shard)",
        "of_all = [self.kl, self.mean, self.total]",
        "test_sharded_divergences.py",
    ),
    Mutant(
        "divergences over shards: forward of one rank's classes",
        "(kl,) = sums([kl], self.shard)",
        "pass",
        "test_sharded_divergences.py",
    ),
    Mutant(
        "divergences over shards: log-sum-exps of one rank",
        "merged = [x.logsumexp(0) for x in of_all[: len(lses)]]",
        "merged = list(lses)",
        "test_sharded_divergences.py",
    ),
    Mutant(
        "probabilities over shards: the largest of one rank",
        "of_label, y, total = largest(of_label, y, total, self.shard)",
        "pass",
        "test_sharded_divergences.py",
    ),
    Mutant(
        "probabilities over shards: padding's and others' class weights",
        "classes = slice(shard.first, shard.first + len(problem.weight))",
        "classes = slice(0, len(problem.weight))",
        "test_sharded_divergences.py",
    ),
    Mutant(
        "agreement: the teacher's settings are a rank's own",
        '{"reduction": reduction} | divergence.settings()',
        '{"reduction": reduction}',
        "test_sharded_divergences.py -k settings_of_the_teacher",
    ),
    Mutant(
        "agreement: only what the first rank names",
        "dict.fromkeys(name for one in told for name in one.settings)",
        "told[0].settings",
        "test_sharded_divergences.py -k settings_of_the_teacher",
    ),
    Mutant(
        "agreement: budgets of environments are a rank's own",
        "layout._replace(problem=problem.but(memory_budget=budget))",
        "layout",
        "test_sharded.py -k a_budget_decides",
    ),
]
