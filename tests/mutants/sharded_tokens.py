"""Mutants of what is known token by token of a vocabulary spread over ranks."""

from mutants import Mutant

TOKENS = "test_sharded_tokens.py"
AGREEMENT = "test_sharded_tokens_agreement.py"

MUTANTS = [
    Mutant(
        "ranks: an addend of zeros in hidden's order of memory",
        "problem.hidden.new_zeros(local.problem.hidden.shape, dtype=acc)",
        "torch.zeros_like(local.problem.hidden, dtype=acc)",
        "test_sharded_tokens.py -k four_ranks",
    ),
    Mutant(
        "tokens: no gradient where nothing counts on any rank",
        "if (alone and all(u is None for u in upstream)) or not any(wanted):",
        "if all(u is None for u in upstream) or not any(wanted):",
        "test_sharded_tokens.py -k four_ranks",
    ),
    Mutant(
        "classes of shards: each rank's own logits",
        "    all_reduce(z, counted.shard.group)  # one number",
        "    # one number",
        f"{TOKENS} -k several",
    ),
    Mutant(
        "classes of shards: those elsewhere are the first row",
        "return rows.masked_fill(~here, local.problem.ignore_index)",
        "return rows",
        f"{TOKENS} -k several",
    ),
    Mutant(
        "classes of shards: their gradient left out",
        "chosen=here.masked_fill(~local.problem.but(labels=here).valid(), -1),",
        "chosen=torch.full_like(here, -1),",
        f"{TOKENS} -k several",
    ),
    Mutant(
        "classes of shards: ranks may ask for different ones",
        "checked = {_LABELS: labels, ",
        "checked = {_LABELS: labels[:0], ",
        f"{AGREEMENT} -k classes",
    ),
    Mutant(
        "tokens of shards: the label is among the others",
        "torch.where(local.here, others, found.lse.double()),",
        "found.lse.double(),",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: a stand-in is the label",
        "torch.where(local.here, z, -math.inf),",
        "z,",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: rounded where p -> 1",
        "torch.where(nll < 1, z + nll.expm1().log(), lse + (-nll.neg().exp()).log1p())",
        "torch.where(nll < 0, z, lse + (-nll.neg().exp().float()).log1p())",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: entropies averaged",
        "p * (entropies + surprise)",
        "p * entropies",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: the winner among the others",
        "others = above.exp().scatter(0, winner, 0).sum(0)",
        "others = above.exp().sum(0)",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: argmax of a shard",
        "(argmax + shard.first).double()",
        "argmax.double()",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: the first shard's maximum",
        "classes.gather(0, tops.argmax(0, keepdim=True))[0]",
        "classes[0]",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: maximum without the label",
        "highest = torch.maximum(top[0], z)",
        "highest = top[0] + 0 * z",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: maximum of kernels without the label",
        "tl.store(highest + row, tl.maximum(m, z).to(tl.float32), mask=mask_n)",
        "tl.store(highest + row, m.to(tl.float32), mask=mask_n)",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: mean over a shard",
        "found.zmean.double() * len(local.problem.weight)",
        "found.zmean.double()",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: onehot where the label is not",
        "less_one if here is None else torch.where(here, less_one, p_label)",
        "less_one",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: mean of as many classes as here",
        "(V if classes is None else classes)",
        "V",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: probability of the label at its stand-in",
        "torch.where(local.here, values.nll, values.lse - z_here)",
        "values.nll",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: probabilities of a shard",
        "            local.problem, wanted, values.lse, upstream, Dtypes(acc, dtype, dtype)",
        "            local.problem, wanted, 0.9 * values.lse, upstream, Dtypes(acc, dtype, dtype)",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: weights of the first classes",
        "class_weight=None if c is None else c[classes],",
        "class_weight=None if c is None else c[:real],",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: everybody's first tokens",
        "first = dist.get_rank(self.group) * max(self.tokens)",
        "first = 0",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: padding gets the classes' gradients",
        "padded[: len(grad)] = grad",
        "padded[len(padded) - len(grad) :] = grad",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: own sum alone",
        "all_reduce(everyones, group)",
        "pass",
        TOKENS,
    ),
    Mutant(
        "tokens of shards: other class weights",
        'f"{[*c.shape]}, checksum {_checksum(c.double())}"',
        '"given"',
        "test_sharded_tokens_agreement.py -k all_ranks",
    ),
    Mutant(
        "tokens of shards: others' upstream unheard",
        "of[i] = u if bool(u.ne(0).any()) else None",
        "of[i] = None",
        TOKENS,
    ),
]
