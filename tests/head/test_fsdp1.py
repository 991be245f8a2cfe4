"""FSDP1 around a replaced head: the whole model without logits, a head of its own refused."""

import contextlib
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from fusedce import head_report, replace_loss_head

V, H = 37, 16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(V, H), nn.Linear(H, H)
        self.lm_head = nn.Linear(H, V, bias=False)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.body(self.embedding(ids))))


def batch(rank):
    return torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(rank))


def two_steps(model, rank):
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        z = model(batch(rank))
        loss = F.cross_entropy(z[:, :-1].flatten(0, 1), batch(rank)[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def wrapped(replaced, unit, original_parameters):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = Model()
    if replaced:
        replace_loss_head(model)
    options = {"use_orig_params": original_parameters, "device_id": torch.device("cpu")}
    model.body = FSDP(model.body, **options)
    if unit:
        model.lm_head = FSDP(model.lm_head, **options)
    return FSDP(model, **options)


def worker(rank, path, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        for original in (False, True):
            native = two_steps(wrapped(False, False, original), rank)
            model = wrapped(True, False, original)
            losses, report = two_steps(model, rank), head_report(model)
            counts = report.losses_fused, report.logits_made
            results["whole", original, rank] = native, losses, counts
            try:
                two_steps(wrapped(True, True, original), rank)
                results["unit", original, rank] = "no error"
            except RuntimeError as e:
                results["unit", original, rank] = str(e)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes():
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        path = os.path.join(folder, "store")
        with contextlib.suppress(mp.ProcessRaisedException, mp.ProcessExitedException):
            mp.start_processes(worker, (path, results), nprocs=2, start_method="fork")
        yield dict(results)


@pytest.mark.parametrize("original", [False, True])
def test_a_whole_model_trains_without_logits(original, two_processes):
    for rank in range(2):
        native, losses, counts = two_processes["whole", original, rank]
        assert losses == pytest.approx(native, rel=1e-5)
        assert counts == (2, 0)


@pytest.mark.parametrize("original", [False, True])
def test_a_head_that_is_a_unit_of_its_own_is_refused_in_words(original, two_processes):
    for rank in range(2):
        assert "FSDP1 (FullyShardedDataParallel) shards it as a unit" in two_processes[
            "unit", original, rank
        ]
