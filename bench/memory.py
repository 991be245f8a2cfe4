"""Memory of the loss against the number of tokens, counted: `docs/memory.png` and its data.

    python bench/memory.py

Bytes are those of `fusedce plan` for the head of Llama 3 8B in bfloat16 on an H200; the picture
marks the peaks that `bench/gpu.py` measured at the same shape.
"""

from __future__ import annotations

import json
import sys

from lib import pictures
from lib.results import FOLDER, ROOT, write

from fusedce.tools.plan import plan

MODEL, DEVICE, DTYPE = "4096,128256", "H200", "bf16"
TOKENS = tuple(2**n for n in range(10, 18))


def counted() -> dict[str, object]:
    """Bytes beyond inputs and gradients of each method, for every number of tokens."""
    rows = []
    for tokens in TOKENS:
        found = plan(MODEL, tokens=tokens, dtype=DTYPE, device=DEVICE)
        held = {name: sum(parts.values()) for name, parts in found["methods"].items()}
        held["fused_ce, least memory_budget"] = found["least_budget"]
        rows.append({"tokens": tokens, "bytes": held})
    return {"model": MODEL, "device": DEVICE, "dtype": DTYPE, "rows": rows}


def main() -> int:
    data = counted()
    write(FOLDER / "memory.json", data)
    measured = json.loads((FOLDER / "gpu-h200.json").read_text())["rows"]
    print(f"written: {pictures.memory(data, measured, ROOT / 'docs' / 'memory.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
