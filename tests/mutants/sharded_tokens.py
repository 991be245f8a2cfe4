"""Mutants of what is known token by token of a vocabulary spread over ranks."""

from mutants import Mutant

TOKENS = "test_sharded_tokens.py"
AGREEMENT = "test_sharded_tokens_agreement.py"

MUTANTS = [
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
        "classes of shards: ranks may ask for different ones",
        "checked = {_LABELS: labels, ",
        "checked = {_LABELS: labels[:0], ",
        f"{AGREEMENT} -k classes",
    ),
    Mutant(
        "tokens of shards: the label is among the others",
        "torch.where(local.here, others, lse),",
        "lse,",
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
]
