"""Tiny models and data for Trainer, with rows that hold very different numbers of labels."""

import tokenizers
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fusedce import FusedTrainerMixin
from support.bounds import SAME_MODEL

V = 61
# Quotients of what is logged; parameters move by lr times a gradient of up to 1 in two steps.
CLOSE = {"rel": 8 * SAME_MODEL, "abs": SAME_MODEL, "nan_ok": True}


class FusedTrainer(FusedTrainerMixin, Trainer):
    pass


def llama(**kwargs):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=64, use_cache=False, **kwargs,
        )
    )  # fmt: skip


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=64, use_cache=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bart():
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, use_cache=False,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def mixtral():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, use_cache=False,
        max_position_embeddings=64, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def word_tokenizer(n):
    """A tokenizer of the words w0, w1, ..., numbered after three special tokens."""
    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(n))]
    raw = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<pad>")
    )
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


class Dataset(torch.utils.data.Dataset):
    """Rows of one size with valid labels at their beginning, from very few to all."""

    def __init__(self, n=16, size=12, seed=1):
        rng = torch.Generator().manual_seed(seed)
        self.rows = []
        for i in range(n):
            ids = torch.randint(3, V, (size,), generator=rng)
            labels = ids.clone()
            labels[2 + (i * 7) % (size - 1) :] = -100
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Seen(TrainerCallback):
    """Norms of the gradients that reach the optimizer, and the logs."""

    def __init__(self):
        self.norms, self.logs = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(norms).norm()))

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


def arguments(tmp_path, size=4, steps=1, **kwargs):
    return TrainingArguments(
        **{
            "output_dir": str(tmp_path), "per_device_train_batch_size": size,
            "gradient_accumulation_steps": steps, "max_steps": 3, "learning_rate": 1e-2,
            "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
            "disable_tqdm": True, "max_grad_norm": 0, "lr_scheduler_type": "constant",
            "per_device_eval_batch_size": 8, "dataloader_pin_memory": False,
        } | kwargs
    )  # fmt: skip


def train(kind, model, args, **kwargs):
    seen = Seen()
    trainer = kind(
        model=model, args=args, train_dataset=kwargs.pop("train_dataset", Dataset()),
        callbacks=[seen, *kwargs.pop("callbacks", ())], **kwargs,
    )  # fmt: skip
    output = trainer.train()
    losses = [log["loss"] for log in seen.logs if "loss" in log]
    return trainer, losses, seen, output


def sharpened():
    """A model with losses far from each other."""
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return model


def true_mean(model, data):
    batch = torch.utils.data.default_collate(data.rows)
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


def logs_of(trainer):
    """What a trainer has logged, without times."""
    return [
        {k: v for k, v in entry.items() if not any(x in k for x in ("time", "second"))}
        for entry in trainer.state.log_history
    ]
