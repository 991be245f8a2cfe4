"""A vocabulary spread over real gloo processes equals the whole one, option by option."""

import functools
import itertools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import EXACT
from support.vocabulary import (
    OPTIONS,
    UNEQUAL,
    H,
    Largest,
    N,
    close,
    compare,
    inputs,
    own_rows,
    truth,
    watched_collectives,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fusedce import fused_ce
from fusedce.agreement import ALL_GATHER
from fusedce.autograd import dispatch
from fusedce.backends import held, plan
from fusedce.backends.shards.agreement import LENGTH
from fusedce.sharded import sharded_ce, sharded_cross_entropy

# ---- cases, each run by every rank ------------------------------------------------------------


def local_shards(options, rank, dtype=torch.float64, **more):
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes), dtype, **options, **more)
    local, rows = own_rows(x, sizes, rank)
    out = sharded_ce(**local, process_group=dist.group.WORLD, chunk_tokens=7)
    compare(local, rows, out, truth(x), dtype)
    return float(out.loss_sum)


def low_precision(dtype, rank):
    """Twice the error of torch with all logits in the same dtype, plus a rounding."""
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes), dtype, n=60)
    local, rows = own_rows(x, sizes, rank)
    out = sharded_ce(**local, process_group=dist.group.WORLD)
    loss, _, exact = truth(x, upstream=1.0)
    out.loss_sum.backward()
    leaf = {k: x[k].clone().requires_grad_() for k in ("hidden", "weight")}
    valid = x["labels"] != -100
    logits = F.linear(leaf["hidden"][valid], leaf["weight"]).float()
    F.cross_entropy(logits, x["labels"][valid], reduction="sum").backward()
    close(out.loss_sum, loss, torch.float32)
    for name, part in (("hidden", slice(None)), ("weight", rows)):
        if not exact[name][part].numel():
            continue
        error = (local[name].grad.double() - exact[name][part]).norm()
        torchs = (leaf[name].grad[part].double() - exact[name][part]).norm()
        assert error <= 2 * torchs + torch.finfo(dtype).eps * exact[name][part].norm()


def peaked(rank):
    """At p -> 0.999 in float32 the sums of the ranks do not cancel."""
    sizes = UNEQUAL[dist.get_world_size()]
    V = sum(sizes)
    x = inputs(V, torch.float32)
    unit = F.normalize(x["weight"], dim=-1)
    gap = 16.0
    labels = torch.arange(N) % V
    x |= {"weight": unit, "labels": labels, "hidden": gap * unit[labels]}
    local, rows = own_rows(x, sizes, rank)
    out = sharded_ce(**local, process_group=dist.group.WORLD)
    # Logits of 16 are rounded, and 1 - p with them: as many roundings again as the sums make.
    compare(local, rows, out, truth(x), torch.float32, slack=2)


def padded(rank):
    """The last rows are no classes: no probability, no gradient, on whichever rank they lie."""
    sizes = UNEQUAL[dist.get_world_size()]
    real = sum(sizes) - sizes[-1] - 1  # one rank has nothing but padding
    x = inputs(sum(sizes), softcap=3.0, label_smoothing=0.1)
    x["labels"] = (
        x["labels"].where(x["labels"] < real, torch.tensor(0)).where(x["labels"] != -100, -100)
    )
    local, rows = own_rows(x, sizes, rank)
    out = sharded_ce(**local, process_group=dist.group.WORLD, vocab_size=real)
    exact = truth(x, real=real)
    assert exact[2]["weight"][real:].abs().max() == 0
    compare(local, rows, out, exact)
    with torch.no_grad():
        every, said = (
            sharded_ce(**local, process_group=dist.group.WORLD, vocab_size=size).loss_sum
            for size in (None, sum(sizes))
        )
    torch.testing.assert_close(said, every, **EXACT)


def sharded_tokens(options, rank):
    """Sequence parallelism with a different number of tokens on each rank, none on one."""
    world = dist.get_world_size()
    sizes = UNEQUAL[world]
    x = inputs(sum(sizes), **options)
    borders = {2: (0, 0, N), 4: (0, 5, 5, 20, N)}[world]
    mine = slice(borders[rank], borders[rank + 1])
    local, rows = own_rows(x, sizes, rank)
    hidden = x["hidden"][mine].clone().requires_grad_()
    local |= {"hidden": hidden, "labels": x["labels"][mine]}
    if "token_weight" in x:
        local["token_weight"] = x["token_weight"][mine]
    out = sharded_ce(**local, process_group=dist.group.WORLD, tokens_sharded=True, chunk_tokens=8)
    loss, n_valid, grads = truth(x)
    grads["hidden"] = grads["hidden"][mine]
    compare(local, rows, out, (loss, n_valid, grads))


def nothing_valid(rank):
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes))
    x["labels"].fill_(-100)
    local, _ = own_rows(x, sizes, rank)
    out = sharded_ce(**local, process_group=dist.group.WORLD)
    out.mean().backward()
    assert (out.loss_sum.item(), out.n_valid.item()) == (0, 0)
    assert all(local[k].grad.abs().sum() == 0 for k in ("hidden", "weight"))


def frozen_and_twice(rank):
    """Only what requires grad gets one; a second backward adds the same again."""
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes))
    _, _, exact = truth(x, upstream=1.0)
    for frozen, trained in (("hidden", "weight"), ("weight", "hidden")):
        local, rows = own_rows(x, sizes, rank)
        local[frozen].requires_grad_(False)
        out = sharded_ce(**local, process_group=dist.group.WORLD)
        out.loss_sum.backward(retain_graph=True)
        out.loss_sum.backward()
        close(
            local[trained].grad,
            2 * (exact[trained][rows] if trained == "weight" else exact[trained]),
        )
        assert local[frozen].grad is None
    with torch.no_grad():
        assert not sharded_ce(**local, process_group=dist.group.WORLD).loss_sum.requires_grad


def chunked(rank):
    """No more than a chunk of logits is ever held, in training and in evaluation."""
    x = inputs(64, torch.float32, n=100)
    sizes = [64 // dist.get_world_size()] * dist.get_world_size()
    local, _ = own_rows(x, sizes, rank)
    found = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad), Largest(sizes[0]) as largest:
            sharded_ce(**local, process_group=dist.group.WORLD, chunk_tokens=10)
        found.append(largest.tokens)
    return found


def automatic_chunks(rank):
    """Chunks are cut for the largest shard, on all ranks alike."""
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes), n=200)
    local, rows = own_rows(x, sizes, rank)
    budget, plan.CPU_BUDGET = plan.CPU_BUDGET, 32 * 8 * max(sizes)  # 32 tokens
    try:
        with Largest(sizes[rank]) as largest:
            out = sharded_ce(**local, process_group=dist.group.WORLD)
    finally:
        plan.CPU_BUDGET = budget
    assert sizes[rank] <= 1 or largest.tokens == 32  # a column is nothing special
    compare(local, rows, out, truth(x))


def collectives(rank):
    """The collectives of one training step, forward and backward."""
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes))
    local, _ = own_rows(x, sizes, rank)
    with watched_collectives() as calls:
        out = sharded_ce(**local, process_group=dist.group.WORLD, chunk_tokens=8)
        forward = len(calls)
        out.loss_sum.backward()
        assert len(calls) == forward, "backward communicates"
    return calls, int(out.n_valid)


def errors(rank):
    sizes = UNEQUAL[dist.get_world_size()]
    x = inputs(sum(sizes))
    group = dist.group.WORLD

    def message(change=None, **more):
        local, _ = own_rows(x, sizes, rank)
        return ranks.error_of(
            sharded_ce, **local | (change or {}), **{"process_group": group} | more
        )

    bad = x["labels"].clone()
    bad[3] = sum(sizes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def weight(placements):
        return distribute_tensor(x["weight"], mesh, placements)

    return {
        "different labels": message({"labels": x["labels"].roll(rank)}),
        "label": message({"labels": bad}),
        "vocab_size": message(vocab_size=sum(sizes) + 1),
        "vocab_size type": message(vocab_size=3.0),
        "smoothing": message(label_smoothing=1.5),
        "group": message(process_group="tp"),
        "columns": ranks.error_of(fused_ce, x["hidden"], weight([Shard(1)]), x["labels"]),
        "replicated": ranks.error_of(fused_ce, x["hidden"], weight([Replicate()]), x["labels"]),
        "hidden columns": ranks.error_of(
            fused_ce,
            distribute_tensor(x["hidden"], mesh, [Shard(1)]),
            weight([Shard(0)]),
            x["labels"],
        ),
        "triton": ranks.error_of(
            fused_ce, x["hidden"], x["weight"], x["labels"], process_group=group, backend="triton"
        ),
    }


def tiles(options, tokens_sharded, rank):
    """Under a budget that asks for tiles of the vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "way_of", lambda call, **asked: held.by_tiles(call, 5, 3))
        sizes = UNEQUAL[dist.get_world_size()]
        x = inputs(sum(sizes), **options)
        local, rows = own_rows(x, sizes, rank)
        exact = truth(x)
        mine = slice(None)
        if tokens_sharded:
            world = dist.get_world_size()
            mine = slice(N * rank // world, N * (rank + 1) // world)
            for name in ("hidden", "labels", "token_weight"):
                if name in local:
                    local[name] = local[name][mine].detach().clone()
            local["hidden"].requires_grad_()
            exact[2]["hidden"] = exact[2]["hidden"][mine]
        out = sharded_ce(
            **local, process_group=dist.group.WORLD, tokens_sharded=tokens_sharded,
            memory_budget=2**30,
        )  # fmt: skip
        compare(local, rows, out, exact)
    return float(out.loss_sum)


def budgets(rank):
    """The way taken under each budget, and errors for too small or differing budgets."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 24, generator=rng).bfloat16().requires_grad_()
    weight = torch.randn(1500, 24, generator=rng).bfloat16().requires_grad_()
    x = {
        "hidden": hidden, "weight": weight, "labels": torch.arange(300),
        "process_group": dist.group.WORLD,
    }  # fmt: skip
    taken = []

    def watched(call, **asked):
        taken.append(plan.way_of(call, **asked).name)
        return plan.way_of(call, **asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held, "SCRATCH_CPU", 0)
        patch.setattr(dispatch, "way_of", watched)
        losses, grads = [], []
        for budget in (2**24, 2**20 + 2**19, 2**19):
            loss = sharded_ce(**x, memory_budget=budget).loss_sum
            losses.append(float(loss.detach()))
            grads.append(torch.autograd.grad(loss, (hidden, weight)))
        small = ranks.error_of(functools.partial(sharded_ce, **x, memory_budget=2**16))
        other = ranks.error_of(functools.partial(sharded_ce, **x, memory_budget=2**20 + rank))
        patch.setenv("FUSEDCE_MEMORY_BUDGET", str(2**20 + rank))
        of_environment = ranks.error_of(functools.partial(sharded_ce, **x))
        patch.delenv("FUSEDCE_MEMORY_BUDGET")
        capped = functools.partial(sharded_cross_entropy, **x, reduction="none", softcap=5.0)
        least = re.search(r"at least (\d+) bytes", ranks.error_of(capped, memory_budget=1))
        assert least is not None
        capped(memory_budget=int(least[1])).sum().backward()  # has room, too
        x["hidden"].grad = x["weight"].grad = None
    torch.testing.assert_close(losses, losses[:1] * 3)
    rows = slice(1500 * rank, 1500 * (rank + 1))
    whole = weight.detach().repeat(dist.get_world_size(), 1)  # every rank has drawn the same
    exact = [x.detach().double().requires_grad_() for x in (whole, hidden)]
    logits = exact[1] @ exact[0].T
    of_weight, of_hidden = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits, x["labels"], reduction="sum"), exact
    )
    for found in grads:  # of each way, within two roundings
        for g, e in zip(found, (of_hidden, of_weight[rows]), strict=True):
            assert (g.double() - e).norm() <= 2 * 2**-9 * e.norm()
    return taken, small, other, of_environment


CASES = {
    **{f"local {k}": functools.partial(local_shards, v) for k, v in OPTIONS.items()},
    "float32": functools.partial(local_shards, OPTIONS["everything"], dtype=torch.float32),
    "bfloat16": functools.partial(low_precision, torch.bfloat16),
    "float16": functools.partial(low_precision, torch.float16),
    "peaked": peaked,
    "padded": padded,
    "sharded tokens": functools.partial(sharded_tokens, {}),
    "sharded tokens, all options": functools.partial(sharded_tokens, OPTIONS["everything"]),
    "nothing valid": nothing_valid,
    "frozen and twice": frozen_and_twice,
    "automatic chunks": automatic_chunks,
    "tiles": functools.partial(tiles, {}, False),
    "tiles, all options": functools.partial(tiles, OPTIONS["everything"], False),
    "tiles, sharded tokens": functools.partial(tiles, OPTIONS["everything"], True),
    "budgets": budgets,
    "chunked": chunked,
    "collectives": collectives,
    "errors": errors,
}
QUICK = ("chunked", "collectives", "errors", "budgets")
EQUAL = [name for name in CASES if name not in QUICK]
WORLDS = pytest.mark.parametrize("world", [2, 4])


@functools.cache
def results(world, names=QUICK):
    return ranks.run({name: CASES[name] for name in names}, world)


@WORLDS
@pytest.mark.parametrize("name", EQUAL)
def test_equals_the_whole_vocabulary(name, world):
    found = ranks.of(results(world, tuple(EQUAL)), name)
    assert len(set(found)) == 1  # the same bits of the loss on all ranks


@WORLDS
def test_only_a_chunk_of_logits_is_held(world):
    for training, evaluation in ranks.of(results(world), "chunked"):
        assert training == evaluation == 10


@WORLDS
def test_a_budget_decides_the_way_on_all_ranks(world):
    for taken, small, other, of_environment in ranks.of(results(world), "budgets"):
        assert taken == ["one chunk", "chunks", "tiles"]
        assert "ValueError: memory_budget must be at least" in small
        assert "memory_budget must be the same on all ranks" in other
        assert "memory_budget must be the same on all ranks" in of_environment


@WORLDS
def test_the_collectives_are_those_of_the_docstring(world):
    assert 8 * LENGTH <= 1024
    for calls, n_valid in ranks.of(results(world), "collectives"):
        chunks = [min(8, n_valid - i) for i in range(0, n_valid, 8)]
        assert len(chunks) > 1
        assert calls == [
            (ALL_GATHER, world * LENGTH, True),
            (ALL_GATHER, world * 2 * chunks[0], False),
            *[
                call  # the sum of one chunk's rows runs while the next chunk is computed
                for C, following in itertools.pairwise(chunks)
                for call in (
                    (ALL_GATHER, world * 2 * following, False),
                    ("all_reduce", C * H, True),
                )
            ],
            ("all_reduce", chunks[-1] * H, True),
        ]


@WORLDS
def test_errors_are_raised_on_all_ranks(world):
    for found in ranks.of(results(world), "errors"):
        rows = sum(UNEQUAL[world])
        assert "ValueError: labels must be the same on all ranks" in found["different labels"]
        assert (
            f"ValueError: labels must hold class indices in 0 <= label < V={rows}" in found["label"]
        )
        assert f"got {rows} at flattened position 3" in found["label"]
        assert f"vocab_size must be 1 to {rows} (all rows), got {rows + 1}" in found["vocab_size"]
        assert "TypeError: vocab_size must be an int" in found["vocab_size type"]
        assert "ValueError: label_smoothing must be in [0, 1], got 1.5" in found["smoothing"]
        assert "TypeError: process_group must be a process group" in found["group"]
        assert "ValueError: weight must have Shard(0)" in found["columns"]
        assert "pass weight.redistribute(placements=[Shard(0)])" in found["columns"]
        assert "pass weight.to_local()" in found["replicated"]
        assert "pass hidden.redistribute(placements=[Replicate()])" in found["hidden columns"]
        assert "RuntimeError: backend='triton' cannot run" in found["triton"]
