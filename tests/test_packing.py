"""Documents packed into a row: attention that crosses their borders is found by trying it."""

import logging

import pytest
import torch
from support.bounds import SAME_MODEL
from support.tiny_trainer import FusedTrainer, V, arguments, gpt2, llama, train
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import fusedce
from fusedce.packing import leak_across_documents

CROSSES = "crosses the borders of packed documents"


def packed(lengths=(5, 8, 3), *, mask=False, seed=0):
    """One row of documents, and where each lies."""
    ids = torch.randint(3, V, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    batch["labels"] = ids
    return batch | ({"attention_mask": torch.ones_like(ids)} if mask else {})


class Varlen(nn.Module):
    """Attends within the documents that ``position_ids`` tell of, or across them."""

    def __init__(self, reads=True):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lm_head, self.reads = nn.Embedding(V, 16), nn.Linear(16, V), reads

    def forward(self, input_ids, position_ids=None, labels=None):
        x = self.body(input_ids)
        document = (position_ids == 0).cumsum(1)
        sees = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.reads:
            sees = sees & (document[:, :, None] == document[:, None])
        scores = (x @ x.mT).masked_fill(~sees, -torch.inf).softmax(-1)
        logits = self.lm_head(x + scores @ x)
        return CausalLMOutput(logits=logits)


def test_a_document_reads_the_one_before_it_under_a_mask_of_ones(no_logits):
    """The complaint about packing without FlashAttention: losses depend on the neighbours.

    transformers makes a mask of ``position_ids`` alone, and not beside an ``attention_mask``.
    """
    model = llama().eval()
    lengths = (5, 8, 3)

    def losses(batch):
        stats = fusedce.model_logprobs(model, batch)
        return [x.detach() for x in stats.logprob.split(lengths, 1)]

    rows = packed(lengths)["input_ids"].split(lengths, 1)
    alone = [fusedce.model_logprobs(model, {"input_ids": x}).logprob.detach() for x in rows]
    right, wrong = losses(packed(lengths)), losses(packed(lengths, mask=True))
    for one, other in zip(right, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=SAME_MODEL, atol=8 * SAME_MODEL)
    assert (wrong[0] - alone[0]).abs().max() < 1e-5
    assert (wrong[1] - alone[1]).abs().max() > 1e-3


CASES = {
    "sdpa": (llama, {}, False),
    "sdpa, a mask of ones": (llama, {"mask": True}, True),
    "GPT-2, a mask of ones": (gpt2, {"mask": True}, True),
    "variable length": (Varlen, {}, False),
    "position_ids are ignored": (lambda: Varlen(reads=False), {}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_leak_is_found_by_other_tokens_in_one_document(name):
    make, how, leaks = CASES[name]
    model = make().train()
    change = leak_across_documents(model, packed(**how))
    assert (change > 1e-4) if leaks else (change == 0)
    assert all(m.training for m in model.modules())


def test_a_cache_keeps_transformers_from_reading_position_ids():
    model = llama()
    assert leak_across_documents(model, packed() | {"use_cache": True}) > 1e-4


def test_a_batch_that_cannot_tell():
    model = llama()
    ids = packed()["input_ids"]
    assert leak_across_documents(model, {"input_ids": ids}) is None
    assert leak_across_documents(model, packed((16,))) is None
    assert leak_across_documents(model, packed() | {"pixel_values": torch.ones(1)}) is None
    lengths = {"cu_seq_lens_q": torch.tensor([0, 5, 13, 16])}  # sdpa does not read them
    assert leak_across_documents(model, {"input_ids": ids} | lengths) > 1e-4


@pytest.mark.parametrize("name", ["sdpa", "sdpa, a mask of ones", "variable length"])
def test_the_audit_says_so(name):
    make, how, leaks = CASES[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        for seed in range(2):
            batch = packed(**how, seed=seed)
            labels = fusedce.shift_labels(batch.pop("labels"), position_ids=batch["position_ids"])
            logits = model(**batch).logits
            nn.functional.cross_entropy(logits.view(-1, V), labels.view(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (CROSSES in report.verdict()) == leaks
    assert report.right() is not leaks
    assert [step.n_tokens for step in report.steps] == [13, 13]
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 0


class Rows(torch.utils.data.Dataset):
    def __init__(self, **how):
        self.rows = [{k: x[0] for k, x in packed(**how, seed=i).items()} for i in range(8)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


@pytest.mark.parametrize("mask", [False, True])
def test_the_mixin_warns_once(tmp_path, caplog, mask):
    args = arguments(tmp_path, 1, 2)
    with caplog.at_level(logging.WARNING, logger="fusedce.trainer"):
        trainer, *_ = train(FusedTrainer, llama(), args, train_dataset=Rows(mask=mask))
    assert caplog.text.count(CROSSES) == mask
    assert fusedce.head_report(trainer.model).logits_made == 0


def test_rows_of_one_document_cost_nothing(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("the model ran for nothing")

    monkeypatch.setattr("fusedce.trainer.leak_across_documents", never)
    train(FusedTrainer, llama(), arguments(tmp_path, 1, 2), train_dataset=Rows(lengths=(9,)))
