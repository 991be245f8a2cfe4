"""Divergences and class probabilities over a sharded vocabulary equal those of the whole head."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import IN_FLOAT64
from support.vocabulary import UNEQUAL

import fusedce

N, H, T = 13, 6, 5
WORLDS = pytest.mark.parametrize("world", [2, 4])


def drawn(rank):
    """Tensors in float64, and this rank's rows; one of four ranks has none."""
    sizes = UNEQUAL[dist.get_world_size()]
    rng = torch.Generator().manual_seed(1)
    shapes = {"h": (N, H), "w": (sum(sizes), H), "th": (N, T), "tw": (sum(sizes), T), "u": (N,)}
    x = {k: torch.randn(*s, generator=rng, dtype=torch.float64) for k, s in shapes.items()}
    x["y"] = torch.randint(sum(sizes), (N,), generator=rng)
    x["y"][2] = -100
    first = sum(sizes[:rank])
    return x, slice(first, first + sizes[rank])


def exact_divergence(x, h, w, real, kind):
    """``(N,)``: the divergence at temperature 1.5, and 0.4 times the cross-entropy."""
    z = h @ w[:real].T
    q, p = (z / 1.5).log_softmax(-1), (x["th"] @ x["tw"][:real].T / 1.5).log_softmax(-1)
    if kind == "forward":
        r = (p.exp() * (p - q)).sum(-1)
    elif kind == "reverse":
        r = (q.exp() * (q - p)).sum(-1)
    else:
        m = (0.3 * p.exp() + 0.7 * q.exp()).log()
        r = (0.3 * p.exp() * (p - m) + 0.7 * q.exp() * (q - m)).sum(-1)
    r = r + 0.4 * F.cross_entropy(z, x["y"].clamp(0), reduction="none")
    return r.masked_fill(x["y"] < 0, 0)


def compare(x, rows, own, ours, exact):
    """Values and gradients; ``ours(h, w)`` of this rank, ``exact(h, w)`` of all, ``(N,)`` each."""
    h, w = x["h"][own].clone().requires_grad_(), x["w"][rows].clone().requires_grad_()
    a, b = x["h"].clone().requires_grad_(), x["w"].clone().requires_grad_()
    out, e = ours(h, w), exact(a, b)
    if out.dim():
        torch.testing.assert_close(out, e[own], **IN_FLOAT64)
        out, e = (out * x["u"][own]).sum(), (e * x["u"]).sum()
    else:
        e = e.sum()
        torch.testing.assert_close(out, e, **IN_FLOAT64)
    out.backward()
    e.backward()
    torch.testing.assert_close(h.grad, a.grad[own], **IN_FLOAT64)
    torch.testing.assert_close(w.grad, b.grad[rows], **IN_FLOAT64)


def divergence(kind, tokens_sharded, chunk, padding, rank):
    x, rows = drawn(rank)
    V = len(x["w"]) - padding
    x["y"] = torch.where(x["y"] >= V, 0, x["y"])
    own = slice(None)
    if tokens_sharded:
        own = torch.arange(N).tensor_split(dist.get_world_size())[rank]
    options = {
        "divergence": kind, "beta": 0.3, "temperature": 1.5, "ce_weight": 0.4,
        "process_group": dist.group.WORLD, "tokens_sharded": tokens_sharded,
        "chunk_tokens": chunk, "vocab_size": V if padding else None,
    }  # fmt: skip
    exact = functools.partial(exact_divergence, x, real=V, kind=kind)
    for function in (fusedce.fused_kl, fusedce.fused_kl_tokens):

        def ours(h, w, function=function):
            out = function(h, w, x["th"][own], x["tw"][rows], x["y"][own], **options)
            return out.loss_sum if function is fusedce.fused_kl else out

        compare(x, rows, own, ours, lambda h, w: exact(h, w))


def probabilities(reduction, options, rank):
    x, rows = drawn(rank)
    rng = torch.Generator().manual_seed(2)
    V = len(x["w"])
    t = torch.rand(N, V, generator=rng, dtype=torch.float64)
    options = dict(options)
    c = options.pop("class_weight", None) and torch.rand(V, generator=rng, dtype=torch.float64)
    of_tokens = {"token_weight": x["u"].abs()} if options.pop("token_weight", False) else {}

    def exact(h, w):
        z = h @ w.T
        loss = F.cross_entropy(z, t, c, reduction="none", label_smoothing=0.1)
        loss = loss + 0.01 * z.logsumexp(-1).square()
        loss = loss * of_tokens.get("token_weight", 1)
        return loss / N if reduction == "mean" else loss

    def ours(h, w):
        return fusedce.fused_cross_entropy(
            h, w, t[:, rows], class_weight=c, reduction=reduction, label_smoothing=0.1,
            z_loss=0.01, process_group=dist.group.WORLD, **of_tokens, **options,
        )  # fmt: skip

    compare(x, rows, slice(None), ours, exact)


def sure(rank):
    """Nothing cancels where the student is sure of the likeliest class, on whichever rank."""
    x, rows = drawn(rank)
    V = len(x["w"])
    for at in range(V):
        w, h, t = torch.zeros(V, H).double(), torch.eye(1, H).double(), torch.zeros(1, V).double()
        w[at, 0], t[0, at] = 40.0, 1.0
        got = fusedce.fused_cross_entropy(h, w[rows], t[:, rows], process_group=dist.group.WORLD)
        expected = torch.log1p((V - 1) * torch.tensor(-40.0).double().exp())
        torch.testing.assert_close(got, expected, rtol=IN_FLOAT64["rtol"], atol=0)


def refused(rank):
    """Errors, the same on all ranks, for settings of the teacher that differ."""
    x, rows = drawn(rank)
    given = x["h"], x["w"][rows], x["th"], x["tw"][rows], x["y"]
    kl = functools.partial(ranks.error_of, fusedce.fused_kl, *given, process_group=dist.group.WORLD)
    tokens = functools.partial(
        ranks.error_of, fusedce.fused_kl_tokens, *given, process_group=dist.group.WORLD
    )
    of_probabilities = functools.partial(
        ranks.error_of, fusedce.fused_cross_entropy, x["h"], x["w"][rows],
        process_group=dist.group.WORLD,
    )  # fmt: skip
    whole = torch.rand(N, len(x["w"])).double()
    bias = torch.zeros(len(x["tw"][rows])).double()
    return {
        "teacher_softcap": kl(teacher_softcap=5.0 + rank),
        "teacher_logit_scale": kl(teacher_logit_scale=1.0 + rank),
        "divergence": kl(divergence="reverse" if rank else "forward"),
        "beta": kl(divergence="jsd", beta=0.2 + 0.1 * rank),
        "ce_weight": kl(ce_weight=float(rank)),
        "temperature": kl(temperature=1.0 + rank),
        "teacher_bias": kl(teacher_bias=bias if rank else None),
        "reduction": tokens() if rank else kl(),
        "teacher_weight": ranks.error_of(
            fusedce.fused_kl, *given[:3], x["tw"], x["y"], process_group=dist.group.WORLD
        ),
        "backend='torch'": kl(backend="triton"),
        "labels of class probabilities": of_probabilities(whole),
        "tokens_sharded": of_probabilities(whole[:, rows], tokens_sharded=True),
    }


CASES = {
    **{
        f"{kind}, {'own tokens' if own else 'all tokens'}, {chunk}, {padding}": functools.partial(
            divergence, kind, own, chunk, padding
        )
        for kind, own, chunk, padding in (
            ("forward", False, None, 0), ("forward", True, 4, 0), ("forward", False, 4, 6),
            ("reverse", False, 4, 0), ("reverse", True, None, 6), ("jsd", False, None, 0),
            ("jsd", True, 4, 0),
        )
    },
    **{
        f"probabilities, {reduction}, {[*options]}": functools.partial(
            probabilities, reduction, options
        )
        for reduction, options in (
            ("sum", {}), ("mean", {"chunk_tokens": 4}), ("none", {"class_weight": True}),
            ("mean", {"class_weight": True, "token_weight": True}),
        )
    },
    "sure": sure,
    "refused": refused,
}  # fmt: skip


@functools.cache
def results(world):
    return ranks.run(CASES, world)


@WORLDS
@pytest.mark.parametrize("name", [name for name in CASES if name != "refused"])
def test_equals_the_whole_vocabulary(name, world):
    ranks.of(results(world), name)


@WORLDS
def test_settings_of_the_teacher_that_differ_are_an_error_on_all_ranks(world):
    for errors in ranks.of(results(world), "refused"):
        for name, words in errors.items():
            assert words is not None, name
            assert name in words, words
