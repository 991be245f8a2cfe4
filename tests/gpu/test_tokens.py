"""Losses and statistics token by token, divergences and classes of the Triton backend."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.bounds import errs_like
from support.sums import COMPILED, EACH_DTYPE, quick

import fusedce
from fusedce.testing import Case

N, H, V = (300, 256, 5003) if COMPILED else (24, 64, 299)


def inputs(device, dtype, seed=0):
    case = Case((N,), H, V, dtype, logits="flat", ignored=0.25, seed=seed)
    hidden, weight, labels, _ = case.tensors(device)
    return 4 * hidden.nan_to_num(), weight, labels


def compare(ours, theirs, hidden, weight, labels):
    """Values and gradients of ``ours``, and of ``theirs`` in the same dtype and in float64."""

    def run(fn, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        values = fn(*leaves, labels)
        grads = torch.autograd.grad(values.sum(), leaves)
        return values.detach(), *grads

    dtype = hidden.dtype
    errs_like(run(ours, dtype), run(theirs, dtype), run(theirs, torch.float64))


def log_probs(hidden, weight, temperature=1.0, *, bias=None, softcap=None, logit_scale=1.0):
    """With float32 logits at least; the product's inputs are rounded as the loss's are."""
    z = F.linear(hidden, weight)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = logit_scale * (z if bias is None else z + bias.to(z.dtype))
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return (z / temperature).log_softmax(-1)


def where_valid(x, labels):
    return x.masked_fill(labels == -100, 0)


def chosen(z, labels):
    return where_valid(z.gather(1, labels.clamp(min=0)[:, None])[:, 0], labels)


@EACH_DTYPE
def test_losses_by_token(device, dtype):
    compare(
        lambda h, w, y: fusedce.fused_cross_entropy(h, w, y, reduction="none", backend="triton"),
        lambda h, w, y: -chosen(log_probs(h, w), y),
        *inputs(device, dtype),
    )


@EACH_DTYPE
@pytest.mark.parametrize("temperature", [1.0, "by token"])
def test_log_probabilities_and_entropy(device, dtype, temperature):
    hidden, weight, labels = inputs(device, dtype)
    if temperature == "by token":
        temperature = torch.linspace(0.5, 2.0, N, device=device)

    def ours(h, w, y):
        found = fusedce.fused_logprobs(h, w, y, temperature=temperature, backend="triton")
        return found.logprob + 0.3 * found.entropy

    def theirs(h, w, y):
        by = temperature if isinstance(temperature, float) else temperature[:, None]
        z = log_probs(h, w, by)
        return chosen(z, y) + 0.3 * where_valid(-(z.exp() * z).sum(-1), y)

    compare(ours, theirs, hidden, weight, labels)


@EACH_DTYPE
def test_log_probabilities_of_several_classes(device, dtype):
    hidden, weight, labels = inputs(device, dtype)
    several = torch.stack([labels, (labels + 5).clamp(max=V - 1)], 1)
    several[labels == -100] = -100

    def theirs(h, w, y):
        z = log_probs(h, w).gather(1, y.clamp(min=0))
        return z.masked_fill(y == -100, 0)

    compare(
        lambda h, w, y: fusedce.fused_logprobs(h, w, y, backend="triton").logprob,
        theirs, hidden, weight, several,
    )  # fmt: skip


@EACH_DTYPE
def test_class_weights(device, dtype):
    class_weight = torch.linspace(0.0, 3.0, V, device=device)

    def theirs(h, w, y):
        return F.cross_entropy(
            F.linear(h, w).to(torch.promote_types(h.dtype, torch.float32)), y,
            weight=class_weight.to(torch.promote_types(h.dtype, torch.float32)),
        )  # fmt: skip

    compare(
        lambda h, w, y: fusedce.fused_cross_entropy(
            h, w, y, class_weight=class_weight, backend="triton"
        ),
        theirs, *inputs(device, dtype),
    )  # fmt: skip


@EACH_DTYPE
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "ce_weight": 0.5}])
def test_divergences(device, dtype, kind, options):
    hidden, weight, labels = inputs(device, dtype)
    teacher, teacher_weight, _ = inputs(device, dtype, seed=1)
    t = options.get("temperature", 1.0)

    def theirs(h, w, y):
        log_q = log_probs(h, w, t)
        log_p = log_probs(teacher.to(h.dtype), teacher_weight.to(h.dtype), t)
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        p, q = log_p.exp(), log_q.exp()
        found = {
            "forward": lambda: p * (log_p - log_q),
            "reverse": lambda: q * (log_q - log_p),
            "jsd": lambda: (p * (log_p - log_m) + q * (log_q - log_m)) / 2,
        }[kind]().sum(-1)
        return where_valid(found - options.get("ce_weight", 0.0) * chosen(log_probs(h, w), y), y)

    def ours(h, w, y):
        return fusedce.fused_kl(
            h, w, teacher, teacher_weight, y, divergence=kind, backend="triton", **options
        ).loss_sum[None]

    compare(ours, lambda h, w, y: theirs(h, w, y).sum()[None], hidden, weight, labels)


POINTWISE = {"bias": True, "softcap": 5.0, "logit_scale": 0.7}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        quick(loss, options, on_interpreter=loss == "jsd" and list(options) == ["softcap"])
        for loss in ("none", "logprob and entropy", "forward", "jsd")
        for options in (*({name: x} for name, x in POINTWISE.items()), POINTWISE)
    ],
)  # fmt: skip
def test_options_alone_and_all_together(device, dtype, loss, options):
    hidden, weight, labels = inputs(device, dtype)
    teacher, teacher_weight, _ = inputs(device, dtype, seed=1)
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.linspace(-1, 1, V, device=device, dtype=dtype)

    def ours(h, w, y):
        if loss == "none":
            return fusedce.fused_cross_entropy(
                h, w, y, reduction="none", backend="triton", **options
            )
        if loss == "logprob and entropy":
            found = fusedce.fused_logprobs(h, w, y, backend="triton", **options)
            return found.logprob + 0.3 * found.entropy
        return fusedce.fused_kl(
            h, w, teacher, teacher_weight, y, divergence=loss, backend="triton", **options
        ).loss_sum[None]

    def theirs(h, w, y):
        log_q = log_probs(h, w, **options)
        q = log_q.exp()
        if loss == "none":
            return -chosen(log_q, y)
        if loss == "logprob and entropy":
            return chosen(log_q, y) - 0.3 * where_valid((q * log_q).sum(-1), y)
        log_p = log_probs(teacher.to(h.dtype), teacher_weight.to(h.dtype))
        p, log_m = log_p.exp(), torch.logaddexp(log_p, log_q) - math.log(2)
        if loss == "forward":
            found = p * (log_p - log_q)
        else:
            found = (p * (log_p - log_m) + q * (log_q - log_m)) / 2
        return where_valid(found.sum(-1), y).sum()[None]

    compare(ours, theirs, hidden, weight, labels)


def test_the_likeliest_classes(device):
    hidden, weight, _, _ = Case((N,), H, V).tensors(device)
    exact = hidden.double() @ weight.double().T
    assert fusedce.fused_argmax(hidden, weight, backend="triton").equal(exact.argmax(1))
    top = fusedce.fused_topk(hidden, weight, 5, backend="triton")
    assert top.index.equal(exact.topk(5).indices)
    torch.testing.assert_close(
        top.logprob.double(), exact.log_softmax(-1).topk(5).values, rtol=1e-5, atol=1e-5
    )


def test_statistics_beside_a_sum(device):
    """Likeliest classes, the z-loss and the entropy come from the pass that makes the sum."""
    hidden, weight, labels = inputs(device, torch.float32)
    weight.requires_grad_()
    found = torch.empty_like(labels)
    out = fusedce.fused_ce(hidden, weight, labels, argmax_out=found, backend="triton")
    out.mean().backward()
    exact = (hidden.double() @ weight.detach().double().T).argmax(1)
    assert found.equal(exact.masked_fill(labels == -100, -1))
