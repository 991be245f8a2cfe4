"""Ranks with unequal numbers of micro-batches or samples: an error, or counted once; no hang."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.engines import accelerator
from support.loops import H, V, new_weight
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fusedce import LossAccumulator, fused_ce
from fusedce.accumulate.window_grads import _STREAMING

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


def runs_out(first, rank):
    """Rank 1 has two micro-batches, rank 0 three; DDP reduces gradients in every backward.

    ``first`` chooses the earlier event: the end of rank 1's window or rank 0's third micro-batch;
    after ``both``, each rank looks for the mark of the other.
    """
    model = DistributedDataParallel(parallel.Model())
    acc = LossAccumulator()
    stream(acc, model, 2)
    exchange = acc._lifecycle.exchange
    n_messages, store, mark = exchange._n_messages, exchange._store(), exchange._mark

    def goes_on():
        if first != "third":
            store.wait([f"end/{n_messages}"])
        stream(acc, model, 1)
        acc.finish(model.parameters())

    def mark_and_wait(micro_batches):
        mark(micro_batches)
        store.wait([f"begun/{n_messages}/3"])

    def ends():
        if first == "third":
            store.wait([f"begun/{n_messages}/3"])
        if first == "both":
            exchange._mark = mark_and_wait
        acc.finish(model.parameters())

    error, seconds = ranks.timed(ends if rank else goes_on)
    if rank and first == "third":
        model(*parallel.micro_batches(1, 0)[0]).loss_sum.backward()  # what rank 0 waits for
    return error, seconds, goes_on_afterwards(acc, model, rank)


def fails(rank):
    """Rank 1 raises in a window of known counts, before DDP's backward."""
    model = DistributedDataParallel(parallel.Model())
    acc = LossAccumulator()

    def window():
        with acc.window([1, 1]):
            stream(acc, model, 1)
            if rank:
                raise ZeroDivisionError("a bug in the loop")
            exchange = acc._lifecycle.exchange
            exchange._store().wait([f"end/{exchange._n_messages}"])
            stream(acc, model, 1)

    error, seconds = ranks.timed(window)
    return error, seconds, goes_on_afterwards(acc, model, rank)


def two_at_once(rank):
    """One ends after two micro-batches, while the other accumulator's third is on its way."""
    (a, one), (b, two) = ((LossAccumulator(), new_weight()) for _ in range(2))
    hidden, labels = ones()
    for acc, weight in ((a, one), (b, two), (a, one), (b, two)):
        acc.backward(fused_ce(hidden, weight, labels))
    if not rank:
        a._lifecycle.exchange._store().wait([f"end/{a._lifecycle.exchange._n_messages}"])
        b.backward(fused_ce(hidden, two, labels))
    a.finish([one])
    if rank:
        b.backward(fused_ce(hidden, two, labels))
    b.finish([two])
    return a.metrics()["n_tokens"], b.metrics()["n_tokens"]


def stream(acc, model, times):
    for _ in range(times):
        acc.backward(model(*ones()))


def ones():
    """One valid token."""
    hidden, labels = parallel.micro_batches(0, 2)[0]
    labels[1:] = -100
    return hidden, labels


def goes_on_afterwards(acc, model, rank):
    acc.discard_window()
    model.zero_grad()
    stream(acc, model, 1)
    return acc.finish(model.parameters())


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


def marked(case):
    """Ended windows leave marks, as TORCH_DISTRIBUTED_DEBUG asks for."""

    def run(rank):
        dist.set_debug_level(dist.DebugLevel.INFO)
        try:
            return case(rank)
        finally:
            dist.set_debug_level(dist.DebugLevel.OFF)

    return run


CASES = {
    "joined": functools.partial(joined, False),
    "joined, guarded": functools.partial(joined, True),
    "helped": ran_out_and_helped,
    "ends first": marked(functools.partial(runs_out, "end")),
    "both at once": marked(functools.partial(runs_out, "both")),
    "begins first": marked(functools.partial(runs_out, "third")),
    "fails": marked(fails),
    "two at once": marked(two_at_once),
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
    return len(_STREAMING)


def test_a_forked_process_has_no_open_window_of_its_parent():
    """Its gradients would count as another accumulator's."""
    acc = LossAccumulator()
    hidden, labels = ones()
    acc.backward(fused_ce(hidden, new_weight(), labels))
    assert open_windows(0) > 0
    assert ranks.of(ranks.run({"open": open_windows}), "open") == [0, 0]
    acc.discard_window()


def test_a_rank_that_runs_out_of_micro_batches():
    words = "RuntimeError: ranks have different numbers of micro-batches in this window: "
    for case in ("ends first", "both at once"):
        (a, fast, after), (b, fast_too, after_too) = ranks.of(results(), case)
        assert a == b
        assert a.startswith(words + "2 on rank 1, 3 on rank 0")
        assert after
        assert after_too
        assert max(fast, fast_too) < ranks.SOON
    (a, *_), (b, fast, _) = ranks.of(results(), "begins first")
    assert a.startswith(words)
    assert b.startswith(words + "this one ends it after 2, rank 0 has begun number 3")
    assert fast < ranks.SOON


def test_a_rank_that_fails_is_not_waited_for_in_backward():
    (told, fast, after), (own, _, after_too) = ranks.of(results(), "fails")
    assert own == "ZeroDivisionError: a bug in the loop"
    assert told == f"RuntimeError: {own} (on rank 1)"
    assert fast < ranks.SOON
    assert after
    assert after_too


def test_two_accumulators_do_not_wait_for_each_other():
    assert ranks.of(results(), "two at once") == [(4, 6), (4, 6)]


def test_a_rank_without_data_takes_part():
    for grad, metrics in ranks.of(results(), "helped"):
        model = parallel.Model()
        out = model(*parallel.micro_batches(1, 0)[0])
        out.mean().backward()
        torch.testing.assert_close(grad, model.head.weight.grad, rtol=1e-5, atol=1e-7)
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
