"""Mutants of the likeliest classes, and of operands of several dtypes."""

from mutants import Mutant

TOPK = "test_topk.py"

MUTANTS = [
    Mutant(
        "topk: any of equal logits",
        "if z.shape[1] > k and tied.any():",
        "if False:",
        f"{TOPK} -k equal",
    ),
    Mutant(
        "topk: the last of equal logits",
        "at = at.sort(dim=1).values",
        "at = at.sort(dim=1, descending=True).values",
        f"{TOPK} -k equal",
    ),
    Mutant(
        "topk: the likeliest among the others",
        "z.scatter_(1, found[:, :1], -torch.inf)",
        "z.scatter(1, found[:, :1], -torch.inf)",
        f"{TOPK} -k classes",
    ),
    Mutant(
        "topk: a tile's likeliest is lost",
        "rest = torch.logaddexp(rest, torch.minimum(best[:, 0], values[:, 0]).double())",
        "pass",
        f"{TOPK} -k classes",
    ),
    Mutant(
        "topk: classes of a tile",
        "torch.cat([classes, found + begin], 1)",
        "torch.cat([classes, found], 1)",
        f"{TOPK} -k classes",
    ),
    Mutant(
        "topk: one temperature",
        "z.div_(problem.temperature[block, None])",
        "z.div_(problem.temperature[:1, None])",
        f"{TOPK} -k temperatures",
    ),
    Mutant(
        "topk: a sure class cancels",
        "likeliest = -(others - wide[:, 0]).exp().log1p()",
        "likeliest = wide[:, 0].float() - torch.logaddexp(others, wide[:, 0]).float()",
        f"{TOPK} -k sure",
    ),
    Mutant(
        "topk: classes of a shard",
        "_over_ranks(top, at + shard.first, others, shard)",
        "_over_ranks(top, at, others, shard)",
        f"{TOPK} -k sharded",
    ),
    Mutant(
        "topk: other ranks' likeliest are lost",
        "torch.cat([rest[..., 0], firsts]).logsumexp(0)",
        "rest[..., 0].logsumexp(0)",
        f"{TOPK} -k sharded",
    ),
    Mutant(
        "topk: tokens of the first rank",
        "(shard.own(x, N) for x in (top, at, others))",
        "(x[:N] for x in (top, at, others))",
        f"{TOPK} -k sharded",
    ),
    Mutant(
        "mixed dtypes: hidden's own",
        "wide = given or functools.reduce(torch.promote_types, found)",
        "wide = given or problem.hidden.dtype",
        "test_mixed_dtypes.py",
    ),
]
