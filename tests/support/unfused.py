"""Models whose loss is not one fused cross-entropy, and their data."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
)
from transformers.modeling_outputs import CausalLMOutput

from support.tiny_trainer import Dataset, V, sharpened


def dora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, use_dora=True, target_modules=["lm_head", "q_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    return peft.get_peft_model(sharpened(), config)


def unfused(model):
    """A causal LM of transformers whose loss is its own, not F.cross_entropy."""
    model.loss_function = lambda logits, labels, **_: F.nll_loss(
        logits[:, :-1].log_softmax(-1).flatten(0, 1), labels[:, 1:].flatten()
    )
    return model


class Means(nn.Module):
    """A model with losses of its own from a body and heads, none of them F.cross_entropy."""

    def __init__(self, reduction="mean", shift=1, terms=1):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lm_head = nn.Embedding(V, 16), nn.Linear(16, V)
        self.lm_head.weight.data.mul_(20)
        self.reduction, self.shift, self.terms = reduction, shift, terms

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.body(input_ids))
        loss = 0
        for ahead in range(self.shift, self.shift + self.terms):
            logprobs = logits[:, : logits.shape[1] - ahead].log_softmax(-1)
            loss = loss + F.nll_loss(
                logprobs.flatten(0, 1), labels[:, ahead:].flatten(), reduction=self.reduction
            )
        return CausalLMOutput(loss=loss, logits=logits)


class MaskedMean(Means):
    """The mean of the valid labels as many write it: 0/0 without any, in backward as well."""

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.body(input_ids))
        logprobs = logits[:, :-1].log_softmax(-1)
        labels = labels[:, 1:]
        valid = labels != -100
        nll = -logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * valid
        return CausalLMOutput(loss=self.mean(nll, valid), logits=logits)

    def mean(self, nll, valid):
        return nll.sum() / valid.sum()


class MeanOfRows(MaskedMean):
    """Weighs a token of a short row more."""

    def mean(self, nll, valid):
        return (nll.sum(-1) / valid.sum(-1).clamp(min=1)).mean()


class TwoLosses(Means):
    """Two fused losses: of the next token, and of the one after it."""

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.body(input_ids))
        losses = [
            F.cross_entropy(logits[:, :-n].flatten(0, 1), labels[:, n:].flatten()) for n in (1, 2)
        ]
        return CausalLMOutput(loss=losses[0] + 0.3 * losses[1], logits=logits)


class Attended(Means):
    """One fused loss that leaves padding out by the attention mask, not by the labels alone."""

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.lm_head(self.body(input_ids))
        used = attention_mask[:, 1:] != 0
        return CausalLMOutput(loss=F.cross_entropy(logits[:, :-1][used], labels[:, 1:][used]))


class Documents(torch.utils.data.Dataset):
    """One class for each row."""

    def __init__(self):
        self.rows = [
            {"input_ids": row["input_ids"], "labels": torch.tensor(i % 3)}
            for i, row in enumerate(Dataset(10).rows)
        ]

    __len__, __getitem__ = Dataset.__len__, Dataset.__getitem__


def classifier():
    torch.manual_seed(0)
    return LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_labels=3, pad_token_id=0,
        )
    )  # fmt: skip
