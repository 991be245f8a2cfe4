"""FusedTrainerMixin corrects the stock trainer: each test shows its error and our result."""

import functools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from support import ranks
from support.bounds import SAME_MODEL, STATISTIC
from support.engines import accelerator
from support.tiny_trainer import (
    Dataset,
    FusedTrainer,
    arguments,
    llama,
    mixtral,
    sharpened,
    train,
    true_mean,
)
from support.unfused import unfused
from torch import nn
from torch.utils.data import default_collate
from transformers import (
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

import fusedce
from fusedce import head_report


def labelled(n=16, label=None, rows=slice(None), size=12):
    """Rows of which some have all their tokens as labels (or none but ``label``)."""
    data = Dataset(n, size)
    for row in data.rows[rows]:
        ids = row["input_ids"]
        row["labels"] = ids.clone() if label is None else torch.full_like(ids, label)
    return data


@pytest.mark.slow
def test_auxiliary_loss_is_a_mean_over_micro_batches(tmp_path):
    """The router's gradient with a frozen cross-entropy: that of the mean auxiliary loss."""

    class RouterNorm(TrainerCallback):
        norm = None

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            (self.norm,) = [p.grad.clone() for n, p in model.named_parameters() if "gate.w" in n]

    def router_grad(kind):
        model, seen, micro = mixtral(), RouterNorm(), []

        def collate(rows):
            micro.append(default_data_collator(rows))
            return micro[-1]

        nn.init.zeros_(model.lm_head.weight)  # flat logits: the cross-entropy asks for nothing
        args = arguments(tmp_path, 4, 4, max_steps=1)
        train(kind, model, args, callbacks=[seen], data_collator=collate)
        return seen.norm, micro

    found, micro = router_grad(FusedTrainer)
    model = mixtral()
    nn.init.zeros_(model.lm_head.weight)
    aux = sum(0.5 * model(**one).aux_loss / 4 for one in micro)
    (gate,) = [p for n, p in model.named_parameters() if "gate.w" in n]
    (expected,) = torch.autograd.grad(aux, gate)
    # relative to the largest entry: they are sums over tokens of both signs
    close = {"rtol": 8 * SAME_MODEL, "atol": 8 * SAME_MODEL * float(expected.abs().max())}
    assert len(micro) == 4
    torch.testing.assert_close(found, expected, **close)
    assert router_grad(Trainer)[0].norm() > 3 * expected.norm()


@pytest.mark.parametrize("size", [1, 3, 8])
def test_evaluation_is_a_mean_over_tokens(size, tmp_path):
    args = arguments(tmp_path, per_device_eval_batch_size=size)
    exact = true_mean(sharpened(), Dataset(11))
    stock = Trainer(model=sharpened(), args=args, eval_dataset=Dataset(11)).evaluate()
    ours = FusedTrainer(model=sharpened(), args=args, eval_dataset=Dataset(11)).evaluate()
    assert abs(stock["eval_loss"] - exact) > 1e-3  # a mean of means
    assert ours["eval_loss"] == pytest.approx(exact, rel=STATISTIC)


def test_logged_loss_is_per_token_over_the_interval(tmp_path):
    """One interval of two steps at learning rate 0: the mean over all its tokens."""
    args = arguments(tmp_path, 2, 1, max_steps=8, logging_steps=8, learning_rate=0.0)
    exact = true_mean(sharpened(), Dataset())
    _, stock, *_ = train(Trainer, sharpened(), args)
    _, ours, _, output = train(FusedTrainer, sharpened(), args)
    assert abs(stock[0] - exact) > 1e-3  # a mean of means
    assert ours[0] == pytest.approx(exact, rel=STATISTIC)
    assert output.training_loss == pytest.approx(exact, rel=STATISTIC)


def test_a_short_last_window_and_batches_with_nothing_valid(tmp_path):
    """10 rows as 4 + 4 + 2: the last step is divided by what it holds."""
    curves, data = [], labelled(10, -100, slice(None, None, 2))
    for size, steps in ((4, 1), (1, 4)):
        args = arguments(tmp_path, size, steps, max_steps=-1, num_train_epochs=2)
        curves.append(train(FusedTrainer, llama(), args, train_dataset=data)[1])
    assert len(curves[0]) == 6
    assert all(math.isfinite(x) for x in curves[1])
    torch.testing.assert_close(curves[0], curves[1], rtol=0, atol=SAME_MODEL)


def packed_row(n=2, size=6):
    """Documents in one row, and as rows of their own."""
    padded = default_collate(labelled(n, size=size).rows)
    packed = {name: x.view(1, -1) for name, x in padded.items()}
    return packed | {"position_ids": torch.arange(size).repeat(n)[None]}, padded


@pytest.mark.parametrize("how", ["position_ids", "cu_seqlens", "shift_labels"])
def test_no_token_is_trained_across_documents(how, tmp_path):
    packed, padded = packed_row()
    if how == "cu_seqlens":
        packed["cu_seq_lens_q"] = torch.tensor([0, 6, 12], dtype=torch.int32)
        del packed["position_ids"]
    if how == "shift_labels":
        packed["shift_labels"] = F.pad(packed["labels"], (0, 1), value=-100)[:, 1:]
    trainer = FusedTrainer(model=llama(), args=arguments(tmp_path), train_dataset=Dataset())
    counted = trainer._get_num_items_in_batch([dict(packed)], torch.device("cpu"))
    assert int(counted) == 10  # 11 positions have a successor, one of them in another document
    if how != "cu_seqlens":
        loss = trainer.compute_loss(trainer.model.train(), dict(packed))
        torch.testing.assert_close(loss, llama()(**padded).loss)


def test_a_model_that_does_not_shift_trains_on_the_first_label_of_a_document(tmp_path):
    model = llama()
    model.loss_function = lambda logits, labels, **_: F.cross_entropy(logits.mT, labels)
    row = packed_row()[0]
    trainer = FusedTrainer(model=model, args=arguments(tmp_path), train_dataset=Dataset())
    assert int(trainer._get_num_items_in_batch([dict(row)], torch.device("cpu"))) == 12
    with torch.no_grad():
        torch.testing.assert_close(trainer.compute_loss(model, dict(row)), model(**row).loss)


def test_only_the_loss_of_the_model_is_rewritten(tmp_path):
    """Other losses that are logged or measured stay as they are."""

    class Logs(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            trainer.log({"loss": 7.0})
            trainer.compute_loss(trainer.model, batch)  # no part of training

    batch, exact = default_collate(Dataset(3).rows), true_mean(sharpened(), Dataset())
    args = arguments(tmp_path, 4, 1, max_steps=4, logging_steps=4, learning_rate=0.0)
    trainer = FusedTrainer(
        model=sharpened(), args=args, train_dataset=Dataset(), eval_dataset=Dataset(5),
        callbacks=[Logs()], compute_metrics=lambda _: {"other_loss": 3.0},
    )  # fmt: skip
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses == [7.0] * 4 + [pytest.approx(exact, rel=STATISTIC)]
    metrics = trainer.evaluate(metric_key_prefix="mine")
    assert metrics["mine_other_loss"] == 3.0
    assert metrics["mine_loss"] == pytest.approx(true_mean(sharpened(), Dataset(5)), rel=STATISTIC)
    assert math.isnan(trainer.evaluate(labelled(3, -100))["eval_loss"])


def test_a_prediction_step_of_the_users_own_is_not_training(tmp_path):
    """Its loss is that of the batch, whatever the micro-batches of a step, and counts nowhere."""

    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            losses.append(trainer.prediction_step(model, dict(batch), True)[0])
            expected.append(model(**batch).loss.detach())

    batch = default_data_collator([Dataset().rows[i] for i in range(2)])
    losses, expected = [], []
    args = arguments(tmp_path, 2, 4)
    trainer = FusedTrainer(model=llama(), args=args, train_dataset=Dataset(), callbacks=[Looks()])
    trainer.train()
    torch.testing.assert_close(losses, expected)
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert logged == train(FusedTrainer, llama(), arguments(tmp_path, 2, 4))[1]
    alone = FusedTrainer(model=llama(), args=args)
    torch.testing.assert_close(
        alone.prediction_step(alone.model, dict(batch), True)[0], llama()(**batch).loss.detach()
    )


# ---- refusals -------------------------------------------------------------------------------


def test_another_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match="compute_loss_func asks for another loss"):
        FusedTrainer(model=llama(), args=arguments(tmp_path), compute_loss_func=lambda *a, **k: 0)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z, y: -z.log_softmax(-1)[..., 0].mean(), "does not depend on its labels"),
        (
            lambda z, y: F.cross_entropy(z, y, reduction="sum"),
            "the loss of Own is a sum over its labels",
        ),
    ],
)
def test_a_loss_that_would_be_trained_wrongly_is_refused(loss, words, tmp_path):
    class Own(LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            output = super().forward(input_ids)
            output["loss"] = loss(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return output

    with pytest.raises(ValueError, match=words):
        train(FusedTrainer, Own(llama().config), arguments(tmp_path))


def test_a_wrong_count_is_found(tmp_path):
    class Dropping(LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            if self.training:
                labels = labels.clone()
                labels[:, :3] = -100
            return super().forward(input_ids, labels=labels)

    with pytest.raises(RuntimeError, match="the model's loss has counted"):
        train(FusedTrainer, Dropping(llama().config), arguments(tmp_path))


@pytest.mark.parametrize("shifted", [False, True])
def test_repeated_samples_of_an_evaluation_are_counted_once(shifted, tmp_path):
    """Seven rows for two ranks in batches of two: accelerate repeats one."""

    def collate(rows):
        batch = default_data_collator(rows)
        if shifted:
            batch["shift_labels"] = fusedce.shift_labels(batch["labels"])
        return batch

    def evaluated(rank):
        accelerator(rank)
        trainer = FusedTrainer(
            model=sharpened(), args=arguments(tmp_path, per_device_eval_batch_size=2),
            eval_dataset=Dataset(7), data_collator=collate,
        )  # fmt: skip
        seen, add = [], fusedce.LossMeter.update
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            count = lambda acc, out: (seen.append(int(out[1])), add(acc, out))[1]  # noqa: E731
            patch.setattr(fusedce.LossMeter, "update", count)
            warnings.simplefilter("error", UserWarning)
            return trainer.evaluate()["eval_loss"], sum(seen)

    losses, counted = zip(*ranks.shared({"evaluated": evaluated})("evaluated"), strict=True)
    assert sum(counted) == sum(int((row["labels"][1:] != -100).sum()) for row in Dataset(7).rows)
    assert losses == pytest.approx([true_mean(sharpened(), Dataset(7))] * 2, rel=SAME_MODEL)


class Logging(FusedTrainer):
    log_token_stats = True


OF_ONE_RUN = (
    "loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens", "eval_loss",
    "eval_mean_token_accuracy", "eval_entropy",
)  # fmt: skip


def trained_and_evaluated(folder, rank=None):
    """What is logged in two steps of 8 rows, a third of which have no labels, and evaluated."""
    if rank is not None:
        accelerator(rank)
    data = labelled(16, -100, slice(None, None, 3))
    args = arguments(
        folder, 4 if rank is None else 2, 2, max_steps=2, max_grad_norm=1.0,
        per_device_eval_batch_size=2,
    )  # fmt: skip
    options = {"train_dataset": data, "eval_dataset": Dataset(5)}
    trainer, _, seen, _ = train(Logging, sharpened(), args, **options)
    trainer.evaluate()
    return {name: [log[name] for log in seen.logs if name in log] for name in OF_ONE_RUN}


def test_two_ranks_equal_one(tmp_path):
    case = {"two": functools.partial(trained_and_evaluated, tmp_path)}
    two, _ = ranks.shared(case)("two")
    one = trained_and_evaluated(tmp_path)
    for name, values in one.items():
        assert len(values) == (1 if "eval" in name else 2)
        assert two[name] == pytest.approx(values, rel=SAME_MODEL), name
    assert one["num_tokens"][-1] == 2 * 8 * 12  # steps, rows, tokens of each


class Pictures(LlamaForCausalLM):
    """Takes the patches of all rows' pictures one after the other, as Qwen2-VL does."""

    def forward(self, patches=None, sizes=None, **kwargs):
        if int(sizes.sum()) != len(patches):
            raise ValueError(f"pictures of {sizes.tolist()} patches, got {len(patches)} patches")
        return super().forward(**kwargs)


def with_pictures(rows):
    """Three patches for the picture of each row."""
    patches = torch.zeros(3 * len(rows), 5)
    sizes = torch.full((len(rows), 1), 3)
    return default_data_collator(rows) | {"patches": patches, "sizes": sizes}


def test_tensors_without_a_row_for_each_sample(tmp_path):
    """Models of vision and language take all pictures of a batch in one tensor."""
    model, data = Pictures(llama().config), Dataset(8)
    model.load_state_dict(llama().state_dict())
    exact = true_mean(llama(), data)
    args = arguments(tmp_path, 4, 2, max_steps=1, remove_unused_columns=False)
    _, losses, _, _ = train(
        FusedTrainer, model, args, train_dataset=data, data_collator=with_pictures
    )
    assert losses[0] == pytest.approx(exact, rel=SAME_MODEL)


def test_the_mixin_alone_says_what_to_write():
    mixin = fusedce.FusedTrainerMixin
    for kind, name in ((mixin, "MyTrainer"), (type("Mine", (mixin,), {}), "Mine")):
        with pytest.raises(TypeError, match=rf"write class {name}\(FusedTrainerMixin, Trainer\)"):
            kind(model=None)


@pytest.mark.parametrize("steps", [1, 8])
def test_label_smoothing_of_the_trainers_settings(tmp_path, steps):
    """Loss, gradient and evaluation are those of ``F.cross_entropy(label_smoothing=)``."""
    exact = sharpened()
    batch = default_collate(Dataset(16).rows)
    logits = exact(input_ids=batch["input_ids"]).logits[:, :-1]
    loss = F.cross_entropy(logits.mT, batch["labels"][:, 1:], label_smoothing=0.1)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in exact.parameters()]).norm()
    args = arguments(tmp_path, 16 // steps, steps, max_steps=1, label_smoothing_factor=0.1)
    trainer, losses, seen, _ = train(FusedTrainer, sharpened(), args)
    assert losses[0] == pytest.approx(float(loss), rel=STATISTIC)
    assert seen.norms[0] == pytest.approx(float(norm), rel=8 * SAME_MODEL)
    assert head_report(trainer.model).logits_made == 0
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    alone = FusedTrainer(model=sharpened(), args=args, eval_dataset=Dataset())
    assert alone.evaluate()["eval_loss"] == pytest.approx(float(loss), rel=STATISTIC)


def test_label_smoothing_of_a_loss_that_is_not_fused(tmp_path):
    """It is taken from logits, as the stock trainer does, and counted."""
    batch = default_collate(Dataset(8).rows)
    logits = sharpened()(**batch).logits[:, :-1]
    exact = F.cross_entropy(logits.mT, batch["labels"][:, 1:], label_smoothing=0.1)
    for steps in (1, 8):
        args = arguments(tmp_path, 8 // steps, steps, label_smoothing_factor=0.1)
        _, losses, *_ = train(FusedTrainer, unfused(sharpened()), args, train_dataset=Dataset(8))
        assert losses[0] == pytest.approx(float(exact), rel=STATISTIC)
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    trainer = FusedTrainer(model=unfused(sharpened()), args=args, eval_dataset=Dataset(8))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(exact), rel=STATISTIC)


# ---- windows that end early, and settings of Trainer's -------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    """Five batches of two rows an epoch, whose number nobody knows."""

    def __iter__(self):
        yield from Dataset(10).rows


def test_a_stream_that_ends_inside_a_window_adds_nothing_to_the_next_step(tmp_path, caplog):
    """Trainer adds the gradients of two windows, each divided by its own tokens."""
    model = llama()
    with fusedce.audit(model) as report:
        train(FusedTrainer, model, arguments(tmp_path, 2, 2, max_steps=3), train_dataset=Stream())
    assert len(report.steps) == 3  # the fifth batch of the first epoch is in none
    assert "the data have ended inside a window" in caplog.text
    steps = [arguments(tmp_path, 2, 2, max_steps=n) for n in (2, 3)]
    norms = [train(FusedTrainer, llama(), a, train_dataset=Stream())[2].norms for a in steps]
    whole = Dataset(4).rows  # the window after the border: the first four rows, at the weights then

    class Third(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            if state.global_step == 2:
                plain = llama()
                plain.load_state_dict(model.state_dict())
                self.norm = total_norm(plain, whole)

    third = Third()
    train(FusedTrainer, llama(), steps[1], train_dataset=Stream(), callbacks=[third])
    assert norms[1][2] == pytest.approx(third.norm, rel=8 * SAME_MODEL)


def total_norm(model, rows):
    """The norm of the gradient of the mean over all tokens of ``rows``."""
    total, n = 0.0, 0
    for row in rows:
        count = int(row["labels"][1:].ne(-100).sum())
        total = total + count * model(**{k: x[None] for k, x in row.items()}).loss
        n += count
    (total / n).backward()
    return float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())


@pytest.mark.parametrize("what", ["training", "epoch"])
def test_training_that_is_stopped_inside_a_window_ends_well(tmp_path, what):
    class Stop(TrainerCallback):
        has_stopped = False

        def on_substep_end(self, args, state, control, **_):
            if state.global_step == 1 and not self.has_stopped:
                self.has_stopped = True
                setattr(control, f"should_{what}_stop", True)

    args = arguments(tmp_path, 2, 3, max_steps=-1, num_train_epochs=2, logging_steps=500)
    trainer, *_, output = train(FusedTrainer, llama(), args, callbacks=[Stop()])
    assert trainer.state.global_step == (1 if what == "training" else 4)
    assert math.isfinite(output.training_loss)


class Scaled(FusedTrainer):
    loss_is_scaled_for_ga = True  # of a compute_loss of the user's own, which there is none


def test_a_loss_that_is_said_to_be_scaled_is_not_added_up_undivided(tmp_path):
    args = arguments(tmp_path, 2, 3)
    norms = [train(kind, llama(), args)[2].norms for kind in (FusedTrainer, Scaled)]
    assert norms[1] == pytest.approx(norms[0], rel=SAME_MODEL)
