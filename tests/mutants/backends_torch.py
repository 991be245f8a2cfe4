"""Mutants of the torch backend."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
OPTIONS = "test_options.py"
TORCH = "test_properties.py -k torch_backend"
EDGES = "test_edges.py"

MUTANTS = [
    Mutant(
        "mask: ignored means negative",
        "valid = labels != ignore_index",
        "valid = labels >= 0",
        TORCH,
    ),
    Mutant(
        "count: every position",
        "n_valid = valid.sum()",
        "n_valid = (labels == labels).sum()",
        TORCH,
    ),
    Mutant("target term: p instead of p - 1", "torch.expm1(-nll)", "torch.exp(-nll)", TORCH),
    Mutant(
        "target term: left in the tile too",
        "z.gather(0, local).masked_fill_(inside, 0)",
        "z.gather(0, local)",
        TORCH,
    ),
    Mutant(
        "rescaling: tiles keep their own maximum",
        "(maxima - top).exp_()",
        "(maxima - maxima).exp_()",
        TORCH,
    ),
    Mutant(
        "chunk edge: last chunk dropped",
        "enumerate(chunks)",
        "enumerate(chunks[: max(len(chunks) - 1, 1)])",
        TORCH,
    ),
    Mutant(
        "weight gradient: chunks overwrite each other", "first=number == 0", "first=True", TORCH
    ),
    Mutant(
        "tile edge: one row short",
        "yield begin, min(begin + step, V)",
        "yield begin, min(begin + step, max(V - 1, 1))",
        CONTRACT,
    ),
    Mutant(
        "bias gradient: without the target's term",
        "            add_rows(d_bias_sum, y, coefficient)",
        "            pass",
        TORCH,
    ),
    Mutant(
        "bias gradient: not divided by the softmax sum",
        "torch.mv(tile.to(acc), factor)",
        "tile.to(acc).sum(1)",
        TORCH,
    ),
    Mutant(
        "soft-cap: slope of the tile not squared",
        "slope = None if softcap is None else 1 - (z / softcap).square_()\n            stats",
        "slope = None if softcap is None else 1 - (z / softcap)\n            stats",
        TORCH,
    ),
    Mutant(
        "soft-cap: no slope at the target",
        "1 - (stats.z_label.double() / softcap).square()",
        "1.0",
        TORCH,
    ),
    Mutant(
        "scale: missing in the tile's gradient",
        "mul_(logit_scale * (u_nll + u_lse))",
        "mul_(u_nll + u_lse)",
        TORCH,
    ),
    Mutant(
        "repeated labels: the last one wins",
        "total.index_add_(0, y, rows)",
        "total[y] += rows",
        TORCH,
    ),
    Mutant(
        "options: 0 times inf",
        "(token_weight != 0) | bad",
        "(labels == labels) | bad",
        f"{OPTIONS} -k left_out",
    ),
    Mutant(
        "options: smoothing spread by tokens alone",
        "dh.addr_((self.scale * u)",
        "dh.addr_((0 * u)",
        f"{OPTIONS} -k pair",
    ),
    Mutant(
        "tokens: entropy cancels at p -> 1",
        "e.scatter_(0, place[None], 0)",
        "pass",
        "test_logprobs.py -k cancel",
    ),
    Mutant(
        "edge: nothing valid is computed",
        "rows.split(size) if len(rows) else ()",
        "rows.split(size)",
        EDGES,
    ),
]
