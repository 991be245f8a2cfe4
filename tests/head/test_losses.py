"""The replaced loss head: lazy logits, real models, and behaviour that stays the same."""

import copy
import importlib.util
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_SUMS, STATISTIC, same_model
from support.heads import MODES, V, ce, compiled, loss_and_grads, plain_model, tokens
from torch import nn

import fusedce
import fusedce.backends.torch as torch_backend
from fusedce import replace_loss_head, restore_loss_head
from fusedce.contract.objective import expecting
from fusedce.head.lazy import LazyLogits
from fusedce.head.observe import LossObserver

LOSSES = {
    "view": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1)),
    "module": lambda z, y: nn.CrossEntropyLoss()(z.view(-1, z.size(-1)), y.view(-1)),
    "sum": lambda z, y: F.cross_entropy(z.reshape(-1, V), y.view(-1), reduction="sum"),
    "shift": lambda z, y: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, V), y[..., 1:].reshape(-1)
    ),
    "slices": lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "one position": lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    "mask": lambda z, y: F.cross_entropy(z[y > 10], y[y > 10]),
    "transpose": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "permute": lambda z, y: F.cross_entropy(z.permute(0, 2, 1).float(), y),
    "time first": lambda z, y: F.cross_entropy(z.transpose(0, 1).reshape(-1, V), y.t().reshape(-1)),
    "squeeze": lambda z, y: F.cross_entropy(z[:1].squeeze(0), y[0]),
    "scale": lambda z, y: F.cross_entropy((z * 0.3).view(-1, V), y.view(-1)),
    "divide": lambda z, y: F.cross_entropy((z / 1.7).float().view(-1, V), y.view(-1)),
    "cap": lambda z, y: F.cross_entropy((torch.tanh(z / 2.0) * 2.0).view(-1, V), y.view(-1)),
    "scaled cap": lambda z, y: F.cross_entropy(
        ((3 * z) / 2.0).tanh().mul(-2.0).view(-1, V), y.view(-1)
    ),
    "added bias": lambda z, y: F.cross_entropy(
        ((z + torch.linspace(-1, 1, V)[None]).float() * 2).view(-1, V), y.view(-1)
    ),
    "bias added to": lambda z, y: F.cross_entropy(
        (torch.linspace(-1, 1, V) + z).view(-1, V), y.view(-1)
    ),
    "some classes": lambda z, y: F.cross_entropy(z[..., 5:40].reshape(-1, 35), y.view(-1) % 35),
    "ignore": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), ignore_index=int(y[0, 0])),
    "none": lambda z, y: (
        F.cross_entropy(z.transpose(1, 2), y, reduction="none").square()[y > 10].sum()
    ),
    "smoothing": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), label_smoothing=0.1),
    "smoothed cap": lambda z, y: F.cross_entropy(
        (torch.tanh(z / 2.0) * 2.0).view(-1, V), y.view(-1), label_smoothing=0.1
    ),
    "class weight": lambda z, y: F.cross_entropy(
        z.float().view(-1, V), y.view(-1), torch.linspace(0, 1, V), label_smoothing=0.2
    ),
    "chunk": lambda z, y: sum(ce(a, b) for a, b in zip(z.chunk(2), y.chunk(2), strict=True)),
    "split": lambda z, y: sum(
        ce(a, b) for a, b in zip(z.split([3, 4], 1), y.split([3, 4], 1), strict=True)
    ),
    "tensor_split": lambda z, y: ce(z.tensor_split(3, dim=1)[1], y.tensor_split(3, dim=1)[1]),
    "unbind": lambda z, y: sum(ce(a, b) for a, b in zip(z.unbind(1), y.unbind(1), strict=True)),
    "select": lambda z, y: ce(z.select(0, -1), y.select(0, -1)),
    "iteration": lambda z, y: sum(ce(a, b) for a, b in zip(z, y, strict=True)),
    "mT": lambda z, y: F.cross_entropy(z.mT, y),
    "negation": lambda z, y: ce(-(-z * 0.5), y),
    "0-d factor": lambda z, y: ce(z * torch.tensor(0.5), y),
    "0-d divisor": lambda z, y: ce(z / torch.tensor(1.7, dtype=torch.float64), y),
    "several losses": lambda z, y: ce(z, y) + 2 * ce(z[:, 1:], y[:, 1:]) + ce(z * 0.5, y),
    "list of rows": lambda z, y: ce(z[[0, 2]], y[[0, 2]]),
    "long way": lambda z, y: F.cross_entropy(
        z.to(torch.float32).unsqueeze(0).squeeze(0).type_as(z).clone().flatten(0, 1), y.flatten()
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_fused(name, bias, mode, request):
    model, x, y = plain_model(bias), tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(model, x, y, LOSSES[name], mode)
    replace_loss_head(model)
    request.getfixturevalue("no_logits")
    fused = loss_and_grads(model, x, y, LOSSES[name], mode)
    same_model(fused, native)


REAL = {
    "in place": lambda z, y: F.cross_entropy(z.mul_(0.5).div_(3).tanh_().view(-1, V), y.view(-1)),
    "two caps": lambda z, y: F.cross_entropy(z.tanh().tanh().view(-1, V), y.view(-1)),
    "late bias": lambda z, y: F.cross_entropy((z * 2 + torch.arange(V)).view(-1, V), y.view(-1)),
    "bias after a half": lambda z, y: F.cross_entropy(
        (z * 0.5 + torch.arange(V)).view(-1, V), y.view(-1)
    ),
    "bias per token": lambda z, y: F.cross_entropy(
        (z + torch.arange(7 * V).view(7, V) / V).view(-1, V), y.view(-1)
    ),
    "added": lambda z, y: F.cross_entropy((z + 0.1 * z.square()).view(-1, V), y.view(-1)),
    "tensor scale": lambda z, y: F.cross_entropy((z * torch.arange(V)).view(-1, V), y.view(-1)),
    "probabilities": lambda z, y: F.cross_entropy(z.view(-1, V), F.one_hot(y.view(-1), V).float()),
    "step": lambda z, y: F.cross_entropy(z[..., ::2].reshape(-1, V // 2), y.view(-1) // 2),
    "rows regrouped": lambda z, y: F.cross_entropy(
        z.as_strided((3, 7, V), (V, 3 * V, 1)).reshape(-1, V), y.view(-1)
    ),
    "log_softmax": lambda z, y: -z.log_softmax(-1).gather(-1, y[..., None]).mean(),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_understood_gets_real_logits(name, mode):
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(model, x, y, REAL[name], mode)
    replace_loss_head(model)
    torch.testing.assert_close(loss_and_grads(model, x, y, REAL[name], mode), native)


def test_restore_and_attach_twice():
    model = plain_model()
    before = dict(model[1].__dict__)
    assert replace_loss_head(model) is model
    inside = dict(model[1].__dict__)
    replace_loss_head(model)
    assert dict(model[1].__dict__) == inside
    assert list(model.state_dict()) == ["0.weight", "1.weight"]
    restore_loss_head(model)
    assert dict(model[1].__dict__) == before
    restore_loss_head(model)
    assert type(model(tokens(2, 3))) is torch.Tensor


def test_a_copy_has_its_own_head():
    model = replace_loss_head(plain_model())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[1].weight.zero_()
    y = tokens(3, 7)
    assert F.cross_entropy(twin(y).view(-1, V), y.view(-1)).isclose(torch.tensor(V).log())
    assert not F.cross_entropy(model(y).view(-1, V), y.view(-1)).isclose(torch.tensor(V).log())
    restore_loss_head(twin)
    assert type(twin(y)) is torch.Tensor
    assert isinstance(model(y), LazyLogits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, no_logits):
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    replace_loss_head(model)
    with torch.autocast("cpu", dtype):
        z = model(x)
        inside = F.cross_entropy(z.view(-1, V), y.view(-1))
    after = F.cross_entropy(z.float().view(-1, V), y.view(-1))  # as accelerate does
    assert z.dtype == dtype
    assert inside.dtype == after.dtype == torch.float32
    torch.testing.assert_close(inside, after)
    hidden = model[0](x).to(dtype)
    exact = fusedce.reference_ce(hidden, model[1].weight.to(dtype), y).mean()
    torch.testing.assert_close(inside.double(), exact, rtol=STATISTIC, atol=0)
    after.backward()
    assert model[1].weight.grad.dtype == torch.float32


def test_frozen_head_gets_no_gradient(no_logits):
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    model[1].weight.requires_grad_(False)
    replace_loss_head(model)
    F.cross_entropy(model(x).view(-1, V), y.view(-1)).backward()
    assert model[1].weight.grad is None
    assert model[0].weight.grad is not None


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (3, TypeError, "model must be a torch.nn.Module, got int"),
        (nn.ReLU(), ValueError, "must have a linear output head"),
    ],
)
def test_refusals(model, error, message):
    with pytest.raises(error, match=message):
        replace_loss_head(model)


# ---- torch.compile --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere"])
def test_compiled_transformers_are_fused(sweep, model_type, request):
    kind = getattr(sweep.transformers, sweep.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    model = sweep.tools.build(kind, sweep.CONFIG_MAPPING[model_type](), {}, steps=True)
    inputs = sweep.tools.batch(model.config)
    native = sweep.tools.run(model, inputs)
    replace_loss_head(model)
    request.getfixturevalue("no_logits")
    model.forward = compiled(model.forward)
    fused = sweep.tools.run(model, inputs)
    same_model(fused, native)


# ---- models of transformers -----------------------------------------------------------------

CLASSES = [
    "gpt2", "llama", "gemma", "gemma2", "gemma3_text", "cohere", "granite", "mistral", "mixtral",
    "qwen2", "qwen3", "qwen2_moe", "phi3", "olmo2", "opt", "bloom", "gpt_neox", "mamba", "bart",
    "bert", "roberta", "gpt_neo", "falcon_h1", "deepseek_v3", "gpt_oss", "smollm3", "starcoder2",
]  # fmt: skip


@pytest.fixture(scope="module")
def sweep():
    pytest.importorskip("transformers")
    path = Path(__file__).parents[2] / "bench" / "sweep_heads.py"
    spec = importlib.util.spec_from_file_location("sweep_heads", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sweep_heads"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model_type", CLASSES)
def test_classes_of_transformers(sweep, model_type):
    names = sweep.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in names:
        pytest.skip(f"this transformers has no causal LM {model_type}")
    row = sweep.check(model_type, names[model_type])
    assert row.get("right"), row
    assert row["fused"], row


def test_an_observer_is_of_its_thread_alone():
    """A model that is evaluated in another thread keeps its own denominator, and is not counted."""
    model = replace_loss_head(plain_model())
    x, y = tokens(3, 5), tokens(3, 5, seed=1)
    found = []
    with LossObserver(torch.tensor(3.0)) as observer:
        thread = threading.Thread(target=lambda: found.append(ce(model(x), y)))
        thread.start()
        thread.join()
        assert not observer.losses
        here = ce(model(x), y)
        assert len(observer.losses) == 1
    torch.testing.assert_close(found[0], ce(plain_model()(x), y))
    torch.testing.assert_close(here * 3, found[0] * 15)


def test_an_observer_holds_what_it_monitors():
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    with torch.no_grad():
        y[0, :5] = model[1](model[0](x)).argmax(-1)[0, :5]
        correct = int((model(x).argmax(-1) == y).sum())
    with LossObserver(monitor=("correct",)) as observer:
        LOSSES["view"](model(x), y).backward()
    assert [int(m["correct"]) for m in observer.monitors] == [correct]


class Told(nn.Module):
    """Divides its sum by a number it is given, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.body = plain_model()

    def forward(self, x, y, num_items_in_batch=None):
        z, reduction = self.body(x), "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(z.view(-1, V), y.view(-1), reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


@pytest.mark.parametrize("items", [None, 37, 37.0, torch.tensor(37)])
def test_what_a_model_is_told_to_divide_by_is_known_when_gradients_are_made(items, monkeypatch):
    """Backward then has nothing to multiply them by, and nothing to round again."""
    model = Told()
    replace_loss_head(model, head=model.body[1])
    ratios = []
    monkeypatch.setattr(torch_backend, "scale_", lambda x, factor: ratios.append(float(factor)))
    for told in (11, items):  # of the call before, nothing is left
        ratios.clear()
        with expecting(0.3):  # the number that the model is given has precedence
            model(tokens(3, 4), tokens(3, 4, seed=1), num_items_in_batch=told).backward()
    assert ratios == pytest.approx([1.0, 1.0], rel=SAME_SUMS)
    restore_loss_head(model)
    assert not model._forward_pre_hooks
