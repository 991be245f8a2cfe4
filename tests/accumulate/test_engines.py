"""The accumulator under real engines, with gloo processes: equal to a single process.

`support/parallel.py` has the data: uneven lengths, one rank fully ignored in one window, the last
window short.
"""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.bounds import SAME_SUMS, STATISTIC
from support.engines import accelerator, train
from support.loops import H, V, distance, new_weight
from support.versions import FSDP2_MEAN, marked
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, default_collate

from fusedce import LossAccumulator, LossMeter, fused_ce


def no_sync(model, last):
    return contextlib.nullcontext() if last else model.no_sync()


def fsdp(reduction, streaming, rank):
    model = fully_shard(parallel.Model())
    if reduction == "sum":
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)  # gloo has no multiply-and-sum
    return train(model, LossAccumulator(model, grad_reduction=reduction), rank, streaming)


def accelerate_streaming(rank):
    """`accelerate`'s own loop: it prefetches, ends the short window, and divides by 3 always."""
    engine = accelerator(rank, gradient_accumulation_steps=3)
    model = parallel.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=parallel.LEARNING_RATE)
    model, optimizer = engine.prepare(model, optimizer)
    acc = LossAccumulator.from_accelerator(engine, model)
    grads = []
    for hidden, labels in loader(engine):
        with engine.accumulate(model):
            acc.backward(model(hidden, labels))
            if engine.sync_gradients:
                acc.finish()
                grads.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return grads, [p.detach() for p in model.parameters()], acc.metrics()


def accelerate_window(rank):
    """Micro-batches are drawn first: `accumulate` would take each of the last ones for an end."""
    engine = accelerator(rank, gradient_accumulation_steps=3)
    model = engine.prepare(parallel.Model())
    return train(
        model, LossAccumulator.from_accelerator(engine, model), rank, False, silent=no_sync
    )


def loader(engine):
    """The micro-batches of all ranks, dealt out in turn."""
    world = dist.get_world_size()
    per_rank = [
        [x for window in range(len(parallel.WINDOWS)) for x in parallel.micro_batches(window, r)]
        for r in range(world)
    ]
    dealt = [x for together in zip(*per_rank, strict=True) for x in together]
    return engine.prepare(DataLoader(dealt, batch_size=1, collate_fn=lambda batch: batch[0]))


EQUAL = {"accelerate, streaming": accelerate_streaming, "accelerate, window": accelerate_window}
EQUAL |= {f"fsdp2, divide factor 1, {x}": functools.partial(fsdp, "sum", x) for x in (False, True)}
FOUR = {f"fsdp2, mean, four, {x}": functools.partial(fsdp, "mean", x) for x in (False, True)}
found_of = {2: ranks.shared(EQUAL), 4: ranks.shared(FOUR, 4)}


@pytest.mark.parametrize("name", marked([*EQUAL, *FOUR], FSDP2_MEAN, "fsdp2, mean"))
def test_several_processes_equal_one(name):
    world = 4 if name in FOUR else 2
    for found in found_of[world](name):
        parallel.assert_equal_to_single_process(found, world)


# ---- accelerate ---------------------------------------------------------------------------------

on_two_ranks = ranks.together()


@on_two_ranks
def test_engines_that_accelerate_drives(rank):
    """Test doubles stand for DeepSpeed, which is not installed."""
    deepspeed = SimpleNamespace(
        distributed_type=SimpleNamespace(value="DEEPSPEED"),
        gradient_accumulation_steps=3,
        backward=lambda loss: (loss / 3).backward(),
    )
    acc, model = LossAccumulator.from_accelerator(deepspeed), parallel.Model()
    batch = parallel.micro_batches(0, 0)[0]
    words = "streaming is not possible here: .*steps the optimizer inside the last backward"
    with pytest.raises(RuntimeError, match=words):
        acc.backward(model(*batch))
    with acc.window([5]):  # declared counts are fine: 5 tokens here and 5 there
        acc.backward(model(*batch))
    dist.all_reduce(model.head.weight.grad)
    exact = parallel.Model()
    exact(*batch).mean().backward()
    assert distance(model.head.weight.grad / 2, exact.head.weight.grad) <= SAME_SUMS
    for changes, words in (
        ({"distributed_type": SimpleNamespace(value="MEGATRON_LM")}, "Megatron-LM"),
        ({"parallelism_config": SimpleNamespace(sp_enabled=True)}, "DeepSpeed's sequence"),
    ):
        with pytest.raises(ValueError, match=f"accelerator: {words}"):
            LossAccumulator.from_accelerator(SimpleNamespace(**vars(deepspeed) | changes))
    with pytest.raises(TypeError, match=r"accelerator must be an accelerate.Accelerator"):
        LossAccumulator.from_accelerator(model)
    assert "2 ranks" in repr(LossAccumulator.from_accelerator(accelerator(rank)))


ROWS = [3, 1, 4, 1, 5, 2, 3]  # tokens of each sample: 19; filled up for two ranks of two, 8 rows


def samples():
    rng = torch.Generator().manual_seed(0)
    found = []
    for n in ROWS:
        labels = torch.full((6,), -100)
        labels[:n] = torch.randint(V, (n,), generator=rng)
        found.append({"hidden": torch.randn(6, H, generator=rng), "labels": labels})
    return found


@on_two_ranks
def test_samples_that_fill_up_are_counted_once(rank):
    """Seven samples for two ranks in batches of two: accelerate repeats one."""
    engine, weight = accelerator(rank), new_weight().detach()
    for masked in (True, False):
        acc, meter = LossAccumulator.from_accelerator(engine), LossMeter()
        for batch in engine.prepare(DataLoader(samples(), batch_size=2)):
            if masked:
                batch = acc.mask_repeated_samples(batch)
            meter.update(fused_ce(batch["hidden"], weight, batch["labels"]))
        metrics = meter.compute()
        if masked:
            rows = default_collate(samples())
            exact = float(fused_ce(rows["hidden"], weight, rows["labels"]).mean())
            assert metrics["n_tokens"] == sum(ROWS)
            assert metrics["loss"] == pytest.approx(exact, rel=STATISTIC)
        else:
            assert metrics["n_tokens"] > sum(ROWS)
