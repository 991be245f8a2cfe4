"""Mutants of memory budgets: the ways, and backward by tiles of the vocabulary."""

from mutants import Mutant

BUDGET = "test_memory_budget.py"
PLAN = "backends/test_plan.py"
TILES = f"{BUDGET} -k on_both_backends"
SHARDED = "loss/test_sharded.py"

MUTANTS = [
    Mutant(
        "plan: the accumulator is not counted",
        'held["d_weight in float32"] = acc * V * H',
        "pass",
        PLAN,
    ),
    Mutant(
        "plan: a budget that is too small takes the least way",
        "    least = min(tried, key=lambda way: way.bytes)",
        "    return min(tried, key=lambda way: way.bytes)",
        f"{BUDGET} -k too_small",
    ),
    Mutant(
        "plan: chunks of the fewest tokens",
        "    if way.name != CHUNKS:",
        "    if True:",
        f"{PLAN} -k never_slower",
    ),
    Mutant(
        "plan: a tile of a CPU as wide as the tokens let it",
        "    tokens = 2048 if call.triton else 128",
        "    tokens = call.n",
        f"{PLAN} -k width_of_a_tile",
    ),
    Mutant(
        "budget: the environment is not asked",
        "    given = os.environ.get(BUDGET_VARIABLE",
        '    given = "" and os.environ.get(BUDGET_VARIABLE',
        f"{BUDGET} -k environment",
    ),
    Mutant(
        "budget: that of a replaced head is forgotten",
        "        replaced.memory_budget = memory_budget",
        "        pass",
        "head/test_models.py -k budget",
    ),
    Mutant(
        "two passes: the denominator is forgotten",
        "outer = nothing + factor",
        "outer = nothing + 1",
        TILES,
    ),
    Mutant(
        "two passes: the mean logit's slope dropped at the label",
        "at_label = at_label + by.zmean * c / V",
        "pass",
        TILES,
    ),
    Mutant(
        "tiles, torch: a repeated row counts twice",
        "again[1:] = rows[1:] == rows[:-1]",
        "pass",
        f"{BUDGET} -k any_tile_torch",
    ),
    Mutant(
        "tiles, torch: the last rows of a matrix as they come",
        "missing = 0 if size % ROW_MULTIPLE else -len(block) % ROW_MULTIPLE",
        "missing = 0",
        f"{BUDGET} -k same_bits_in_every_batch",
    ),
    Mutant(
        "tiles, torch: blocks overwrite each other",
        "hidden.to(gemm), d_weight, add=number > 0",
        "hidden.to(gemm), d_weight",
        TILES,
    ),
    Mutant(
        "tiles, triton: blocks overwrite each other",
        "largest, first=first == 0",
        "largest, first=True",
        TILES,
    ),
    Mutant(
        "tiles, triton: float16's entries without their factors",
        "self.entries.mul_(self.factors)",
        "pass",
        f"{BUDGET} -k float16",
    ),
    Mutant(
        "tiles, triton: products that are added in scratch replace what was there",
        "some += product(",
        "some[:] = product(",
        TILES,
    ),
    Mutant(
        "shards: chunks under any budget",
        "return way_of(sharded_call(problem, shard, N), memory_budget=budget).name == TILES",
        "return False",
        f"{SHARDED} -k budget",
    ),
    Mutant(
        "budget: several classes cost nothing",
        "len(problem.hidden) * K * (in_range + upstream)",
        "len(problem.hidden) * K % (in_range + upstream)",
        "test_memory_budget.py -k says_the_whole",
    ),
]
