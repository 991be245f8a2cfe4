"""Mutants of names and orders of arguments that peers use."""

from mutants import Mutant

PEERS = "test_names_of_peers.py"
EXPLAIN = "contract/test_explain.py"

MUTANTS = [
    Mutant(
        "peers: losses stand where the hidden state does",
        "loss.roll(offset, -1) if offset",
        "loss.roll(0, -1) if offset",
        f"{PEERS} -k sliced",
    ),
    Mutant(
        "peers: token weights stay behind the shift",
        "token_weight = token_weight.roll(-offset, -1)",
        "pass",
        f"{PEERS} -k shift_with",
    ),
    Mutant(
        "labels: none ignored, and the lowest value is",
        "labels = labels.clamp(min=ignore_index + 1)",
        "labels = labels",
        f"{EXPLAIN} -k no_label",
    ),
    Mutant(
        "labels: a value beyond int32 cut off",
        "value if labels is None else int(labels[position])",
        "value",
        f"{EXPLAIN} -k own_value",
    ),
    Mutant(
        "masks: taken as they are",
        "x if x is None or x.dtype in (torch.float32, torch.float64) else x.float()",
        "x",
        "contract/test_checks.py -k float32_or_better",
    ),
]
