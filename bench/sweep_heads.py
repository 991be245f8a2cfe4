"""Every causal-LM class of transformers, built small: loss and gradients before and after
`replace_loss_head`, in training and in evaluation.

    python bench/sweep_heads.py                 # all of them: a table, and bench/results/heads.json
    python bench/sweep_heads.py gpt2 gemma2     # some model types, with the reason of a failure

"fused" means that no logits were computed; "real" that the model does something with them that the
fused loss does not know, and got real ones; both must give the same loss and gradients.
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

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fusedce import head_report, replace_loss_head, restore_loss_head

V, T, B = 97, 12, 2
# Families of classes with output embeddings, each class in the first that has it.
FAMILIES: dict[str, dict[str, Any]] = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "vision-language": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
# Small values by the names configurations use. Lists of layer kinds are cut to the layers.
SMALL = {
    "vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32,
    "word_embed_proj_dim": 32, "emb_dim": 32, "embed_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "d_ff": 48, "ffn_hidden_size": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_inner": 48, "dff": 48, "inner_dim": 48,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "encoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "attention_head_dim": 8,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_topk": 2, "moe_k": 2,
    "n_shared_experts": 1, "num_shared_experts": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "sliding_window": 8,
    "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "time_step_rank": 4, "mamba_dt_rank": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "lru_width": 32, "attention_window_size": 8,
    "num_hash_buckets": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": V,
    "layer_types": None, "mlp_layer_types": None,
}  # fmt: skip
# Where an architecture has a scale or a cap, one that a wrong loss could not hide.
STEPS = {
    "final_logit_softcapping": 3.0, "logit_scale": 0.37, "logits_scaling": 1.7,
    "lm_head_multiplier": 0.6, "logits_soft_cap": 3.0, "output_logit_softcap": 3.0,
    "mup_width_multiplier": 1.3, "output_multiplier": 0.6,
}  # fmt: skip
# What differs between the attempts to build a class.
ATTEMPTS: list[dict[str, Any]] = [
    {},
    {"is_decoder": True},
    {"head_dim": ..., "num_key_value_heads": ...},
    {"num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4},
    {"num_key_value_heads": 4, "num_kv_heads": 4},
    {"sliding_window": ..., "pad_token_id": ...},
    {"hidden_size": 64, "head_dim": 16, "d_model": 64, "n_embd": 64},
    {"num_hidden_layers": ..., "hidden_size": 64},
    {"layer_types": ...},
    {"part": "text_config"},
]
# Classes that need something of their own.
RECIPES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "layer_types": ...},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # Reformer draws its dropout and its hashes from torch.seed(), another one each time.
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local"],
                 "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "kimi_linear": {"num_experts_per_token": 2, "num_experts": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "layer_types": ...,
                   "n_groups": 1},
}  # fmt: skip


def small_config(config_class: type, attempt: dict[str, Any]) -> Any:
    """A configuration of that class with everything that has a name of size made small."""
    default = config_class()
    changes = {k: v for k, v in (SMALL | STEPS | attempt).items() if v is not ...}
    known = default.to_dict()
    values = {}
    for name, value in changes.items():
        if name not in known and name not in getattr(default, "attribute_map", {}):
            continue
        may_be_unset = name in ("pad_token_id", "layer_types") or name in STEPS
        if known.get(name) is None and not may_be_unset:
            continue
        values[name] = value
    for name, part in default.sub_configs.items():  # text and vision towers
        if attempt.get("part") == name and part is not AutoConfig:
            return small_config(part, attempt)
        if isinstance(getattr(default, name, None), PretrainedConfig):
            values[name] = small_config(type(getattr(default, name)), attempt)
    values |= {k: v for k, v in attempt.items() if k in known and v is not ...}
    small = config_class(**values)
    small.use_cache = False
    return small


def build(model_type: str, class_name: str, attempt: dict[str, Any]) -> torch.nn.Module:
    model_class = getattr(transformers, class_name)
    config = small_config(CONFIG_MAPPING[model_type], attempt)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > 2e7:
        raise ValueError(f"still {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return model_class(config).float()


def batch(config: Any) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, min(V, vocabulary), (B, T), generator=rng)
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def run(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """Loss and gradients in training, loss in evaluation; the same random numbers each time."""
    model.zero_grad()
    model.train()
    torch.manual_seed(2)
    loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.eval()
    torch.manual_seed(2)
    with torch.no_grad():
        evaluated = model(**inputs).loss
    return loss.detach(), grads, evaluated


def compare(model: torch.nn.Module) -> dict[str, Any]:
    """Errors of the replaced head, and whether logits were computed."""
    inputs = batch(model.config)
    with torch.no_grad():  # freshly initialised heads give nearly flat logits
        model.get_output_embeddings().weight.mul_(10)
    native = run(model, inputs)
    before = dict(model.get_output_embeddings().__dict__)
    replace_loss_head(model)
    fused = run(model, inputs)
    report = head_report(model)
    restore_loss_head(model)
    assert dict(model.get_output_embeddings().__dict__) == before, "restore left something behind"
    assert fused[1].keys() == native[1].keys(), "other parameters have gradients"
    total = torch.cat([g.flatten() for g in native[1].values()]).norm()
    difference = [(fused[1][n] - g).flatten() for n, g in native[1].items()]
    return {
        "loss": float(native[0]),
        "loss_error": float(abs(fused[0] - native[0]) / native[0]),
        "eval_error": float(abs(fused[2] - native[2]) / native[2]),
        "grad_error": float(torch.cat(difference).norm() / total),
        "fused": report.losses_fused == 2 and report.logits_made == 0,
    }


def check(model_type: str, class_name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model_type": model_type, "class": class_name}
    first = None
    recipe = [RECIPES[model_type]] if model_type in RECIPES else []
    for attempt in recipe + ATTEMPTS:
        try:
            model = build(model_type, class_name, attempt)
            run(model, batch(model.config))
        except Exception as e:
            first = first or f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:150]
            continue
        try:
            row |= compare(model)
        except Exception as e:
            row |= {
                "failed": f"{type(e).__name__}: {str(e)[:200]}",
                "trace": traceback.format_exc(),
            }
            return row
        right = (
            row["loss_error"] <= 1e-6 and row["eval_error"] <= 1e-6 and row["grad_error"] <= 1e-5
        )
        return row | {"right": right}
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
        out = args.out or Path(__file__).parent / "results" / "heads.json"
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
