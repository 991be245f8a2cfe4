"""Choice of the head module, heads whose own code does more than a product, errors and copies."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both
from support.bounds import STATISTIC
from support.heads import H, V, ce, plain_model, tokens
from torch import nn

from fusedce import reference_ce, replace_loss_head, restore_loss_head
from fusedce.head.lazy import LazyLogits


def model_of(head, *between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, H), *between, head)


class WithValueHead(nn.Module):
    def __init__(self, V=V, rows=V):
        super().__init__()
        self.embedding = nn.Embedding(rows, H)
        self.lm_head = nn.Linear(H, V)
        self.value_head = nn.Linear(H, 1)

    def kinds(self):
        linears = {n: m for n, m in self.named_children() if isinstance(m, nn.Linear)}
        return {n for n, m in linears.items() if type(m(torch.zeros(2, H))) is LazyLogits}


def test_the_head_is_found_by_its_rows_by_a_tied_weight_or_is_asked_for():
    """As nanoGPT's, where other layers have as many rows."""
    assert replace_loss_head(WithValueHead()).kinds() == {"lm_head"}
    model = WithValueHead(rows=V + 3)
    with pytest.raises(ValueError, match=r"head must be given.*lm_head, value_head could be"):
        replace_loss_head(model)
    assert replace_loss_head(model, head=model.lm_head).kinds() == {"lm_head"}
    model = WithValueHead()
    model.other = nn.Linear(H, V)
    with pytest.raises(ValueError, match="head must be given"):
        replace_loss_head(model)
    model.lm_head.weight = model.embedding.weight
    assert replace_loss_head(model).kinds() == {"lm_head"}


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("lm_head", r"must be a torch.nn.Module, got str: pass model.get_submodule\('lm_head'\)"),
        (nn.Embedding(V, H), "head must be a linear layer .* got Embedding"),
        (nn.Parameter(torch.zeros(V, H)), "head must be a torch.nn.Module, got Parameter"),
        (nn.Bilinear(2, 2, 2), "head must be a linear layer .* got Bilinear"),
        (nn.ReLU(), "head must be a linear layer .* got ReLU"),
        (nn.Conv1d(2, 2, 3), "head must be a linear layer.*Conv1d"),
        (plain_model()[1], "a Linear that Sequential does not hold"),
        (replace_loss_head(plain_model())[1], "a Linear that Sequential does not hold"),
    ],
)
def test_what_is_no_head(head, message):
    with pytest.raises((TypeError, ValueError), match=message):
        replace_loss_head(plain_model(), head=head)


def test_what_is_no_model():
    with pytest.raises(ValueError, match="must have a linear output head"):
        replace_loss_head(nn.ReLU())


def test_a_kept_input_of_the_head_is_a_plain_tensor(tmp_path):
    """Hooks of the head and of a layer inside it keep what they are given."""
    inside = nn.Dropout()
    model, kept = model_of(nn.Sequential(nn.Identity(), inside, nn.Linear(H, V))), []
    replace_loss_head(model, head=model[1])
    for module in (model[1], inside):
        module.register_forward_hook(lambda m, args, out: kept.extend(args))
    ce(model(tokens(3, 7)), tokens(3, 7)).backward()
    assert len(kept) == 2
    for x in kept:
        assert type(x) is torch.Tensor
        torch.save(x.detach(), tmp_path / "x")
        assert torch.equal(torch.load(tmp_path / "x"), x)
        torch.compile(lambda t: t * 2, backend="eager", fullgraph=True)(x)


def test_an_input_of_another_width_raises_where_the_untouched_head_does():
    head = replace_loss_head(plain_model())[1]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        head(torch.randn(3, head.in_features + 1))


# ---- copies, and what is left unchanged -----------------------------------------------------


@pytest.mark.parametrize("kind", ["shallow", "replica"])
def test_a_shallow_copy_computes_with_its_own_parameters(kind):
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    h, head = model[0](x), model[1]
    twin = copy.copy(head) if kind == "shallow" else head._replicate_for_data_parallel()
    twin._parameters = {"weight": 2 * head.weight, "bias": None}
    torch.testing.assert_close(twin(h) + 0, 2 * head(h) + 0)
    ce(twin(h), x).backward()
    assert head.weight.grad is not None


def test_a_deep_copy_has_its_own_head():
    model = replace_loss_head(plain_model())
    twin, y = copy.deepcopy(model), tokens(3, 7)
    with torch.no_grad():
        twin[1].weight.zero_()
    uniform = torch.tensor(V).log()
    assert ce(twin(y), y).isclose(uniform)
    assert not ce(model(y), y).isclose(uniform)
    restore_loss_head(twin)
    assert type(twin(y)) is torch.Tensor
    assert isinstance(model(y), LazyLogits)


def test_a_head_stays_what_it_was_and_is_restored():
    model = plain_model()
    before = dict(model[1].__dict__)
    assert replace_loss_head(model) is model
    inside = dict(model[1].__dict__)
    replace_loss_head(model)
    assert dict(model[1].__dict__) == inside
    assert list(model.state_dict()) == ["0.weight", "1.weight"]
    assert type(model[1]) is type(copy.deepcopy(model)[1]) is nn.Linear
    for _ in range(2):
        restore_loss_head(model)
        assert dict(model[1].__dict__) == before
    assert type(model(tokens(2, 3))) is torch.Tensor


# ---- heads whose own code does more ---------------------------------------------------------


class MultipliesInFloat32(nn.Linear):
    """Heads of reinforcement learning and mixtures of experts multiply in float32 for stability."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float(), self.bias.float())


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
            loss = ce(z.float(), y)
        loss.backward()
        results.append((z.dtype, loss.detach(), [p.grad for p in m.parameters()]))
    exact = reference_ce(hidden.float(), native[2].weight.float(), y, bias=native[2].bias.float())
    torch.testing.assert_close(results[1][1].double(), exact.mean(), rtol=STATISTIC, atol=0)
    assert results[0][0] == results[1][0]
    for fused, expected in zip(results[1][2], results[0][2], strict=True):
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


class Multiplied(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T


class Keywords(nn.Linear):
    """As adapters of PEFT that change the weight."""

    def forward(self, x):
        return F.linear(input=x, weight=self.weight * 2, bias=self.bias)


class LoRA(nn.Module):
    """As litgpt's, whose second product is no ``F.linear``."""

    def __init__(self, rank=2):
        super().__init__()
        self.linear = nn.Linear(H, V).requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(rank, H)), nn.Parameter(torch.randn(V, rank))

    def forward(self, x):
        return self.linear(x) + (x @ self.A.transpose(0, 1) @ self.B.transpose(0, 1)) * 0.5


PARAMETRIZE = nn.utils.parametrizations
HEADS = {
    "noisy": lambda: Noisy(H, V),
    "scaled in training": lambda: ScaledInTraining(H, V),
    "normalised": lambda: Normalised(H, V, bias=False),
    "a product by matmul": lambda: Multiplied(H, V, bias=False),
    "arguments by keyword": lambda: Keywords(H, V),
    "a product of LoRA": LoRA,
    "spectral norm": lambda: PARAMETRIZE.spectral_norm(nn.Linear(H, V, bias=False)),
    "weight norm": lambda: PARAMETRIZE.weight_norm(nn.Linear(H, V, bias=False)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(H, V, bias=False)),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_head_that_does_more_is_fused_since_its_own_code_runs(name, mode):
    """Power iterations run as often as without fusedce."""
    torch.manual_seed(0)
    model = getattr(model_of(HEADS[name](), nn.Linear(H, H)), mode)()

    def program(m, x, y):
        torch.manual_seed(2)
        return ce(m(x), y) + ce(m(x)[:, 1:], y[:, 1:])

    report = both(program, model, head="2")
    assert (report.losses_fused, report.logits_made) == (2, 0)


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
    model = model_of(nn.Linear(H, V, bias=False), nn.Linear(H, H, bias=False))
    report = both(lambda m, x, y: ce(m(x), y), model)
    assert (report.losses_fused, report.logits_made) == (1, 0)
    assert "Foreign" in type(model[:2](tokens(2)).grad_fn).__name__


class Blocks(nn.Linear):
    def forward(self, x):
        return torch.einsum("bth,vh->btv", x, self.weight)


class Doubled(torch.Tensor):
    """As a quantised weight, whose own product is not its values'."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        doubles = func in (F.linear, torch.Tensor.add)
        return out.as_subclass(torch.Tensor) * 2 if doubles else out


class Quantised(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.as_subclass(Doubled), self.bias)


@pytest.mark.parametrize("kind", [Quantised, nn.Linear])
def test_another_tensor_subclass_computes_in_its_own_way(kind):
    added = torch.ones(V).as_subclass(Doubled) if kind is nn.Linear else 0
    both(lambda m, x, y: ce(m(x) + added, y), model_of(kind(H, V)))


def test_a_head_without_such_a_product_is_named_in_the_report():
    report = both(lambda m, x, y: ce(m(x), y), model_of(Blocks(H, V)))
    assert report.losses_fused == 0
    assert "input reaches einsum, which is no product" in str(report)
