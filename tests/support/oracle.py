"""Losses from all logits in the inputs' dtype, and ours as `fusedce.testing` compares them."""

import functools

import torch
import torch.nn.functional as F

from fusedce import fused_cross_entropy
from fusedce.contract.results import TokenStatsAndMean


def finished_logits(hidden, weight, bias, softcap=None, logit_scale=1.0):
    z = F.linear(hidden, weight, bias)
    z = (z if z.dtype == torch.float64 else z.float()) * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def token_stats(
    hidden, weight, labels, *, bias=None, ignore_index=-100, softcap=None, logit_scale=1.0,
    temperature=1.0,
):  # fmt: skip
    """Log-probabilities as RL libraries compute them, from fp32 logits of the inputs' product.

    Labels ``(...)``, or ``(..., K)`` for several classes; one temperature, or one a token.
    """
    z = finished_logits(hidden, weight, bias, softcap, logit_scale)
    several = labels.dim() == hidden.dim()
    classes = labels if several else labels[..., None]
    taken = classes != ignore_index
    valid = taken.any(-1)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.masked_fill(~valid, 1)[..., None].to(z)
    z = z / temperature
    log_p = z.log_softmax(-1)
    logprob = log_p.gather(-1, classes.long().clamp(0, len(weight) - 1)).where(taken, 0)
    return TokenStatsAndMean(
        logprob if several else logprob[..., 0],
        (-(log_p.exp() * log_p).sum(-1)).where(valid, 0),
        z.logsumexp(-1).where(valid, 0),
        z.argmax(-1).where(valid, -1),
        z.mean(-1).where(valid, 0),
    )


def cross_entropy(hidden, weight, labels, *, bias=None, class_weight=None, **options):
    """``F.cross_entropy`` of the logits, leading dimensions as ours take them."""
    logits = F.linear(hidden, weight, bias)
    if logits.dim() == 3:  # torch wants the classes in second place
        logits = logits.transpose(1, 2)
    return F.cross_entropy(logits, labels, weight=class_weight, **options)


def summed(hidden, weight, labels, reduction="sum", **options):
    """``fused_cross_entropy`` as a loss of `fusedce.testing`: it has all options."""
    n_valid = (labels != options.get("ignore_index", -100)).sum()
    loss = fused_cross_entropy(hidden, weight, labels, reduction=reduction, **options)
    return loss.sum(), n_valid


by_token = functools.partial(summed, reduction="none")
"""The same by token losses, whose backward computes the logits again."""
