"""A replaced head, the accumulator and the trainer's mixin on a device."""

import pytest
import torch
from support.device import current

import fusedce

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu
SIZES = {"vocab_size": 3001, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **SIZES, intermediate_size=256, num_key_value_heads=2, use_cache=False)),
    "Gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        **SIZES, intermediate_size=256, num_key_value_heads=2, head_dim=64, use_cache=False,
        attn_implementation="eager")),
    "GPT2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=3001, n_embd=256, n_layer=2, n_head=4, use_cache=False,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_replaced_head_trains_as_the_untouched_model(name, dtype):
    torch.manual_seed(0)
    model = MODELS[name]().to(current(), dtype).train()
    ids = torch.randint(3001, (2, 64), device=current())
    found = []
    for fused in (False, True):
        if fused:
            fusedce.replace_loss_head(model)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((loss.detach().float(), grads))
    (stock, stock_grads), (ours, grads) = found
    assert fusedce.head_report(model).logits_made == 0
    roundings = 8 if dtype is torch.float32 else 4
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, stock, rtol=roundings * eps, atol=0)
    assert (grads - stock_grads).norm() <= roundings * eps * stock_grads.norm() + 1e-5


def test_a_device_tells_what_is_done_with_a_loss():
    """``autograd.grad`` is no micro-batch, ``backward(inputs=)`` is, and clipping shows."""
    weight, hidden = (torch.randn(n, 8, device=current(), requires_grad=True) for n in (31, 5))
    labels = torch.arange(5, device=current())
    acc = fusedce.LossAccumulator([weight])

    def scaled():
        return acc.scale(fusedce.fused_ce(hidden, weight, labels, backend="torch"))

    loss = scaled()
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad adds none"):
        acc.finish()
    loss.backward(inputs=[weight])
    acc.finish()
    assert acc.metrics()["n_tokens"] == 5
    assert float(acc.clip_grad_norm_(1e-3)) > 1e-3
    assert float(weight.grad.norm()) == pytest.approx(1e-3, rel=1e-3)
    weight.grad = None
    scaled().backward()
    torch.nn.utils.clip_grad_norm_([weight], 1e-3)
    with pytest.raises(RuntimeError, match="changed between the last micro-batch"):
        acc.finish()


def test_a_step_of_the_trainer_with_the_mixin(tmp_path):
    class Trainer(fusedce.FusedTrainerMixin, transformers.Trainer):
        pass

    torch.manual_seed(0)
    model = MODELS["Llama"]().to(current())
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(3001, (8, 32)).tolist()]
    args = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2,
        report_to=[], logging_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 2
    assert all(abs(loss - 8.0) < 0.5 for loss in logged)  # log(3001), untrained
    assert fusedce.head_report(model).logits_made == 0
