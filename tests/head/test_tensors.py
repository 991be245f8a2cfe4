"""Lazy logits behave as real ones, in all modes, and are those of the moment when the head ran."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.attacks import alike, same, same_loss
from support.bounds import SAME_MODEL
from support.heads import MODES, H, V, ce, plain_model, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedce import head_report, replace_loss_head
from fusedce.head.lazy import LazyLogits

WITHOUT_GRAD = [mode for mode in MODES if mode != "grad"]


@pytest.mark.usefixtures("each_mode")
def test_it_is_laid_out_as_real_ones():
    model, x = plain_model(), tokens(3, 7)
    real = model(x)
    z = replace_loss_head(model)(x)
    for step in (
        lambda z: z[:, 1:],
        lambda z: z.transpose(1, 2) * 2,
        lambda z: z[..., 3:9].unsqueeze(1).permute(3, 0, 1, 2),
        lambda z: z[:, torch.tensor([4, 0])],
        lambda z: z[torch.tensor([True, False, True])],
        lambda z: z.transpose(1, 2)[torch.tensor([2, 0, 1])],
        lambda z: z.transpose(1, 2)[torch.tensor([True, False, True])],
        lambda z: z.movedim(2, 0)[:, torch.tensor([1, 0])],
    ):
        assert isinstance(step(z), LazyLogits)
        torch.testing.assert_close(step(z).flatten() + 0, step(real).flatten())
        assert step(z).stride() == step(real).stride()
        assert step(z).is_contiguous() == step(real).is_contiguous()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        z[:, 1:].view(-1, V)
    with pytest.raises(IndexError, match="out of range"):
        z.transpose(0, 3)


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


def labels_of_another_shape(model):
    with pytest.raises(RuntimeError, match="multi-target"):
        F.cross_entropy(model(tokens(21)), tokens(21, 1))
    return ()


def in_inference_mode_later(model):
    z = model(tokens(3, 7))
    with torch.inference_mode():
        return z[:, :-1].argmax(-1), ce(z.float(), tokens(3, 7)), z.detach() + 0


USES = {
    "in inference mode later": in_inference_mode_later,
    "labels of another shape": labels_of_another_shape,
    "another weight": other_weight,
    "functional_call": functional_call,
    "a value per row is no bias": lambda model: model(tokens(V)) + torch.arange(V)[:, None],
    "export": lambda model: torch.export.export(model, (tokens(3, 7),)).module()(tokens(3, 7)),
    "trace": lambda model: torch.jit.trace(model, tokens(3, 7))(tokens(3, 7, seed=1)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode"])
def test_a_use_of_a_model_gives_the_same(use, mode):
    if (use, mode) == ("export", "inference_mode"):
        pytest.skip("torch exports nothing there")
    alike(USES[use], mode)


@same
def test_hooks_of_the_head_see_the_gradient_of_the_logits(m, x, y):
    seen = []
    m[1].register_full_backward_hook(lambda m, i, o: seen.extend((i[0], o[0])))
    loss = ce(m(x), y)
    loss.backward()
    return loss.detach(), *seen


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


# ---- the moment of the head's run is what counts ----------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda w, h: w.mul_(2),
        lambda w, h: h.mul_(2),
        lambda w, h: h.data.mul_(2),  # as a CUDA graph's static output changes
        lambda w, h: np.copyto(h.numpy(), np.ones(h.shape, np.float32)),
    ],
    ids=["head", "hidden", "hidden, data", "hidden, numpy"],
)
def test_what_changes_before_a_look_is_refused(change):
    model, y = replace_loss_head(plain_model()), tokens(3, 7, seed=1)
    hidden = torch.randn(3, 7, H)
    z = model[1](hidden)
    with torch.no_grad():
        change(model[1].weight, hidden)
    for look in (lambda: z.argmax(-1), lambda: ce(z, y)):
        with pytest.raises(RuntimeError, match=r"has changed .* since the head ran"):
            look()


def averaged(p):
    """As torch-ema and diffusers swap averaged weights in."""
    p.data.copy_(p.data * 0.5)


@pytest.mark.parametrize(
    "change",
    [
        averaged,
        lambda p: p.data.add_(1),
        lambda p: p.data[7].zero_(),
        lambda p: p.data[:, 3].sub_(1),
    ],
)
@pytest.mark.parametrize("of", ["weight", "bias"])
def test_a_write_through_data_before_a_look_is_refused(change, of):
    """No version counter moves."""
    model, y = replace_loss_head(plain_model(bias=True)), tokens(3, 7, seed=1)
    z = model(tokens(3, 7))
    if of == "bias":
        z, change = z.float(), lambda p: p.data[7].sub_(1)
    change(getattr(model[1], of))
    for look in (lambda: z.argmax(-1), lambda: ce(z, y)):
        with pytest.raises(RuntimeError, match=r"fusedce.*has changed"):
            look()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_has_not_changed(bad):
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    with torch.no_grad():
        model[1].weight.fill_(bad)
    assert not torch.isfinite(ce(model(x), x))


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


def stepped(make):
    """Logits of a model after one step of an optimizer."""
    model = replace_loss_head(plain_model())
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    optimizer = make(model.parameters())
    z = model(x)
    ce(model(x), y).backward()
    optimizer.step()
    return z


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "look",
    [
        lambda z: z.argmax(-1),
        lambda z: ce(z, tokens(3, 7)),
        lambda z: z[:, -1].float().sum(),
        lambda z: z.numpy(),
    ],
)
def test_logits_read_after_a_step_are_refused(name, look):
    z = stepped(OPTIMIZERS[name])
    with pytest.raises(
        RuntimeError, match=r"changed \(by an optimizer step\?\) since the head ran"
    ):
        look(z.detach())


def test_logits_that_were_looked_at_before_stay_what_they_were():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    z = model(x)
    half = z / 2
    seen = z + 0
    half.argmax(-1)
    ce(model(x), x).backward()
    torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()
    torch.testing.assert_close(z * 1.0 + 0, seen)
    torch.testing.assert_close(half + 0, seen / 2)


@pytest.mark.parametrize("trained", ["another model", "the body", "all but the frozen head"])
def test_the_step_of_an_unrelated_optimizer_changes_nothing(trained):
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    parameters = list(model[0].parameters())  # the hidden state was computed before
    if trained == "another model":
        parameters = list(nn.Linear(3, 3).parameters())
    if trained == "all but the frozen head":
        model[1].weight.requires_grad_(False)
    z, real = model(x), (model(x) + 0).detach()
    ce(model(x), x).backward()
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(parameters, fused=True).step()
    torch.testing.assert_close(z.detach() + 0, real)


def test_lbfgs_may_run_the_model_inside_its_step():
    def trained(model):
        optimizer, x = torch.optim.LBFGS(model.parameters(), max_iter=5), tokens(3, 7)

        def closure():
            optimizer.zero_grad()
            loss = ce(model(x), x.roll(1, 0))
            loss.backward()
            return loss

        optimizer.step(closure)
        return closure().detach()

    expected, got = trained(plain_model()), trained(replace_loss_head(plain_model()))
    # its line search divides differences of losses and of gradients by each other
    torch.testing.assert_close(got, expected, rtol=64 * SAME_MODEL, atol=0)


def test_a_head_that_is_a_part_of_a_larger_memory_may_be_changed_by_any_step():
    """An engine holds all parameters in one buffer, and the optimizer has copies of it."""
    model = plain_model()
    buffer = torch.zeros(2 * model[1].weight.numel())
    part = buffer[: model[1].weight.numel()].view_as(model[1].weight)
    replaced = copy.deepcopy(model)
    replaced[1].weight.data = part.copy_(model[1].weight.detach())
    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    z, unread = replace_loss_head(replaced)(x), replaced(x)
    z.retain_grad()
    ce(z, y).backward()
    copies = buffer.clone().requires_grad_()
    copies.grad = torch.ones_like(copies)
    torch.optim.SGD([copies], 0.1).step()
    buffer.copy_(copies.detach())  # no version counter of the parameter sees that
    native = model(x)
    native.retain_grad()
    ce(native, y).backward()
    torch.testing.assert_close(z.grad + 0, native.grad)
    with pytest.raises(RuntimeError, match="has changed"):
        unread.argmax(-1)


# ---- evaluation and serving -------------------------------------------------------------


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


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_one_position_of_each_sequence_is_made_at_once(mode):
    model = replace_loss_head(plain_model())
    with MODES[mode]():
        assert type(model(tokens(3, 1))) is torch.Tensor
        assert type(model(tokens(3, 2))) is LazyLogits
    assert type(model(tokens(3, 1))) is LazyLogits
    assert "generation" in str(head_report(model))


# ---- writes into parts, into operands after their use, and what is refused --------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z.resize_(2, V),
        lambda z: z.resize_as_(torch.ones(2, 2)),
        lambda z: z.set_(torch.ones(3, 7, V)),
        lambda z: z.unsqueeze_(0),
        lambda z: (z * 0.5).swapaxes_(1, 2),
        lambda z: z.as_strided_((7, 3, V), (V, 7 * V, 1)),
        lambda z: setattr(z, "data", torch.zeros(3, 7, V)),
    ],
)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_another_shape_or_memory_in_place_is_refused_in_words(change, mode):
    with MODES[mode]():
        z = replace_loss_head(plain_model())(tokens(3, 7))
        with pytest.raises(RuntimeError, match=r"fusedce.*lazy logits.*logits \+ 0"):
            change(z)


@pytest.mark.parametrize("weighted", [False, True])
@same
def test_arguments_of_the_loss_written_after_backward(m, x, y, weighted):
    """Labels stand in a buffer that the next batch fills: a gradient seen later is of these."""
    weight, y, kept = torch.linspace(0.5, 1.5, V) if weighted else None, y.clone(), []
    z = m(x)
    z.register_hook(kept.append)
    loss = F.cross_entropy(z.view(-1, V), y.view(-1), weight=weight)
    loss.backward()
    (y if weight is None else weight).zero_()
    return loss.detach(), kept[0]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_an_operand_written_after_its_use(mode):
    """Factor, bias and mask stand in buffers that others fill later: torch refuses gradients."""

    def loss(z, y):
        t, bias, rows = torch.tensor(0.5), torch.linspace(0, 1, V), y > 10
        chosen = ((z + bias) * t)[rows]
        labels = y[rows]
        t.add_(1), bias.mul_(2), rows.logical_not_()
        return ce(chosen, labels)

    same_loss(loss, mode)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_loss_is_differentiated_by_the_logits(reentrant):
    """Its second run, inside the call, sees lazy logits as the first one did."""
    model, x = plain_model(), tokens(3, 7)
    y = torch.arange(21) % V

    def gradient():
        z = model(x)
        loss = checkpoint(
            lambda z: F.cross_entropy(z.flatten(0, -2), y), z, use_reentrant=reentrant
        )
        if reentrant:  # torch allows no other way there
            z.retain_grad()
            loss.backward()
            return z.grad
        return torch.autograd.grad(loss, z)[0]

    exact = gradient()
    replace_loss_head(model)
    torch.testing.assert_close(gradient(), exact)
