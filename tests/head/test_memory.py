"""The memory that lazy logits keep alive, and the number of times that logits are made."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from lib.peaks import peak_extra_bytes
from support.attacks import both
from support.heads import H, V, ce, plain_model, tokens

from fusedce import replace_loss_head
from fusedce.head.gradient import LazyGradient
from fusedce.head.lazy import LazyLogits


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """Hide the objects of other tests from the garbage collector, which walks over all of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_kept_loss_holds_no_gradients_and_no_logits_after_backward():
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    z = model(x)
    z.argmax(-1)
    loss = ce(z, y)
    loss.backward()
    del z
    model.zero_grad()
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    others = [t for t in tensors if type(t) is torch.Tensor and t.shape == (V, H)]
    assert all(t.data_ptr() == model[1].weight.data_ptr() for t in others)
    assert all(t.device.type == "meta" for t in tensors if t.shape in ((3, 7, V), (21, V)))


def test_kept_detached_logits_hold_no_graph():
    """The graph of a deep backbone is most of the memory."""
    model = replace_loss_head(plain_model())
    gc.collect()
    gc.disable()
    try:
        inside = model[0](tokens(8, 64))
        saved = weakref.ref(inside)
        kept = model[1](inside.square()).detach()
        loss = ce(kept, tokens(8, 64, seed=1))
        del inside  # an evaluation step without no_grad: nothing calls backward
        assert saved() is None
    finally:
        gc.enable()
    assert not loss.requires_grad
    assert next(iter(kept.expr.steps)).given[0].nbytes < kept.nbytes


def test_a_tied_head_has_two_gradients_at_a_time_as_in_torch():
    assert peak_extra_bytes("support.memory:tied", {}) <= 80 << 20


@pytest.mark.parametrize(("calls", "gradients"), [(False, 2), (True, 3)])
def test_a_loss_in_pieces_holds_few_gradients_of_the_weight_at_a_time(calls, gradients):
    """Of several calls of the head, torch adds the gradients up beside the first, which waits."""
    peak = peak_extra_bytes("support.memory:pieces", {"count": 16, "calls": calls})
    assert peak <= (32 * gradients + 16) << 20


def test_the_same_cast_twice_makes_logits_once():
    def program(m, x, y):
        z = m(x)
        return z.float().logsumexp(-1).sum() + z.float().square().sum() + z.double().exp().mean()

    assert both(program).logits_made == 1


STEPS_OF_TRAINING = {
    "no backward": lambda m, z, loss: None,
    "loss of tokens": lambda m, z, loss: F.cross_entropy(z.mT, z.argmax(-1), reduction="none"),
    "plain": lambda m, z, loss: loss.backward(),
    "hook": lambda m, z, loss: (z.register_hook(lambda g: g * 2), loss.backward()),
    "kept": lambda m, z, loss: (z.retain_grad(), loss.backward()),
    "a view's": lambda m, z, loss: (z.view(-1).retain_grad(), loss.backward()),
    "twice": lambda m, z, loss: (loss.backward(retain_graph=True), loss.backward()),
    "written in place": lambda m, z, loss: (
        z.register_hook(lambda g: g * 2), z.mul_(0.5),
        z.register_hook(lambda g: g * 3), ce(z, tokens(3, 7)).backward(),
    ),
    "looked at": lambda m, z, loss: (z.argmax(-1), loss.backward(), z.detach() + 0),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS_OF_TRAINING)
def test_a_step_leaves_nothing_for_the_garbage_collector(name):
    model, x, y = replace_loss_head(plain_model(bias=True)), tokens(3, 7), tokens(3, 7, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    gc.collect()
    before = lazy_tensors()
    gc.disable()
    try:
        z = model(x)
        loss = ce(z * 0.5, y) + ce(z, y)
        STEPS_OF_TRAINING[name](model, z, loss)
        assert len(lazy_tensors()) > len(before)
        del z, loss
        optimizer.step()
        optimizer.zero_grad()
        assert lazy_tensors() == before
    finally:
        gc.enable()


def lazy_tensors():
    return {id(x) for x in gc.get_objects() if type(x) in (LazyLogits, LazyGradient)}
