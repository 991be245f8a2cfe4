"""Compare loss and gradients of every causal LM of transformers, built small, before and after
`replace_loss_head`, in training and in evaluation.

    python bench/sweep_heads.py                 # all of them: a table, and bench/results/heads.json
    python bench/sweep_heads.py gpt2 gemma2     # some model types, with the reason of a failure

"fused" means that no logits were computed; "real" that the model used real logits for an operation
that the fused loss lacks; both must give the same loss and gradients.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fusedce import head_report, replace_loss_head, restore_loss_head
from fusedce.tools import check as tools

ROOT = Path(__file__).parents[1]
# Families of classes with output embeddings, each class in the first that has it.
FAMILIES: dict[str, dict[str, Any]] = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "vision-language": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


def compare(model: Any) -> dict[str, Any]:
    """Errors of the replaced head, and whether logits were computed."""
    inputs = tools.batch(model.config)
    native = tools.run(model, inputs)
    before = dict(model.get_output_embeddings().__dict__)
    replace_loss_head(model)
    ours = tools.run(model, inputs)
    report = head_report(model)
    restore_loss_head(model)
    assert dict(model.get_output_embeddings().__dict__) == before, "restore left something behind"
    loss_error, eval_error, grad_error = tools.errors_of(ours, native)
    return {
        "loss": float(native[0]),
        "loss_error": loss_error,
        "eval_error": eval_error,
        "grad_error": grad_error,
        "fused": report.losses_fused == 2 and report.logits_made == 0,
    }


def check(model_type: str, class_name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model_type": model_type, "class": class_name}
    first = None
    for attempt in tools.attempts(model_type):
        try:
            config = CONFIG_MAPPING[model_type]()
            model = tools.build(getattr(transformers, class_name), config, attempt, steps=True)
            tools.run(model, tools.batch(model.config))
        except Exception as e:
            first = first or f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:150]
            continue
        try:
            row |= compare(model)
        except Exception as e:
            row |= {
                "failed": f"{type(e).__name__}: {str(e)[:200]}",
                "trace": traceback.format_exc().replace(f"{ROOT}/", ""),
            }
            return row
        bounds = tools.LOSS_ERROR, tools.LOSS_ERROR, tools.GRAD_ERROR
        errors = (row[f"{name}_error"] for name in ("loss", "eval", "grad"))
        return row | {"right": all(e <= b for e, b in zip(errors, bounds, strict=True))}
    return row | {"not_built": first}


def classes() -> list[tuple[str, str, str]]:
    """``(family, model type, class name)``, each class once."""
    found: dict[str, tuple[str, str, str]] = {}
    for family, names in FAMILIES.items():
        for model_type, class_names in names.items():
            every = class_names if isinstance(class_names, (list, tuple)) else (class_names,)
            for class_name in every:
                found.setdefault(class_name, (family, model_type, class_name))
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows, begin = [], time.time()
    print("| model type | class | loss error | eval error | gradient error | |")
    print("|---|---|---|---|---|---|")
    for family, model_type, class_name in classes():
        if args.model_types and model_type not in args.model_types:
            continue
        if args.families and family not in args.families:
            continue
        row = {"family": family} | check(model_type, class_name)
        rows.append(row)
        if "loss_error" in row:
            numbers = " | ".join(
                f"{row[k]:.0e}" for k in ("loss_error", "eval_error", "grad_error")
            )
            verdict = ("fused" if row["fused"] else "real") + ("" if row["right"] else ", WRONG")
        else:
            numbers, verdict = " | | ", row.get("failed") or f"not built: {row['not_built']}"
        print(f"| {model_type} | {class_name} | {numbers} | {verdict} |", flush=True)
        if args.model_types and "trace" in row:
            print(row["trace"])
    ran = [r for r in rows if "loss_error" in r]
    right = [r for r in ran if r["right"]]
    fused = [r for r in right if r["fused"]]
    failed = [r for r in rows if "failed" in r]
    by_family = {
        family: [sum(r["family"] == family for r in part) for part in (rows, ran, right, fused)]
        for family in FAMILIES
    }
    print("classes, built and run, right, fused:", by_family)
    summary = (
        f"{len(rows)} classes, {len(ran) + len(failed)} built and run, {len(right)} right, "
        f"{len(fused)} of them fused; {time.time() - begin:.0f} s"
    )
    print("\n" + summary)
    if args.out or not args.model_types:
        out = args.out or ROOT / "bench" / "results" / "heads.json"
        data = {
            "transformers": transformers.__version__,
            "summary": summary,
            "families": by_family,
            "rows": rows,
        }
        out.write_text(json.dumps(data, indent=1) + "\n")
    return 0 if len(right) == len(ran) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
