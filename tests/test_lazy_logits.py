"""Lazy logits behave as real ones would, whoever looks at them, writes into them or keeps them."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from test_head import H, V, compiled, loss_and_grads, plain_model, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedce import replace_loss_head
from fusedce.lazy_logits import LazyLogits


def test_writing_into_logits_counts():
    """Some models mask classes in place before the loss; metrics may have looked before that."""

    def loss(z, y):
        with torch.no_grad():
            z.argmax(-1)
        z[..., :5] = torch.finfo(z.dtype).min
        return F.cross_entropy(z.view(-1, V), y.view(-1).clamp(min=5))

    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(model, x, y, loss)
    replace_loss_head(model)
    torch.testing.assert_close(loss_and_grads(model, x, y, loss), native)


def ce(z, y):
    return F.cross_entropy(z.reshape(-1, V), y.reshape(-1))


def view_written(z, y):
    z.view(-1, V)[:, 3] = 1.0
    return ce(z, y)


def root_written_after_a_view(z, y):
    flat = z.view(-1, V)
    z[..., 3] = 1.0
    return ce(flat, y)


def root_written_after_a_copy(z, y):
    shifted = z[:, :-1].contiguous()
    z[..., 3] = 1.0
    return ce(shifted, y[:, 1:])


def reshape_that_copies(z, y):
    rows = z[:, :-1].reshape(-1, V)
    rows[:, 3] = 1.0
    return ce(z, y) + ce(rows, y[:, 1:])


def real_view_written(z, y):
    z.select(-1, 3).fill_(1.0)
    return ce(z, y)


def real_view_of_a_view_written(z, y):
    z.transpose(1, 2).narrow(1, 3, 2).fill_(1.0)
    return ce(z, y)


def data_written(z, y):
    z.data[..., 3] = 1.0
    z.detach().view(-1, V)[:, 4] = 2.0
    return ce(z, y)


def view_scaled(z, y):
    flat = z.view(-1, V)
    flat *= 0.5
    flat.div_(3)
    return ce(z, y)


def scaled_after_a_view(z, y):
    flat = z.view(-1, V)
    z.mul_(0.5)
    return ce(flat, y)


def scaled_after_a_look(z, y):
    column = z.select(-1, 3)
    z.mul_(0.5)
    return ce(z, y) + column.sum()


def scaled_before(z, y):
    other = z * 2
    z.mul_(0.5)
    return ce(z, y) + ce(other, y)


def copies_written(z, y):
    for twin in (z.clone(), z.to(z.dtype, copy=True), z[y > 10], z[[0, 1]], z * 1):
        twin.fill_(1.0)
    return ce(z, y)


def own_type_is_no_copy(z, y):
    z.to(z.dtype).contiguous().float()[..., 3] = 1.0
    return ce(z, y)


def looked_then_written(z, y):
    z.sum()
    z.view(-1, V)[0] = 1.0
    return ce(z.view(-1, V), y)


WRITES = [
    view_written, root_written_after_a_view, root_written_after_a_copy, reshape_that_copies,
    real_view_written, real_view_of_a_view_written, data_written, view_scaled, scaled_after_a_view,
    scaled_after_a_look, scaled_before, copies_written, own_type_is_no_copy,
    looked_then_written,
]  # fmt: skip


@pytest.mark.parametrize("loss", WRITES, ids=lambda f: f.__name__)
def test_writing(loss):
    model, x, y = plain_model(True), tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(model, x, y, loss)
    replace_loss_head(model)
    torch.testing.assert_close(loss_and_grads(model, x, y, loss), native)


@pytest.mark.parametrize(
    "loss",
    [view_written, root_written_after_a_view, view_scaled, scaled_after_a_view, scaled_before],
    ids=lambda f: f.__name__,
)
def test_writing_in_one_graph(loss):
    model, x, y = plain_model(True), tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(model, x, y, loss)
    run = compiled(lambda x, y: loss(model(x), y), fullgraph=True)
    replace_loss_head(model)
    model.zero_grad()
    run(x, y).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], native[1:])


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


def test_looking_without_a_graph_does_not_lose_it():
    model, x = plain_model(), tokens(3, 7)
    replace_loss_head(model)
    z = model(x)
    with torch.no_grad():
        z.argmax(-1)
    z.sum().backward()
    assert model[1].weight.grad is not None


def test_gradients_of_logits_are_for_those_who_ask():
    seen = {}
    for name, model in (("real", plain_model()), ("lazy", replace_loss_head(plain_model()))):
        z = model(tokens(3, 7))
        z.register_hook(lambda grad, name=name: seen.__setitem__(name, grad))
        z.retain_grad()
        F.cross_entropy(z.view(-1, V), tokens(3, 7, seed=1).view(-1)).backward()
        seen[name, "grad"] = z.grad
    torch.testing.assert_close(seen["lazy"], seen["real"])
    torch.testing.assert_close(seen["lazy", "grad"], seen["real"])


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
        with pytest.raises(RuntimeError, match="was changed in place after the head"):
            look()
    z = model(x)
    seen = z + 0
    torch.optim.SGD(model.parameters(), 1.0).step()
    torch.testing.assert_close(z.sum(), seen.sum())


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
    """As in reinforcement learning: the old policy's logits, used where the new one is trained."""
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


def test_resized_vocabulary():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    model[1].weight = nn.Parameter(torch.randn(V + 14, H))
    assert model(x).shape == (3, 7, V + 14)
    ce64 = F.cross_entropy(model(x).view(-1, V + 14), tokens(21) + 14)
    torch.testing.assert_close(
        ce64, F.cross_entropy((model(x) + 0).view(-1, V + 14), tokens(21) + 14)
    )


def test_autocast_at_the_look_changes_nothing():
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    native = model(x)
    z = replace_loss_head(model)(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert z.log_softmax(-1).dtype == torch.float32
        torch.testing.assert_close(z.log_softmax(-1), native.log_softmax(-1))
        torch.testing.assert_close(ce(model(x).float(), y), ce(native, y), rtol=1e-2, atol=0)


def test_a_finer_bias_is_not_rounded():
    def losses(z):
        part = (z[..., :40] + bias[:40]).view(-1, 40)
        return ce(z + bias, y), F.cross_entropy(part, y.view(-1) % 40)

    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    bias = torch.linspace(-1, 1, V) * 1.001
    for model in (plain_model(), plain_model().bfloat16()):
        native = losses(model(x))
        torch.testing.assert_close(losses(replace_loss_head(model)(x)), native)


def test_a_value_per_row_is_no_bias():
    model, x, column = plain_model(), tokens(V), torch.arange(V)[:, None]
    native = model(x) + column
    torch.testing.assert_close((replace_loss_head(model)(x) + column) + 0, native)


def test_a_head_that_makes_float32():
    class Head(nn.Linear):
        def forward(self, x):
            return super().forward(x).float()

    model = nn.Sequential(nn.Embedding(V, H), Head(H, V)).bfloat16()
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    native = model(x)
    z = replace_loss_head(model)(x)
    assert z.dtype == torch.float32
    torch.testing.assert_close(z + 0, native)
    assert ce(z, y).dtype == torch.float32
    torch.testing.assert_close(ce(z, y), ce(native, y), rtol=1e-3, atol=0)


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


def test_models_can_be_saved():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    twin = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert isinstance(other(x), LazyLogits)
        torch.testing.assert_close(other(x) + 0, model(x) + 0)


def test_written_logits_survive_a_wrapper():
    """DDP takes a model's outputs apart and puts them together again."""
    z = replace_loss_head(plain_model())(tokens(3, 7))
    leaves, spec = torch.utils._pytree.tree_flatten({"logits": z})
    assert isinstance(torch.utils._pytree.tree_unflatten(leaves, spec)["logits"], LazyLogits)
    z[..., 3] = 7.0
    leaves, spec = torch.utils._pytree.tree_flatten({"logits": z})
    assert (torch.utils._pytree.tree_unflatten(leaves, spec)["logits"][..., 3] == 7).all()


# ---- torch.compile --------------------------------------------------------------------------


def test_logits_of_a_compiled_model():
    """They leave the graph as something that is no tensor but answers like one."""
    model, x, y = plain_model(True), tokens(3, 7), tokens(3, 7, seed=1)
    real = model(x).detach()
    run = compiled(replace_loss_head(model), fullgraph=True)
    z = run(x)
    assert (z.shape, z.dtype, z.ndim, z.size(-1), len(z)) == (real.shape, real.dtype, 3, V, 3)
    torch.testing.assert_close(z.argmax(-1), real.argmax(-1))
    torch.testing.assert_close(torch.softmax(z.float(), -1), real.softmax(-1))
    torch.testing.assert_close((z[:, -1] + 1).detach(), real[:, -1] + 1)
    torch.testing.assert_close((1 - z).detach(), 1 - real)
    assert torch.equal(z > 0, real > 0)
    assert type(z.detach()) is LazyLogits
    z[..., :3] = 0.0
    assert (z[..., :3] == 0).all()
    z -= 1
    assert (z[..., :3] == -1).all()
    z = run(x)
    loss = F.cross_entropy(z.view(-1, V), y.view(-1))  # outside of the graph
    loss.backward()
    torch.testing.assert_close(loss.detach(), F.cross_entropy(real.view(-1, V), y.view(-1)))
    assert model[1].weight.grad.norm() > 0
