"""Mutants of a vocabulary spread over ranks, by the Triton kernels."""

from mutants import Mutant

EQUAL = "test_sharded_triton.py -k equals"

MUTANTS = [
    Mutant(
        "labels' logits: a bias with gaps",
        "bias = None if bias is None else bias.contiguous()\n    here",
        "here",
        "test_sharded_tokens.py -k four_ranks",
    ),
    Mutant(
        "shards, Triton: the label's logit stays with its rank",
        "    all_reduce(z_label, shard.group)  # of one number",
        "    # of one number",
        EQUAL,
    ),
    Mutant(
        "shards, Triton: sums of blocks without their references",
        "(sums.double().log() + references).logsumexp(0)",
        "sums.double().log().logsumexp(0)",
        EQUAL,
    ),
    Mutant(
        "shards, Triton: a gradient by the sums of one rank",
        "others = tl.load(merged + stride_row + c)",
        "others = tl.sum(s * tl.exp2(references - top), axis=0)",
        EQUAL,
    ),
    Mutant(
        "shards, Triton: a rank without classes adds what its buffers hold",
        "            exponentials.clear()\n",
        "            exponentials.fill(h, y, best, z_label)\n",
        EQUAL,
    ),
    Mutant(
        "shards, Triton: the mean logit of one rank's classes",
        "all_gather(x, shard.group).view(-1, len(x)).sum(0)",
        "all_gather(x, shard.group).view(-1, len(x))[0]",
        EQUAL,
    ),
    Mutant(
        "shards, Triton: smoothing over one rank's classes",
        "RowFactors(local, shard.V, mean)",
        "RowFactors(local, None, mean)",
        EQUAL,
    ),
    Mutant(
        "shards, Triton: gradients over another count than the factor's",
        "outer=1.0 / max(shard.valid, 1)",
        "outer=1.0 / max(shard.counted, 1)",
        EQUAL,
    ),
    Mutant(
        "shards, Triton: a chunk's sum over ranks waits for the next chunk",
        "if written is not None:\n                written(end)\n",
        "if written is not None:\n                written(begin)\n",
        "test_sharded_waits.py -k launches",
    ),
    Mutant(
        "shards, Triton: nothing overlaps",
        "            if written is not None:\n                written(end)\n",
        "",
        "test_sharded_triton.py -k collectives",
    ),
    Mutant(
        "shards, Triton: padding has a probability",
        "weight=weight[:real] if real else weight.new_zeros(1",
        "weight=weight if real else weight.new_zeros(1",
        EQUAL,
    ),
    Mutant(
        "shards, Triton: each device its own chunks",
        "budget=min(budgets)",
        "budget=budgets[dist.get_rank(group)]",
        EQUAL,
    ),
    Mutant(
        "shards, Triton: the host waits for the number of rows",
        "    n_here, n = len(problem.hidden), shard.counted\n",
        "    n_here, n = len(problem.hidden), int(problem.valid().sum())\n",
        "test_sharded_waits.py -k nothing_waits",
    ),
]
