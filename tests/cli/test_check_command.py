"""`fusedce check`: whether a model's loss is fused and right; CI reads the exit status."""

import json

import pytest
import torch
from support.bounds import STATISTIC
from support.command_line import answer, call

import fusedce


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_a_class_is_checked(name):
    """T5's configuration names no first token of the decoder, which its published ones do."""
    found = answer("check", name)
    assert found["equal"]
    assert found["fused"]
    assert found["why_not"] == []
    assert found["loss_error"] <= STATISTIC


def test_a_folder_keeps_its_own_scales(tmp_path):
    config = {"model_type": "gemma2", "final_logit_softcapping": 2.5}
    config |= {"hidden_size": 2304, "vocab_size": 256000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from fusedce.tools.check import small_config
    from fusedce.tools.model_sizes import class_of, config_of

    of = config_of(str(tmp_path))
    assert class_of(str(tmp_path), of).__name__ == "Gemma2ForCausalLM"
    small = small_config(of, {}, transforms=False)
    assert (small.final_logit_softcapping, small.hidden_size) == (2.5, 32)
    assert answer("check", str(tmp_path))["fused"]


def test_adapters_and_low_precision_are_checked():
    found = answer("check", "llama", "--peft", "--dtype", "bf16")
    assert found["equal"]
    assert found["fused"]
    assert found["native_errors"][0] > 0


def test_a_wrong_loss_is_found(monkeypatch):
    """The exit status is 1 for a head that scales its gradient; CI reads it."""
    from fusedce.tools import check

    def broken(model):
        model.get_output_embeddings().weight.register_hook(lambda grad: 1.001 * grad)
        return fusedce.replace_loss_head(model)

    monkeypatch.setattr(check, "replace_loss_head", broken)
    found = answer("check", "llama", status=1)
    assert not found["equal"]
    assert found["grad_error"] > 1e-5  # far above float32's rounding
    text = call("check", "llama").output
    assert "NO, do not use it" in text
    assert max(map(len, text.splitlines())) <= 80


def test_real_logits_are_named():
    """ProphetNet takes a log-softmax of its own: right, and not fused."""
    found = answer("check", "ProphetNetForCausalLM", status=3)
    assert found["equal"]
    assert not found["fused"]
    assert found["why_not"]


SMALL = {"vocab_size": 120, "num_layers": 1, "num_heads": 2, "num_hidden_layers": 1,
         "num_attention_heads": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("LlamaForCausalLM", {"hidden_size": 16, "intermediate_size": 24}),
        (
            "T5ForConditionalGeneration",
            {"d_model": 16, "d_kv": 8, "d_ff": 24, "decoder_start_token_id": 0},
        ),
    ],
)
def test_weights_of_a_folder_are_loaded(tmp_path, name, config):
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    kind(kind.config_class(**SMALL | config)).save_pretrained(tmp_path)
    found = answer("check", str(tmp_path), "--full")
    assert found["model_class"] == name
    assert found["fused"]
    assert found["equal"]
    assert answer("check", str(tmp_path))["parameters"] != found["parameters"]


def test_a_model_without_weights_is_not_loaded():
    done = call("check", "llama", "--full")
    assert done.exit_code == 2
    assert "there are none in llama" in done.stderr
