"""Evaluation and serving: behaviour is the same without gradients and in inference mode."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.heads import MODES, V, ce, plain_model, tokens

from fusedce import head_report, replace_loss_head
from fusedce.head.lazy import LazyLogits

WITHOUT_GRAD = [mode for mode in MODES if mode != "grad"]


def ban_in_float(z):
    scores = z.float()
    scores[..., 3] = 50.0
    return scores.argmax(-1), z.argmax(-1)


def ban_in_rows(z):
    rows = z.reshape(-1, V)
    rows[:, 3] = 50.0
    copied = z[:, :-1].reshape(-1, V)
    copied[:, 4] = 60.0
    return rows.argmax(-1), copied.argmax(-1), z.argmax(-1)


def sample_warped(z):
    """Temperature and top-k as generation applies them."""
    scores = z[:, -1, :].to(copy=True, dtype=torch.float32, device="cpu")
    scores = scores / 0.7
    least = torch.topk(scores, 5)[0][..., -1, None]
    scores = scores.masked_fill(scores < least, -float("inf"))
    return scores.softmax(-1), z[:, -1].float()


def other_places(z):
    return z.cpu(), z.to("cpu"), z.to("cpu", torch.float64), z.type(torch.float64), z.to(z)


def chosen(z):
    y = tokens(3, 7, seed=1)
    return z[y > 10], z[[0, 2]], z[:, torch.tensor([1, 1])], torch.index_select(z, 0, y[0, :1] % 3)


def compiled_writer(z):
    global _writer
    if _writer is None:
        _writer = torch.compile(lambda t: t.mul_(2), backend="eager")
    _writer(z)
    return z.sum(), ce(z, tokens(3, 7))


def all_at_once(z):
    return torch.stack([z, z * 2]), torch.cat([z, z], 1), torch.where(z > 0, z, 0.0)


_writer = None
USES = [
    ban_in_float, ban_in_rows, sample_warped,
    other_places, chosen, compiled_writer, all_at_once,
]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", WITHOUT_GRAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_use_of_logits(use, mode, dtype):
    x, results = tokens(3, 7), []
    for model in (plain_model(), replace_loss_head(plain_model())):
        model.to(dtype)
        with MODES[mode]():
            results.append(use(model(x)))
    results[1] = tuple(r + 0 for r in results[1])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_logits_are_as_of_the_heads_run(mode):
    """Inference tensors count no writes, so that the head keeps a copy of its input."""
    model = replace_loss_head(plain_model())
    with MODES[mode]():
        hidden = model[0](tokens(3, 7))
        expected = F.linear(hidden, model[1].weight)
        z = model[1](hidden)
        hidden.mul_(2)
        if mode == "inference_mode":
            torch.testing.assert_close(z + 0, expected)
        else:
            with pytest.raises(RuntimeError, match="has changed"):
                z.argmax(-1)


# ---- models of transformers -----------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_is_fused(llama, mode, dtype, request):
    native = copy.deepcopy(llama).to(dtype)
    replaced, ids = replace_loss_head(copy.deepcopy(native)), tokens(2, 9)
    request.getfixturevalue("no_logits")
    with MODES[mode]():
        losses = [m(input_ids=ids, labels=ids).loss for m in (replaced, native)]
    torch.testing.assert_close(*losses, rtol=torch.finfo(dtype).eps * 4, atol=0)  # logits of dtype
    assert head_report(replaced).losses_fused == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_head(llama, mode, where, tmp_path, request):
    """Hooks of accelerate fetch the weight for the head's call, and drop it afterwards."""
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    offload = {
        "cpu": lambda m: big_modeling.cpu_offload(m, execution_device="cpu"),
        "disk": lambda m: big_modeling.disk_offload(m, tmp_path, execution_device="cpu"),
    }[where]
    ids = tokens(2, 9)
    native, replaced = offload(copy.deepcopy(llama)), offload(copy.deepcopy(llama))
    replace_loss_head(replaced)
    request.getfixturevalue("no_logits")
    with MODES[mode]():
        losses = [m(input_ids=ids, labels=ids).loss for m in (replaced, native)]
    torch.testing.assert_close(*losses)
    assert head_report(replaced).losses_fused == 1


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
def test_generation(llama, mode, options):
    replaced, ids, found = replace_loss_head(copy.deepcopy(llama)), tokens(2, 9), []
    for model in (llama, replaced):
        torch.manual_seed(1)
        with MODES[mode]():
            out = model.generate(
                ids, max_new_tokens=5, pad_token_id=0, return_dict_in_generate=True,
                output_logits=True, output_scores=True, **options,
            )  # fmt: skip
        found.append((out.sequences, [z + 0 for z in out.logits], [s + 0 for s in out.scores]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_decoding_with_a_static_cache_and_a_compiled_forward(llama, mode):
    """The steps of ``mode="reduce-overhead"`` on a GPU, without the captured graph."""
    replaced, ids, found = replace_loss_head(copy.deepcopy(llama)), tokens(2, 9), []
    for model in (copy.deepcopy(llama), replaced):
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, backend="aot_eager")
        with MODES[mode]():
            found.append(
                model.generate(
                    ids, max_new_tokens=5, do_sample=False, pad_token_id=0,
                    cache_implementation="static", disable_compile=True,
                )
            )  # fmt: skip
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_one_position_of_each_sequence_is_made_at_once(mode):
    model = replace_loss_head(plain_model())
    with MODES[mode]():
        assert type(model(tokens(3, 1))) is torch.Tensor
        assert type(model(tokens(3, 2))) is LazyLogits
    assert type(model(tokens(3, 1))) is LazyLogits
    assert "generation" in str(head_report(model))
