"""Lazy logits behave as real ones where code reads them, writes into them or keeps them."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from support.heads import H, V, loss_and_grads, plain_model, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedce import replace_loss_head
from fusedce.head.lazy import LazyLogits


def ce(z, y):
    return F.cross_entropy(z.reshape(-1, V), y.reshape(-1))


def test_it_is_a_tensor():
    model, x = plain_model(), tokens(3, 7)
    real = model(x)
    replace_loss_head(model)
    z = model(x)
    assert isinstance(z, torch.Tensor)
    assert (z.shape, z.dtype, z.ndim, z.size(-1), len(z)) == (real.shape, real.dtype, 3, V, 3)
    assert z.requires_grad
    assert not z.detach().requires_grad
    torch.testing.assert_close(z.argmax(-1), real.argmax(-1))
    torch.testing.assert_close(z[:, -1].detach().numpy(), real[:, -1].detach().numpy())
    torch.testing.assert_close(torch.cat([z, z]), torch.cat([real, real]))
    torch.testing.assert_close(z.detach() * 2, real.detach() * 2)
    assert "LazyLogits" in repr(z)


@pytest.mark.usefixtures("each_mode")
def test_it_is_laid_out_as_real_ones():
    model, x = plain_model(), tokens(3, 7)
    real = model(x)
    z = replace_loss_head(model)(x)
    for step in (
        lambda z: z,
        lambda z: z[:, 1:],
        lambda z: z.transpose(0, 1),
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
    assert z.permute(dims=(2, 0, 1)).shape == (V, 3, 7)


# ---- the moment of the head's run is what counts --------------------------------------------


@pytest.mark.parametrize("then", ["head", "hidden"])
def test_what_changes_before_a_look_is_refused(then):
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    hidden = torch.randn(3, 7, H)
    z, loss = model[1](hidden), ce(model(x), y)
    loss.backward()
    with torch.no_grad():
        (model[1].weight if then == "head" else hidden).mul_(2)
    for look in (lambda: z.argmax(-1), lambda: ce(z, y)):
        with pytest.raises(RuntimeError, match=r"has changed .* since the head ran"):
            look()
    z = model(x)
    seen = z + 0
    torch.optim.SGD(model.parameters(), 1.0).step()
    torch.testing.assert_close(z.sum(), seen.sum())


@pytest.mark.usefixtures("each_mode")
def test_functional_call():
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    others = {name: 2 * p.detach() for name, p in model.named_parameters()}
    native = ce(torch.func.functional_call(model, others, x), y)
    replace_loss_head(model)
    z = torch.func.functional_call(model, others, x)
    torch.testing.assert_close(ce(z, y), native)
    torch.testing.assert_close(ce(z + 0, y), native)


def test_gradients_by_function_transforms():
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    parameters = dict(model.named_parameters())
    grad = torch.func.grad(lambda p: ce(torch.func.functional_call(model, p, x), y))
    native = grad(parameters)
    replace_loss_head(model)
    torch.testing.assert_close(grad(parameters), native)


def test_without_grad_means_without_grad():
    """Reinforcement learning uses the old policy's logits while the new one is trained."""
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    with torch.no_grad():
        old = model(x)
    assert not old.requires_grad
    for value in (ce(old, y), ce(old / 2, y), old.log_softmax(-1), old.sum()):
        assert not value.requires_grad
    new = model(x)
    with torch.no_grad():
        half = new / 2
    assert new.requires_grad
    assert not ce(half, y).requires_grad
    assert ce(new, y).requires_grad
    bias = torch.zeros(V, requires_grad=True)
    ce(old + bias, y).backward()
    assert bias.grad.norm() > 0
    assert model[1].weight.grad is None


@pytest.mark.usefixtures("each_mode")
def test_resized_vocabulary():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    model[1].weight = nn.Parameter(torch.randn(V + 14, H))
    assert model(x).shape == (3, 7, V + 14)
    ce64 = F.cross_entropy(model(x).view(-1, V + 14), tokens(21) + 14)
    torch.testing.assert_close(
        ce64, F.cross_entropy((model(x) + 0).view(-1, V + 14), tokens(21) + 14)
    )


@pytest.mark.usefixtures("each_mode")
def test_autocast_at_the_look_changes_nothing():
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    native = model(x)
    z = replace_loss_head(model)(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert z.log_softmax(-1).dtype == torch.float32
        torch.testing.assert_close(z.log_softmax(-1), native.log_softmax(-1))
        of_bf16 = {"rtol": torch.finfo(torch.bfloat16).eps, "atol": 0}  # the product's rounding
        torch.testing.assert_close(ce(model(x).float(), y), ce(native, y), **of_bf16)


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
def test_a_value_per_row_is_no_bias():
    model, x, column = plain_model(), tokens(V), torch.arange(V)[:, None]
    native = model(x) + column
    torch.testing.assert_close((replace_loss_head(model)(x) + column) + 0, native)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_inside_a_checkpoint():
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(model, x, y, ce)
    replace_loss_head(model)
    model.zero_grad()
    loss = checkpoint(lambda h: ce(model[1](h), y), model[0](x), use_reentrant=True)
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], native[1:])
    # Logits of a reentrant checkpoint have no graph: a loss outside must not pass for one.
    z = checkpoint(model[1], model[0](x), use_reentrant=True)
    assert not ce(z, y).requires_grad or z.grad_fn is not None


@pytest.mark.usefixtures("each_mode")
def test_models_can_be_saved():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    twin = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert isinstance(other(x), LazyLogits)
        torch.testing.assert_close(other(x) + 0, model(x) + 0)


def test_looking_in_inference_mode_spoils_nothing():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    with torch.no_grad():
        z = model(x)
    with torch.inference_mode():
        z.argmax(-1)
    factor = torch.ones(V, requires_grad=True)
    (z * factor).sum().backward()
    assert factor.grad is not None


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


def test_hooks_see_the_gradient_of_the_logits():
    seen = []
    for model in (plain_model(), replace_loss_head(plain_model())):
        hook = model[1].register_full_backward_hook(lambda m, i, o: seen.append((i[0], o[0])))
        ce(model(tokens(3, 7)), tokens(3, 7, seed=1)).backward()
        hook.remove()
    torch.testing.assert_close(seen[1], seen[0])
    assert isinstance(model(tokens(3, 7)), LazyLogits)


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


def test_export_sees_the_original():
    model, x = plain_model(), tokens(3, 7)
    native = model(x)
    exported = torch.export.export(replace_loss_head(model), (x,)).module()
    torch.testing.assert_close(exported(x), native)
