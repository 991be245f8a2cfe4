"""Mutants of a vocabulary spread over ranks."""

from mutants import Mutant

SHARDS = "test_sharded.py"

AGREE = "test_sharded_agreement.py"

MUTANTS = [
    Mutant(
        "shards: weights travel in the dtype of each rank",
        "_gather_tokens(token_weight.double(), most",
        "_gather_tokens(token_weight, most",
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
        "DTYPES.index(problem.hidden.dtype),",
        "0,",
        f"{AGREE} -k hidden_states_of_another",
    ),
    Mutant("shards: merged without their maxima", "(sums * (ks - top).exp())", "sums", SHARDS),
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
        "shards: the label counts twice", "self._set_label(torch.zeros_like(k))", "pass", SHARDS
    ),
    Mutant(
        "shards: padding has a probability",
        "min(max(shard.V - shard.first, 0), len(weight))",
        "len(weight)",
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
        "for chunk in chunks_of(rows, size):\n        h = hidden",
        "for chunk in chunks_of(rows, max(len(rows), 1)):\n        h = hidden",
        SHARDS,
    ),
    Mutant(
        "shards: chunks overwrite each other",
        "d_weight[: local.real] +=",
        "d_weight[: local.real] =",
        SHARDS,
    ),
    Mutant("shards: labels may differ", "or len(set(checksums)) > 1", "", SHARDS),
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
        "torch.logaddexp(log_others, z_label)",
        "z_label + self.nll",
        "test_sharded_agreement.py -k masked_label",
    ),
    Mutant(
        "shards: numbers are not compared",
        "[_bits(getattr(problem, name)) for name in NUMBERS]",
        "[0 for _ in NUMBERS]",
        AGREE,
    ),
    Mutant(
        "replicas: hidden states may differ",
        "mine[_SKETCH] = _sketch(problem).view(torch.int64)",
        "pass",
        "test_sharded_agreement.py -k replicated",
    ),
    Mutant(
        "replicas: ignored positions are looked at",
        "wide = wide.masked_fill(~valid[:, None], 0)",
        "pass",
        "test_sharded_agreement.py -k replicated",
    ),
    Mutant(
        "replicas: an error stays in one dimension of the mesh",
        "mine[_TEXT] = ",
        "_ = ",
        "test_sharded_agreement.py -k replicated",
    ),
    Mutant(
        "shards: rows are found by waiting",
        "    return device_rows(problem, shard.V, shard.counted)",
        "    return valid_rows(problem, shard.V)",
        "test_sharded_waits.py",
    ),
    Mutant(
        "shards: a bad label's place is lost on a device",
        "bad_label_codes(first, value)",
        "bad_label_codes(0 * first, value)",
        "test_sharded_waits.py -k bad_label",
    ),
]
