"""torch.func: gradients and vmap over samples, as preference losses use them."""

import pytest
import torch
import torch.nn.functional as F
from support.bounds import errs_like, in_float64
from support.params import QUICK_ON_TORCH
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

from fusedce import fused_ce, fused_cross_entropy, fused_logprobs

BACKENDS = ["torch", "triton"]
B, N, H, V = 3, 5, 8, 13


def inputs():
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, N, H, generator=rng)
    weight = torch.randn(V, H, generator=rng)
    labels = torch.randint(V, (B, N), generator=rng)
    labels[1, 2] = -100
    return hidden, weight, labels


def options(name):
    return {} if name == "plain" else {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.05}


def eager(hidden, weight, labels, name, reduction="sum"):
    z = F.linear(hidden, weight)
    if name == "plain":
        return F.cross_entropy(z, labels, reduction=reduction)
    z = 3.0 * torch.tanh(z / 3.0)
    each = F.cross_entropy(z, labels, label_smoothing=0.1, reduction="none")
    each = each + torch.where(labels == -100, 0, 0.05 * z.logsumexp(-1) ** 2)
    return each.sum() if reduction == "sum" else each.sum() / (labels != -100).sum()


LOSSES = {
    "fused_ce": lambda h, w, y, name, backend: (
        fused_ce(h, w, y, backend=backend, **options(name)).loss_sum
    ),
    "sum": lambda h, w, y, name, backend: fused_cross_entropy(
        h, w, y, reduction="sum", backend=backend, **options(name)
    ),
    "none": lambda h, w, y, name, backend: fused_cross_entropy(
        h, w, y, reduction="none", backend=backend, **options(name)
    ).sum(),
}
CASES = [(loss, name) for loss in LOSSES for name in ("plain", "options")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loss", "name"), CASES)
def test_grad_and_value(loss, name, backend):
    hidden, weight, labels = (x[0] if x.dim() != 2 or x is not None else x for x in inputs())
    hidden, weight, labels = inputs()
    hidden, labels = hidden[1], labels[1]
    ours = grad_and_value(LOSSES[loss], argnums=(0, 1))(hidden, weight, labels, name, backend)
    wanted = grad_and_value(eager, argnums=(0, 1))(hidden, weight, labels, name)
    exact = grad_and_value(eager, argnums=(0, 1))(*in_float64(hidden, weight), labels, name)
    errs_like(tree_leaves(ours), tree_leaves(wanted), tree_leaves(exact))


@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
@pytest.mark.parametrize(("loss", "name"), CASES)
def test_vmap_over_samples(loss, name, backend):
    """Values; gradients of each sample, of the shared head and of a head a sample."""
    hidden, weight, labels = inputs()

    def ours(h, w, y):
        return LOSSES[loss](h, w, y, name, backend)

    def wanted(h, w, y):
        return eager(h, w, y, name)

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
            tree_leaves(transform(ours, *given)), tree_leaves(transform(wanted, *given)),
            tree_leaves(transform(wanted, *in_float64(*given))),
        )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_of_samples_are_their_own(backend):
    hidden, weight, labels = inputs()
    n = vmap(lambda h, y: fused_ce(h, weight, y, backend=backend).n_valid)(hidden, labels)
    assert n.tolist() == [5, 4, 5]
    mean = vmap(lambda h, y: fused_cross_entropy(h, weight, y, backend=backend))(hidden, labels)
    wanted = vmap(lambda h, y: eager(h, weight, y, "plain", "mean"))(hidden, labels)
    torch.testing.assert_close(mean, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_of_samples(backend):
    """A preference loss: pairs of sequences, a function of the sums of their log-probabilities."""
    hidden, weight, labels = inputs()

    def ours(h, w, y):
        stats = fused_logprobs(h, w, y, backend=backend)
        return torch.sigmoid(0.1 * stats.logprob.sum() + stats.entropy.sum())

    def wanted(h, w, y):
        log_p = F.linear(h, w).log_softmax(-1)
        used = y != -100
        own = log_p.gather(-1, y.clamp(min=0)[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return torch.sigmoid(0.1 * (own * used).sum() + (entropy * used).sum())

    for transform in (
        lambda f, h, w: vmap(f, (0, None, 0))(h, w, labels),
        lambda f, h, w: vmap(grad_and_value(f), (0, None, 0))(h, w, labels),
        lambda f, h, w: grad(lambda w: vmap(f, (0, None, 0))(h, w, labels).sum())(w),
    ):
        given = (hidden, weight)
        errs_like(
            tree_leaves(transform(ours, *given)), tree_leaves(transform(wanted, *given)),
            tree_leaves(transform(wanted, *in_float64(*given))),
        )  # fmt: skip
    argmax = vmap(lambda h, y: fused_logprobs(h, weight, y, backend=backend).argmax)(hidden, labels)
    best = torch.where(labels != -100, F.linear(hidden, weight).argmax(-1), -1)
    assert argmax.equal(best)


def test_what_has_no_derivative_is_refused():
    hidden, weight, labels = inputs()

    def loss(h):
        return fused_ce(h, weight, labels[0]).loss_sum

    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        jvp(loss, (hidden[0],), (hidden[0],))
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        hessian(loss)(hidden[0])
    with pytest.raises(RuntimeError, match="gradient of the loss is not differentiable"):
        grad(lambda h: grad(loss)(h).square().sum())(hidden[0])
