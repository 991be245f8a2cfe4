"""A vocabulary spread over real gloo processes, by the Triton kernels (interpreted)."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import SAME_SUMS, logit_rounding
from support.vocabulary import (
    OPTIONS,
    UNEQUAL,
    H,
    N,
    inputs,
    near,
    own_rows,
    truth,
    watched_collectives,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fusedce import fused_ce
from fusedce.agreement import ALL_GATHER
from fusedce.backends import plan
from fusedce.backends.shards.agreement import LENGTH
from fusedce.backends.shards.collectives import REDUCE_SCATTER
from fusedce.sharded import sharded_ce

ROUNDINGS = ((torch.float32, 4), (torch.bfloat16, 0.5), (torch.float16, 0.5))
FLOOR = {dtype: n * torch.finfo(dtype).eps for dtype, n in ROUNDINGS}  # where both are lucky
# 256 classes share a reference in the interpreter: some ranks have several such blocks.
WIDE = {2: (300, 530), 4: (40, 530, 0, 70)}
UNCAPPED = {k: v for k, v in OPTIONS["everything"].items() if k != "softcap"}
UNSMOOTHED = {k: v for k, v in OPTIONS["everything"].items() if k != "label_smoothing"}


def group():
    return dist.group.WORLD


def backward(out, local, upstream=0.37):
    (out.loss_sum * upstream).backward()
    return {k: local[k].grad for k in ("hidden", "weight", "bias") if k in local}


def compared(x, sizes, rank, exact=None, real=None, **asked):
    """The loss here: errors at most twice those of the unsharded kernels, and a rounding."""
    dtype = x["hidden"].dtype
    local, rows = own_rows(x, sizes, rank)
    out = sharded_ce(**local, process_group=group(), backend="triton", **asked)
    grads = backward(out, local)
    every, _ = own_rows(x, [sum(sizes)], 0)
    classes = {k: every[k][:real] for k in ("weight", "bias") if k in every}
    whole = fused_ce(**every | classes, backend="triton")
    theirs = backward(whole, every)
    loss, n_valid, exact = truth(x, real=real)
    assert out.loss_sum.dtype == torch.float32
    assert int(out.n_valid) == n_valid
    near(out.loss_sum, whole.loss_sum, loss, FLOOR[torch.float32], "loss")
    for name, grad in grads.items():
        part = slice(None) if name == "hidden" else rows
        assert grad.dtype == dtype
        near(grad, theirs[name][part], exact[name][part], FLOOR[dtype], name)
    return float(out.loss_sum)


# ---- cases, each run by every rank ------------------------------------------------------------


def training(options, dtype, sizes, rank, n=N):
    sizes = sizes[dist.get_world_size()]
    x = inputs(sum(sizes), dtype, n=n, **options)
    return compared(x, sizes, rank, chunk_tokens=7)


def peaked(gap, dtype, rank):
    """p -> 1 at the label, or at another class: references far from each other on the ranks."""
    sizes = WIDE[dist.get_world_size()]
    V = sum(sizes)
    x = inputs(V, torch.float32)
    unit = F.normalize(x["weight"], dim=-1)
    labels = torch.arange(N) * 37 % V
    near_to = labels if gap > 0 else (labels + V // 2) % V  # sure and right, or sure and wrong
    x |= {"weight": unit, "labels": labels, "hidden": abs(gap) * unit[near_to]}
    x |= {k: x[k].to(dtype) for k in ("weight", "hidden")}
    return compared(x, sizes, rank)


def padded(rank):
    """The last rows are no classes: no probability, no gradient, on whichever rank they lie."""
    sizes = UNEQUAL[dist.get_world_size()]
    real = sum(sizes) - sizes[-1] - 1  # one rank has nothing but padding
    x = inputs(sum(sizes), torch.float32, label_smoothing=0.1, bias=True)
    x["labels"] = torch.where(x["labels"] < real, x["labels"], 0)
    return compared(x, sizes, rank, real=real, vocab_size=real)


def sharded_tokens(options, rank):
    """Sequence parallelism with a different number of tokens on each rank, none on one."""
    world = dist.get_world_size()
    sizes = UNEQUAL[world]
    x = inputs(sum(sizes), torch.float32, **options)
    borders = {2: (0, 0, N), 4: (0, 5, 5, 20, N)}[world]
    mine = slice(borders[rank], borders[rank + 1])
    found = []
    for tokens in (False, True):
        local, _ = own_rows(x, sizes, rank)
        if tokens:
            for name in ("hidden", "labels", "token_weight"):
                if name in local:
                    local[name] = local[name][mine].detach().clone()
            local["hidden"].requires_grad_()
        out = sharded_ce(
            **local, process_group=group(), tokens_sharded=tokens, chunk_tokens=8, backend="triton"
        )
        grads = backward(out, local)
        found.append((out.loss_sum.detach(), out.n_valid, grads))
    (a, n, together), (b, m, apart) = found
    torch.testing.assert_close(a, b)
    assert int(n) == int(m)
    torch.testing.assert_close(apart["hidden"], together["hidden"][mine])
    torch.testing.assert_close(apart["weight"], together["weight"])
    return float(b)


def nothing_valid(rank):
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes), torch.float32)
    x["labels"].fill_(-100)
    local, _ = own_rows(x, sizes, rank)
    out = sharded_ce(**local, process_group=group(), backend="triton")
    grads = backward(out, local)
    assert (float(out.loss_sum), int(out.n_valid)) == (0, 0)
    assert all(grad.abs().sum() == 0 for grad in grads.values())
    with torch.no_grad():
        out = sharded_ce(**local, process_group=group(), backend="triton")
    return float(out.loss_sum)


def frozen(rank):
    """Only what requires grad gets one; a second backward adds the same again."""
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes), torch.float32)
    _, _, exact = truth(x, upstream=1.0)
    for left, trained in (("hidden", "weight"), ("weight", "hidden")):
        local, rows = own_rows(x, sizes, rank)
        local[left].requires_grad_(False)
        out = sharded_ce(**local, process_group=group(), backend="triton")
        out.loss_sum.backward(retain_graph=True)
        out.loss_sum.backward()
        of = exact[trained][rows] if trained == "weight" else exact[trained]
        # gradients of N tokens, added twice, each with the rounding of its logits
        atol = 2 * len(x["labels"]) * logit_rounding(x["hidden"].nan_to_num(), x["weight"])
        torch.testing.assert_close(local[trained].grad.double(), 2 * of, rtol=SAME_SUMS, atol=atol)
        assert local[left].grad is None
    return float(out.loss_sum)


def one_trains(rank):
    """One rank trains its part of the bias, the other nothing at all."""
    sizes = UNEQUAL[dist.get_world_size()]
    local, _ = own_rows(inputs(sum(sizes), torch.float32, bias=True), sizes, rank)
    for name in ("hidden", "weight", "bias"):
        local[name].requires_grad_(name == "bias" and rank == 0)
    return ranks.error_of(sharded_ce, **local, process_group=group(), backend="triton")


def forward(options, sizes, rank):
    """Without gradients: the unsharded kernel's loss, and that of the torch path."""
    sizes = sizes[dist.get_world_size()]
    x = inputs(sum(sizes), torch.float32, **options)
    local, _ = own_rows(x, sizes, rank)
    with torch.no_grad():
        out = sharded_ce(**local, process_group=group(), backend="triton")
        torchs = sharded_ce(**local, process_group=group(), backend="torch")
        whole = fused_ce(**x, backend="triton")
    loss, n_valid, _ = truth(x)
    assert int(out.n_valid) == n_valid
    near(out.loss_sum, whole.loss_sum, loss, FLOOR[torch.float32], "of the whole")
    near(out.loss_sum, torchs.loss_sum, loss, FLOOR[torch.float32], "of torch")
    return float(out.loss_sum)


def infinite(rank):
    """A class masked by a bias of -inf, and a token whose logits hold +inf."""
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes), torch.float32, bias=True)
    x["bias"][1] = -torch.inf
    x["labels"] = torch.where(x["labels"] == 1, 0, x["labels"])
    loss = compared(x, sizes, rank)
    x["bias"][2] = torch.inf
    local, _ = own_rows(x, sizes, rank)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = sharded_ce(**local, process_group=group(), backend="triton")
        assert not out.loss_sum.isfinite()
    return loss


def batches(rank):
    """A token's loss has the same bits in any batch."""
    sizes = WIDE[dist.get_world_size()]
    x = inputs(sum(sizes), torch.float32)
    x["labels"] = x["labels"].where(x["labels"] != -100, torch.tensor(3))
    x["hidden"] = x["hidden"].nan_to_num(0.5)
    found = []
    for tokens in (slice(4, 5), slice(0, N), slice(3, 12)):
        for grad in (True, False):
            local, _ = own_rows(x, sizes, rank)
            weight = torch.zeros(N)
            weight[4] = 1
            local |= {"labels": x["labels"][tokens], "token_weight": weight[tokens]}
            local["hidden"] = x["hidden"][tokens].clone().requires_grad_()
            with torch.set_grad_enabled(grad):
                out = sharded_ce(**local, process_group=group(), backend="triton")
            found.append((grad, float(out.loss_sum)))
    assert len(set(found)) == 2, found
    return found[0][1]


def budgets_of_devices(rank):
    """Ranks whose devices would have chunks of other sizes cut the same ones."""
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes), torch.float32, n=300)
    local, _ = own_rows(x, sizes, rank)
    local["token_weight"] = torch.ones(300)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(plan, "DEVICE_BUDGET", 128 * 4 * max(sizes))  # 128 tokens
        with watched_collectives() as calls:
            out = sharded_ce(**local, process_group=group(), backend="triton")
    chunks = [name for name, *_ in calls].count(ALL_GATHER) - 1
    assert chunks == 2
    return float(out.loss_sum)


def monitored(options, tokens, backend, rank):
    """Sums beside the loss and the likeliest classes, with gradients and without."""
    world = dist.get_world_size()
    sizes = UNEQUAL[world]
    x = inputs(sum(sizes), torch.float32, **options)
    borders = {2: (0, 9, N), 4: (0, 5, 5, 20, N)}[world]
    mine = slice(borders[rank], borders[rank + 1]) if tokens else slice(None)
    mesh = init_device_mesh("cpu", (world,))
    for monitor in (("correct",), ("correct", "entropy", "z_loss"), ()):
        for grad in (True, False):
            every, _ = own_rows(x, [sum(sizes)], 0)
            theirs = torch.empty(N, dtype=torch.int64)
            whole = fused_ce(**every, monitor=monitor, argmax_out=theirs, backend="torch")
            local, rows = own_rows(x, sizes, rank)
            if tokens:  # says by its placement that tokens are sharded
                for name in ("hidden", "labels", "token_weight"):
                    if name in local:
                        local[name] = local[name][mine].detach().clone()
                local["hidden"].requires_grad_()
            argmax = torch.empty(len(local["labels"]), dtype=torch.int64)
            asked = local | {"process_group": None if tokens else group()}
            with torch.set_grad_enabled(grad):
                for name in ("hidden", "weight", "labels") if tokens else ():
                    shape = {"shape": x[name].shape, "stride": x[name].stride()}
                    asked[name] = DTensor.from_local(local[name], mesh, [Shard(0)], **shape)
                out = fused_ce(**asked, monitor=monitor, argmax_out=argmax, backend=backend)
            assert torch.equal(argmax, theirs[mine])
            torch.testing.assert_close(out.loss_sum, whole.loss_sum)
            if monitor:
                assert set(out.monitors) == set(monitor)
                torch.testing.assert_close(dict(out.monitors), dict(whole.monitors))
            if grad:
                whole.loss_sum.backward()
                out.loss_sum.backward()
                of_sums = SAME_SUMS * float(every["weight"].grad.abs().max())
                torch.testing.assert_close(
                    local["weight"].grad, every["weight"].grad[rows], rtol=0, atol=of_sums
                )
    return float(out.loss_sum)


def collectives(rank):
    """Collectives of a training step with ignored rows, of evaluation, and with sharded tokens."""
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes), torch.float32)
    found = {}
    for name, options, grad, tokens in (
        ("training", {}, True, False),
        ("smoothing", {"label_smoothing": 0.1}, True, False),
        ("forward", {}, False, False),
        ("tokens", {}, True, True),
    ):
        local, _ = own_rows(x, sizes, rank)
        with watched_collectives() as calls, torch.set_grad_enabled(grad):
            out = sharded_ce(
                **local, process_group=group(), chunk_tokens=8, backend="triton",
                tokens_sharded=tokens, **options,
            )  # fmt: skip
            before = len(calls)
            if grad:
                out.loss_sum.backward()
            assert len(calls) == before, "backward communicates"
        found[name] = list(calls), int(out.n_valid)
    return found


CASES = {
    **{
        f"{name}, narrow": functools.partial(training, options, torch.float32, UNEQUAL)
        for name, options in (OPTIONS | {"uncapped": UNCAPPED, "unsmoothed": UNSMOOTHED}).items()
    },
    "plain, wide": functools.partial(training, {}, torch.float32, WIDE),
    "bfloat16": functools.partial(training, UNSMOOTHED, torch.bfloat16, WIDE),
    "bfloat16, smoothed": functools.partial(training, UNCAPPED, torch.bfloat16, UNEQUAL),
    "float16": functools.partial(training, UNCAPPED, torch.float16, UNEQUAL),
    "sure and right": functools.partial(peaked, 16.0, torch.float32),
    "sure and wrong": functools.partial(peaked, -60.0, torch.bfloat16),
    "padded": padded,
    "sharded tokens": functools.partial(sharded_tokens, {}),
    "sharded tokens, options": functools.partial(sharded_tokens, OPTIONS["weights"] | UNCAPPED),
    "nothing valid": nothing_valid,
    "frozen": frozen,
    **{
        f"forward, {name}": functools.partial(forward, options, UNEQUAL)
        for name, options in (OPTIONS | {"uncapped": UNCAPPED}).items()
        if name in ("plain", "everything", "uncapped", "z_loss")
    },
    "forward, wide": functools.partial(forward, {}, WIDE),
    "infinite": infinite,
    "batches": batches,
    "budgets of devices": budgets_of_devices,
    **{
        f"monitors, {name}, {backend}": functools.partial(monitored, options, tokens, backend)
        for name, options, tokens in (
            ("plain", {}, False),
            ("options", UNSMOOTHED, False),
            ("sharded tokens", {"z_loss": 0.1}, True),
        )
        for backend in ("torch", "triton")
    },
    "one trains": one_trains,
    "collectives": collectives,
}
# Four ranks (one without rows) on few cores take long: cases in which their number matters.
OF_FOUR = (
    "plain, narrow", "everything, narrow", "plain, wide", "padded", "sharded tokens, options",
    "nothing valid", "forward, everything", "forward, wide", "monitors, options, triton",
    "one trains", "collectives",
)  # fmt: skip
WORLDS = pytest.mark.parametrize("world", [2, 4])


QUICK = (
    "everything, narrow", "plain, wide", "bfloat16, smoothed", "padded", "sharded tokens, options",
    "nothing valid", "forward, everything",
)  # fmt: skip


@functools.cache
def results(world, names=None):
    names = names or (CASES if world == 2 else OF_FOUR)
    return ranks.run({name: CASES[name] for name in names}, world)


@pytest.mark.parametrize("name", QUICK)
def test_equals_the_whole_vocabulary(name):
    equal_on_all_ranks(results(2, QUICK), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "name"),
    [
        (world, name)
        for world, names in ((2, CASES), (4, OF_FOUR))
        for name in names
        if name not in ("collectives", "one trains", *(QUICK if world == 2 else ()))
    ],
)
def test_equals_the_whole_vocabulary_in_other_cases(name, world):
    equal_on_all_ranks(results(world), name)


def equal_on_all_ranks(found, name):
    assert len(set(ranks.of(found, name))) == 1  # the same bits of the loss on all ranks


@pytest.mark.slow
@WORLDS
def test_ranks_train_together_or_not_at_all(world):
    for error in ranks.of(results(world), "one trains"):
        assert "ValueError: weight.requires_grad must be the same on all ranks" in error


@pytest.mark.slow
@WORLDS
def test_the_collectives_are_those_of_the_docstring(world):
    for found in ranks.of(results(world), "collectives"):
        calls, n = found["training"]
        chunks = [min(8, n - i) for i in range(0, n, 8)]
        assert len(chunks) > 1
        met, labels = (ALL_GATHER, world * LENGTH, True), ("all_reduce", n, False)
        by_chunk = [
            call  # a chunk's rows are added up while the next chunk is computed
            for C in chunks
            for call in ((ALL_GATHER, world * C, False), ("all_reduce", C * H, True))
        ]
        assert calls == [met, labels, *by_chunk]
        calls, _ = found["smoothing"]
        assert calls == [met, labels, (ALL_GATHER, world * (H + 1), False), *by_chunk]
        calls, _ = found["forward"]
        assert calls == [met, (ALL_GATHER, world * 2 * n, False)]
        calls, n = found["tokens"]
        chunks = [min(8, n - i) for i in range(0, n, 8)]
        assert calls == [
            met,
            (ALL_GATHER, world * N * H, False),
            (ALL_GATHER, world * N, False),
            ("all_reduce", n, False),
            *[(ALL_GATHER, world * C, False) for C in chunks],
            (REDUCE_SCATTER, N * H, False),
        ]
