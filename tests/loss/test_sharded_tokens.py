"""Token losses on a vocabulary spread over real gloo processes equal those on the whole one."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import EXACT, SAME_SUMS, logit_rounding
from support.vocabulary import (
    UNEQUAL,
    H,
    N,
    answers,
    class_weights,
    compare_to_whole,
    inputs,
    own_rows,
    watched_collectives,
    wide,
)

from fusedce import fused_cross_entropy, fused_logprobs
from fusedce.agreement import ALL_GATHER
from fusedce.backends.shards.agreement import LENGTH
from fusedce.sharded import sharded_ce, sharded_cross_entropy, sharded_logprobs

LOSSES = {
    "plain": {},
    "all": {"softcap": 3.0, "logit_scale": 0.7, "label_smoothing": 0.2, "z_loss": 0.05},
}
K = 4
ROUNDINGS = ((torch.float64, 512), (torch.float32, 4), (torch.bfloat16, 0.5))
FLOOR = {dtype: n * torch.finfo(dtype).eps for dtype, n in ROUNDINGS}  # where both are lucky
STATISTICS = {
    "plain": {},
    "all": {"softcap": 3.0, "logit_scale": -0.7, "temperature": 0.6, "mean_logit": True},
    "temperatures": {
        "temperature": 0.5 + torch.rand(N, generator=torch.Generator().manual_seed(4))
    },
}


def equal_to_the_whole(function, whole, options, dtype, backend, rank, chunk=None):
    """Compare losses of ``inputs``; ``token_weight`` in ``options`` is replaced by a tensor."""
    x = inputs(sum(UNEQUAL[dist.get_world_size()]), dtype, bias=True)
    if "token_weight" in options:
        options = options | {"token_weight": x["hidden"].new_ones(N, dtype=torch.float32)}
        options["token_weight"][::5] = 0
    return compared(x, function, whole, options, backend, rank, chunk)


def several(options, dtype, backend, rank):
    """Labels ``(N, K)``: classes of both ranks, ignored ones, and one class twice."""
    V = sum(UNEQUAL[dist.get_world_size()])
    x = inputs(V, dtype, bias=True) | {"labels": classes_of_tokens(V)}
    x["hidden"] = x["hidden"].nan_to_num(0.3)
    x["hidden"][1] = float("nan")  # all its classes are ignored
    found = compared(x, sharded_logprobs, fused_logprobs, options, backend, rank)
    assert len(found[0]) == N
    assert len(found[0][0]) == K
    return found


def compared(x, function, whole, options, backend, rank, chunk=None):
    """The results, equal to the unsharded ones within twice their error and a floor."""
    sizes = UNEQUAL[dist.get_world_size()]
    out = compare_to_whole(
        x, function, whole, sizes, options, backend, rank, FLOOR, chunk_tokens=chunk
    )
    return [x.tolist() for x in out]


def one_of_several(rank):
    """One class a token is its label; padding is out of range; a budget has room or says so."""
    sizes = UNEQUAL[dist.get_world_size()]
    V = sum(sizes)
    x = inputs(V, torch.float32)
    group = {"process_group": dist.group.WORLD}
    label, _ = own_rows(x, sizes, rank)
    one, _ = own_rows(x | {"labels": x["labels"][:, None].int()}, sizes, rank)
    out, grads = answers(sharded_logprobs, label, **group)
    outs, grads_of_one = answers(sharded_logprobs, one, **group)
    torch.testing.assert_close(outs[0][:, 0], out[0], **EXACT)
    torch.testing.assert_close(outs[1:], out[1:], **EXACT)
    torch.testing.assert_close(grads_of_one, grads)
    classes = classes_of_tokens(V - 1)
    classes[3, 2] = V - 1
    several, _ = own_rows(x | {"labels": classes}, sizes, rank)
    several["hidden"] = several["hidden"].detach().nan_to_num(0.3).requires_grad_()
    bad = ranks.error_of(sharded_logprobs, **several, **group, vocab_size=V - 1)
    assert f"got {V - 1} at flattened position {3 * K + 2}" in bad
    free, _ = answers(sharded_logprobs, several, **group)
    tight, _ = answers(sharded_logprobs, several, **group, memory_budget=2**23)
    torch.testing.assert_close(tight, free)
    assert "memory_budget" in ranks.error_of(
        sharded_logprobs, **several, **group, memory_budget=2**12
    )
    ranks_differ = several | {"labels": classes[:, : 2 + rank]}
    error = ranks.error_of(sharded_logprobs, **ranks_differ, **group)
    assert "'statistics of tokens, 2 classes each'" in error


def classes_of_tokens(V):
    rng = torch.Generator().manual_seed(5)
    classes = torch.randint(V, (N, K), generator=rng)
    classes[torch.rand(N, K, generator=rng) < 0.2] = -100
    classes[1] = -100
    classes[2, 3] = classes[2, 0]
    return classes


def sure(rank):
    """p -> 1 in float32: losses and entropies of 1e-7 nats keep their digits."""
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes), torch.float32)
    unit = F.normalize(x["weight"], dim=-1)
    labels = torch.arange(N) % sum(sizes)
    x |= {"weight": unit, "labels": labels, "hidden": 30.0 * unit[labels]}
    local, rows = own_rows(x, sizes, rank)
    exact, _ = own_rows({k: wide(v) for k, v in x.items()}, [sum(sizes)], 0)
    (logprob, entropy, *_), grads = answers(sharded_logprobs, local, process_group=dist.group.WORLD)
    truth, true_grads = answers(fused_logprobs, exact)
    assert truth[0].abs().min() < 1e-5  # some are sure
    # 1 - p has the relative error that logits have as numbers
    rounding = 2 * logit_rounding(x["hidden"], x["weight"])
    for a, b in ((logprob, truth[0]), (entropy, truth[1])):
        torch.testing.assert_close(a.double(), b, rtol=rounding, atol=0)
    for name, part in (("hidden", slice(None)), ("weight", rows)):
        torch.testing.assert_close(
            grads[name].double(),
            true_grads[name][part],
            rtol=2 * rounding,
            atol=rounding * float(true_grads[name].abs().max()),
        )


def reductions(rank):
    """Sum and mean, with class weights and without."""
    sizes = UNEQUAL[dist.get_world_size()]
    V = sum(sizes)
    for reduction in ("mean", "sum"):
        for class_weight in (None, class_weights(V).double()):
            x = inputs(V)
            local, rows = own_rows(x, sizes, rank)
            every, _ = own_rows(x, [V], 0)
            options = {"reduction": reduction, "class_weight": class_weight, "z_loss": 0.1}
            (a,), grads = answers(
                sharded_cross_entropy, local, process_group=dist.group.WORLD, **options
            )
            (b,), true = answers(fused_cross_entropy, every, **options)
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(grads["hidden"], true["hidden"])
            torch.testing.assert_close(grads["weight"], true["weight"][rows])


def padding(rank):
    """The last rows are no classes: no probability, no gradient, no likeliest class."""
    sizes = UNEQUAL[dist.get_world_size()]
    real = sum(sizes) - sizes[-1] - 1  # one rank has nothing but padding
    x = inputs(sum(sizes), bias=True)
    x["bias"][real:] = 100.0
    x["labels"] = torch.where(x["labels"] < real, x["labels"], 0)
    local, rows = own_rows(x, sizes, rank)
    every, _ = own_rows(x | {k: x[k][:real] for k in ("weight", "bias")}, [real], 0)
    options = {"mean_logit": True}
    out, grads = answers(
        sharded_logprobs, local, process_group=dist.group.WORLD, vocab_size=real, **options
    )
    theirs, true = answers(fused_logprobs, every, **options)
    for a, b in zip(out, theirs, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(grads["hidden"], true["hidden"])
    for name in ("weight", "bias"):
        padded = torch.zeros_like(x[name])
        padded[:real] = true[name]
        torch.testing.assert_close(grads[name], padded[rows])
    assert out[3].max() < real


def sharded_tokens(reduction, rank, several=False):
    """Each rank has its own tokens, one has none; with `several`, labels are `(n, K)`."""
    world = dist.get_world_size()
    sizes = UNEQUAL[world]
    borders = {2: (0, 0, N), 4: (0, 5, 5, 20, N)}[world]
    mine = slice(borders[rank], borders[rank + 1])
    weights = class_weights(sum(sizes)).double()
    x = inputs(sum(sizes))
    rng = torch.Generator().manual_seed(4)
    t = 0.5 + torch.rand(N, generator=rng, dtype=torch.float64)
    u = torch.randn((N, K) if several else (N,), generator=rng, dtype=torch.float64)
    if several:
        x |= {"labels": classes_of_tokens(sum(sizes)), "hidden": x["hidden"].nan_to_num(0.3)}
    local, rows = own_rows(x, sizes, rank)
    every, _ = own_rows(x, [sum(sizes)], 0)
    local["hidden"] = x["hidden"][mine].clone().requires_grad_()
    local["labels"] = x["labels"][mine]
    group = {"process_group": dist.group.WORLD, "tokens_sharded": True}
    if reduction is None:
        a = sharded_logprobs(**local, **group, temperature=t[mine])
        b = fused_logprobs(**every, temperature=t)
        v = u.sum(-1) if several else u
        ((a.logprob * u[mine]).sum() + 0.3 * (a.entropy * v[mine]).sum()).backward()
        ((b.logprob * u).sum() + 0.3 * (b.entropy * v).sum()).backward()
        torch.testing.assert_close(a.argmax, b.argmax[mine])
        a, b = a.logprob, b.logprob[mine]
    else:
        options = {"class_weight": weights, "label_smoothing": 0.1, "reduction": reduction}
        a = sharded_cross_entropy(**local, **group, **options)
        b = fused_cross_entropy(**every, **options)
        none = reduction == "none"
        (a * u[mine] if none else 0.37 * a).sum().backward()
        (b * u if none else 0.37 * b).sum().backward()
        b = b[mine] if none else b
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(local["hidden"].grad, every["hidden"].grad[mine])
    torch.testing.assert_close(local["weight"].grad, every["weight"].grad[rows])


def edges(rank):
    """No token; nothing valid; frozen inputs; a second backward; a shard of masked classes."""
    sizes = UNEQUAL[dist.get_world_size()]
    group = dist.group.WORLD
    x = inputs(sum(sizes))
    for labels in (torch.zeros(0, dtype=torch.int64), torch.zeros(0, K, dtype=torch.int64)):
        local, _ = own_rows(x | {"hidden": x["hidden"][:0], "labels": labels}, sizes, rank)
        stats = sharded_logprobs(**local, process_group=group)
        assert stats.logprob.shape == labels.shape
        (stats.logprob.sum() + stats.entropy.sum()).backward()
        assert local["weight"].grad.eq(0).all()
    local, _ = own_rows(x | {"labels": torch.full((N,), -100)}, sizes, rank)
    stats = sharded_logprobs(**local, process_group=group)
    (stats.logprob + stats.entropy).sum().backward()
    assert stats.argmax.eq(-1).all()
    assert all(local[k].grad.abs().sum() == 0 for k in ("hidden", "weight"))
    for frozen, trained in (("hidden", "weight"), ("weight", "hidden")):
        local, rows = own_rows(x, sizes, rank)
        every, _ = own_rows(x, [sum(sizes)], 0)
        local[frozen].requires_grad_(False)
        loss = sharded_cross_entropy(**local, process_group=group, reduction="none").sum()
        loss.backward(retain_graph=True)
        loss.backward()
        fused_cross_entropy(**every, reduction="sum").backward()
        expected = every[trained].grad[rows if trained == "weight" else slice(None)]
        torch.testing.assert_close(local[trained].grad, 2 * expected)
        assert local[frozen].grad is None
        with pytest.raises(RuntimeError, match="create_graph"):
            loss = sharded_cross_entropy(**local, process_group=group, reduction="none").sum()
            torch.autograd.grad(loss, local[trained], create_graph=True)
    with torch.no_grad():
        assert not sharded_logprobs(**local, process_group=group).logprob.requires_grad
    for backend in ("torch", "triton"):
        x = inputs(sum(sizes), torch.float32)
        x["labels"] = torch.where(x["labels"] < 0, -100, x["labels"] % sizes[0])
        x["bias"] = torch.zeros(sum(sizes))
        x["bias"][sizes[0] :] = -torch.inf  # all but the first rank's classes
        local, _ = own_rows(x, sizes, rank)
        a = sharded_logprobs(**local, process_group=group, backend=backend)
        b = fused_logprobs(**x)
        torch.testing.assert_close(tuple(a), tuple(b))


def no_gradient_is_missing(rank):
    """Where no own token of any rank counts gradients are 0, not absent: DDP waits for them."""
    sizes = UNEQUAL[dist.get_world_size()]
    shared = {"process_group": dist.group.WORLD, "tokens_sharded": True}
    ignored = torch.full((N,), -100)
    for x in (inputs(sum(sizes)) | {"labels": ignored}, inputs(sum(sizes))):
        local, _ = own_rows(x, sizes, rank)
        stats = sharded_logprobs(**local, **shared)
        (0 * stats.logprob + 0 * stats.entropy).sum().backward()
        assert all(local[k].grad.eq(0).all() for k in ("hidden", "weight"))
        local, _ = own_rows(x, sizes, rank)
        loss = sharded_cross_entropy(**local, **shared, reduction="none").sum()
        (0 * loss).backward()
        assert all(local[k].grad.eq(0).all() for k in ("hidden", "weight"))


def any_order_of_memory(backend, rank):
    """Columns side by side, biases with gaps, a rank without rows: the same as rows side by side.

    A collective sends memory as it lies.
    """
    sizes, group = UNEQUAL[dist.get_world_size()], dist.group.WORLD
    x = inputs(sum(sizes), torch.float32, bias=True)
    x["labels"] = x["labels"].where(x["labels"] >= 0, 1)  # every token counts
    x["hidden"] = x["hidden"].nan_to_num(0.5)
    for function, options in (
        (sharded_ce, {}),
        (sharded_cross_entropy, {"reduction": "none"}),
        (sharded_logprobs, {}),
    ):
        found = []
        for plain in (True, False):
            local, _ = own_rows(x, sizes, rank)
            if not plain:
                with torch.no_grad():
                    for name in ("hidden", "weight"):
                        local[name] = local[name].t().contiguous().t().requires_grad_()
                    gaps = local["bias"].repeat_interleave(2)[::2]
                    local["bias"] = gaps.detach().requires_grad_()
            out = function(**local, process_group=group, backend=backend, **options)
            (out[0].sum() if isinstance(out, tuple) else out.sum()).backward()
            found.append([*out[:1], *(local[k].grad for k in ("hidden", "weight", "bias"))])
        torch.testing.assert_close(found[1], found[0], rtol=SAME_SUMS, atol=SAME_SUMS)


def collectives(several, rank):
    """The collectives of one training step, and the number of them in the forward pass."""
    local, _ = own_rows(inputs(11), UNEQUAL[2], rank)
    if several:
        local["labels"] = local["labels"][:, None].expand(N, K)
    with watched_collectives() as calls:
        stats = sharded_logprobs(**local, process_group=dist.group.WORLD)
        forward = len(calls)
        stats.logprob.sum().backward()
    return calls, forward, int(local["labels"].ne(-100).view(N, -1).any(1).sum())


def vocab_parallel(rank):
    """The test of tensor-parallel trainers: the loss of every token, scaled by a random mask."""
    V, world = 16, dist.get_world_size()
    rng = torch.Generator().manual_seed(7)
    hidden = torch.randn(4, 5, H, generator=rng)
    weight = torch.randn(V, H, generator=rng)
    target, mask = torch.randint(V, (4, 5), generator=rng), torch.rand(4, 5, generator=rng)
    own = slice(rank * V // world, (rank + 1) * V // world)
    mine, shard = hidden.clone().requires_grad_(), weight[own].clone().requires_grad_()
    loss = sharded_cross_entropy(mine, shard, target, process_group=dist.group.WORLD,
                                 reduction="none")  # fmt: skip
    (loss * mask).sum().backward()
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight.T
    eager = F.cross_entropy(logits.view(-1, V), target.view(-1), reduction="none").view(4, 5)
    (eager * mask).sum().backward()
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(mine.grad, hidden.grad)
    torch.testing.assert_close(shard.grad, weight.grad[own])
    return loss.tolist()


losses = partial(equal_to_the_whole, sharded_cross_entropy, fused_cross_entropy)
statistics = partial(equal_to_the_whole, sharded_logprobs, fused_logprobs)
EACH = {"reduction": "none"}
WEIGHTED = EACH | {"class_weight": class_weights(11)}
CASES = {
    "class weights": partial(
        losses, LOSSES["all"] | WEIGHTED | {"token_weight": 1}, torch.float32, "torch"
    ),
    "weights of classes alone": partial(losses, WEIGHTED, torch.float32, "triton", chunk=7),
    "sure": sure,
    "reductions": reductions,
    "padding": padding,
    **{
        f"tokens, {reduction}": partial(sharded_tokens, reduction)
        for reduction in (None, "none", "mean", "sum")
    },
    "edges": edges,
    "tokens, no gradient": no_gradient_is_missing,
    **{
        f"tokens in any order, {backend}": partial(any_order_of_memory, backend)
        for backend in ("torch", "triton")
    },
    "vocabulary parallel": vocab_parallel,
}
RUNS = [
    ("torch", torch.float64, ("plain", "all", "temperatures")),
    ("torch", torch.float32, ("all",)),
    ("torch", torch.bfloat16, ("all",)),
    ("triton", torch.float32, ("plain", "all", "temperatures")),
    ("triton", torch.bfloat16, ("all",)),
]
for _backend, _dtype, _names in RUNS:
    for _name in _names:
        _run = (_dtype, _backend)
        if _name in LOSSES:
            CASES[f"losses {_name} {_backend} {_dtype}"] = partial(
                losses, LOSSES[_name] | EACH, *_run
            )
        CASES[f"statistics {_name} {_backend} {_dtype}"] = partial(
            statistics, STATISTICS[_name], *_run
        )
for _backend, _dtype, _name in (
    ("torch", torch.float64, "all"),
    ("torch", torch.bfloat16, "plain"),
    ("triton", torch.float32, "all"),
    ("triton", torch.bfloat16, "temperatures"),
):
    CASES[f"several {_name} {_backend} {_dtype}"] = partial(
        several, STATISTICS[_name], _dtype, _backend
    )
CASES |= {
    "several, own tokens": partial(sharded_tokens, None, several=True),
    "several, one": one_of_several,
}
EQUAL = (
    "losses", "statistics", "several all", "several plain", "several temp", "class weights",
    "weights of classes", "vocabulary",
)  # fmt: skip
FEW = (
    "statistics all torch", "several all torch", "several, own", "reductions", "padding", "tokens",
    "edges",
)  # fmt: skip


COLLECTIVES = {
    "collectives": partial(collectives, False),
    "collectives of several": partial(collectives, True),
}


@cache
def results(world):
    return ranks.run({k: v for k, v in CASES.items() if world == 2 or k.startswith(FEW)}, world)


@cache
def results_of_collectives():
    return ranks.run(COLLECTIVES)  # without the slow cases


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_vocabulary(name):
    found = ranks.of(results(2), name)
    if name.startswith(EQUAL):
        assert found[0] is not None
        assert found[0] == found[1]  # the same bits on all ranks


@pytest.mark.parametrize("name", [k for k in CASES if k.startswith(FEW)])
def test_on_four_ranks_one_of_them_without_rows(name):
    ranks.of(results(4), name)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_collectives_are_those_of_the_docstring(name):
    for calls, forward, n_valid in ranks.of(results_of_collectives(), name):
        of_classes = [("all_reduce", n_valid * K, False)] if "several" in name else []
        assert calls == [
            (ALL_GATHER, 2 * LENGTH, True),
            *of_classes,
            (ALL_GATHER, 2 * 5 * n_valid, False),  # with entropy, maximum and its class
            ("all_reduce", n_valid * H, True),
        ]
        assert forward == 2 + len(of_classes)
