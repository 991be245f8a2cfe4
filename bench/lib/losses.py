"""Define what is measured: our loss, its peers, every function and option beside eager code.

Each loss takes ``hidden (N, H)``, ``weight (V, H)``, ``labels (N,)`` and options, and returns the
mean over valid tokens, ready for ``backward``. A peer is imported at its first call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce

FLOOR = "bare GEMMs"
COMPILED = "compiled eager"
CHUNKS = 8


# ---- our loss and its peers -----------------------------------------------------------------


def fused_ce(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """:func:`fusedce.fused_ce`."""
    return fusedce.fused_ce(hidden, weight, labels, **options).mean()


def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Torch's own loss on float32 logits, as models of transformers compute it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(eager)  # here, since the compiler's import takes seconds


def torch_chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``F.linear_cross_entropy``, of torch 2.12 and later; its own chunks take minutes."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4096)
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger-Kernel's fused loss in Triton."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)


def cut_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, filter_eps: float | str | None = "high"
) -> Tensor:
    """Cut-cross-entropy; ``filter_eps=None`` computes all gradients."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, labels, filter_eps=filter_eps)


def quack(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """QuACK's chunked loss; version 0.6.5 refuses chunks of as many tokens as H is long."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    chunk = 4096 if hidden.shape[1] != 4096 else 2048
    return chunked_linear_cross_entropy(
        hidden, weight, labels, reduction="mean", chunk_size=chunk, tuned=False
    )


def _liger_cute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger-Kernel's loss for Hopper, which its public class does not choose by itself."""
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

    return sm90.LigerFusedLinearCrossEntropySM90Function.apply(hidden, weight, labels)


def _plain_eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Torch's own loss on logits of the inputs' dtype."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _eight_chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Eager, eight chunks of tokens one after the other, each differentiated before the next."""
    count = (labels != -100).sum()
    total = torch.zeros((), device=hidden.device)
    for h, y in zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True):
        loss = F.cross_entropy(F.linear(h, weight).float(), y, reduction="sum") / count
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    return total


def bare_gemms(
    hidden: Tensor, weight: Tensor, labels: Tensor, mode: str = "train"
) -> Callable[[], object]:
    """The products on the valid rows that every method needs, 2 N V H FLOPs each.

    In the mode "forward" the logits, in "train" both gradients too: products of the exponentials
    of a softmax, as those of a loss are. (A device that its power limits multiplies other numbers
    in another time.)
    """
    h, w = hidden.detach()[labels != -100].clone(), weight.detach()
    exps = torch.mm(h, w.t()) if mode == "train" else None
    for some in () if exps is None else exps.split(max(2**24 // len(w), 1)):
        some.copy_(torch.softmax(some.float(), -1))

    def gemms() -> None:
        torch.mm(h, w.t())
        if exps is not None:
            torch.mm(exps, w)
            torch.mm(exps.t(), h)

    return gemms


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "fused_ce": fused_ce,
    "eager": eager,
    COMPILED: lambda *inputs: _compiled()(*inputs),
    "F.linear_cross_entropy, 4096": torch_chunked,
    "eight chunks": _eight_chunks,
    "eager, plain": _plain_eager,
    "Liger-Kernel": liger,
    "Liger-Kernel, CuTe": _liger_cute,
    "cut-cross-entropy": cut_cross_entropy,
    "cut-cross-entropy, exact": functools.partial(cut_cross_entropy, filter_eps=None),
    "QuACK": quack,
}
ON_CPU = tuple(IMPLEMENTATIONS)[:6]


# ---- options and divergences ----------------------------------------------------------------


def _by_token(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return fusedce.fused_cross_entropy(hidden, weight, labels, reduction="none", **options).mean()


def _fused_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    stats = fusedce.fused_logprobs(hidden, weight, labels)
    return (stats.logprob + 0.01 * stats.entropy).mean()


def _eager_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    logprob = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return (logprob - 0.01 * (log_p.exp() * log_p).sum(-1))[labels != -100].mean()


@functools.cache
def _numbers(n: int, device: torch.device) -> Tensor:
    return torch.rand(n, generator=torch.Generator(device).manual_seed(1), device=device)


def _with(options: Callable[[Tensor, Tensor], dict[str, Any]]) -> Callable[..., Tensor]:
    """``fused_cross_entropy`` with the options that are made for ``hidden`` and ``weight``."""
    return lambda h, w, y: fusedce.fused_cross_entropy(h, w, y, **options(h, w))


OPTIONS: dict[str, Callable[..., Tensor]] = {
    "bias": _with(lambda h, w: {"bias": _numbers(len(w), w.device).to(w.dtype)}),
    "logit_scale": _with(lambda h, w: {"logit_scale": 0.5}),
    "softcap": _with(lambda h, w: {"softcap": 30.0}),
    "label_smoothing": _with(lambda h, w: {"label_smoothing": 0.1}),
    "label_smoothing + softcap": _with(lambda h, w: {"label_smoothing": 0.1, "softcap": 30.0}),
    "z_loss": _with(lambda h, w: {"z_loss": 1e-4}),
    "token_weight": _with(lambda h, w: {"token_weight": _numbers(len(h), h.device)}),
    "class_weight": _with(lambda h, w: {"class_weight": _numbers(len(w), w.device)}),
    'reduction="none"': _by_token,
    "fused_logprobs": _fused_logprobs,
    "eager log-probabilities": _eager_logprobs,
}


@functools.lru_cache(2)  # of the few rows that warm up, and of all
def _teacher(weight: Tensor, N: int) -> Tensor:
    """Hidden states of a teacher with the same head."""
    rng = torch.Generator(weight.device).manual_seed(1)
    return torch.randn(N, weight.shape[1], generator=rng, device=weight.device).to(weight.dtype)


def _divergence(kind: str) -> Callable[..., Tensor]:
    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return fusedce.fused_kl(h, w, _teacher(w, len(h)), w.detach(), y, divergence=kind).mean()

    return loss


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    **{f"{kind} KL": _divergence(kind) for kind in ("forward", "reverse")},
    "Jensen-Shannon": _divergence("jsd"),
}


LOSSES = IMPLEMENTATIONS | OPTIONS | DIVERGENCES

# ---- every function and option beside eager code that computes the same ---------------------

Pair = tuple[Callable[..., object], Callable[..., object]]


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).float()


def _log_p(hidden: Tensor, weight: Tensor) -> Tensor:
    return _logits(hidden, weight).log_softmax(-1)


def _valid_mean(losses: Tensor, labels: Tensor) -> Tensor:
    return losses.masked_fill(labels == -100, 0).sum() / (labels != -100).sum()


def _eager_z_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    z = _logits(hidden, weight)
    return F.cross_entropy(z, labels) + _valid_mean(1e-4 * z.logsumexp(-1).square(), labels)


def _eager_token_weight(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(_logits(hidden, weight), labels, reduction="none")
    return (losses * _numbers(len(hidden), hidden.device)).sum()


def _of_labels(log_p: Tensor, labels: Tensor) -> Tensor:
    found = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return found.masked_fill(labels == -100, 0)


def _eager_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    log_p = _log_p(hidden, weight)
    found = _of_labels(log_p, labels) - 0.01 * (log_p.exp() * log_p).sum(-1)
    return found.masked_fill(labels == -100, 0).mean()


def _eager_divergence(kind: str) -> Callable[..., Tensor]:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        log_q = _log_p(hidden, weight)
        with torch.no_grad():
            log_p = _log_p(_teacher(weight, len(hidden)), weight)
        if kind == "forward":
            parts = F.kl_div(log_q, log_p, log_target=True, reduction="none")
        elif kind == "reverse":
            parts = F.kl_div(log_p, log_q, log_target=True, reduction="none")
        else:
            log_m = torch.logaddexp(log_p, log_q) - math.log(2)
            parts = F.kl_div(log_m, log_p, log_target=True, reduction="none")
            parts = (parts + F.kl_div(log_m, log_q, log_target=True, reduction="none")) / 2
        return _valid_mean(parts.sum(-1), labels)

    return loss


PAIRS: dict[str, Pair] = {
    "fused_ce": (
        lambda h, w, y: fusedce.fused_ce(h, w, y).mean(),
        lambda h, w, y: F.cross_entropy(_logits(h, w), y),
    ),
    "bias": (
        OPTIONS["bias"],
        lambda h, w, y: F.cross_entropy(
            F.linear(h, w, _numbers(len(w), w.device).to(w.dtype)).float(), y
        ),
    ),
    "logit_scale": (
        OPTIONS["logit_scale"],
        lambda h, w, y: F.cross_entropy(_logits(h, w) * 0.5, y),
    ),
    "softcap": (
        OPTIONS["softcap"],
        lambda h, w, y: F.cross_entropy(30 * torch.tanh(_logits(h, w) / 30), y),
    ),
    "label_smoothing": (
        OPTIONS["label_smoothing"],
        lambda h, w, y: F.cross_entropy(_logits(h, w), y, label_smoothing=0.1),
    ),
    "label_smoothing + softcap": (
        OPTIONS["label_smoothing + softcap"],
        lambda h, w, y: F.cross_entropy(
            30 * torch.tanh(_logits(h, w) / 30), y, label_smoothing=0.1
        ),
    ),
    "z_loss": (OPTIONS["z_loss"], _eager_z_loss),
    "token_weight": (
        lambda h, w, y: fusedce.fused_ce(h, w, y, token_weight=_numbers(len(h), h.device)).loss_sum,
        _eager_token_weight,
    ),
    "class_weight": (
        OPTIONS["class_weight"],
        lambda h, w, y: F.cross_entropy(_logits(h, w), y, _numbers(len(w), w.device)),
    ),
    'reduction="none"': (
        _by_token,
        lambda h, w, y: F.cross_entropy(_logits(h, w), y, reduction="none").mean(),
    ),
    "fused_logprobs": (
        lambda h, w, y: fusedce.fused_logprobs(h, w, y).logprob.sum(),
        lambda h, w, y: _of_labels(_log_p(h, w), y).sum(),
    ),
    "fused_logprobs, entropy": (_fused_logprobs, _eager_entropy),
    **{
        f"fused_kl, {kind}": (_divergence(kind), _eager_divergence(kind))
        for kind in ("forward", "reverse", "jsd")
    },
    "fused_topk, 8": (
        lambda h, w, y: fusedce.fused_topk(h, w, 8).logprob,
        lambda h, w, y: _log_p(h, w).topk(8).values,
    ),
    "fused_argmax": (
        lambda h, w, y: fusedce.fused_argmax(h, w),
        lambda h, w, y: F.linear(h, w).argmax(-1),
    ),
}
"""By name, ours and eager's."""
EVALUATED = ("fused_topk, 8", "fused_argmax")  # of every position, whatever its label
EAGER = "eager: "
OF_PAIRS: dict[str, Callable[..., object]] = {
    prefix + name: function
    for name, pair in PAIRS.items()
    for prefix, function in zip(("ours: ", EAGER), pair, strict=True)
}
