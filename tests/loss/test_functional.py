"""torch.func: gradients and vmap over samples, as preference losses use them."""

import pytest
import torch
import torch.nn.functional as F
from support.bounds import errs_like, in_float64
from support.oracle import token_stats
from support.params import QUICK_ON_TORCH
from torch.func import grad, jacrev, vmap
from torch.utils._pytree import tree_leaves

from fusedce import fused_ce, fused_cross_entropy, fused_kl, fused_logprobs

BACKENDS = ["torch", "triton"]
B, N, H, V = 3, 5, 8, 13
OPTIONS = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.05}


def inputs():
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, N, H, generator=rng)
    weight = torch.randn(V, H, generator=rng)
    labels = torch.randint(V, (B, N), generator=rng)
    labels[1, 2] = -100
    return hidden, weight, labels


def plain(hidden, weight, labels, reduction="sum"):
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction)


def with_options(hidden, weight, labels):
    z = 3.0 * torch.tanh(F.linear(hidden, weight) / 3.0)
    each = F.cross_entropy(z, labels, label_smoothing=0.1, reduction="none")
    return (each + torch.where(labels == -100, 0, 0.05 * z.logsumexp(-1) ** 2)).sum()


def divergence(hidden, weight, labels):
    q = F.linear(hidden, weight).log_softmax(-1)
    p = F.linear(hidden.detach() + 1, weight.detach()).log_softmax(-1)
    return ((p.exp() * (p - q)).sum(-1) * (labels != -100)).sum()


def preference(hidden, weight, labels, stats=token_stats, **options):
    """Of pairs of sequences: a function of the sums of their log-probabilities."""
    found = stats(hidden, weight, labels, **options)
    return torch.sigmoid(0.1 * found.logprob.sum() + found.entropy.sum())


LOSSES = {
    "fused_ce": (lambda *x, **o: fused_ce(*x, **o).loss_sum, plain),
    "fused_ce, options": (lambda *x, **o: fused_ce(*x, **OPTIONS, **o).loss_sum, with_options),
    "sum": (lambda *x, **o: fused_cross_entropy(*x, reduction="sum", **o), plain),
    "none": (lambda *x, **o: fused_cross_entropy(*x, reduction="none", **o).sum(), plain),
    "none, options": (
        lambda *x, **o: fused_cross_entropy(*x, reduction="none", **OPTIONS, **o).sum(),
        with_options,
    ),
    "divergence": (
        lambda h, w, y, backend: fused_kl(
            h, w, h.detach() + 1, w.detach(), y, backend=backend
        ).loss_sum,
        divergence,
    ),
    "preference": (lambda *x, **o: preference(*x, fused_logprobs, **o), preference),
}  # fmt: skip


@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
@pytest.mark.parametrize("name", LOSSES)
def test_vmap_over_samples(name, backend):
    """Values; gradients of each sample, of the shared head and of a head a sample."""
    hidden, weight, labels = inputs()
    of_samples, eager = LOSSES[name]

    def ours(h, w, y):
        return of_samples(h, w, y, backend=backend)

    heads = torch.stack([weight, -weight, 2 * weight])
    for transform in (
        lambda f, h, w, _: vmap(f, (0, None, 0))(h, w, labels),
        lambda f, h, w, _: vmap(f, (0, None, None))(h, w, labels[0]),
        lambda f, h, w, _: vmap(f, (1, None, 1))(h.transpose(0, 1), w, labels.t()),
        lambda f, h, w, heads: vmap(f, (0, 0, 0))(h, heads, labels),
        lambda f, h, w, _: vmap(grad(f), (0, None, 0))(h, w, labels),
        lambda f, h, w, _: vmap(grad(f, argnums=(0, 1)), (0, None, 0))(h, w, labels),
        lambda f, h, w, _: grad(
            lambda w: vmap(f, (0, None, 0))(h, w, labels).square().sum()
        )(w),
        lambda f, h, w, _: jacrev(lambda h: vmap(f, (0, None, 0))(h, w, labels))(h),
    ):  # fmt: skip
        given = (hidden, weight, heads)
        errs_like(
            tree_leaves(transform(ours, *given)), tree_leaves(transform(eager, *given)),
            tree_leaves(transform(eager, *in_float64(*given))),
        )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_and_classes_of_samples_are_their_own(backend):
    hidden, weight, labels = inputs()
    n = vmap(lambda h, y: fused_ce(h, weight, y, backend=backend).n_valid)(hidden, labels)
    assert n.tolist() == [5, 4, 5]
    mean = vmap(lambda h, y: fused_cross_entropy(h, weight, y, backend=backend))(hidden, labels)
    wanted = vmap(lambda h, y: plain(h, weight, y, "mean"))(hidden, labels)
    torch.testing.assert_close(mean, wanted)
    argmax = vmap(lambda h, y: fused_logprobs(h, weight, y, backend=backend).argmax)(hidden, labels)
    best = torch.where(labels != -100, F.linear(hidden, weight).argmax(-1), -1)
    assert argmax.equal(best)
