"""The audit measures the weight of every token in any training loop."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from support import ranks
from support.bounds import SAME_MODEL
from support.loops import H, V, batches
from support.tiny_trainer import arguments, llama, train
from torch.nn.parallel import DistributedDataParallel

import fusedce
from fusedce import LossAccumulator, fused_ce
from fusedce.auditing import Step

SIZES = [2, 14]  # tokens of the micro-batches of each step
AVERAGED = "your micro-batches are averaged: tokens of short ones weigh up to 7.0 x more"
RIGHT = "every token weighs the same, and the gradient is that of the mean over all tokens"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = torch.nn.Linear(H, H), torch.nn.Linear(H, V, bias=False)

    def forward(self, hidden, labels=None):
        hidden = torch.tanh(self.body(hidden))
        return self.head(hidden) if labels is None else fused_ce(hidden, self.head.weight, labels)


def cross_entropy(model, one, reduction="mean"):
    return F.cross_entropy(model(one[0]), one[1], reduction=reduction)


def watched(loop, *, model=None, sizes=SIZES, wrap=lambda model: model, seed=0, **kwargs):
    """The report of ``loop(model, micro-batches, optimizer)``, called for each of two steps."""
    model = wrap(model or Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model, **kwargs) as report:
        for i in range(2):
            loop(model, batches(sizes, seed + i), optimizer)
    return report


def tokens(report):
    return [step.n_tokens for step in report.steps]


def step(optimizer):
    optimizer.step()
    optimizer.zero_grad()


# ---- loops, right and wrong ---------------------------------------------------------------------


def naive(model, micro, optimizer, scale=1):
    for one in micro:
        (cross_entropy(model, one) * scale / len(micro)).backward()
    step(optimizer)


def summed(model, micro, optimizer, factor=1 / 16, before_step=None):
    """The sums of the losses times a factor; `before_step` may change the gradients."""
    for one in micro:
        (cross_entropy(model, one, "sum") * factor).backward()
    if before_step is not None:
        before_step(model)
    step(optimizer)


def divided(model, by):
    for p in model.parameters():
        p.grad /= by


def clipped(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def declared(model, micro, optimizer):
    acc = LossAccumulator()
    with acc.window([(y != -100).sum() for _, y in micro]):
        for one in micro:
            acc.backward(model(*one))
    step(optimizer)


def streaming(model, micro, optimizer, acc=None):
    acc = acc or LossAccumulator()
    for one in micro:
        acc.backward(model(*one))
    acc.finish(model.parameters())
    step(optimizer)


CLASSES = torch.linspace(0.5, 3.0, V)


def smoothed(model, micro, optimizer, log=lambda loss: None):
    n, logged = sum(SIZES), 0.0
    for hidden, labels in micro:
        z = model(hidden)
        loss = F.cross_entropy(z, labels, reduction="sum", label_smoothing=0.1) / n
        logged += loss.item()
        loss.backward()
    log(logged)
    step(optimizer)


def weighted(model, micro, optimizer, by="classes"):
    for hidden, labels in micro:
        weight = CLASSES if by == "classes" else None
        losses = F.cross_entropy(model(hidden), labels, weight, reduction="none")
        if by == "tokens":
            losses = losses * torch.linspace(1, 2, len(labels))
        (losses / 16).sum().backward()
    step(optimizer)


def at_once(model, micro, optimizer):
    """Two forwards, one backward."""
    sum(cross_entropy(model, one, "sum") / 16 for one in micro).backward()
    step(optimizer)


def forgetful(to_none, model, micro, optimizer):
    for one in micro:
        optimizer.zero_grad(set_to_none=to_none)
        (cross_entropy(model, one, "sum") / 16).backward()
    optimizer.step()


def lost(to_none):
    return functools.partial(torch.nn.Module.zero_grad, set_to_none=to_none)


def by_hand(model, micro, optimizer):
    model.head.weight.square().sum().backward()
    optimizer.step()


class Sure(Model):
    """Its likeliest class is ahead by ``extra`` nats."""

    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def forward(self, hidden):
        z = super().forward(hidden)
        return z + self.extra * F.one_hot(z.argmax(-1), V)


LOOPS = {
    "summed": summed,
    "declared": declared,
    "streaming": streaming,
    "smoothed": smoothed,
    "divided": functools.partial(summed, factor=1, before_step=lambda m: divided(m, 16)),
    "clipped": functools.partial(summed, before_step=clipped),
    "at once": at_once,
}


@pytest.mark.parametrize("extra", [18.0, 30.0, 60.0])  # p is 1 in float32, 60 nats in float64 too
@pytest.mark.parametrize("each", [1, 2])
def test_certain_tokens_count(extra, each):
    """The labels of every micro-batch, or of every second one, are sure."""

    def loop(model, micro, optimizer):
        for i, (hidden, labels) in enumerate(micro):
            sure = torch.where(labels >= 0, model(hidden).detach().argmax(-1), labels)
            one = hidden, labels if i % each else sure
            (cross_entropy(model, one, "sum") / 16).backward()
        step(optimizer)

    report = watched(loop, model=Sure(extra))
    assert report.verdict() == RIGHT
    assert tokens(report) == [16, 16]


@pytest.mark.parametrize("name", LOOPS)
def test_a_plain_loop_that_is_right(name):
    report = watched(LOOPS[name])
    assert report.verdict() == RIGHT
    assert tokens(report) == [16, 16]


SCALED = functools.partial(naive, scale=1024)
LOST = "zero_grad was called before the optimizer step: the gradients of {} micro-batches were lost"
WRONG = {
    "averaged": (naive, AVERAGED),
    "weights of classes": (weighted, "tokens of one micro-batch weigh differently"),
    "weights of tokens": (
        functools.partial(weighted, by="tokens"), "tokens of one micro-batch weigh differently",
    ),
    "undivided": (
        functools.partial(summed, factor=1 / 8),
        "gradients are 2 x those of the mean over the step's tokens",
    ),
    "divided by another number": (
        functools.partial(summed, factor=1, before_step=lambda m: divided(m, 8)),
        "gradients are 16 x those of the mean",
    ),
    "scaled": (SCALED, "gradients are 1.02e+03 x"),
    "lost": (functools.partial(forgetful, False), LOST.format(2)),
    "lost, to None": (functools.partial(forgetful, True), LOST.format(2)),
    "lost before_the_step": (functools.partial(summed, before_step=lost(False)), LOST.format(4)),
    "lost before_the_step, to None": (
        functools.partial(summed, before_step=lost(True)), LOST.format(4),
    ),
    "by hand": (by_hand, "the model itself was never called with gradients"),
}  # fmt: skip


def test_denominators_whose_errors_cancel_are_wrong_in_each_step():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        for sizes in ([4], [12], [8]):  # a constant denominator, right on average
            summed(model, batches(sizes), optimizer, factor=1 / 8)
    assert report.right() is False
    assert (
        "gradients are 0.5 to 1.5 x those of the mean over the step's tokens in 2 of 3 steps"
        in (report.verdict())
    )


def test_a_correction_of_another_model_is_none_of_this_one():
    model, other = Model(), Model()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    accs = LossAccumulator(model), LossAccumulator(other)
    with fusedce.audit(model) as report:
        for acc, kind, sizes in zip(accs, (model, other), (SIZES, [3]), strict=True):
            for hidden, labels in batches(sizes):
                acc.backward(kind(hidden, labels))
        for acc in accs:
            acc.finish()
            acc.clip_grad_norm_(1e-3)
        optimizer.step()
    assert report.steps[0].scale == pytest.approx(1, rel=SAME_MODEL)
    assert report.verdict() == RIGHT


@pytest.mark.parametrize("name", WRONG)
def test_a_plain_loop_that_is_wrong(name):
    loop, words = WRONG[name]
    assert words in watched(loop).verdict()


def test_a_scale_that_the_audit_is_told_of_is_no_mistake():
    assert watched(SCALED, loss_scale=lambda: 1024.0).verdict() == AVERAGED


def mean_of_means(micro):
    model = Model()
    return sum(float(cross_entropy(model, one).detach()) for one in micro) / len(micro)


def test_the_losses_of_a_step():
    """That of its tokens, that whose gradient was taken, and that which is logged."""
    found = watched(naive).steps[0]
    micro = batches(SIZES)
    true = mean_of_means([[torch.cat(x) for x in zip(*micro, strict=True)]])
    assert isinstance(found, Step)
    assert found.averaged
    assert found.loss == pytest.approx(true, rel=SAME_MODEL)
    assert found.descended == pytest.approx(mean_of_means(micro), rel=SAME_MODEL)
    assert found.scale == pytest.approx(1, rel=SAME_MODEL)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        smoothed(model, micro, optimizer, report.log)
    assert report.verdict() == RIGHT
    assert report.steps[0].logged == pytest.approx(report.steps[0].loss, rel=8 * SAME_MODEL)
    with fusedce.audit(model) as report:
        naive(model, micro, optimizer)
        report.log(9.0)  # after the step: still that step's
    assert report.steps[0].logged == 9.0
    assert "the loss that is logged is not that of the tokens (9.0000 where" in report.verdict()


def test_other_optimizers_and_evaluation_are_left_out():
    model, other = Model(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        with torch.no_grad():
            model(batches([3])[0][0])
        optimizer.step()
        cross_entropy(model, batches([3])[0]).backward()
        optimizer.step()
    assert report.steps == []
    assert "no optimizer step was made" in report.verdict()
    with pytest.raises(ValueError, match="audit needs a model that returns logits"):
        with fusedce.audit(torch.nn.LSTM(2, 2)) as report:
            report._model(torch.randn(3, 2))


# ---- steps that are skipped on purpose ----------------------------------------------------------


class Overflows(Model):
    """A gradient of its head overflows in backward when it is told so."""

    def __init__(self):
        super().__init__()
        self.overflow = False
        self.head.weight.register_hook(lambda g: g * math.inf if self.overflow else g)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(("where", "skip"), [
    ("backward", "scaler"), ("loss", "scaler"),
    ("backward", "norm"), ("loss", "norm"),
    ("backward", "fused_optimizer"), ("loss", "fused_optimizer"),
])  # fmt: skip
def test_a_step_that_is_skipped_for_its_gradients_is_left_out(where, skip, to_none):
    """The second of three steps of an averaging loop; a fused optimizer skips its step itself."""
    model, fused = Overflows(), skip == "fused_optimizer"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=skip != "norm")
    with fusedce.audit(model, loss_scale=scaler.get_scale) as report:
        for i in range(3):
            model.overflow = where == "backward" and i == 1
            factor = math.inf if where == "loss" and i == 1 else 1 / 2
            for one in batches(SIZES, i):
                scaler.scale(cross_entropy(model, one) * factor).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9) if skip == "norm" else 0
            if math.isfinite(norm):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=to_none)
    assert report.verdict() == AVERAGED
    assert [(step.n_tokens, step.lost) for step in report.steps] == [(16, 0)] * 2


# ---- engines ------------------------------------------------------------------------------------


on_two_ranks = ranks.together()


@on_two_ranks
def test_two_ranks_of_ddp(rank):
    """Two micro-batches of 2 and 14 tokens on one rank, of 6 and 6 on the other."""
    acc = LossAccumulator()  # one over both ranks
    for loop, verdict in ((naive, AVERAGED), (functools.partial(streaming, acc=acc), RIGHT)):
        sizes = (SIZES, [6, 6])[rank]
        report = watched(loop, sizes=sizes, wrap=DistributedDataParallel, seed=10 * rank)
        assert (report.verdict(), tokens(report)[0]) == (verdict, 28)


def audited(tmp_path, trainer, *, bf16=False, replaced=False, counts=True, **kwargs):
    """The report of a run of the tiny Llama; old versions of transformers counted no tokens."""
    model = llama()
    if replaced:
        fusedce.replace_loss_head(model)
    if not counts:
        model.accepts_loss_kwargs = False
    report = fusedce.audit(model)
    args = arguments(tmp_path, size=1, steps=4, bf16=bf16)
    train(trainer, model, args, **kwargs, callbacks=[report.callback()])
    return report


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_the_stock_trainer(tmp_path, replaced, counts, bf16):
    """In mixed precision accelerate returns fp32 copies of the logits that the loss is made of."""
    report = audited(tmp_path, transformers.Trainer, replaced=replaced, counts=counts, bf16=bf16)
    averaged = "your micro-batches are averaged: tokens of short ones"
    assert report.verdict().startswith(RIGHT if counts else averaged)
    assert len(report.steps) == 3
    assert all(step.logged is not None for step in report.steps)


# ---- models that compute their own loss ---------------------------------------------------------


class Whole(Model):
    """Computes its own loss, a part of which may be no cross-entropy; it has no configuration."""

    def __init__(self, *, auxiliary=0.0, clamped=False, copies=False):
        super().__init__()
        self.auxiliary, self.clamped, self.copies = auxiliary, clamped, copies

    def forward(self, hidden, labels):
        hidden = torch.tanh(self.body(hidden))
        logits = self.head(hidden)
        seen = logits.clamp(-1e4, 1e4) if self.clamped else logits
        loss = F.cross_entropy(seen, labels) + self.auxiliary * (1 + hidden.square().mean())
        return {"loss": loss, "logits": logits.double() if self.copies else logits}


def steps_of(model, replaced):
    """The steps of a loop with one micro-batch of 8 tokens and one of 3."""
    if replaced:
        fusedce.replace_loss_head(model, head=model.head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        for hidden, labels in batches([8, 3]):
            (3 * model(hidden, labels)["loss"]).backward()
            step(optimizer)
    return report.steps


MODELS = {
    "a router's loss is added": {"auxiliary": 2.0},
    "a clamp cannot be fused": {"clamped": True},
}


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_an_auxiliary_loss_is_no_weight_of_tokens(name, replaced):
    steps, right = steps_of(Whole(**MODELS[name]), replaced), steps_of(Whole(), False)
    assert [step.n_tokens for step in steps] == [8, 3]
    assert [step.scale for step in steps] == pytest.approx([3, 3], rel=8 * SAME_MODEL)
    assert steps[0].loss == pytest.approx(right[0].loss, rel=8 * SAME_MODEL)


@pytest.mark.parametrize("own_loss", [False, True])
def test_logits_that_are_copies(own_loss):
    """As mixed precision returns them; the loss is the model's, or the loop's of the copies."""

    def loop(model, micro, optimizer):
        for hidden, labels in micro:
            out = model(hidden, labels)
            ((F.cross_entropy(out["logits"], labels) if own_loss else out["loss"]) / 2).backward()
        step(optimizer)

    report = watched(loop, model=Whole(copies=True))
    assert report.verdict() == AVERAGED
    assert tokens(report) == [16, 16]
