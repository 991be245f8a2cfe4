"""Losses from all logits: the reference in float64, or torch's result in the inputs' dtype."""

import torch
import torch.nn.functional as F

from fusedce import TokenStats


def finished_logits(hidden, weight, bias, softcap=None, logit_scale=1.0):
    z = F.linear(hidden, weight, bias)
    z = (z if z.dtype == torch.float64 else z.float()) * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def token_stats(
    hidden, weight, labels, *, bias=None, ignore_index=-100, softcap=None, logit_scale=1.0,
    temperature=1.0,
):  # fmt: skip
    """Log-probabilities as RL libraries compute them, from fp32 logits of the inputs' product."""
    z = finished_logits(hidden, weight, bias, softcap, logit_scale)
    log_p = (z / temperature).log_softmax(-1)
    valid = labels != ignore_index
    logprob = log_p.gather(-1, labels.long().clamp(0, len(weight) - 1)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    lse = (z / temperature).logsumexp(-1)
    return TokenStats(
        torch.where(valid, logprob, 0),
        torch.where(valid, entropy, 0),
        torch.where(valid, lse, 0),
        torch.where(valid, z.argmax(-1), -1),
    )


def cross_entropy(hidden, weight, labels, *, bias=None, class_weight=None, **options):
    """``F.cross_entropy`` of the logits, leading dimensions as ours take them."""
    logits = F.linear(hidden, weight, bias)
    if logits.dim() == 3:  # torch wants the classes in second place
        logits = logits.transpose(1, 2)
    return F.cross_entropy(logits, labels, weight=class_weight, **options)
