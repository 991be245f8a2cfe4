"""Heads that do more than hidden @ weight.T + bias: their own code runs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both
from support.bounds import STATISTIC, same_model
from support.heads import H, V, ce, tokens
from torch import nn

from fusedce import head_report, reference_ce, replace_loss_head


def model_of(head):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, H), head)


class Upcasting(nn.Linear):
    def forward(self, x):
        return super().forward(x).float()


@pytest.mark.parametrize("when", ["bf16 model", "autocast", "turned to bf16 later"])
def test_a_head_that_upcasts(when):
    native = model_of(Upcasting(H, V))
    if when == "bf16 model":
        native.bfloat16()
    replaced = replace_loss_head(copy.deepcopy(native))
    if when == "turned to bf16 later":
        native.bfloat16(), replaced.bfloat16()
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    results = []
    for m in (native, replaced):
        with torch.autocast("cpu", torch.bfloat16, enabled=when == "autocast"):
            z = m(x)
            assert z.dtype == torch.float32
            results.append((z + 0, ce(z, y)))
    torch.testing.assert_close(results[1][0], results[0][0])
    rounding = torch.finfo(torch.bfloat16).eps  # of the logits, which the fused loss has not
    torch.testing.assert_close(results[1][1], results[0][1], rtol=rounding, atol=0)


class MultipliesInFloat32(nn.Linear):
    """Heads of reinforcement learning and mixtures of experts multiply in float32 for stability."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias)


class RoundsAfterwards(MultipliesInFloat32):
    def forward(self, x):
        return super().forward(x).to(x.dtype)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        (MultipliesInFloat32, torch.float32),
        (MultipliesInFloat32, torch.bfloat16),
        (RoundsAfterwards, torch.float32),
    ],
)
@pytest.mark.parametrize("when", ["bf16 body", "autocast"])
def test_the_loss_is_computed_in_the_dtype_in_which_the_head_multiplies(kind, weights, when):
    torch.manual_seed(0)
    native = nn.Sequential(nn.Embedding(V, 256), nn.Linear(256, 64), kind(64, V))
    if when == "bf16 body":
        native[:2].bfloat16()
    native[2].to(weights)
    with torch.no_grad():
        native[2].weight.mul_(4)
    replaced = replace_loss_head(copy.deepcopy(native))
    x, y, results = tokens(8, 16), tokens(8, 16, seed=1), []
    for m in (native, replaced):
        with torch.autocast("cpu", torch.bfloat16, enabled=when == "autocast"):
            z = m(x)
            hidden = m[:2](x).detach()
        ce(z.float(), y).backward()
        results.append((z.dtype, [p.grad for p in m.parameters()]))
    exact = reference_ce(hidden.float(), native[2].weight.float(), y, bias=native[2].bias.float())
    with torch.autocast("cpu", torch.bfloat16, enabled=when == "autocast"):
        fused = ce(replaced(x).float(), y)
    torch.testing.assert_close(fused.double(), exact.mean(), rtol=STATISTIC, atol=0)
    assert results[0][0] == results[1][0]
    for fused, expected in zip(results[1][1], results[0][1], strict=True):
        assert (fused - expected).norm() <= 2**-7 * expected.norm()  # native ones are bf16


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


class ScaledInTraining(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (0.5 if self.training else 1.0)


class Normalised(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1)) * 10


@pytest.mark.parametrize("kind", [Noisy, ScaledInTraining, Normalised])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_head_that_does_more_is_fused_since_its_own_code_runs(kind, mode, request):
    native = getattr(model_of(kind(H, V, bias=False)), mode)()
    replaced = replace_loss_head(copy.deepcopy(native))
    x, y, results = tokens(3, 7), tokens(3, 7, seed=1), []
    for m in (native, replaced):
        if m is replaced:
            request.getfixturevalue("no_logits")
        torch.manual_seed(2)
        loss = ce(m(x), y)
        loss.backward()
        results.append((loss.detach(), [p.grad for p in m.parameters()]))
    same_model(results[1], results[0])


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.spectral_norm,
                                  nn.utils.parametrizations.weight_norm,
                                  nn.utils.spectral_norm])  # fmt: skip
def test_a_parametrized_weight(wrap, mode):
    native = getattr(model_of(wrap(nn.Linear(H, V, bias=False))), mode)()
    replaced = replace_loss_head(copy.deepcopy(native))
    for b, c in zip(native.buffers(), replaced.buffers(), strict=True):
        assert torch.equal(b, c)  # asking has changed nothing
    for _ in range(2):  # a power iteration each time
        x, y = tokens(3, 7), tokens(3, 7, seed=1)
        results = []
        for m in (native, replaced):
            m.zero_grad()
            loss = ce(m(x), y)
            loss.backward()
            results.append((loss.detach(), {n: p.grad for n, p in m.named_parameters()}))
        same_model(results[1], results[0])
    assert head_report(replaced).losses_fused == 2


class Multiplied(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T


class LoRA(nn.Module):
    """As litgpt's, whose second product is no ``F.linear``."""

    def __init__(self, frozen, rank=2):
        super().__init__()
        self.linear = frozen.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, frozen.in_features))
        self.B = nn.Parameter(torch.randn(frozen.out_features, rank))

    def forward(self, x):
        return self.linear(x) + (x @ self.A.transpose(0, 1) @ self.B.transpose(0, 1)) * 0.5


@pytest.mark.parametrize("head", [lambda: Multiplied(H, V), lambda: LoRA(nn.Linear(H, V))])
def test_a_head_whose_product_is_a_matmul_is_fused(head):
    model = model_of(head())
    model.insert(1, nn.Linear(H, H))  # so that the head is found by its rows
    report = both(lambda m, x, y: ce(m(x), y), model)
    assert (report.losses_fused, report.logits_made) == (1, 0)


class Foreign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, g.flatten(0, -2).T @ x.flatten(0, -2)


def test_another_librarys_linear_runs_but_for_the_head(monkeypatch):
    """DeepSpeed's ZeRO-3 puts such a function in ``F.linear``."""
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: Foreign.apply(x, weight))
    model = model_of(nn.Linear(H, V, bias=False))
    model.insert(1, nn.Linear(H, H, bias=False))
    report = both(lambda m, x, y: ce(m(x), y), model)
    assert (report.losses_fused, report.logits_made) == (1, 0)
    assert "Foreign" in type(model[:2](tokens(2)).grad_fn).__name__


class Blocks(nn.Linear):
    def forward(self, x):
        return torch.einsum("bth,vh->btv", x, self.weight)


def test_a_head_without_such_a_product_is_named_in_the_report():
    report = both(lambda m, x, y: ce(m(x), y), model_of(Blocks(H, V)))
    assert report.losses_fused == 0
    assert "input reaches einsum, which is no product" in str(report)
