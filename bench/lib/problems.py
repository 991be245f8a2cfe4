"""Problems to measure, what is measured on them, and the suites made of both."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce
from fusedce.tools import bench
from fusedce.tools.bench import COMPILED, FLOOR, cut_cross_entropy, torch_chunked

OURS = ["fused_ce"]
# (N, H, V): SmolLM twice, Llama 3.2 1B
SHAPES = [(1024, 576, 49152), (4096, 576, 49152), (512, 2048, 128256)]
SUITES = {
    "time": "forward + backward",
    "forward": "forward alone, no gradient",
    "memory": "peak beyond inputs and gradients",
    "masked": "share of ignored labels",
    "budget": "time and memory under a memory budget",
    "options": "each option, and log-probabilities",
    "divergences": "divergences from a teacher, and class probabilities",
    "eager": "every function and option, each beside eager code of its own",
}
CHUNKS = 8
BLOCK = 256  # tokens whose float64 logits the truth holds at a time
MiB = 2**20


class Spec(NamedTuple):
    """One problem: its sizes and the mode of the call."""

    N: int
    H: int
    V: int
    dtype: str = "bfloat16"
    device: str = "cpu"
    mode: str = "train"  # or "forward": no gradient
    ignored: float = 0.0
    budget: int | None = None  # MiB; fused_ce alone


def make_inputs(spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """``hidden (N, H), weight (V, H), labels (N,)``; never zeros, ignored rows hold junk.

    As after training, the label's logit stands out by a gap that differs from token to token, so
    that probabilities of the labels run from 1/V to beyond 0.999 (mean loss about 2 nats).
    """
    rng = torch.Generator(spec.device).manual_seed(0)
    random = functools.partial(torch.randn, generator=rng, device=spec.device)
    weight = random(spec.V, spec.H) / spec.H**0.5  # rows of about unit length
    labels = torch.randint(0, spec.V, (spec.N,), generator=rng, device=spec.device)
    hidden = random(spec.N, spec.H)
    gap = 20 * torch.rand(spec.N, 1, generator=rng, device=spec.device).sqrt()
    hidden += gap * weight[labels] / weight[labels].square().sum(-1, keepdim=True)
    ignored = torch.randperm(spec.N, generator=rng, device=spec.device)
    labels[ignored[: round(spec.ignored * spec.N)]] = -100
    dtype = getattr(torch, spec.dtype)
    return hidden.to(dtype), weight.to(dtype), labels


# ---- what is measured beside the implementations of `fusedce bench` -------------------------


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
def _teacher(weight: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Hidden states of a teacher with the same head, and its probabilities."""
    rng = torch.Generator(weight.device).manual_seed(1)
    hidden = torch.randn(N, weight.shape[1], generator=rng, device=weight.device).to(weight.dtype)
    with torch.no_grad():
        return hidden, torch.softmax(F.linear(hidden, weight).float(), -1)


def _divergence(kind: str) -> Callable[..., Tensor]:
    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        teacher = _teacher(w, len(h))[0]
        return fusedce.fused_kl(h, w, teacher, w.detach(), y, divergence=kind).mean()

    return loss


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    **{f"{kind} KL": _divergence(kind) for kind in ("forward", "reverse")},
    "Jensen-Shannon": _divergence("jsd"),
    "class probabilities": lambda h, w, y: fusedce.fused_cross_entropy(
        h, w, _teacher(w, len(h))[1]
    ),
}


def _liger_cute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger-Kernel's loss for Hopper, which its public class does not choose by itself."""
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

    return sm90.LigerFusedLinearCrossEntropySM90Function.apply(hidden, weight, labels)


CHUNKED = {"F.linear_cross_entropy, 4096": functools.partial(torch_chunked, batch_chunk_size=4096)}
IMPLEMENTATIONS = bench.IMPLEMENTATIONS | CHUNKED | {
    "Liger-Kernel, CuTe": _liger_cute,
    "cut-cross-entropy, exact": functools.partial(cut_cross_entropy, filter_eps=None),
}  # fmt: skip
ON_CPU = (*bench.ON_CPU, *CHUNKED)
LOSSES = IMPLEMENTATIONS | OPTIONS | DIVERGENCES
LOSSES |= {"eager, plain": _plain_eager, "eight chunks": _eight_chunks}


def make_call(name: str, spec: Sequence[Any]) -> Callable[[], object]:
    """A call that does the whole job once and drops the gradients; warmed up on a few rows."""
    of = Spec(*spec)
    _forget(name)
    if name in _OF_PAIRS:  # so many that they share their inputs
        return bench.make_call(name, *_shared_inputs(of), of.mode, _OF_PAIRS[name])
    return bench.make_call(name, *make_inputs(of), of.mode, LOSSES.get(name), **_options(of))


_shared_inputs = functools.lru_cache(1)(make_inputs)


def _forget(name: str) -> None:
    """Reset torch.compile, which would compile for dynamic shapes at the second shape."""
    if name == COMPILED:
        torch.compiler.reset()


def _options(spec: Spec) -> dict[str, Any]:
    return {"memory_budget": spec.budget * MiB} if spec.budget else {}


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
            log_p = _log_p(_teacher(weight, len(hidden))[0], weight)
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
    "class probabilities": (
        DIVERGENCES["class probabilities"],
        lambda h, w, y: F.cross_entropy(_logits(h, w), _teacher(w, len(h))[1]),
    ),
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
_OF_PAIRS: dict[str, Callable[..., object]] = {
    prefix + name: function
    for name, pair in PAIRS.items()
    for prefix, function in zip(("ours: ", EAGER), pair, strict=True)
}
# (N, H, V): the smallest at which no call may be slower than eager, an odd one, and two models
PAIR_SHAPES = [(64, 256, 8192), (256, 384, 16003), SHAPES[0], SHAPES[2]]


# ---- errors ---------------------------------------------------------------------------------


def errors(name: str, spec: Sequence[Any]) -> dict[str, float]:
    """Relative error of the mean loss, and normwise of the gradients, against float64.

    Empty for the bare products, and for losses that differ from the plain one.
    """
    if name == FLOOR or name in OPTIONS | DIVERGENCES | _OF_PAIRS:
        return {}
    of = Spec(*spec)
    _forget(name)
    hidden, weight, labels = make_inputs(of)
    leaves = [hidden, weight] if of.mode == "train" else []
    for x in leaves:
        x.requires_grad_()
    with torch.set_grad_enabled(of.mode != "forward"):
        loss = LOSSES[name](hidden, weight, labels, **_options(of))
    if loss.requires_grad:
        loss.backward()
    found = [loss.detach(), *(x.grad for x in leaves)]
    names = ("loss", "d_hidden", "d_weight")
    exact = _truth(of._replace(mode="", budget=None))
    return {
        label: float((x.double() - e).norm() / e.norm())
        for label, x, e in zip(names, found, exact, strict=False)
    }


@functools.lru_cache(1)
def _truth(spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss and its gradients in float64, of `BLOCK` tokens at a time."""
    hidden, weight, labels = make_inputs(spec)
    h, w = hidden.double(), weight.double()
    used = (labels != -100).nonzero()[:, 0]
    total, d_hidden, d_weight = h.new_zeros(()), torch.zeros_like(h), torch.zeros_like(w)
    for rows in used.split(BLOCK):
        logp = F.log_softmax(h[rows] @ w.T, -1)
        at = labels[rows, None]
        total -= logp.gather(1, at).sum()
        slope = logp.exp_().scatter_add_(1, at, torch.full_like(at, -1, dtype=h.dtype))
        d_hidden[rows] = slope @ w
        d_weight.addmm_(slope.T, h[rows])
    return total / len(used), d_hidden / len(used), d_weight / len(used)


# ---- suites ---------------------------------------------------------------------------------


def flops(spec: Spec) -> float:
    """FLOPs of the bare products."""
    valid = spec.N - round(spec.ignored * spec.N)
    return {"forward": 2, "train": 6}[spec.mode] * valid * spec.H * spec.V


def gradient_bytes(spec: Spec) -> int:
    """Bytes of the gradients that ``backward`` leaves."""
    elements = (spec.N + spec.V) * spec.H if spec.mode == "train" else 0
    return elements * getattr(torch, spec.dtype).itemsize


def problems(suite: str, *, dry: bool = False) -> Iterator[tuple[Spec, list[str]]]:
    """The problems of a suite on a CPU, each with the implementations to run on it.

    ``dry`` shrinks them, to see the script through soon.
    """
    everyone = [*ON_CPU, "eight chunks"]
    everyone.remove("F.linear_cross_entropy")  # whose own chunks take minutes
    dtypes, small = ["float32", "bfloat16"], SHAPES[0]

    def spec(shape: tuple[int, int, int], dtype: str = dtypes[0], **more: Any) -> Spec:
        made = Spec(*shape, dtype=dtype, **{"ignored": 0.25, **more})
        return tiny(made) if dry else made

    if suite in ("time", "memory", "forward"):
        mode = "forward" if suite == "forward" else "train"
        for shape in SHAPES:
            for dtype in dtypes:  # (in float32 "eager, plain" is "eager")
                plain = [] if dtype == "float32" else ["eager, plain"]
                yield spec(shape, dtype, mode=mode), [*everyone, *plain]
    elif suite == "masked":
        for share in (0.0, 0.25, 0.5, 0.75, 0.9):
            yield spec(small, ignored=share), [*OURS, "eager"]
    elif suite == "budget":
        for mib in (16, 64, 256):
            yield spec(small, budget=mib), OURS
        yield spec(small), [*OURS, 'reduction="none"']
    elif suite in ("options", "divergences"):
        shape = small if suite == "divergences" else (256, 384, 16003)
        names = [*OURS, *(OPTIONS if suite == "options" else DIVERGENCES)]
        for dtype in dtypes:
            for mode in ("forward", "train") if suite == "options" else ("train",):
                yield spec(shape, dtype, mode=mode, ignored=0.0), names
    elif suite == "eager":
        for shape, dtype in itertools.product(PAIR_SHAPES, dtypes):
            for mode, ignored in itertools.product(("train", "forward"), (0.0, 0.75)):
                yield spec(shape, dtype, mode=mode, ignored=ignored), _pair_names(mode, ignored)


def _pair_names(mode: str, ignored: float) -> list[str]:
    """Ours and eager's by turns, of the pairs that such a problem has."""
    return [
        prefix + name
        for name in PAIRS
        if mode == "forward" or name not in EVALUATED
        if not ignored or name not in (*EVALUATED, "class probabilities")  # which have no labels
        for prefix in ("ours: ", EAGER)
    ]


def tiny(spec: Spec) -> Spec:
    """The problem in small sizes, such that the problems of a suite stay different."""
    N, H, V = max(spec.N // 256, 8), max(spec.H // 64, 8), max(spec.V // 512, 64)
    return spec._replace(N=N, H=H, V=V)
