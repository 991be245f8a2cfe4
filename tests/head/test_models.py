"""Models of transformers: training, evaluation, generation, and heads that come later."""

import copy

import peft
import pytest
import sweep_heads
import torch
from accelerate import big_modeling
from support.heads import MODES, tokens
from support.tiny_trainer import V, llama

from fusedce import head_report, replace_loss_head, restore_loss_head
from fusedce.backends import plan
from fusedce.backends.torch import sum_grads

WITHOUT_GRAD = [mode for mode in MODES if mode != "grad"]
CLASSES = [
    "gpt2", "llama", "gemma", "gemma2", "gemma3_text", "cohere", "granite", "mistral", "mixtral",
    "qwen2", "qwen3", "qwen2_moe", "phi3", "olmo2", "opt", "bloom", "gpt_neox", "mamba", "bart",
    "bert", "roberta", "gpt_neo", "falcon_h1", "deepseek_v3", "gpt_oss", "smollm3", "starcoder2",
]  # fmt: skip


def run(model):
    ids = tokens(2, 9)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("model_type", CLASSES)
def test_classes_of_transformers(model_type):
    names = sweep_heads.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in names:
        pytest.skip(f"this transformers has no causal LM {model_type}")
    row = sweep_heads.check(model_type, names[model_type])
    assert row.get("right"), row
    assert row["fused"], row


# ---- evaluation and generation --------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_is_fused(mode, dtype, request):
    native = llama().eval().to(dtype)
    replaced = replace_loss_head(copy.deepcopy(native))
    request.getfixturevalue("no_logits")
    with MODES[mode]():
        losses = [run(m) for m in (replaced, native)]
    of_logits = {torch.float32: 4 * torch.finfo(dtype).eps, torch.bfloat16: 2**-11}[dtype]
    torch.testing.assert_close(*losses, rtol=of_logits, atol=0)  # native ones are rounded to dtype
    assert head_report(replaced).losses_fused == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_head(mode, where, tmp_path, request):
    """Hooks of accelerate fetch the weight for the head's call, and drop it afterwards."""
    offload = {
        "cpu": lambda m: big_modeling.cpu_offload(m, execution_device="cpu"),
        "disk": lambda m: big_modeling.disk_offload(m, tmp_path, execution_device="cpu"),
    }[where]
    native, replaced = offload(llama()), offload(llama())
    replace_loss_head(replaced)
    request.getfixturevalue("no_logits")
    with MODES[mode]():
        torch.testing.assert_close(run(replaced), run(native))
    assert head_report(replaced).losses_fused == 1


def generated(model, mode, **options):
    torch.manual_seed(1)
    with MODES[mode]():
        out = model.generate(
            tokens(2, 9), max_new_tokens=5, pad_token_id=0, use_cache=True, output_logits=True,
            return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
    return out.sequences, [z + 0 for z in out.logits], [s + 0 for s in out.scores]


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.7, "top_k": 5},
        {"num_beams": 3},
        {"bad_words_ids": [[3], [5]], "repetition_penalty": 1.3},
        {"cache_implementation": "static", "disable_compile": True},
    ],
    ids=["greedy", "sample", "beams", "banned", "static cache"],
)
def test_generation(mode, options):
    found = []
    for model in (llama().eval(), replace_loss_head(llama().eval())):
        found.append(generated(model, mode, **options))
    torch.testing.assert_close(found[1], found[0])


# ---- heads that come later ------------------------------------------------------------------


def test_a_resized_vocabulary_stays_replaced(no_logits):
    model = replace_loss_head(llama())
    twin = copy.deepcopy(model)
    twin.resize_token_embeddings(V + 8)
    run(twin).backward()
    assert head_report(twin).active
    assert head_report(twin).losses_fused == 1
    assert head_report(model).losses_fused == 0  # a copy watches its own head
    restore_loss_head(twin)
    twin.resize_token_embeddings(V + 9)
    assert type(twin(input_ids=tokens(2, 9)).logits) is torch.Tensor
    decoder = copy.deepcopy(replace_loss_head(llama()).model)  # outlives its model
    assert decoder(input_ids=tokens(2, 9)).last_hidden_state.shape[:2] == (2, 9)


def test_a_memory_budget_is_that_of_the_loss_and_of_heads_that_come_later(monkeypatch):
    asked = []

    def watched(call, **options):
        if options["memory_budget"] is not None:
            asked.append(options["memory_budget"])
        return plan.choose_plan(call, **options)

    monkeypatch.setattr(sum_grads, "choose_plan", watched)
    model = replace_loss_head(llama(), memory_budget=2**26)
    run(model).backward()
    model.resize_token_embeddings(V + 7)
    model.zero_grad()
    run(model).backward()
    replace_loss_head(model)  # changes nothing
    run(model)
    replace_loss_head(model, memory_budget=2**27)
    run(model)
    model.resize_token_embeddings(V + 9)
    run(model)
    assert asked == [2**26] * 3 + [2**27] * 2
    with pytest.raises(TypeError, match="memory_budget must be an int, in bytes"):
        replace_loss_head(model, memory_budget="1 GiB")


def test_lora_that_comes_later_stays_replaced(no_logits):
    model = replace_loss_head(llama())
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    for now in (lambda: adapted, adapted.merge_and_unload):
        model = now()
        run(model)
        assert head_report(model).active
        assert head_report(model).losses_fused == 1
