"""How much each token weighs in one optimizer step, by a loop that averages and by LossAccumulator.

    python bench/weights.py

One step of a small random Llama over the 8 sequences of `bench/stacks.py`, a micro-batch each;
`fusedce.audit` reads the weights. Writes `bench/results/weights.json` and `docs/weights.png`.
"""

from __future__ import annotations

import sys

import stacks
import torch
from lib import pictures
from lib.results import FOLDER, ROOT, stamp, versions, write

import fusedce


def weights(accumulates: bool) -> list[tuple[int, float]]:
    """Tokens of each micro-batch, and the weight of one of them over the right weight."""
    torch.manual_seed(0)
    model = stacks.MODELS["Llama"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [stacks.stacked([row]) for row in stacks.sequences()]
    with fusedce.audit(model) as report:
        if accumulates:
            fusedce.replace_loss_head(model)
            acc = fusedce.LossAccumulator(model)
            with acc.window([fusedce.count_valid(row["labels"]) for row in rows]):
                for row in rows:
                    acc.backward(fusedce.model_loss(model, row))
        else:
            for row in rows:
                (model(**row).loss / len(rows)).backward()
        optimizer.step()
    return [(n, round(weight, 4)) for n, weight in report.steps[0].micro_batches]


def main() -> int:
    found = {
        name: weights(name == "LossAccumulator") for name in ("mean of means", "LossAccumulator")
    }
    kept = {name: v for name, v in versions().items() if name in ("torch", "transformers")}
    write(FOLDER / "weights.json", {"weights": found, "versions": kept} | stamp())
    print(f"written: {pictures.weights(found, ROOT / 'docs' / 'weights.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
