"""The audit finds the logits of models that return them in a tuple, or their loss alone."""

import pytest
import torch
import torch.nn.functional as F
from support.loops import H, V, batches
from support.tiny_trainer import llama
from torch import nn
from torch._dynamo.testing import CompileCounter

import fusedce
from fusedce import fused_ce

SIZES = [2, 14]  # tokens of the micro-batches of each step
AVERAGED = "your micro-batches are averaged: tokens of short ones weigh up to 7.0 x more"
RIGHT = "every token weighs the same, and the gradient is that of the mean over all tokens"


class GPT(nn.Module):
    """Returns what ``returned(logits, loss)`` makes of its logits and of its loss by ``loss``."""

    def __init__(self, returned, loss=F.cross_entropy, finish=lambda z: z):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.lm_head = nn.Linear(H, H), nn.Linear(H, V, bias=False)
        self.returned, self.loss, self.finish = returned, loss, finish

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, hidden, labels, reduction="mean"):
        logits = self.finish(self.lm_head(torch.tanh(self.body(hidden))))
        loss = self.loss(logits.view(-1, V), labels.view(-1), reduction=reduction)
        return self.returned(logits, loss)


def own_nll(z, labels, reduction):
    return F.nll_loss(z.log_softmax(-1), labels, reduction=reduction)


def transposed(z, labels, reduction):
    """The classes in dimension 1, as for images."""
    return F.cross_entropy(z[None].transpose(1, 2), labels[None], reduction=reduction)


def alone(logits, loss):
    return loss


MODELS = {
    "nanoGPT": GPT(lambda logits, loss: (logits, loss)),
    "loss first": GPT(lambda logits, loss: (loss, logits)),
    "beside a hidden state": GPT(lambda z, loss: (loss, z, z[:, :3].expand(2, -1, -1))),
    "another view": GPT(lambda logits, loss: (logits[:1] + 0, loss)),
    "a copy without gradient": GPT(lambda logits, loss: (logits.detach(), loss)),
    "a dictionary": GPT(lambda logits, loss: {"loss": loss, "prediction": logits}),
    "loss alone": GPT(alone),
    "loss alone, soft-capped": GPT(alone, finish=lambda z: 2 * torch.tanh(z / 2)),
    "loss alone, of its own code": GPT(alone, own_nll),
    "loss alone, classes first": GPT(alone, transposed),
}


def loss_in(out):
    if isinstance(out, dict):
        return out["loss"]
    return next(x for x in (out if isinstance(out, tuple) else [out]) if x.dim() == 0)


def verdict(model, called, *, right, run=None):
    """Of two steps of a loop that averages, or of one that is right."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(called if run is None else run) as report:
        for seed in range(2):
            for hidden, labels in batches(SIZES, seed):
                if right:
                    (loss_in(called(hidden, labels, "sum")) / sum(SIZES)).backward()
                else:
                    (loss_in(called(hidden, labels)) / len(SIZES)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_found_wherever_they_are(name, replaced):
    model = MODELS[name]
    if replaced:
        fusedce.replace_loss_head(model)
    try:
        for right, words in ((False, AVERAGED), (True, RIGHT)):
            report = verdict(model, model, right=right)
            assert report.verdict() == words
            assert [step.n_tokens for step in report.steps] == [16, 16]
    finally:
        fusedce.restore_loss_head(model)


def test_transformers_without_return_dict():
    model, ids = llama(), torch.randint(3, 61, (2, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        for labels in (ids, ids.masked_fill(torch.arange(9) > 2, -100)):
            (model(input_ids=ids, labels=labels, return_dict=False)[0] / 2).backward()
        optimizer.step()
    assert report.verdict().startswith("your micro-batches are averaged")
    assert [step.n_tokens for step in report.steps] == [16 + 4]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("around", ["the compiled", "the model"])
def test_a_compiled_model(before, around):
    """It may have been compiled, and run, before the audit; it is compiled again afterwards."""
    model = GPT(lambda logits, loss: (logits, loss))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    if before:
        compiled(*batches([4])[0])
    graphs = counter.frame_count
    run = compiled if around == "the compiled" else model
    assert verdict(model, compiled, right=False, run=run).verdict() == AVERAGED
    assert counter.frame_count == graphs
    compiled(*batches([5])[0])
    assert counter.frame_count > 0


def test_a_model_compiled_in_place():
    model = GPT(alone)
    torch._dynamo.reset()
    model.compile(backend="eager")
    model(*batches([4])[0])
    assert verdict(model, model, right=False).verdict() == AVERAGED


class Body(nn.Module):
    """Returns hidden states of which a loop makes logits."""

    def __init__(self, loss):
        super().__init__()
        self.body, self.lm_head, self.loss = nn.Linear(H, H), nn.Linear(H, V), loss

    def forward(self, hidden, labels, reduction="mean"):
        return self.loss(self.body(hidden))


@pytest.mark.parametrize("kind", ["hidden state", "scaled later"])
def test_what_is_no_logits_is_not_judged(kind):
    """The gradient of a hidden state is no difference of probabilities; there is no table."""
    model = Body(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = model.body if kind == "hidden state" else model.lm_head
    with fusedce.audit(module) as report:
        for hidden, labels in batches(SIZES):
            z = model.lm_head(model.body(hidden))
            z = 4 * z if kind == "scaled later" else z
            (F.cross_entropy(z, labels) / 2).backward()
        optimizer.step()
    assert report.right() is None
    assert str(report).startswith("what Linear returned are no logits of a cross-entropy")
    assert "fusedce.audit(model.head)" in str(report)
    with fusedce.audit(model.lm_head) as report:
        for hidden, labels in batches(SIZES):
            (F.cross_entropy(model.lm_head(model.body(hidden)), labels) / 2).backward()
        optimizer.step()
    assert report.verdict() == AVERAGED


def test_a_loss_that_no_head_and_no_cross_entropy_made_is_refused_in_the_forward():
    model = GPT(alone)
    model.forward = lambda hidden, labels: fused_ce(hidden, model.lm_head.weight, labels).mean()
    with pytest.raises(ValueError, match=r"or a LossSum.*audit\(model.head\).*GPT returned Tensor"):
        with fusedce.audit(model):
            model(*batches([3])[0])
    with pytest.raises(ValueError, match="mine"), fusedce.audit(model):
        model.forward = fail
        model(*batches([3])[0])
    assert not torch.overrides._get_current_function_mode_stack()


def fail(*_):
    raise ValueError("mine")
