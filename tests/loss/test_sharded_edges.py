"""A vocabulary spread over gloo processes: tokens, gradients or logits out of the ordinary."""

import functools
import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import EXACT, IN_FLOAT64, SAME_SUMS, logit_rounding
from support.params import slow
from support.versions import COMPILES_COLLECTIVES
from support.vocabulary import UNEQUAL, K, Layout, N, answers, inputs, whole

from fusedce import (
    fused_ce,
    fused_cross_entropy,
    fused_kl,
    fused_logprobs,
    fused_topk,
    reference_ce,
)

losses = functools.partial(fused_cross_entropy, reduction="none")
FUNCTIONS = (fused_ce, losses, fused_logprobs)
DTYPES = {"torch": torch.float64, "triton": torch.float32}


def drawn(backend, **options):
    return inputs(sum(UNEQUAL[dist.get_world_size()]), DTYPES[backend], **options)


def shard(x, rank, backend, **options):
    """Arguments of this rank, and its slice of rows."""
    local, rows, _ = Layout(own_tokens=options.get("tokens_sharded", False)).held(x, rank)
    return local | {"process_group": dist.group.WORLD, "backend": backend} | options, rows


def upstream_of_zero(backend, rank):
    """Own tokens whose losses nobody needs: gradients are 0, not absent."""
    for function in (losses, fused_logprobs):
        local, _ = shard(drawn(backend), rank, backend, tokens_sharded=True)
        out = function(**local)
        (0 * (out if isinstance(out, torch.Tensor) else out.logprob + out.entropy)).sum().backward()
        assert all(local[name].grad.eq(0).all() for name in ("hidden", "weight"))


def frozen_and_twice(backend, rank):
    """Only what requires grad gets one; a second backward adds the same again."""
    x = drawn(backend)
    exact = whole({k: v.double() if k != "labels" else v for k, v in x.items()})
    reference_ce(**exact).loss_sum.backward()
    # gradients of N tokens, added twice, each with the rounding of its logits
    atol = 2 * N * logit_rounding(x["hidden"].nan_to_num(), x["weight"])
    close = IN_FLOAT64 if backend == "torch" else {"rtol": SAME_SUMS, "atol": atol}
    for function in (lambda **o: fused_ce(**o).loss_sum, lambda **o: losses(**o).sum()):
        for frozen, trained in (("hidden", "weight"), ("weight", "hidden")):
            local, rows = shard(x, rank, backend)
            local[frozen].requires_grad_(False)
            loss = function(**local)
            loss.backward(retain_graph=True)
            loss.backward()
            expected = 2 * exact[trained].grad[rows if trained == "weight" else slice(None)]
            torch.testing.assert_close(local[trained].grad.double(), expected, **close)
            assert local[frozen].grad is None
            with pytest.raises(RuntimeError, match=r"create_graph|not differentiable"):
                torch.autograd.grad(function(**local), local[trained], create_graph=True)
        with torch.no_grad():
            assert not function(**local).requires_grad


def infinite(backend, rank):
    x = drawn(backend, bias=True)
    x["bias"][2] = math.inf
    local, _ = shard(x, rank, backend)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert not fused_ce(**local).loss_sum.isfinite()


def masked_label(backend, rank):
    """A label whose logit is -inf: the loss and the gradients are those of a whole vocabulary."""
    x = drawn(backend, bias=True)
    x["bias"][x["labels"].max()] = -math.inf
    every, (local, rows) = whole(x), shard(x, rank, backend)
    (loss, _), grads = answers(fused_ce, local)
    (expected, _), exact = answers(fused_ce, every | {"backend": backend})
    assert loss == expected == math.inf
    torch.testing.assert_close(grads["hidden"], exact["hidden"], equal_nan=True)
    torch.testing.assert_close(grads["weight"], exact["weight"][rows], equal_nan=True)


def batches(backend, rank):
    """A token's loss has the same bits in any batch."""
    x = inputs(830 if backend == "triton" else sum(UNEQUAL[dist.get_world_size()]), torch.float32)
    x["labels"] = x["labels"].where(x["labels"] != -100, torch.tensor(3))
    x["hidden"] = x["hidden"].nan_to_num(0.5)
    sizes = {2: (300, 530)} if backend == "triton" else UNEQUAL
    x["token_weight"] = torch.zeros(N).index_fill_(0, torch.tensor(4), 1)
    found = set()
    for tokens in (slice(4, 5), slice(0, N), slice(3, 12)):
        some = {k: v if k == "weight" else v[tokens] for k, v in x.items()}
        for grad in (True, False):
            local, _, _ = Layout(sizes).held(some, rank)
            with torch.set_grad_enabled(grad):
                out = fused_ce(**local, process_group=dist.group.WORLD, backend=backend)
            found.add((grad, float(out.loss_sum)))
    assert len(found) == 2, found


def any_order_of_memory(backend, rank):
    """Columns side by side, biases with gaps, a rank without rows: the same as rows side by side.

    A collective sends memory as it lies.
    """
    x = inputs(sum(UNEQUAL[dist.get_world_size()]), torch.float32, bias=True)
    x["labels"] = x["labels"].where(x["labels"] >= 0, 1)  # every token counts
    x["hidden"] = x["hidden"].nan_to_num(0.5)
    for function in FUNCTIONS:
        plain, _ = shard(x, rank, backend)
        other, _ = shard(x, rank, backend)
        with torch.no_grad():
            for name in ("hidden", "weight"):
                other[name] = other[name].t().contiguous().t().requires_grad_()
            gaps = other["bias"].repeat_interleave(2)[::2]
            other["bias"] = gaps.detach().requires_grad_()
        expected, found = (answers(function, local) for local in (plain, other))
        torch.testing.assert_close(found, expected, rtol=SAME_SUMS, atol=SAME_SUMS)


def kinds_that_differ(backend, rank):
    """Labels and weights of own tokens in other dtypes on each rank: the same bits as in one."""
    found = []
    same = (torch.int64,) * 4, (torch.float32,) * 4
    mixed = (torch.int64, torch.int32) * 2, (torch.int16, torch.float64) * 2
    for of_labels, of_weights in (same, mixed):
        x = drawn(backend) | {"token_weight": (torch.arange(N) % 3).float()}
        local, _ = shard(x, rank, backend, tokens_sharded=True)
        local["labels"] = local["labels"].to(of_labels[rank])
        local["token_weight"] = local["token_weight"].to(of_weights[rank])
        found.append(answers(fused_ce, local))
    torch.testing.assert_close(found[1], found[0], **EXACT)


def one_of_several(backend, rank):
    """One class a token is its label; padding is out of range; a budget has room or says so."""
    V = sum(UNEQUAL[dist.get_world_size()])
    x = inputs(V, torch.float32)
    label, _ = shard(x, rank, backend)
    one, _ = shard(x | {"labels": x["labels"][:, None].int()}, rank, backend)
    (logprob, *others), grads = answers(fused_logprobs, label)
    (of_one, *others_of_one), grads_of_one = answers(fused_logprobs, one)
    torch.testing.assert_close((of_one[:, 0], others_of_one), (logprob, others), **EXACT)
    torch.testing.assert_close(grads_of_one, grads)
    x = inputs(V, torch.float32, kind="several")
    x["labels"] = x["labels"].clamp(max=V - 2)
    several, _ = shard(x, rank, backend)
    free = fused_logprobs(**several)
    torch.testing.assert_close(tuple(fused_logprobs(**several, memory_budget=2**23)), tuple(free))
    assert "memory_budget" in ranks.error_of(fused_logprobs, **several, memory_budget=2**12)
    several["labels"][3, 2] = V - 1
    bad = ranks.error_of(fused_logprobs, **several, vocab_size=V - 1)
    assert f"got {V - 1} at flattened position {3 * K + 2}" in bad


def groups_of_one(backend, rank):
    """A rank alone in a group of its own has the whole vocabulary."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.5, -0.5, 1.0]])
    target = torch.tensor([2, 0])
    found = losses(logits, torch.eye(3), target, process_group=groups[rank], backend=backend)
    torch.testing.assert_close(found, F.cross_entropy(logits, target, reduction="none"))


def in_compiled_code(_, rank):
    """A plain process group, which a compiler may not ask for just anything."""
    x = {k: v for k, v in drawn("torch").items() if k in ("hidden", "weight", "labels")}
    local, _ = shard(x, rank, "torch")
    names = [k for k in ("hidden", "weight") if k in local]
    for function in (fused_ce, fused_logprobs):
        found = []
        for run in (function, torch.compile(function, backend="aot_eager")):
            out = run(**local)[0]
            found.append((out, *torch.autograd.grad(out.sum(), [local[k] for k in names])))
        torch.testing.assert_close(found[1], found[0])


def least_budget_of_uneven_shards(_, rank):
    """The largest shard decides: all ranks raise, and say the same."""
    x = {k: v for k, v in drawn("torch").items() if k in ("hidden", "weight")}
    local, _ = shard(x, rank, "torch")
    local = {k: v.detach() if torch.is_tensor(v) else v for k, v in local.items()}
    words = ranks.error_of(fused_topk, **local, k=2, memory_budget=2**12)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, words)
    assert "memory_budget must be at least" in words
    assert len(set(told)) == 1, told
    least = int(re.search(r"at least (\d+)", words)[1])
    fused_topk(**local, k=2, memory_budget=least)


def a_whole_teacher_beside_a_shard(_, rank):
    x = {k: v for k, v in drawn("torch").items() if k in ("hidden", "weight")}
    local, _ = shard(x, rank, "torch")
    words = ranks.error_of(
        fused_kl, **local, teacher_hidden=x["hidden"].nan_to_num(), teacher_weight=x["weight"]
    )
    assert "this rank's rows" in words


BOTH = (
    upstream_of_zero, frozen_and_twice, infinite, masked_label, batches, any_order_of_memory,
    kinds_that_differ, one_of_several, groups_of_one,
)  # fmt: skip
CASES = {
    "torch": (
        *BOTH,
        least_budget_of_uneven_shards,
        a_whole_teacher_beside_a_shard,
        *[in_compiled_code] * COMPILES_COLLECTIVES,
    ),
    "triton": BOTH,
}
OF_FOUR = (any_order_of_memory,)  # by Triton, which is interpreted


@functools.cache
def results(backend, world):
    cases = CASES[backend] if world == 2 or backend == "torch" else OF_FOUR
    return ranks.run({case.__name__: functools.partial(case, backend) for case in cases}, world)


@pytest.mark.parametrize(
    ("backend", "world", "name"),
    [
        *(("torch", world, case.__name__) for world in (2, 4) for case in CASES["torch"]),
        *(slow("triton", 2, case.__name__) for case in CASES["triton"]),
        *(slow("triton", 4, case.__name__) for case in OF_FOUR),
    ],
)
def test_on_ranks(backend, world, name):
    ranks.of(results(backend, world), name)
