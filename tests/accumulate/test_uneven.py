"""Ranks with unequal numbers of micro-batches or samples: an error, or counted once; no hang."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.bounds import SAME_MODEL
from support.engines import accelerator
from support.loops import H, V, new_weight
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fusedce import LossAccumulator, fused_ce
from fusedce.accumulate.guard import _OPEN

ROWS = [3, 1, 4, 1, 5, 2, 3]  # tokens of each sample: 19; filled up for two ranks of two, 8 rows


def joined(guarded, rank):
    """DDP's ``Join``, with and without a model that the accumulator guards."""
    model = DistributedDataParallel(parallel.Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = LossAccumulator()
    if guarded:
        acc.guard(optimizer, model)

    def loop(declared):
        with Join([model]):
            one = parallel.micro_batches(0, rank)[0]
            if declared:
                acc.window([1]).__enter__()
            else:
                acc.backward(model(*one))

    refused = ranks.error_of(loop, True), ranks.error_of(start_joined, acc, model, rank)
    Join([model], enable=False)  # as the message says: a Join that is over leaves its mark
    acc.backward(model(*parallel.micro_batches(0, rank)[0]))
    assert acc.finish(model.parameters())
    return refused


def start_joined(acc, model, rank):
    acc.discard_window()
    Join([model])
    acc.backward((new_weight().sum(), torch.tensor(1)))


def ran_out_and_helped(rank):
    """The error's advice works: a rank without data goes on with ignored labels."""
    model = DistributedDataParallel(parallel.Model())
    acc = LossAccumulator()
    for window in range(2):
        model.zero_grad()
        hidden, labels = parallel.micro_batches(window, rank)[0]
        if rank and window:
            labels = torch.full_like(labels, -100)
        with acc.window([(labels != -100).sum()]):
            acc.backward(model(hidden, labels))
    return parallel.whole(model.module.head.weight.grad), acc.metrics()


def ones():
    """One valid token."""
    hidden, labels = parallel.micro_batches(0, 2)[0]
    labels[1:] = -100
    return hidden, labels


def evaluation(masked, rank):
    """Seven samples for two ranks in batches of two: accelerate repeats one."""
    engine = accelerator(rank)
    loader = engine.prepare(DataLoader(samples(), batch_size=2, collate_fn=collate))
    weight = new_weight().detach()
    acc = LossAccumulator.from_accelerator(engine)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for batch in loader:
            if masked:
                batch = acc.without_repeats(batch)
            acc.add(fused_ce(batch["hidden"], weight, batch["labels"]))
    said = [str(w.message) for w in caught if "counted twice" in str(w.message)]
    return acc.metrics(), said


def samples():
    rng = torch.Generator().manual_seed(0)
    found = []
    for n in ROWS:
        labels = torch.full((6,), -100)
        labels[:n] = torch.randint(V, (n,), generator=rng)
        found.append({"hidden": torch.randn(6, H, generator=rng), "labels": labels})
    return found


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


CASES = {
    "joined": functools.partial(joined, False),
    "joined, guarded": functools.partial(joined, True),
    "helped": ran_out_and_helped,
    "masked": functools.partial(evaluation, True),
    "counted twice": functools.partial(evaluation, False),
}


@functools.cache
def results():
    return ranks.run(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joined", "joined, guarded"])
def test_join_is_refused_in_the_same_words(name):
    (a, b), (c, d) = ranks.of(results(), name)
    assert a == c
    assert b == d
    for words in (a, b):
        assert "Join lets a rank leave while others train on" in words
        assert "micro-batches whose labels are all ignore_index" in words


def open_windows(rank):
    return len(_OPEN)


def test_a_forked_process_has_no_open_window_of_its_parent():
    """Its gradients would count as another accumulator's."""
    acc = LossAccumulator()
    hidden, labels = ones()
    acc.backward(fused_ce(hidden, new_weight(), labels))
    assert open_windows(0) > 0
    assert ranks.of(ranks.run({"open": open_windows}), "open") == [0, 0]
    acc.discard_window()


def test_a_rank_without_data_takes_part():
    for grad, metrics in ranks.of(results(), "helped"):
        model = parallel.Model()
        out = model(*parallel.micro_batches(1, 0)[0])
        out.mean().backward()
        torch.testing.assert_close(grad, model.head.weight.grad, rtol=SAME_MODEL, atol=1e-7)
        assert metrics["n_tokens"] == 5 + 20 + 4


def test_samples_that_fill_up_are_counted_once():
    weight = new_weight().detach()
    rows = collate(samples())
    exact = fused_ce(rows["hidden"], weight, rows["labels"])
    for metrics, said in ranks.of(results(), "masked"):
        assert metrics["n_tokens"] == sum(ROWS)
        assert metrics["loss"] == pytest.approx(float(exact.mean()), rel=1e-6)
        assert said == []
    for metrics, said in ranks.of(results(), "counted twice"):
        assert metrics["n_tokens"] > sum(ROWS)
        assert "acc.without_repeats(batch)" in said[0]


def test_one_process_repeats_nothing():
    acc = LossAccumulator()
    batch = {"labels": torch.ones(2, 3)}
    assert acc.without_repeats(batch) is batch
    assert not dist.is_initialized()
