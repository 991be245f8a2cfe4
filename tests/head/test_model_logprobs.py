"""Log-probabilities through a model's own head, beside the untouched model's logits in float64."""

import copy

import peft
import pytest
import torch
import torch.nn.functional as F
from support import ranks
from support.bounds import SAME_MODEL, STATISTIC, same_model
from support.heads import MODES
from support.loops import distance
from support.tiny_trainer import V, bart, gpt2, llama
from support.unfused import dora
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import fusedce
from fusedce import fused_logprobs, fused_topk, head_report, model_logprobs, shift_labels

SIZES = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "use_cache": False,
}  # fmt: skip


def lora(**settings):
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=3, lora_alpha=12, **settings))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return model


def gemma():
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)
    return Gemma2ForCausalLM(config)


def cohere():
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3, pad_token_id=0))


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "soft-capped": gemma,
    "scaled": cohere,
    "LoRA on the head": lambda: lora(target_modules=["q_proj", "lm_head"]),
    "modules_to_save": lambda: lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


def batch():
    ids = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def expected(model, given, aligned, temperature):
    """Statistics ``(B, T)`` of the logits of a copy in float64, and gradients of a policy loss."""
    exact = copy.deepcopy(model).double()
    z = exact(**given).logits / torch.as_tensor(temperature, dtype=torch.float64)[..., None]
    log_p, used = z.log_softmax(-1), aligned != -100
    logprob = log_p.gather(-1, aligned.clamp(min=0)[..., None])[..., 0]
    stats = [logprob, -(log_p.exp() * log_p).sum(-1), z.logsumexp(-1)]
    stats = [x.where(used, 0) for x in stats] + [z.argmax(-1).where(used, -1)]
    return stats, grads_of(exact, stats)


def grads_of(model, stats):
    """Of all three statistics, weighed otherwise at each position."""
    weights = torch.linspace(-1, 1, stats[0].numel()).view(stats[0].shape)
    total = sum(((k + weights) * x).sum() for k, x in enumerate(stats[:3]))
    model.zero_grad()
    total.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


TEMPERATURES = {
    "one": 0.7,
    "each token": torch.linspace(0.5, 2, 18).view(2, 9),
    "each sequence": torch.tensor([[0.5], [1.5]]),
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_models_own_logits(name, temperature, no_logits):
    model, t = MODELS[name]().eval(), TEMPERATURES[temperature]
    given = {"input_ids": batch()["input_ids"]}
    aligned = shift_labels(batch()["labels"])
    stats, grads = expected(model, given, aligned, t)
    found = model_logprobs(model, batch(), temperature=t)
    assert torch.equal(found.argmax, stats[3])
    for got, right in zip(found[:3], stats[:3], strict=True):
        torch.testing.assert_close(got.double(), right, rtol=SAME_MODEL, atol=SAME_MODEL)
    got = grads_of(model, found)
    assert got.keys() == grads.keys()
    same_model(got, grads)
    assert head_report(model).since is None, "the model stays as it was"


@pytest.mark.parametrize("name", ["LoRA on the head", "soft-capped", "DoRA"])
def test_the_likeliest_classes_and_a_sampler_with_top_k_and_top_p(name):
    model = (MODELS | {"DoRA": dora})[name]().eval()
    aligned, t = shift_labels(batch()["labels"]), TEMPERATURES["each sequence"]
    used = aligned != -100
    exact = copy.deepcopy(model).double()
    z = (exact(input_ids=batch()["input_ids"]).logits / t[..., None]).log_softmax(-1)
    right = z.topk(12)
    right = fusedce.TopK(right.values.where(used[..., None], 0), right.indices)
    found = model_logprobs(model, batch(), temperature=t, top=12)
    torch.testing.assert_close(found.top.logprob.double(), right.logprob, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.top.index, right.index.where(used[..., None], -1))
    sampler = {"top_k": 12, "top_p": 0.6}
    logprob = z.gather(-1, aligned.clamp(min=0)[..., None])[..., 0]
    of = lambda lp, top: fusedce.recipes.filtered_logprob(lp, aligned, top, **sampler)  # noqa: E731
    got, expected = of(found.logprob, found.top), of(logprob, right)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    got.sum().backward()
    expected.sum().backward()
    grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, exact)]
    same_model(*grads)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode(mode, replaced, no_logits):
    model = lora(target_modules=["lm_head"]).eval()
    if replaced:
        fusedce.replace_loss_head(model)
    right = model_logprobs(model, batch())
    with MODES[mode]():
        found = model_logprobs(model, batch())
    assert found.logprob.requires_grad == (mode == "grad")
    for got, at in zip(found, right, strict=True):
        torch.testing.assert_close(got.detach() + 0, at.detach(), rtol=STATISTIC, atol=STATISTIC)
    assert head_report(model).losses_fused == (2 if replaced else 0)


def test_with_lora_on_the_head_the_weight_alone_gives_another_answer():
    """PEFT's ``lm_head.weight`` is that of the base model."""
    model = lora(target_modules=["lm_head"]).eval()
    aligned = shift_labels(batch()["labels"])
    hidden = model.base_model.model.model(batch()["input_ids"]).last_hidden_state
    of_weight = fused_logprobs(hidden, model.base_model.model.lm_head.weight, aligned)
    off = (of_weight.logprob - model_logprobs(model, batch()).logprob).abs().max()
    assert off > 0.1


def test_a_reference_policy_with_the_adapter_off(no_logits):
    model = lora(target_modules=["q_proj", "lm_head"]).eval()
    with torch.no_grad(), model.disable_adapter():
        reference = model_logprobs(model, batch())
    plain = model_logprobs(llama().eval(), batch())
    torch.testing.assert_close(reference.logprob, plain.logprob, rtol=STATISTIC, atol=STATISTIC)


def test_where_labels_come_from():
    model = llama().eval()
    ids, labels = batch().values()
    right = model_logprobs(model, {"input_ids": ids, "labels": labels})
    aligned = {"input_ids": ids, "shift_labels": shift_labels(labels)}
    for got, at in zip(model_logprobs(model, aligned), right, strict=True):
        assert torch.equal(got, at)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding on the left
    found = model_logprobs(model, {"input_ids": ids, "attention_mask": mask})
    assert (found.argmax[0, :3] == -1).all()
    assert (found.argmax[0, 3:-1] >= 0).all()
    assert (found.argmax[:, -1] == -1).all()
    causal = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)  # says of no padding
    whole = model_logprobs(model, {"input_ids": ids, "attention_mask": causal})
    assert (whole.argmax[:, :-1] >= 0).all()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    packed = model_logprobs(model, {"input_ids": ids, "position_ids": positions})
    assert (packed.argmax[:, [3, 8]] == -1).all()


def test_an_encoder_and_decoder_predicts_its_labels(no_logits):
    model = bart().eval()
    ids = batch()["input_ids"]
    given = {"input_ids": ids, "labels": ids[:, :5].contiguous()}
    found = model_logprobs(model, given)
    loss = float(model(**given).loss.detach())
    assert float(-found.logprob.detach().mean()) == pytest.approx(loss, rel=SAME_MODEL)


def test_an_encoder_and_decoder_that_shifts_its_labels_only_for_a_loss(no_logits):
    """Whisper has no ``prepare_decoder_input_ids_from_labels``."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=4,
        max_source_positions=8, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    given = {"input_features": torch.randn(2, 4, 16), "labels": batch()["labels"]}
    found = model_logprobs(model, given)
    loss = float(model(**given).loss.detach())
    mean = float(-found.logprob.detach().sum() / (given["labels"] != -100).sum())
    assert mean == pytest.approx(loss, rel=SAME_MODEL)


def test_a_masked_language_model_predicts_its_labels(no_logits):
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES)).eval()
    found = model_logprobs(model, batch())
    loss = float(model(**batch()).loss.detach())
    used = found.argmax >= 0
    assert torch.equal(used, batch()["labels"] != -100)
    mean = float(-found.logprob.detach().sum() / used.sum())
    assert mean == pytest.approx(loss, rel=SAME_MODEL)
    ids = batch()["input_ids"]
    with pytest.raises(ValueError, match='must hold "labels"'):
        model_logprobs(model, {"input_ids": ids})


def test_logits_that_cannot_stay_lazy_give_the_same_values():
    model = dora().eval()
    aligned = shift_labels(batch()["labels"])
    t = TEMPERATURES["each sequence"]
    stats, grads = expected(model, {"input_ids": batch()["input_ids"]}, aligned, t)
    found = model_logprobs(model, batch(), temperature=t)
    for got, right in zip(found[:3], stats[:3], strict=True):
        torch.testing.assert_close(got.double(), right, rtol=SAME_MODEL, atol=8 * SAME_MODEL)
    same_model(grads_of(model, found), grads)


def test_twice_and_through_the_graph_of_the_gradient():
    """``retain_graph``, and a penalty on the gradient, which needs real logits."""
    model = llama().eval()
    found = model_logprobs(model, batch())
    first = grads_of_kept(model, found)
    same_model(grads_of_kept(model, found), first)
    model.zero_grad()
    weight = model.lm_head.weight
    (grad,) = torch.autograd.grad(
        model_logprobs(model, batch()).logprob.sum(), weight, create_graph=True
    )
    grad.square().sum().backward()
    penalty = weight.grad.clone()
    model.zero_grad()
    z = model(input_ids=batch()["input_ids"]).logits.view(-1, V)
    nll = F.cross_entropy(z, shift_labels(batch()["labels"]).view(-1), reduction="sum")
    (grad,) = torch.autograd.grad(-nll, weight, create_graph=True)
    grad.square().sum().backward()
    torch.testing.assert_close(penalty, weight.grad, rtol=1e-4, atol=1e-5)


def grads_of_kept(model, stats):
    model.zero_grad()
    stats.logprob.sum().backward(retain_graph=True)
    return [p.grad.clone() for p in model.parameters()]


def test_what_is_refused():
    model = llama()
    with pytest.raises(TypeError, match="batch must be a mapping of tensors, got list"):
        model_logprobs(model, [1])
    with pytest.raises(ValueError, match='must hold "labels", "shift_labels" or "input_ids"'):
        model_logprobs(model, {})
    with pytest.raises(ValueError, match="leave out logits_to_keep"):
        model_logprobs(model, batch() | {"logits_to_keep": 3})
    for t in (0.0, -1, torch.zeros(2, 1), torch.ones(3, 1)):
        with pytest.raises(ValueError, match="temperature must be"):
            model_logprobs(model, batch(), temperature=t)
    with pytest.raises(TypeError, match="temperature must be"):
        model_logprobs(model, batch(), temperature="1")
    for top in (0, V + 1):
        with pytest.raises(ValueError, match="top must be in"):
            model_logprobs(model, batch(), top=top)
    with pytest.raises(TypeError, match="top must be an int"):
        model_logprobs(model, batch(), top=2.0)
    with pytest.raises(ValueError, match="memory_budget"):
        model_logprobs(model, batch(), memory_budget=-1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_the_weight_of_a_quantised_layer_is_named(dtype):
    packed = torch.zeros(44, 1, dtype=dtype)  # as bitsandbytes packs four bits
    with pytest.raises(TypeError, match=r"quantised layers pack theirs.*model_logprobs"):
        fused_logprobs(torch.randn(3, 8), packed, torch.zeros(3, dtype=torch.int64))


def test_a_temperature_of_each_sequence():
    hidden, weight = torch.randn(3, 4, 8), torch.randn(11, 8)
    labels, t = torch.randint(11, (3, 4)), torch.tensor([[0.5], [1.0], [2.0]])
    right = fused_logprobs(hidden, weight, labels, temperature=t.expand(3, 4))
    found = fused_logprobs(hidden, weight, labels, temperature=t)
    assert all(map(torch.equal, found, right))
    top = fused_topk(hidden, weight, 2, temperature=t)
    assert torch.equal(top.logprob, fused_topk(hidden, weight, 2, temperature=t.expand(3, 4))[0])


@ranks.together()
def test_under_ddp(rank):
    model = fusedce.replace_loss_head(llama().eval())
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    given = {"input_ids": batch()["input_ids"][rank : rank + 1]}
    model_logprobs(wrapped, given).logprob.sum().backward()
    both = llama().eval()
    (model_logprobs(both, {"input_ids": batch()["input_ids"]}).logprob.sum() / 2).backward()
    same_model([p.grad for p in model.parameters()], [p.grad for p in both.parameters()])


# ---- real logits --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_classes_chosen_in_forward_stay_so_in_backward(dtype):
    """Ties, and real logits of two bytes, would order them otherwise."""
    model = llama().to(dtype)
    weight = model.lm_head.weight
    with torch.no_grad():
        weight.mul_(10)
        weight[30:] = weight[3:34].clone()
    ids = torch.randint(3, V, (3, 11))
    stats = model_logprobs(model, {"input_ids": ids}, top=6)
    loss = (stats.top.logprob * torch.arange(6)).sum()
    (got,) = torch.autograd.grad(loss, weight, create_graph=True)
    logprobs = model(input_ids=ids).logits.float().log_softmax(-1)[:, :-1]
    chosen = logprobs.gather(-1, stats.top.index[:, :-1])
    (expected,) = torch.autograd.grad((chosen * torch.arange(6)).sum(), weight)
    assert distance(got, expected) < (8 * SAME_MODEL if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("bad", [-1, -7, V, V + 5])
@pytest.mark.parametrize("make", [llama, dora])
def test_a_label_out_of_range_is_refused_by_real_logits_too(make, bad):
    model, labels = make(), torch.randint(V, (2, 6))
    ids = labels.clone()
    labels[0, 3] = bad
    words = rf"labels must hold .* got {bad} at flattened position 2"
    with pytest.raises(ValueError, match=words):
        model_logprobs(model, {"input_ids": ids, "labels": labels})


def test_equal_logits_of_a_real_head_come_in_the_order_of_their_classes():
    model = dora()
    ids = torch.randint(3, V, (2, 6))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # all logits are equal
    found = model_logprobs(model, {"input_ids": ids}, top=5).top.index[:, :-1]
    assert (found == torch.arange(5)).all()
