"""Two real gloo processes with uneven batches equal one process with all of them."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fusedce import LossAccumulator, count_valid, fused_ce

V, H = 31, 8
# tokens per micro-batch, [window][rank]; the last window has a rank with nothing valid
WINDOWS = [[[5, 1], [20, 3]], [[0, 7], [2, 2]], [[4, 9], [0, 0]]]


def micro_batches(window, rank):
    rng = torch.Generator().manual_seed(100 * window + rank)
    for n in WINDOWS[window][rank]:
        hidden = torch.randn(n + 2, H, generator=rng)
        labels = torch.randint(0, V, (n + 2,), generator=rng)
        labels[n:] = -100
        yield hidden, labels


def new_model():
    torch.manual_seed(3)
    return torch.nn.Linear(H, V, bias=False)


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = new_model()

    def forward(self, hidden, labels):
        return fused_ce(hidden, self.head.weight, labels)


def worker(rank, path, mode, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        results[rank] = CASES[mode](rank)
    finally:
        dist.destroy_process_group()


def train(rank, streaming, ddp):
    model = Loss()
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
    acc = LossAccumulator(grad_reduction="mean" if ddp else "sum")
    grads = []
    for window in range(len(WINDOWS)):
        model.zero_grad()
        micro = list(micro_batches(window, rank))
        if streaming:
            for hidden, labels in micro:
                acc.backward(wrapped(hidden, labels))
        else:
            with acc.window([count_valid(y, offset=0) for _, y in micro]):
                for hidden, labels in micro:
                    acc.backward(wrapped(hidden, labels))
        grad = model.head.weight.grad
        if not ddp:
            dist.all_reduce(grad)
        if streaming:
            acc.finish(model.parameters())
        grads.append(model.head.weight.grad.clone())
    return grads, acc.metrics()


def ranks_differ(rank):
    try:
        with LossAccumulator().window([1] * (rank + 1)):
            pass
    except RuntimeError as e:
        return str(e)


def empty_raises(rank):
    try:
        with LossAccumulator(on_empty="raise").window([0]):
            pass
    except RuntimeError as e:
        return str(e)


def one_rank_empty(rank):
    with LossAccumulator(on_empty="raise").window([rank]) as acc:
        hidden, labels = torch.randn(1, H), torch.tensor([1 if rank else -100])
        acc.backward(fused_ce(hidden, torch.randn(V, H, requires_grad=True), labels))
    return acc.metrics()["n_tokens"]


CASES = {
    "window_ddp": lambda rank: train(rank, False, True),
    "streaming_ddp": lambda rank: train(rank, True, True),
    "window_sum": lambda rank: train(rank, False, False),
    "streaming_sum": lambda rank: train(rank, True, False),
    "ranks_differ": ranks_differ,
    "empty_raises": empty_raises,
    "one_rank_empty": one_rank_empty,
}


def spawn(mode):
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(
            worker, (os.path.join(folder, "store"), mode, results), nprocs=2, start_method="fork"
        )
        return [results[0], results[1]]


@pytest.mark.parametrize("mode", ["window_ddp", "streaming_ddp", "window_sum", "streaming_sum"])
def test_two_ranks_are_one_big_batch(mode):
    results = spawn(mode)
    total, tokens = 0.0, 0
    for window in range(len(WINDOWS)):
        parts = [p for rank in range(2) for p in micro_batches(window, rank)]
        hidden, labels = (torch.cat(x) for x in zip(*parts, strict=True))
        head = new_model()
        out = fused_ce(hidden, head.weight, labels)
        out.mean().backward()
        total, tokens = total + out.loss_sum.item(), tokens + out.n_valid.item()
        for grads, _ in results:
            error = (grads[window] - head.weight.grad).norm() / head.weight.grad.norm()
            assert error < 1e-6
    for _, metrics in results:
        assert metrics["n_tokens"] == tokens
        assert metrics["loss"] == pytest.approx(total / tokens, rel=1e-6)


def test_ranks_with_different_numbers_of_micro_batches():
    a, b = spawn("ranks_differ")
    assert "1 here, 3 on 2 ranks" in a
    assert "2 here, 3 on 2 ranks" in b


def test_empty_is_a_matter_of_all_ranks():
    assert all("no valid token" in message for message in spawn("empty_raises"))
    assert spawn("one_rank_empty") == [1, 1]
