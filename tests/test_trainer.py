"""Trainers: the stock one with a replaced head, and what FusedTrainerMixin mends."""

import math

import pytest
import torch
from torch import nn

from fusedce import FusedTrainerMixin, replace_loss_head
from fusedce.lazy_state import Lazy

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import (  # noqa: E402
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

V = 61


class FusedTrainer(FusedTrainerMixin, Trainer):
    pass


def llama(**kwargs):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=64, use_cache=False, **kwargs,
        )
    )  # fmt: skip


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=64, use_cache=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bart():
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, use_cache=False,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def mixtral():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, use_cache=False,
        max_position_embeddings=64, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    return MixtralForCausalLM(config)


class Dataset(torch.utils.data.Dataset):
    """Rows of one size with valid labels at their beginning, from very few to all."""

    def __init__(self, n=16, size=12, seed=1):
        rng = torch.Generator().manual_seed(seed)
        self.rows = []
        for i in range(n):
            ids = torch.randint(3, V, (size,), generator=rng)
            labels = ids.clone()
            labels[2 + (i * 7) % (size - 1) :] = -100
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Seen(TrainerCallback):
    """Norms of the gradients that reach the optimizer, and the logs."""

    def __init__(self):
        self.norms, self.logs = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(norms).norm()))

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


def arguments(tmp_path, size=4, steps=1, **kwargs):
    return TrainingArguments(
        **{
            "output_dir": str(tmp_path), "per_device_train_batch_size": size,
            "gradient_accumulation_steps": steps, "max_steps": 3, "learning_rate": 1e-2,
            "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
            "disable_tqdm": True, "max_grad_norm": 0, "lr_scheduler_type": "constant",
            "per_device_eval_batch_size": 8, "dataloader_pin_memory": False,
        } | kwargs
    )  # fmt: skip


def train(kind, model, args, **kwargs):
    seen = Seen()
    trainer = kind(
        model=model, args=args, train_dataset=kwargs.pop("train_dataset", Dataset()),
        callbacks=[seen], **kwargs,
    )  # fmt: skip
    output = trainer.train()
    losses = [log["loss"] for log in seen.logs if "loss" in log]
    return trainer, losses, seen, output


@pytest.fixture
def no_logits(monkeypatch):
    def materialize(self, **kwargs):
        raise AssertionError("real logits were computed")

    monkeypatch.setattr(Lazy, "materialize", materialize)


# ---- the stock Trainer on a replaced head ---------------------------------------------------


def test_stock_trainer_is_the_same_at_any_split(tmp_path, no_logits):
    curves = [
        train(Trainer, replace_loss_head(llama()), arguments(tmp_path, size, steps))[1]
        for size, steps in ((16, 1), (1, 16))
    ]
    torch.testing.assert_close(curves[0], curves[1], rtol=0, atol=1e-5)


def test_stock_trainer_trains_as_without(tmp_path):
    plain, curve, seen, _ = train(Trainer, llama(), arguments(tmp_path))
    fused, fused_curve, fused_seen, _ = train(
        Trainer, replace_loss_head(llama()), arguments(tmp_path)
    )
    torch.testing.assert_close(fused_curve, curve, rtol=1e-5, atol=0)
    torch.testing.assert_close(fused_seen.norms, seen.norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        dict(fused.model.state_dict()), dict(plain.model.state_dict()), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    "kwargs", [{"bf16": True}, {"gradient_checkpointing": True}], ids=["bf16", "checkpointing"]
)
def test_stock_trainer_modes(kwargs, tmp_path, no_logits):
    args = arguments(tmp_path, **kwargs)
    losses = train(Trainer, replace_loss_head(llama()), args, eval_dataset=Dataset(5))[1]
    expected = train(Trainer, llama(), arguments(tmp_path))[1]
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)


def test_stock_trainer_evaluates_and_predicts(tmp_path):
    def accuracy(prediction):
        predicted = prediction.predictions.argmax(-1)[:, :-1]
        labels = prediction.label_ids[:, 1:]
        return {"accuracy": (predicted == labels)[labels != -100].mean()}

    results = []
    for model in (llama(), replace_loss_head(llama())):
        trainer = Trainer(
            model=model, args=arguments(tmp_path), eval_dataset=Dataset(11),
            compute_metrics=accuracy,
        )  # fmt: skip
        evaluated = trainer.evaluate()
        predicted = trainer.predict(Dataset(5))
        results.append(
            [evaluated["eval_loss"], evaluated["eval_accuracy"], predicted.metrics["test_loss"],
             torch.from_numpy(predicted.predictions)]
        )  # fmt: skip
    torch.testing.assert_close(results[1], results[0])


def test_stock_trainer_evaluates_without_logits(tmp_path, no_logits):
    trainer = Trainer(
        model=replace_loss_head(llama()), args=arguments(tmp_path), eval_dataset=Dataset(11)
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(V), rel=0.1)


def test_save_reload_and_resume(tmp_path):
    args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, save_total_limit=9)
    trainer, losses, *_ = train(Trainer, replace_loss_head(llama()), args)
    assert list(trainer.model.state_dict()) == list(llama().state_dict())
    again = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(again(ids).logits, trainer.model(ids).logits.clone())
    seen = Seen()
    resumed = Trainer(
        model=replace_loss_head(llama()), args=args, train_dataset=Dataset(), callbacks=[seen]
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [log["loss"] for log in seen.logs if "loss" in log] == losses[2:]


def test_generation_is_unchanged():
    model, ids = llama().eval(), torch.arange(5)[None]
    settings = {"max_new_tokens": 6, "pad_token_id": 0}
    expected = [
        model.generate(ids, do_sample=False, **settings),
        model.generate(ids, do_sample=False, num_beams=3, **settings),
        model(ids, logits_to_keep=2).logits,
    ]
    replace_loss_head(model)
    got = [
        model.generate(ids, do_sample=False, **settings),
        model.generate(ids, do_sample=False, num_beams=3, **settings),
        model(ids, logits_to_keep=2).logits,
    ]
    torch.testing.assert_close(got[:2], expected[:2], rtol=0, atol=0)
    torch.testing.assert_close(got[2] * 1.0 + 0, expected[2])


# ---- what the mixin mends: each with the stock behaviour wrong ------------------------------


def first_step(kind, make, tmp_path, steps, **kwargs):
    """Logged loss and gradient norm of the first step of 16 rows, as ``steps`` micro-batches."""
    args = arguments(tmp_path, 16 // steps, steps, max_steps=1)
    _, losses, seen, _ = train(kind, make(), args, **kwargs)
    return losses[0], seen.norms[0]


def test_count_after_the_shift(tmp_path):
    """GPT-2's loss shifts, but Trainer counts its labels before that."""

    def all_valid():
        data = Dataset()
        for row in data.rows:
            row["labels"] = row["input_ids"].clone()
        return data

    exact = true_mean(gpt2(), all_valid())
    stock = first_step(Trainer, gpt2, tmp_path, 4, train_dataset=all_valid())
    ours = first_step(FusedTrainer, gpt2, tmp_path, 4, train_dataset=all_valid())
    assert stock[0] == pytest.approx(exact * 11 / 12, rel=1e-4)
    assert ours[0] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("make", [llama, gpt2, bart, mixtral])
def test_one_step_is_one_step_whatever_the_split(make, tmp_path):
    whole = first_step(FusedTrainer, make, tmp_path, 1)
    parts = first_step(FusedTrainer, make, tmp_path, 16)
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    if make is not mixtral:  # whose auxiliary loss is another one for other micro-batches
        assert parts[1] == pytest.approx(whole[1], rel=1e-5)


def test_bart_multiplies_its_loss_by_the_accumulation_steps(tmp_path):
    whole = first_step(Trainer, bart, tmp_path, 1)
    stock = first_step(Trainer, bart, tmp_path, 8)
    assert stock[0] > 6 * whole[0]
    ours = first_step(FusedTrainer, bart, tmp_path, 8)
    assert ours[0] == pytest.approx(whole[0], rel=1e-6)
    assert ours[1] == pytest.approx(whole[1], rel=1e-5)


def test_auxiliary_loss_is_a_mean_over_micro_batches(tmp_path):
    """The router's gradient with a frozen cross-entropy: that of the mean auxiliary loss."""

    class RouterNorm(TrainerCallback):
        norm = None

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            (self.norm,) = [p.grad.clone() for n, p in model.named_parameters() if "gate.w" in n]

    def router_grad(kind, steps):
        model, seen = mixtral(), RouterNorm()
        nn.init.zeros_(model.lm_head.weight)  # flat logits: the cross-entropy asks for nothing
        args = arguments(tmp_path, 16 // steps, steps, max_steps=1)
        kind(model=model, args=args, train_dataset=Dataset(), callbacks=[seen]).train()
        return seen.norm

    expected = torch.zeros(4, 16)
    model = mixtral()
    nn.init.zeros_(model.lm_head.weight)
    for i in range(4):
        rows = [Dataset()[j] for j in epoch_order(4)[i]]
        aux = 0.5 * model(**torch.utils.data.default_collate(rows)).aux_loss / 4
        (gate,) = [p for n, p in model.named_parameters() if "gate.w" in n]
        expected += torch.autograd.grad(aux, gate)[0]
    torch.testing.assert_close(router_grad(FusedTrainer, 4), expected, rtol=1e-4, atol=1e-7)
    assert router_grad(Trainer, 4).norm() > 3 * expected.norm()


def epoch_order(size):
    """The micro-batches of the first epoch, as Trainer's sampler draws them."""
    order = []

    class Spy(Dataset):
        def __getitem__(self, i):
            order.append(i)
            return super().__getitem__(i)

    trainer = Trainer(
        model=llama(), args=arguments("/tmp/unused", size, 16 // size, max_steps=1),
        train_dataset=Spy(),
    )  # fmt: skip
    trainer.train()
    return [order[i : i + size] for i in range(0, 16, size)]


def true_mean(model, data):
    batch = torch.utils.data.default_collate(data.rows)
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_evaluation_is_a_mean_over_tokens(size, tmp_path):
    args = arguments(tmp_path, per_device_eval_batch_size=size)
    exact = true_mean(sharpened(), Dataset(11))
    stock = Trainer(model=sharpened(), args=args, eval_dataset=Dataset(11)).evaluate()
    ours = FusedTrainer(model=sharpened(), args=args, eval_dataset=Dataset(11)).evaluate()
    assert abs(stock["eval_loss"] - exact) > 1e-3
    assert ours["eval_loss"] == pytest.approx(exact, rel=1e-6)


def sharpened():
    """A model with losses far from each other."""
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return model


def test_logged_loss_is_per_token_over_the_interval(tmp_path):
    """One interval of two steps at learning rate 0: the mean over all its tokens."""
    args = arguments(tmp_path, 2, 1, max_steps=8, logging_steps=8, learning_rate=0.0)
    exact = true_mean(sharpened(), Dataset())
    _, stock, *_ = train(Trainer, sharpened(), args)
    _, ours, _, output = train(FusedTrainer, sharpened(), args)
    assert abs(stock[0] - exact) > 1e-3
    assert ours[0] == pytest.approx(exact, rel=1e-6)
    assert output.training_loss == pytest.approx(exact, rel=1e-6)


def test_last_window_of_an_epoch_is_short(tmp_path):
    """10 rows as 4 + 4 + 2: the last step is divided by what it holds."""
    curves = []
    for size, steps in ((4, 1), (1, 4)):
        args = arguments(tmp_path, size, steps, max_steps=-1, num_train_epochs=2)
        curves.append(train(FusedTrainer, llama(), args, train_dataset=Dataset(10))[1])
    assert len(curves[0]) == 6
    torch.testing.assert_close(curves[0], curves[1], rtol=0, atol=1e-5)


def test_batches_with_nothing_valid(tmp_path):
    data = Dataset()
    for row in data.rows[::2]:
        row["labels"] = torch.full_like(row["labels"], -100)
    losses = [
        train(FusedTrainer, llama(), arguments(tmp_path, size, steps), train_dataset=data)[1]
        for size, steps in ((8, 1), (1, 8))
    ]
    assert all(math.isfinite(x) for x in losses[1])
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)


def packed_row(n=2, size=6):
    data = Dataset(n, size)
    for row in data.rows:
        row["labels"] = row["input_ids"].clone()
    return {
        "input_ids": torch.cat([r["input_ids"] for r in data.rows])[None],
        "labels": torch.cat([r["labels"] for r in data.rows])[None],
        "position_ids": torch.arange(size).repeat(n)[None],
    }, torch.utils.data.default_collate(data.rows)


@pytest.mark.parametrize("how", ["position_ids", "cu_seqlens"])
def test_no_token_is_trained_across_documents(how, tmp_path):
    packed, padded = packed_row()
    if how == "cu_seqlens":
        packed["cu_seq_lens_q"] = torch.tensor([0, 6, 12], dtype=torch.int32)
        del packed["position_ids"]
    trainer = FusedTrainer(model=llama(), args=arguments(tmp_path), train_dataset=Dataset())
    counted = trainer._get_num_items_in_batch([dict(packed)], torch.device("cpu"))
    assert int(counted) == 10  # 11 positions have a successor, one of them in another document
    if how == "position_ids":
        loss = trainer.compute_loss(trainer.model.train(), dict(packed))
        torch.testing.assert_close(loss, llama()(**padded).loss)


class Unmasked(LlamaForCausalLM):
    """Attends to all that came before, whatever the positions say."""

    def forward(self, input_ids, position_ids=None, labels=None):
        return super().forward(
            input_ids, attention_mask=torch.ones_like(input_ids), labels=labels,
            position_ids=position_ids,
        )  # fmt: skip


@pytest.mark.parametrize(("make", "times"), [(lambda: Unmasked(llama().config), 1), (llama, 0)])
def test_attention_across_documents_is_said_once(make, times, tmp_path, caplog):
    packed, _ = packed_row()
    trainer = FusedTrainer(model=make(), args=arguments(tmp_path), train_dataset=Dataset())
    for _ in range(2):
        trainer._get_num_items_in_batch([dict(packed)], torch.device("cpu"))
    said = [r for r in caplog.records if "attends across their borders" in r.getMessage()]
    assert len(said) == times


# ---- refusals -------------------------------------------------------------------------------


def test_another_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match="compute_loss_func asks for another loss"):
        FusedTrainer(model=llama(), args=arguments(tmp_path), compute_loss_func=lambda *a, **k: 0)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        FusedTrainer(model=llama(), args=arguments(tmp_path, label_smoothing_factor=0.1))


def test_a_loss_that_is_not_fused_is_refused(tmp_path):
    class Own(LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            output = super().forward(input_ids)
            output["loss"] = -output.logits.log_softmax(-1)[..., 0].mean()
            return output

    trainer = FusedTrainer(
        model=Own(llama().config), args=arguments(tmp_path), train_dataset=Dataset()
    )
    with pytest.raises(ValueError, match=r"must be one fused F.cross_entropy .* there were 0"):
        trainer.train()


def test_a_wrong_count_is_found(tmp_path):
    class Dropping(LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            if self.training:
                labels = labels.clone()
                labels[:, :3] = -100
            return super().forward(input_ids, labels=labels)

    trainer = FusedTrainer(
        model=Dropping(llama().config), args=arguments(tmp_path), train_dataset=Dataset()
    )
    with pytest.raises(RuntimeError, match="the model's loss has counted"):
        trainer.train()
