"""PEFT adapters on the head, and TRL's SFTTrainer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.versions import trl_1_16

from fusedce import FusedTrainerMixin, replace_loss_head, restore_loss_head
from fusedce.loss.fused_ce import ce_apart

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

V, H = 61, 16


def llama(**kwargs):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, use_cache=False,
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | kwargs,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batch():
    ids = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_grads(model):
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(**batch()).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def adapted(**kwargs):
    settings = {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]} | kwargs
    tied = settings.pop("tied", False)
    model = peft.get_peft_model(llama(tie_word_embeddings=tied), peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return model


CASES = {
    "body": {},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "head, rslora": {"target_modules": ["lm_head"], "use_rslora": True},
    "head, bias": {"target_modules": ["lm_head"], "lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "tied": {"tied": True},
}


@pytest.mark.parametrize("name", CASES)
def test_lora_is_fused(name, request):
    model = adapted(**CASES[name])
    expected = loss_and_grads(model)
    keys = list(model.state_dict())
    replace_loss_head(model)
    assert list(model.state_dict()) == keys
    request.getfixturevalue("no_logits")
    loss, grads = loss_and_grads(model)
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)
    assert grads.keys() == expected[1].keys()
    assert not any("base_layer" in n or "original_module" in n for n in grads)
    torch.testing.assert_close(grads, expected[1], rtol=1e-4, atol=1e-7)
    if "head" in name:
        for part in ("lora_A", "lora_B"):
            assert any("lm_head" in n and part in n and g.norm() > 0 for n, g in grads.items())


def test_adapters_can_be_switched_and_merged(no_logits):
    model = replace_loss_head(adapted(target_modules=["lm_head"]))
    plain = float(llama()(**batch()).loss.detach())
    with_adapter = float(model(**batch()).loss.detach())
    assert abs(with_adapter - plain) > 1e-3
    with model.disable_adapter():
        assert float(model(**batch()).loss) == pytest.approx(plain, rel=1e-6)
    model.merge_adapter()
    assert float(model(**batch()).loss) == pytest.approx(with_adapter, rel=1e-5)
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    assert float(merged(**batch()).loss) == pytest.approx(with_adapter, rel=1e-5)


def test_lora_dropout_on_the_head_is_drawn_once(no_logits):
    model = adapted(target_modules=["lm_head"], lora_dropout=0.5).train()
    expected = loss_and_grads(copy.deepcopy(model))
    replace_loss_head(model)
    loss, grads = loss_and_grads(model)
    torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(grads, expected[1], rtol=1e-4, atol=1e-6)


def test_an_adapter_switched_off_for_the_reference_policy():
    """As DPO and GRPO do; its logits are looked at when the adapter is on again."""
    model = adapted(target_modules=["lm_head", "q_proj"])
    ids = batch()["input_ids"]
    with torch.no_grad(), model.disable_adapter():
        native = model(input_ids=ids).logits
    replace_loss_head(model)
    with torch.no_grad(), model.disable_adapter():
        lazy = model(input_ids=ids).logits
    torch.testing.assert_close(lazy.log_softmax(-1), native.log_softmax(-1))
    labels = ids.view(-1)
    fused = F.cross_entropy(lazy.view(-1, V), labels)
    torch.testing.assert_close(fused, F.cross_entropy(native.view(-1, V), labels))


def test_lora_dropout_is_that_of_the_loss():
    """Whenever somebody looks, the logits are those the loss was computed of."""
    model = adapted(target_modules=["lm_head"], lora_dropout=0.5).train()
    replace_loss_head(model)
    torch.manual_seed(3)
    out = model(**batch())
    logits = out.logits[:, :-1].flatten(0, 1)
    labels = batch()["labels"][:, 1:].flatten()
    torch.testing.assert_close(F.cross_entropy(logits + 0, labels), out.loss)
    torch.testing.assert_close(out.logits.log_softmax(-1), (out.logits + 0).log_softmax(-1))


def test_merging_before_a_look_is_a_change():
    model = replace_loss_head(adapted(target_modules=["lm_head"]))
    logits = model(input_ids=batch()["input_ids"]).logits
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="has changed"):
        logits.argmax(-1)


def test_head_replaced_before_peft(no_logits):
    """The other order: LoRA wraps a head that is replaced already."""
    expected = loss_and_grads(adapted(target_modules=["lm_head", "q_proj"]))
    model = replace_loss_head(llama())
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["lm_head", "q_proj"])
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    replace_loss_head(model)
    loss, grads = loss_and_grads(model)
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, expected[1], rtol=1e-4, atol=1e-7)


def test_an_adapter_that_is_no_sum_of_products():
    model = adapted(target_modules=["lm_head"], use_dora=True)
    with pytest.raises(ValueError, match=r"linear with LoRA, got the adapters \['default'\]"):
        replace_loss_head(model)
    assert type(model(**batch()).logits) is torch.Tensor


def test_switching_to_such_an_adapter_gives_real_logits():
    model = replace_loss_head(adapted(target_modules=["lm_head"]))
    torch.manual_seed(5)
    model.add_adapter("dora", peft.LoraConfig(r=2, target_modules=["lm_head"], use_dora=True))
    model.set_adapter("dora")
    with torch.no_grad():
        model.get_output_embeddings().lora_B["dora"].weight.normal_()
    got = loss_and_grads(model)
    expected = loss_and_grads(restore_loss_head(model))
    torch.testing.assert_close(got, expected)


def test_frozen_head_costs_no_weight_gradient(monkeypatch):
    """The op is given a weight that wants none, and that nothing was added to."""
    given = []

    def spy(problem, wanted):
        given.append((problem.weight, wanted))
        return ce_apart(problem, wanted)

    model = adapted()
    monkeypatch.setattr("fusedce.head.lazy.request.ce_apart", spy)
    replace_loss_head(model)
    loss_and_grads(model)
    ((weight, wanted),) = given
    assert not weight.requires_grad
    assert not wanted.weight
    assert weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


# ---- TRL ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl")


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, V)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def text(n, seed):
    ids = torch.randint(3, V, (n,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def sft(trl, tokenizer, tmp_path, model, *, mixin=True, size=8, steps=1, data=None, **kwargs):
    datasets = pytest.importorskip("datasets")
    if data is None:
        data = [{"text": text(3 + 5 * (i % 4), i)} for i in range(8)]

    class FusedSFT(FusedTrainerMixin, trl.SFTTrainer):
        pass

    args = trl.SFTConfig(
        **{
            "output_dir": str(tmp_path), "per_device_train_batch_size": size,
            "gradient_accumulation_steps": steps, "max_steps": 2, "learning_rate": 1e-2,
            "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
            "disable_tqdm": True, "lr_scheduler_type": "constant", "max_length": 32,
            "dataloader_pin_memory": False, "gradient_checkpointing": False, "bf16": False,
            "shuffle_dataset": False, "loss_type": "nll",
        } | kwargs
    )  # fmt: skip
    trainer = (FusedSFT if mixin else trl.SFTTrainer)(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


PAIRS = [{"prompt": text(2 + i, i), "completion": " " + text(9 - i, 50 + i)} for i in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"data": PAIRS, "completion_only_loss": True},
        {"padding_free": True, "max_length": None},
        {"packing": True, "packing_strategy": "bfd"},
    ],
    ids=["padded", "completion only", "padding free", "packed"],
)
def test_sft(kwargs, trl, tokenizer, tmp_path, no_logits):
    """The same curve as TRL's own, which for this model is right, at any split."""
    if kwargs.get("packing"):
        same, stock = sft(trl, tokenizer, tmp_path, llama(), mixin=False, size=1, steps=2, **kwargs)
        fused, ours = sft(trl, tokenizer, tmp_path, llama(), size=1, steps=2, **kwargs)
    else:
        same, stock = sft(trl, tokenizer, tmp_path, llama(), mixin=False, **kwargs)
        fused, ours = sft(trl, tokenizer, tmp_path, llama(), **kwargs)
        _, parts = sft(trl, tokenizer, tmp_path, llama(), size=1, steps=8, **kwargs)
        torch.testing.assert_close(parts, ours, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=0)
    for trainer in (same, fused):
        trainer.evaluate(trainer.train_dataset)
    assert len(statistics(fused)) == 3 * len(statistics(fused)[::3]) >= 9
    torch.testing.assert_close(statistics(fused), statistics(same), rtol=1e-5, atol=1e-7)


def statistics(trainer):
    """What TRL's trainer logs beside the loss, in training and evaluation."""
    names = ("mean_token_accuracy", "entropy", "num_tokens")
    return [
        log[k]
        for log in trainer.state.log_history
        for name in names
        for k in (name, f"eval_{name}")
        if k in log
    ]


def test_sft_logs_the_auxiliary_loss_of_a_router(trl, tokenizer, tmp_path):
    trl_1_16()
    from support.tiny_trainer import mixtral

    def logged(mixin):
        trainer, _ = sft(trl, tokenizer, tmp_path, mixtral(), mixin=mixin, size=4, steps=2)
        return [log["aux_loss"] for log in trainer.state.log_history if "aux_loss" in log]

    stock = logged(False)
    assert len(stock) == 2
    torch.testing.assert_close(logged(True), stock, rtol=1e-4, atol=0)


def test_scale_that_trl_guesses_wrong(trl, tokenizer, tmp_path, no_logits):
    """A model whose forward scales its logits in a way its configuration does not say."""
    trl_1_16()

    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
            hidden = self.model(input_ids, attention_mask).last_hidden_state
            logits = 3.0 * self.lm_head(hidden)
            loss = self.loss_function(logits, labels, self.config.vocab_size)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model = Scaled(llama().config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    _, stock = sft(trl, tokenizer, tmp_path, copy.deepcopy(model), mixin=False)
    _, ours = sft(trl, tokenizer, tmp_path, copy.deepcopy(model))
    rows = [tokenizer(text(3 + 5 * (i % 4), i) + " </s>")["input_ids"] for i in range(8)]
    ids = torch.zeros(8, max(map(len, rows)), dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    hidden = model.model(ids, mask).last_hidden_state
    logits = 3.0 * F.linear(hidden, model.lm_head.weight)
    exact = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).detach())
    assert ours[0] == pytest.approx(exact, rel=1e-5)
    assert abs(stock[0] - exact) > 0.1


def test_trl_head_is_said_to_be_replaced(trl, tokenizer, tmp_path, caplog):
    sft(trl, tokenizer, tmp_path, llama())
    assert any("replaces the fused head of TRL" in r.getMessage() for r in caplog.records)


def test_other_loss_types_are_refused(trl, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"(loss_type='dft'|compute_loss_func) asks for another"):
        sft(trl, tokenizer, tmp_path, llama(), loss_type="dft")


def test_stock_sft_trainer_ignores_a_replaced_head(trl, tokenizer, tmp_path, no_logits):
    """TRL's own head takes the weight and never runs ours: the same loss, and nothing breaks."""
    trl_1_16()
    _, plain = sft(trl, tokenizer, tmp_path, llama(), mixin=False)
    model = replace_loss_head(llama())
    _, replaced = sft(trl, tokenizer, tmp_path, model, mixin=False)
    assert replaced == plain
    with pytest.warns(UserWarning, match="TRL has installed its own fused head"):
        replace_loss_head(restore_loss_head(model))
