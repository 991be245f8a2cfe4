"""Choice of the head module, its copies, heads that come later, and errors of refused heads."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both
from support.bounds import same_model
from support.heads import H, V, ce, plain_model, tokens
from torch import nn

from fusedce import head_report, replace_loss_head, restore_loss_head
from fusedce.backends import plan
from fusedce.backends.torch import training
from fusedce.head.lazy import LazyLogits


def test_a_shallow_copy_computes_with_its_own_parameters():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    h = model[0](x)
    twin = copy.copy(model[1])
    twin._parameters = {"weight": torch.zeros(V, H), "bias": None}
    assert float(twin(h).abs().sum().detach()) == 0
    assert float(model[1](h).abs().sum().detach()) > 0
    other = copy.deepcopy(copy.copy(model[1]))
    assert type(replace_loss_head(nn.Sequential(model[0], other))(x)) is LazyLogits


def test_a_replica_computes_with_its_own_parameters():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    replica = model[1]._replicate_for_data_parallel()
    replica._parameters = {"weight": 2 * model[1].weight, "bias": None}
    h = model[0](x)
    torch.testing.assert_close(replica(h) + 0, 2 * model[1](h) + 0)
    ce(replica(h), x).backward()
    assert model[1].weight.grad is not None


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            "lm_head",
            r"head must be a torch.nn.Module, got str: pass model.get_submodule\('lm_head'\)",
        ),
        (nn.Embedding(V, H), "head must be a linear layer .* got Embedding"),
        (nn.Parameter(torch.zeros(V, H)), "head must be a torch.nn.Module, got Parameter"),
        (nn.Bilinear(2, 2, 2), "head must be a linear layer .* got Bilinear"),
        (nn.ReLU(), "head must be a linear layer .* got ReLU"),
        (nn.Conv1d(2, 2, 3), "head must be a linear layer.*Conv1d"),
    ],
)
def test_what_is_no_head(head, message):
    with pytest.raises(TypeError, match=message):
        replace_loss_head(plain_model(), head=head)


def test_a_head_of_another_model():
    """Replaced already or not, it does nothing for this one."""
    other = plain_model()
    for head in (other[1], replace_loss_head(other)[1]):
        with pytest.raises(ValueError, match="a Linear that Sequential does not hold"):
            replace_loss_head(plain_model(), head=head, memory_budget=10**8)


class WithValueHead(nn.Module):
    def __init__(self, V=V, rows=V):
        super().__init__()
        self.embedding = nn.Embedding(rows, H)
        self.lm_head = nn.Linear(H, V)
        self.value_head = nn.Linear(H, 1)


def test_a_value_head_is_not_taken_for_the_head():
    model = replace_loss_head(WithValueHead())
    assert type(model.lm_head(torch.zeros(2, H))) is LazyLogits
    assert type(model.value_head(torch.zeros(2, H))) is torch.Tensor


def test_where_several_could_be_meant_the_head_is_asked_for():
    with pytest.raises(ValueError, match=r"head must be given.*lm_head, value_head could be"):
        replace_loss_head(WithValueHead(rows=V + 3))
    model = WithValueHead(rows=V + 3)
    replace_loss_head(model, head=model.lm_head)
    assert type(model.lm_head(torch.zeros(2, H))) is LazyLogits


def test_class_weights_in_float64():
    weight = torch.linspace(0, 1, V, dtype=torch.float64)
    both(lambda m, x, y: F.cross_entropy(m(x).double().view(-1, V), y.view(-1), weight))


# ---- heads that come later ------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")

    def make():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=V, hidden_size=H, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=64, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    return make


def run(model):
    ids = tokens(2, 9)
    return model(input_ids=ids, labels=ids).loss


def test_a_resized_vocabulary_stays_replaced(llama, no_logits):
    model = replace_loss_head(llama())
    model.resize_token_embeddings(V + 8)
    run(model).backward()
    assert head_report(model).active
    assert head_report(model).losses_fused == 1
    restore_loss_head(model)
    model.resize_token_embeddings(V + 9)
    assert type(model(input_ids=tokens(2, 9)).logits) is torch.Tensor


@pytest.fixture
def asked(monkeypatch):
    """The memory budgets of the losses that are computed."""
    budgets = []

    def watched(call, **options):
        if options["memory_budget"] is not None:
            budgets.append(options["memory_budget"])
        return plan.way_of(call, **options)

    monkeypatch.setattr(training, "way_of", watched)
    return budgets


def test_a_memory_budget_is_that_of_the_loss_and_of_heads_that_come_later(llama, asked):
    model = llama()
    x = tokens(2, 9)
    replace_loss_head(model, memory_budget=2**26)
    model(input_ids=x, labels=x).loss.backward()
    model.resize_token_embeddings(model.config.vocab_size + 7)
    model.zero_grad()
    model(input_ids=x, labels=x).loss.backward()
    replace_loss_head(model)  # changes nothing
    model(input_ids=x, labels=x).loss.backward()
    replace_loss_head(model, memory_budget=2**27)
    model(input_ids=x, labels=x).loss.backward()
    assert asked == [2**26] * 3 + [2**27]
    with pytest.raises(TypeError, match="memory_budget must be an int, in bytes"):
        replace_loss_head(model, memory_budget="1 GiB")


@pytest.mark.slow
def test_a_memory_budget_is_that_of_a_compiled_model(llama, asked):
    model, x = replace_loss_head(llama(), memory_budget=2**27), tokens(2, 9)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(input_ids=x, labels=x).loss.backward()
    assert asked == [2**27]


def test_lora_that_comes_later_stays_replaced(llama, no_logits):
    peft = pytest.importorskip("peft")
    model = replace_loss_head(llama())
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    run(adapted).backward()
    assert head_report(adapted).active
    assert head_report(adapted).losses_fused == 1
    merged = adapted.merge_and_unload()
    run(merged)
    assert head_report(merged).active
    assert head_report(merged).losses_fused == 1


@pytest.mark.parametrize("kind", ["DoRA", "AdaLoRA"])
def test_an_adapter_that_is_no_sum_of_products_is_right(llama, kind):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], use_dora=True)
    if kind == "AdaLoRA":
        config = peft.AdaLoraConfig(init_r=2, target_r=1, total_step=10, target_modules=["lm_head"])
    adapted = peft.get_peft_model(replace_loss_head(llama()), config)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_()
    first = run(adapted)
    first.backward()
    grads = {n: p.grad.clone() for n, p in adapted.named_parameters() if p.grad is not None}
    adapted.zero_grad()
    second = run(restore_loss_head(adapted))
    second.backward()
    torch.testing.assert_close(first, second)
    same_model(grads, {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None})


def test_a_head_tied_to_the_embedding_is_found():
    """As nanoGPT's, where other layers have as many rows."""
    model = WithValueHead()
    model.other = nn.Linear(H, V)
    with pytest.raises(ValueError, match="head must be given"):
        replace_loss_head(model)
    model.lm_head.weight = model.embedding.weight
    assert type(replace_loss_head(model).lm_head(torch.zeros(2, H))) is LazyLogits
    assert type(model.other(torch.zeros(2, H))) is torch.Tensor


def test_a_deep_copy_watches_its_own_head(llama):
    model = replace_loss_head(llama())
    twin = copy.deepcopy(model)
    twin.resize_token_embeddings(V + 8)
    run(twin).backward()
    assert head_report(twin).losses_fused == 1
    assert head_report(model).losses_fused == 0


def test_an_input_of_another_width_raises_where_the_untouched_head_does():
    head = replace_loss_head(plain_model())[1]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        head(torch.randn(3, head.in_features + 1))


def test_the_type_of_a_head_stays_what_it_was():
    model = replace_loss_head(plain_model())
    assert type(model[1]) is nn.Linear
    assert type(copy.deepcopy(model)[1]) is nn.Linear
    assert type(model(tokens(3, 7))) is LazyLogits


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation_finds_the_head():
    kinds = []
    for model in (plain_model(), replace_loss_head(plain_model())):
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
        kinds.append(type(quantised[1]))
    assert kinds[1] is kinds[0] is not nn.Linear
