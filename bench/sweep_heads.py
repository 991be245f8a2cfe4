"""Compare loss and gradients of every causal LM of transformers, built small, before and after
`replace_loss_head`, in training and in evaluation.

    python bench/sweep_heads.py                 # all of them: a table, and bench/results/heads.json
    python bench/sweep_heads.py gpt2 gemma2     # some model types, with the reason of a failure

"fused" means that no logits were computed; "real" that the model used real logits for an operation
that the fused loss lacks; both must give the same loss and gradients.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import transformers
from lib import small_models
from lib.results import FOLDER, ROOT, stamp, write
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fusedce import head_report, replace_loss_head, restore_loss_head

BOUNDS = {"loss_error": 1e-6, "eval_error": 1e-6, "grad_error": 1e-5}  # relative, in float32
# Families of classes with output embeddings, each class in the first that has it.
FAMILIES: dict[str, dict[str, Any]] = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "vision-language": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


def compare(model: Any) -> dict[str, Any]:
    """Errors of the replaced head, and whether logits were computed."""
    inputs = small_models.batch(model.config)
    native = small_models.run(model, inputs)
    before = dict(model.get_output_embeddings().__dict__)
    replace_loss_head(model)
    ours = small_models.run(model, inputs)
    report = head_report(model)
    restore_loss_head(model)
    assert dict(model.get_output_embeddings().__dict__) == before, "restore left something behind"
    errors = zip(BOUNDS, small_models.errors_of(ours, native), strict=True)
    fused = report.losses_fused == 2 and report.logits_made == 0
    return {"loss": float(native[0]), **dict(errors), "fused": fused}


def check(model_type: str, class_name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model_type": model_type, "class": class_name}
    try:
        config = CONFIG_MAPPING[model_type]()
        model = small_models.build(getattr(transformers, class_name), config)
    except Exception as e:
        return row | {"not_built": f"{type(e).__name__}: {str(e)[:150]}"}
    try:
        row |= compare(model)
    except Exception as e:
        why = f"{type(e).__name__}: {str(e)[:200]}"
        return row | {"failed": why, "trace": traceback.format_exc().replace(f"{ROOT}/", "")}
    return row | {"right": all(row[name] <= most for name, most in BOUNDS.items())}


def classes() -> list[tuple[str, str, str]]:
    """``(family, model type, class name)``, each class once."""
    found: dict[str, tuple[str, str, str]] = {}
    for family, names in FAMILIES.items():
        for model_type, class_names in names.items():
            every = class_names if isinstance(class_names, (list, tuple)) else (class_names,)
            for class_name in every:
                found.setdefault(class_name, (family, model_type, class_name))
    return list(found.values())


def said(row: dict[str, Any]) -> dict[str, str]:
    """A row of the table."""
    errors = {k: f"{row[k]:.0e}" if k in row else "" for k in BOUNDS}
    verdict = ("fused" if row.get("fused") else "real") + ("" if row.get("right") else ", WRONG")
    if "loss_error" not in row:
        verdict = row.get("failed") or f"not built: {row['not_built']}"
    return {"model type": row["model_type"], "class": row["class"], **errors, "": verdict}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for family, model_type, class_name in classes():
        if not args.model_types or model_type in args.model_types:
            rows.append({"family": family} | check(model_type, class_name))
            print(*said(rows[-1]).values(), sep=" | ", flush=True)
            print(rows[-1].get("trace", ""), end="")
    built = [r for r in rows if "not_built" not in r]
    right = [r for r in built if r.get("right")]
    fused = [r for r in right if r["fused"]]
    parts = (rows, built, right, fused)
    by_family = {f: [sum(r["family"] == f for r in part) for part in parts] for f in FAMILIES}
    summary = (
        f"{len(rows)} classes, {len(built)} built and run, {len(right)} right, "
        f"{len(fused)} of them fused"
    )
    print(f"classes, built and run, right, fused: {by_family}\n{summary}")
    if args.out or not args.model_types:
        data = {"transformers": transformers.__version__, "summary": summary} | stamp()
        write(args.out or FOLDER / "heads.json", data | {"families": by_family, "rows": rows})
    return len(right) != len(built)


if __name__ == "__main__":
    sys.exit(main())
