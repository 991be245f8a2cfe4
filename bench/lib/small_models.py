"""Models of transformers, built small with random weights and their own code, and run.

Sizes are made small by the names that configurations give them. Architectures differ in groups of
heads and kinds of layers: the combinations of :data:`ATTEMPTS` are tried in their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

V, T, B = 97, 12, 2
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
# Scales and caps of the logits, set to values that make a wrong loss visible.
LOGIT_TRANSFORMS = {
    "final_logit_softcapping": 3.0, "logit_scale": 0.37, "logits_scaling": 1.7,
    "lm_head_multiplier": 0.6, "logits_soft_cap": 3.0, "output_logit_softcap": 3.0,
    "mup_width_multiplier": 1.3, "output_multiplier": 0.6,
}  # fmt: skip
# Changes that are tried one after the other; `...` keeps the configuration's own value.
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
# Changes for single model types.
OVERRIDES_BY_TYPE: dict[str, dict[str, Any]] = {
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
MOST_PARAMETERS = 2e7


def small_config(config: PretrainedConfig, attempt: dict[str, Any]) -> PretrainedConfig:
    """``config`` with the sizes of :data:`SMALL` and the changes of one attempt.

    Those of the :data:`LOGIT_TRANSFORMS` that the architecture knows are set, too.
    """
    changes = {k: v for k, v in (SMALL | LOGIT_TRANSFORMS | attempt).items() if v is not ...}
    known = config.to_dict()
    values = {}
    for name, value in changes.items():
        if name not in known and name not in getattr(config, "attribute_map", {}):
            continue
        may_be_unset = name in ("pad_token_id", "layer_types") or name in LOGIT_TRANSFORMS
        if known.get(name) is None and not may_be_unset:
            continue
        values[name] = value
    for name, part in config.sub_configs.items():  # text and vision towers
        own = getattr(config, name, None)
        if attempt.get("part") == name and part is not AutoConfig:
            return small_config(own or part(), attempt)
        if isinstance(own, PretrainedConfig):
            values[name] = small_config(own, attempt)
    values |= {k: v for k, v in attempt.items() if k in known and v is not ...}
    small = type(config)(**values)
    small.use_cache = False
    if small.is_encoder_decoder and getattr(small, "decoder_start_token_id", None) is None:
        small.decoder_start_token_id = 0  # models shift their labels by it
    return small


def build(model_class: type[nn.Module], config: PretrainedConfig) -> nn.Module:
    """A small model that runs, in float32, from seed 0; its logits are not nearly equal.

    Raises:
        RuntimeError: no attempt can be built and run.
    """
    first, overrides = None, OVERRIDES_BY_TYPE.get(config.model_type)
    for attempt in [*([overrides] if overrides else []), *ATTEMPTS]:
        try:
            model = _attempted(model_class, config, attempt)
            run(model, batch(model.config))
            return model
        except Exception as problem:  # model code may fail at such small sizes
            first = first or f"{type(problem).__name__}: {str(problem).strip().splitlines()[:1]}"
    raise RuntimeError(f"{model_class.__name__} could not be built small: {first}")


def _attempted(
    model_class: type[nn.Module], config: PretrainedConfig, attempt: dict[str, Any]
) -> Any:
    small = small_config(config, attempt)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(small).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"still {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model: Any = model_class(small).float()
    head = model.get_output_embeddings()
    if isinstance(getattr(head, "weight", None), Tensor):
        with torch.no_grad():
            head.weight.mul_(10)
    return model


def batch(config: PretrainedConfig) -> dict[str, Tensor]:
    """``input_ids`` and ``labels`` ``(B, T)`` from a fixed seed, with five labels ignored."""
    rng = torch.Generator().manual_seed(1)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(min(3, vocabulary - 1), min(V, vocabulary), (B, T), generator=rng)
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


Outcome = tuple[Tensor, Tensor, dict[str, Tensor]]


def run(module: nn.Module, inputs: dict[str, Tensor]) -> Outcome:
    """Loss in training, loss in evaluation, and gradients, from the same seed each time."""
    module.zero_grad()
    module.train()
    torch.manual_seed(2)
    loss = module(**inputs).loss
    loss.backward()
    grads = {n: p.grad.float() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    module.eval()
    torch.manual_seed(2)
    with torch.no_grad():
        evaluated = module(**inputs).loss
    return loss.detach().float(), evaluated.float(), grads


def errors_of(ours: Outcome, truth: Outcome) -> tuple[float, float, float]:
    """Relative errors of the loss, of the loss in evaluation, and of all gradients together.

    They are NaN if other parameters have gradients.
    """
    if ours[2].keys() != truth[2].keys():
        return float("nan"), float("nan"), float("nan")
    norm = torch.cat([g.flatten() for g in truth[2].values()]).norm()
    difference = torch.cat([(ours[2][n] - g).flatten() for n, g in truth[2].items()]).norm()
    return (
        float(abs(ours[0] - truth[0]) / abs(truth[0])),
        float(abs(ours[1] - truth[1]) / abs(truth[1])),
        float(difference / norm),
    )
