"""PEFT adapters on the head."""

import peft
import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_MODEL, STATISTIC, same_model
from support.operators import Calls
from support.tiny_trainer import V, llama
from torch.utils._pytree import tree_leaves

from fusedce import head_report, replace_loss_head


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
    "head, dropout": {"target_modules": ["lm_head"], "lora_dropout": 0.5},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "tied": {"tied": True},
}


@pytest.mark.parametrize("name", CASES)
def test_lora_is_fused(name, request):
    model = adapted(**CASES[name]).train()
    expected = loss_and_grads(model)
    keys = list(model.state_dict())
    replace_loss_head(model)
    assert list(model.state_dict()) == keys
    request.getfixturevalue("no_logits")
    loss, grads = loss_and_grads(model)
    torch.testing.assert_close(loss, expected[0], rtol=STATISTIC, atol=0)
    assert grads.keys() == expected[1].keys()
    assert not any("base_layer" in n or "original_module" in n for n in grads)
    same_model(grads, expected[1])
    if "head" in name:
        for part in ("lora_A", "lora_B"):
            assert any("lm_head" in n and part in n and g.norm() > 0 for n, g in grads.items())


def test_adapters_can_be_switched_and_merged(no_logits):
    model = replace_loss_head(adapted(target_modules=["lm_head"]))
    plain = float(llama()(**batch()).loss.detach())
    with_adapter = float(model(**batch()).loss.detach())
    assert abs(with_adapter - plain) > 1e-3
    with model.disable_adapter():
        assert float(model(**batch()).loss) == pytest.approx(plain, rel=SAME_MODEL)
    model.merge_adapter()
    assert float(model(**batch()).loss) == pytest.approx(with_adapter, rel=SAME_MODEL)
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    del model
    assert float(merged(**batch()).loss) == pytest.approx(with_adapter, rel=SAME_MODEL)
    assert head_report(merged).active


def test_an_adapter_switched_off_for_the_reference_policy():
    """DPO and GRPO read the logits of the reference after the adapter is on again."""
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


def test_merging_before_a_look_is_a_change():
    model = replace_loss_head(adapted(target_modules=["lm_head"]))
    logits = model(input_ids=batch()["input_ids"]).logits
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="has changed"):
        logits.argmax(-1)


def test_frozen_head_costs_no_weight_gradient():
    """The operator is given the weight itself, and returns no gradient of its size."""
    model = replace_loss_head(adapted())
    weight = model.get_output_embeddings().weight
    with Calls() as calls:
        loss_and_grads(model)
    ours = [seen for seen in calls.seen if seen[0].namespace == "fusedce"]
    given = [a for _, args, _ in ours for a in args if getattr(a, "shape", 0) == weight.shape]
    assert {a.data_ptr() for a in given} == {weight.data_ptr()}
    assert all(t.shape != weight.shape for *_, out in ours for t in tree_leaves(out))


LORA = {"target_modules": ["lm_head"], "init_lora_weights": False}
ON_THE_HEAD = {"target_modules": ["lm_head"], "init_weights": False}
METHODS = {  # whether a head so adapted is a sum of products, and its loss fused
    "DoRA": (lambda: peft.LoraConfig(r=2, use_dora=True, **LORA), False),
    "AdaLoRA": (lambda: peft.AdaLoraConfig(init_r=2, target_r=1, total_step=10, **LORA), False),
    "OFT": (lambda: peft.OFTConfig(r=0, oft_block_size=4, **ON_THE_HEAD), False),
    "BOFT": (lambda: peft.BOFTConfig(boft_block_size=4, **ON_THE_HEAD), False),
    "MiSS": (lambda: peft.MissConfig(r=4, **ON_THE_HEAD), False),
    "HRA": (lambda: peft.HRAConfig(r=4, **ON_THE_HEAD), True),
    "LoHa": (lambda: peft.LoHaConfig(r=4, **ON_THE_HEAD), True),
    "FourierFT": (lambda: peft.FourierFTConfig(n_frequency=20, **ON_THE_HEAD), True),
    "trainable tokens": (lambda: peft.LoraConfig(r=4, trainable_token_indices=[1, 2, 3]), True),
}


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_are_right_and_reported(name):
    config, is_fused = METHODS[name]
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), config())
    loss, grads = loss_and_grads(model)
    replace_loss_head(model)
    fused = loss_and_grads(model)
    torch.testing.assert_close(fused[0], loss, rtol=STATISTIC, atol=0)
    same_model(fused[1], grads)
    report = head_report(model)
    assert report.losses_fused == is_fused
    assert bool(report.logits_made) == (not is_fused)
