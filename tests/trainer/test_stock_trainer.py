"""The stock Trainer on a model whose head is replaced."""

import torch
from support.bounds import SAME_MODEL
from support.tiny_trainer import Dataset, Seen, arguments, llama, train
from transformers import LlamaForCausalLM, Trainer

from fusedce import replace_loss_head


def test_stock_trainer_is_the_same_at_any_split(tmp_path, no_logits):
    curves = [
        train(Trainer, replace_loss_head(llama()), arguments(tmp_path, size, steps))[1]
        for size, steps in ((16, 1), (1, 16))
    ]
    torch.testing.assert_close(curves[0], curves[1], rtol=0, atol=SAME_MODEL)


def test_stock_trainer_trains_as_without(tmp_path):
    plain, curve, seen, _ = train(Trainer, llama(), arguments(tmp_path))
    fused, fused_curve, fused_seen, _ = train(
        Trainer, replace_loss_head(llama()), arguments(tmp_path)
    )
    torch.testing.assert_close(fused_curve, curve, rtol=SAME_MODEL, atol=0)
    torch.testing.assert_close(fused_seen.norms, seen.norms, rtol=SAME_MODEL, atol=0)
    # 1% of a step of AdamW, which is the learning rate even for gradients that are mostly rounding
    torch.testing.assert_close(
        dict(fused.model.state_dict()), dict(plain.model.state_dict()), rtol=0, atol=1e-4
    )


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
