"""The audit measures the weight of every token in any training loop."""

import contextlib
import doctest
import functools
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from support import ranks
from support.bounds import SAME_MODEL
from support.engines import accelerator
from support.loops import H, V, batches
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


def step(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def naive(model, micro, optimizer, report=None, backward=torch.Tensor.backward):
    logged = 0.0
    for one in micro:
        loss = cross_entropy(model, one) / len(micro)
        logged += loss.item()
        backward(loss)
    if report is not None:
        report.log(logged)
    step(optimizer)


def summed(model, micro, optimizer, factor=1 / 16, before_step=None):
    """The sums of the losses times a factor; `before_step` may change the gradients."""
    for one in micro:
        (cross_entropy(model, one, "sum") * factor).backward()
    if before_step is not None:
        before_step(model)
    step(optimizer)


def divide(model, by=16):
    for p in model.parameters():
        p.grad /= by


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


undivided = functools.partial(summed, factor=1 / 8)
divided_afterwards = functools.partial(summed, factor=1, before_step=divide)
clipped = functools.partial(summed, before_step=clip)


def declared(model, micro, optimizer, acc=None):
    acc = acc or LossAccumulator()
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


def watched(loop, **kwargs):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model, **kwargs) as report:
        for i in range(2):
            loop(model, batches(SIZES, i), optimizer)
    return report


def true_loss(step):
    model = Model()
    micro = batches(SIZES, step)
    return float(F.cross_entropy(model(torch.cat([h for h, _ in micro])),
                                 torch.cat([y for _, y in micro])))  # fmt: skip


@pytest.mark.parametrize(("loop", "verdict"), [
    (naive, AVERAGED), (summed, RIGHT), (declared, RIGHT), (streaming, RIGHT),
    (undivided, "gradients are 2 x those of the mean over the step's tokens"),
])  # fmt: skip
def test_a_plain_loop(loop, verdict):
    report = watched(loop)
    assert report.verdict() == verdict
    assert [step.n_tokens for step in report.steps] == [16, 16]
    assert report.steps[0].loss == pytest.approx(true_loss(0), rel=SAME_MODEL)


# ---- right loops that raise no alarm, and mistakes beside denominators -------------------------

CLASSES = torch.linspace(0.5, 3.0, V)


def smoothed(model, micro, optimizer, report=None):
    n, logged = sum(SIZES), 0.0
    for hidden, labels in micro:
        z = model(hidden)
        loss = F.cross_entropy(z, labels, reduction="sum", label_smoothing=0.1) / n
        logged += loss.item()
        loss.backward()
    if report is not None:
        report.log(logged)
    step(optimizer)


def weighted(model, micro, optimizer, naive=False):
    of_all = sum(float(CLASSES[y[y != -100]].sum()) for _, y in micro)
    for hidden, labels in micro:
        own = float(CLASSES[labels[labels != -100]].sum()) * len(micro)
        loss = F.cross_entropy(model(hidden), labels, weight=CLASSES, reduction="sum")
        (loss / (own if naive else of_all)).backward()
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


@pytest.mark.parametrize("loop", [smoothed, weighted, divided_afterwards, clipped, at_once])
def test_loops_that_are_right(loop):
    report = watched(loop)
    assert report.verdict() == RIGHT
    assert [step.n_tokens for step in report.steps] == [16, 16]


def test_a_smoothed_loss_is_the_one_that_is_logged():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        smoothed(model, batches(SIZES), optimizer, report)
    assert report.verdict() == RIGHT
    (step,) = report.steps
    assert step.logged == pytest.approx(step.loss, rel=8 * SAME_MODEL)


def test_loops_that_are_wrong_in_another_way():
    averaged = watched(functools.partial(weighted, naive=True))
    assert "your micro-batches are averaged" in averaged.verdict()
    by_8 = functools.partial(divided_afterwards, before_step=lambda model: divide(model, by=8))
    assert "gradients are 16 x those of the mean" in watched(by_8).verdict()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_lost_are_found(to_none):
    report = watched(functools.partial(forgetful, to_none))
    assert report.verdict() == (
        "zero_grad was called before the optimizer step: the gradients of 2 micro-batches were lost"
    )
    assert [step.lost for step in report.steps] == [1, 1]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_lost_before_the_step_are_found(to_none):
    lose = functools.partial(torch.nn.Module.zero_grad, set_to_none=to_none)
    report = watched(functools.partial(summed, before_step=lose))
    assert "the gradients of 4 micro-batches were lost" in report.verdict()


def test_gradients_that_an_engine_takes_out_of_grad_are_not_lost():
    """ZeRO does so inside backward."""

    def loop(model, micro, optimizer):
        taken = {p: torch.zeros_like(p) for p in model.parameters()}

        def take(p):
            taken[p] += p.grad
            p.grad = None

        handles = [p.register_post_accumulate_grad_hook(take) for p in taken]
        for one in micro:
            (cross_entropy(model, one, "sum") / 16).backward()
        for p, grad in taken.items():
            p.grad = grad
        step(optimizer)
        for handle in handles:
            handle.remove()

    assert watched(loop).verdict() == RIGHT


# ---- steps that are skipped on purpose ----------------------------------------------------------


class Overflows(Model):
    """A gradient of its head overflows in backward when it is told so."""

    def __init__(self):
        super().__init__()
        self.padding = torch.nn.ParameterList(torch.zeros(1) for _ in range(4))  # the smallest
        self.overflow = False
        self.head.weight.register_hook(lambda g: g * math.inf if self.overflow else g)

    def forward(self, hidden):
        return super().forward(hidden) + sum(self.padding)


def overflowing(where, skip, fused=False, to_none=True):
    """Three steps of an averaging loop, the second of which overflows and is skipped."""
    model = Overflows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=skip == "scaler")
    with fusedce.audit(model, loss_scale=scaler.get_scale) as report:
        for i in range(3):
            model.overflow = where == "backward" and i == 1
            factor = math.inf if where == "loss" and i == 1 else 1 / 2
            for one in batches(SIZES, i):
                scaler.scale(cross_entropy(model, one) * factor).backward()
            if where == "after backward" and i == 1:
                model.head.weight.grad[0, 0] = math.inf
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9) if skip == "norm" else 0
            if math.isfinite(norm):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=to_none)
    return report


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(("where", "skip"), [
    ("backward", "scaler"), ("loss", "scaler"), ("after backward", "scaler"),
    ("backward", "norm"), ("loss", "norm"),
])  # fmt: skip
def test_a_step_that_is_skipped_for_its_gradients_is_left_out(where, skip, to_none):
    report = overflowing(where, skip, to_none=to_none)
    assert report.verdict() == AVERAGED
    assert [(step.n_tokens, step.lost) for step in report.steps] == [(16, 0)] * 2


@pytest.mark.parametrize("where", ["backward", "loss"])
def test_a_fused_optimizer_that_skips_a_step_itself(where):
    report = overflowing(where, "scaler", fused=True)
    assert report.verdict() == AVERAGED
    assert [(step.n_tokens, step.lost) for step in report.steps] == [(16, 0)] * 2


def test_what_is_logged_is_compared():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        naive(model, batches(SIZES), optimizer, report)
        report.log(9.0)  # after the step: still that step's
    (step,) = report.steps
    assert step.logged == 9.0
    assert "the loss that is logged is not that of the tokens (9.0000 where" in report.verdict()


def test_the_descended_loss_is_the_mean_of_means():
    (step, _) = watched(naive).steps
    model = Model()
    means = [float(cross_entropy(model, one).detach()) for one in batches(SIZES)]
    assert step.descended == pytest.approx(sum(means) / 2, rel=SAME_MODEL)
    assert step.averaged
    assert step.scale == pytest.approx(1, rel=SAME_MODEL)
    assert isinstance(step, Step)


def test_a_scaled_loss():
    def loop(model, micro, optimizer):
        naive(model, micro, optimizer, backward=lambda loss: (loss * 1024).backward())

    assert "gradients are 1.02e+03 x" in watched(loop).verdict()
    assert watched(loop, loss_scale=lambda: 1024.0).verdict() == AVERAGED


def test_the_table_is_not_logged_as_well_as_printed(caplog):
    with caplog.at_level(logging.WARNING, logger="fusedce.auditing"):
        report = watched(naive)
    assert caplog.text == ""
    assert "| 1 | 16 |" in str(report)
    assert str(report).endswith(AVERAGED)


def test_a_loop_that_calls_the_loss_by_hand_is_told_so():
    def loop(model, micro, optimizer):
        weight = next(p for p in model.parameters() if p.dim() == 2)
        (weight.square().sum()).backward()
        optimizer.step()

    assert "the model itself was never called with gradients" in watched(loop).verdict()


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
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        fusedce.audit(3)
    with pytest.raises(ValueError, match="audit needs a model that returns logits"):
        with fusedce.audit(torch.nn.LSTM(2, 2)) as report:
            report._model(torch.randn(3, 2))


def test_the_example():
    names = vars(fusedce) | {"fusedce": fusedce, "torch": torch, "F": F}
    (found,) = doctest.DocTestFinder(recurse=False).find(fusedce.audit, "audit", globs=names)
    assert doctest.DocTestRunner().run(found).failed == 0


# ---- engines ------------------------------------------------------------------------------------


def ddp(loop, rank):
    """Two micro-batches of 2 and 14 tokens on one rank, of 6 and 6 on the other."""
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        for i in range(2):
            loop(model, batches((SIZES, [6, 6])[rank], 10 * rank + i), optimizer)
    return report.verdict(), report.steps[0].n_tokens


def with_accelerate(rank):
    engine = accelerator(rank, gradient_accumulation_steps=2)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = engine.prepare(model, optimizer)
    with fusedce.audit(model) as report:
        for i in range(2):
            for one in batches(SIZES, 10 * rank + i):
                with engine.accumulate(model):
                    engine.backward(cross_entropy(model, one))
                    step(optimizer)
    return report.verdict(), report.steps[0].n_tokens


def shared(rank):
    """The loop of `ddp`, with one accumulator over both ranks."""
    acc = LossAccumulator()
    return ddp(functools.partial(streaming, acc=acc), rank)


CASES = {"naive": functools.partial(ddp, naive), "ours": shared, "accelerate": with_accelerate}


@functools.cache
def results():
    return ranks.run(CASES)


@pytest.mark.parametrize(("name", "verdict", "tokens"), [
    ("naive", AVERAGED, 28), ("ours", RIGHT, 28), ("accelerate", AVERAGED, 32),
])  # fmt: skip
def test_two_ranks(name, verdict, tokens):
    assert ranks.of(results(), name) == [(verdict, tokens)] * 2


def trainer_report(tmp_path, replaced=False, **kwargs):
    transformers = pytest.importorskip("transformers")
    from support.tiny_trainer import arguments, llama, train

    model = llama()
    if replaced:
        fusedce.replace_loss_head(model)
    if kwargs.pop("naive", False):
        model.accepts_loss_kwargs = False  # as transformers was before it counted tokens
    report = fusedce.audit(model)
    args = arguments(tmp_path, size=1, steps=4, bf16=kwargs.pop("bf16", False))
    train(transformers.Trainer, model, args, **kwargs, callbacks=[report.callback()])
    return report


@pytest.mark.parametrize("replaced", [False, True])
def test_the_stock_trainer(tmp_path, replaced):
    assert trainer_report(tmp_path, replaced).verdict() == RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_a_trainer_with_the_mixin(tmp_path, name):
    """The audit's own loss is no part of what the mixin counts."""
    transformers = pytest.importorskip("transformers")
    from support.tiny_trainer import FusedTrainer, arguments, llama, train

    def collate(rows):
        batch = transformers.default_data_collator(rows)
        if name == "shift_labels":
            batch[name] = fusedce.shift_labels(batch["labels"])
        return batch

    model = llama()
    report = fusedce.audit(model)
    args = arguments(tmp_path, size=1, steps=4)
    train(FusedTrainer, model, args, data_collator=collate, callbacks=[report.callback()])
    assert report.verdict() == RIGHT
    assert all(step.logged is not None for step in report.steps)


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True])
def test_a_trainer_that_averages(tmp_path, replaced):
    report = trainer_report(tmp_path, replaced, naive=True)
    assert report.verdict().startswith("your micro-batches are averaged: tokens of short ones")
    assert len(report.steps) == 3
    assert all(step.logged is not None for step in report.steps)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("naive", [False, True])
def test_a_trainer_with_mixed_precision(tmp_path, naive, replaced):
    """accelerate returns fp32 copies of the bf16 logits that the loss is made of."""
    report = trainer_report(tmp_path, replaced, naive=naive, bf16=True)
    assert report.verdict().startswith("your micro-batches are averaged" if naive else RIGHT)
    assert len(report.steps) == 3


def test_lightning():
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, one, index):
            return cross_entropy(self.model, one)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    data = [x for i in range(2) for x in batches(SIZES, i)]
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=2, logger=False, accelerator="cpu", devices=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    with fusedce.audit(module.model) as report, contextlib.suppress(UserWarning):
        trainer.fit(module, loader)
    assert report.verdict() == AVERAGED
    assert [step.n_tokens for step in report.steps] == [16, 16]


class Whole(torch.nn.Module):
    """Computes its own loss, a part of which is no cross-entropy, and has no configuration."""

    def __init__(self, *, auxiliary=0.0, clamped=False):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = torch.nn.Linear(H, H), torch.nn.Linear(H, V, bias=False)
        self.auxiliary, self.clamped = auxiliary, clamped

    def forward(self, hidden, labels):
        hidden = torch.tanh(self.body(hidden))
        logits = self.head(hidden)
        seen = logits.clamp(-1e4, 1e4) if self.clamped else logits
        loss = F.cross_entropy(seen, labels) + self.auxiliary * (1 + hidden.square().mean())
        return {"loss": loss, "logits": logits}


def steps_of(model, replaced, scale=1):
    """The steps of a loop with one micro-batch of 8 tokens and one of 3."""
    if replaced:
        fusedce.replace_loss_head(model, head=model.head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        for hidden, labels in batches([8, 3]):
            (scale * model(hidden, labels)["loss"]).backward()
            step(optimizer)
    return report.steps


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("scale", [1, 3])
def test_an_auxiliary_loss_is_no_weight_of_tokens(replaced, scale):
    """A router's loss is added to the cross-entropy: the tokens' weight stays the same."""
    found = [step.scale for step in steps_of(Whole(auxiliary=2.0), replaced, scale)]
    assert found == pytest.approx([scale, scale], rel=8 * SAME_MODEL)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_loss_that_cannot_be_fused(replaced):
    """The logits of a replaced head are real then, and no configuration is asked."""
    assert [step.n_tokens for step in steps_of(Whole(clamped=True), replaced)] == [8, 3]


class Copies(Whole):
    """Returns a copy of the logits that its loss is made of, as mixed precision does."""

    def forward(self, hidden, labels):
        out = super().forward(hidden, labels)
        return {"loss": out["loss"], "logits": out["logits"].double()}


@pytest.mark.parametrize("own_loss", [False, True])
def test_logits_that_are_copies(own_loss):
    """The loss is the model's, or the loop's of the copies."""
    model = Copies()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fusedce.audit(model) as report:
        for hidden, labels in batches(SIZES):
            out = model(hidden, labels)
            ((F.cross_entropy(out["logits"], labels) if own_loss else out["loss"]) / 2).backward()
        step(optimizer)
    assert report.verdict() == AVERAGED
    assert [step.n_tokens for step in report.steps] == [16]


class InPlace(Whole):
    """Changes its loss in place: Mixtral adds a router's loss, others divide a sum."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def forward(self, hidden, labels):
        logits = self.head(torch.tanh(self.body(hidden)))
        loss = F.cross_entropy(logits, labels, reduction=self.operation)
        if self.operation == "sum":
            loss /= (labels != -100).sum()
        else:
            loss += 2 * (1 + hidden.square().mean())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("operation", ["mean", "sum"])
def test_a_loss_that_the_model_changes_in_place(operation, replaced):
    steps = steps_of(InPlace(operation), replaced)
    assert [step.scale for step in steps] == pytest.approx([1, 1], rel=8 * SAME_MODEL)
    losses = [step.loss for step in steps]
    right = [step.loss for step in steps_of(Whole(), False)]
    assert losses == pytest.approx(right, rel=8 * SAME_MODEL)
