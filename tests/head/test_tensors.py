"""Lazy logits behave as real ones, and are those of the moment when the head ran."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from support.attacks import alike, same
from support.copies import COPIES
from support.heads import H, V, ce, plain_model, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedce import replace_loss_head
from fusedce.head.lazy import LazyLogits


def test_it_is_a_tensor():
    model, x = plain_model(), tokens(3, 7)
    real = model(x)
    z = replace_loss_head(model)(x)
    assert isinstance(z, torch.Tensor)
    assert (z.shape, z.dtype, z.ndim, z.size(-1), len(z)) == (real.shape, real.dtype, 3, V, 3)
    assert z.requires_grad
    assert not z.detach().requires_grad
    torch.testing.assert_close(z.argmax(-1), real.argmax(-1))
    torch.testing.assert_close(z[:, -1].detach().numpy(), real[:, -1].detach().numpy())
    assert "LazyLogits" in repr(z)


@pytest.mark.usefixtures("each_mode")
def test_it_is_laid_out_as_real_ones():
    model, x = plain_model(), tokens(3, 7)
    real = model(x)
    z = replace_loss_head(model)(x)
    for step in (
        lambda z: z[:, 1:],
        lambda z: z.transpose(1, 2) * 2,
        lambda z: z[..., 3:9].unsqueeze(1).permute(3, 0, 1, 2),
    ):
        assert isinstance(step(z), LazyLogits)
        assert step(z).stride() == step(real).stride()
        assert step(z).is_contiguous() == step(real).is_contiguous()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        z[:, 1:].view(-1, V)
    with pytest.raises(IndexError, match="out of range"):
        z.transpose(0, 3)


def test_without_grad_means_without_grad():
    """Reinforcement learning uses the old policy's logits while the new one is trained."""
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    with torch.no_grad():
        old = model(x)
    new = model(x)
    with torch.no_grad():
        half = new / 2
    for value in (old, ce(old, y), ce(old / 2, y), old.log_softmax(-1), ce(half, y)):
        assert not value.requires_grad
    assert ce(new, y).requires_grad
    bias = torch.zeros(V, requires_grad=True)
    with torch.inference_mode():
        old.argmax(-1)
    ce(old + bias, y).backward()
    assert bias.grad.norm() > 0
    assert model[1].weight.grad is None
    # Logits of a reentrant checkpoint have no graph: a loss outside must not pass for one.
    z = checkpoint(model[1], model[0](x), use_reentrant=True)
    assert not ce(z, y).requires_grad or z.grad_fn is not None


@pytest.mark.usefixtures("each_mode")
def test_a_finer_bias_is_not_rounded():
    def losses(z):
        whole = ce(z + bias, y)  # first: a look at z would make all that follows real
        part = (z[..., :40] + bias[:40]).view(-1, 40)
        return whole, F.cross_entropy(part, y.view(-1) % 40)

    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    bias = torch.linspace(-1, 1, V) * 1.001
    for model in (plain_model(), plain_model().bfloat16()):
        native = losses(model(x))
        torch.testing.assert_close(losses(replace_loss_head(model)(x)), native)


@pytest.mark.usefixtures("each_mode")
def test_autocast_at_the_look_changes_nothing():
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    native = model(x)
    z = replace_loss_head(model)(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(z.log_softmax(-1), native.log_softmax(-1))
        of_bf16 = {"rtol": torch.finfo(torch.bfloat16).eps, "atol": 0}  # the product's rounding
        torch.testing.assert_close(ce(model(x).float(), y), ce(native, y), **of_bf16)


def other_weight(model):
    model[1].weight = nn.Parameter(torch.linspace(-1, 1, (V + 14) * H).view(-1, H))
    z = model(tokens(3, 7))
    return z, F.cross_entropy(z.view(-1, V + 14), tokens(21) + 14)


def functional_call(model):
    others = {name: 2 * p.detach() for name, p in model.named_parameters()}
    z = torch.func.functional_call(model, others, tokens(3, 7))
    return ce(z, tokens(3, 7, seed=1)), z


USES = {
    "another weight": other_weight,
    "functional_call": functional_call,
    "a value per row is no bias": lambda model: model(tokens(V)) + torch.arange(V)[:, None],
    "export": lambda model: torch.export.export(model, (tokens(3, 7),)).module()(tokens(3, 7)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode"])
def test_a_use_of_a_model_gives_the_same(use, mode):
    if (use, mode) == ("export", "inference_mode"):
        pytest.skip("torch exports nothing there")
    alike(USES[use], mode)


def test_gradients_by_function_transforms():
    x, y = tokens(3, 7), tokens(3, 7, seed=1)

    def gradients(model):
        grad = torch.func.grad(lambda p: ce(torch.func.functional_call(model, p, x), y))
        return grad(dict(model.named_parameters()))

    alike(gradients)


@same
def test_hooks_of_the_head_see_the_gradient_of_the_logits(m, x, y):
    seen = []
    m[1].register_full_backward_hook(lambda m, i, o: seen.extend((i[0], o[0])))
    loss = ce(m(x), y)
    loss.backward()
    return loss.detach(), *seen


@pytest.mark.usefixtures("each_mode")
@pytest.mark.parametrize("name", COPIES)
def test_models_can_be_copied_and_saved(name):
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    other = COPIES[name](model)
    assert isinstance(other(x), LazyLogits)
    torch.testing.assert_close(other(x) + 0, model(x) + 0)


def test_a_model_is_freed_with_its_last_reference():
    model = replace_loss_head(plain_model())
    weight = weakref.ref(model[1].weight)
    ce(model(tokens(3, 7)), tokens(3, 7)).backward()
    model(tokens(3, 7)).argmax(-1)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


# ---- the moment of the head's run is what counts --------------------------------------------


@pytest.mark.parametrize("then", ["head", "hidden"])
def test_what_changes_before_a_look_is_refused(then):
    model, y = replace_loss_head(plain_model()), tokens(3, 7, seed=1)
    hidden = torch.randn(3, 7, H)
    z = model[1](hidden)
    with torch.no_grad():
        (model[1].weight if then == "head" else hidden).mul_(2)
    for look in (lambda: z.argmax(-1), lambda: ce(z, y)):
        with pytest.raises(RuntimeError, match=r"has changed .* since the head ran"):
            look()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", p.data * 2),
        lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
        lambda p: setattr(p, "data", p.data.double()),
    ],
)
def test_other_data_of_a_parameter_leave_the_logits_what_they_were(change):
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    z, expected = model(x), plain_model()(x)
    change(model[1].weight)
    torch.testing.assert_close(ce(z, y), ce(expected, y))
    torch.testing.assert_close(z + 0, expected)
