"""The memory that lazy logits keep alive, and the number of times that logits are made."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both
from support.heads import H, V, ce, plain_model, tokens
from torch import nn

from fusedce import replace_loss_head
from fusedce.head.lazy import LazyLogits
from fusedce.head.loss import Passenger


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """Hide the objects of other tests from the garbage collector, which walks over all of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_kept_loss_holds_no_gradients_after_backward():
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    loss = ce(model(x), y)
    loss.backward()
    model.zero_grad()
    gc.collect()
    others = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (V, H)]
    assert all(t.data_ptr() == model[1].weight.data_ptr() for t in others)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_that_nobody_keeps_is_freed_without_the_garbage_collector(reduction):
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    gc.collect()
    gc.disable()
    try:
        z = model(x)
        call = weakref.ref(z.expr.product)
        loss = F.cross_entropy(z.view(-1, V), y.view(-1), reduction=reduction)
        del z, loss  # nothing calls backward
        assert call() is None
    finally:
        gc.enable()


class Saved:
    """A tensor that autograd keeps for a backward."""

    def __init__(self, x):
        self.x = x


def kept_by_detached_logits(model):
    """Bytes that are alive for ``logits.detach()`` alone: of the graph, and of the logits."""
    x, y, saved = tokens(8, 64), tokens(8, 64, seed=1), weakref.WeakSet()

    def pack(t):
        new = Saved(t.detach())  # an output would hold the node that holds it
        saved.add(new)
        return new

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda s: s.x):
        z = model(x)
        loss = ce(z, y)
        graph = sum(s.x.nbytes for s in saved)
        kept = z.detach()
        del z, loss  # an evaluation step without no_grad: nothing calls backward
    lazy = getattr(kept, "memory", None)
    own = kept.nbytes if lazy is None else kept.expr.products[0].given[0].nbytes
    return graph, sum(s.x.nbytes for s in saved), own


def test_kept_detached_logits_hold_less_than_real_ones():
    """The graph of a deep backbone is most of the memory."""
    gc.collect()
    gc.disable()
    try:
        layers = [layer for _ in range(12) for layer in (nn.Linear(H, 8 * H), nn.GELU(),
                  nn.Linear(8 * H, H))]  # fmt: skip
        embedding, head = plain_model()
        model = nn.Sequential(embedding, *layers, head)
        _, after, logits = kept_by_detached_logits(model)
        assert after == 0
        replace_loss_head(model, head=head)
        before, after, hidden = kept_by_detached_logits(model)
    finally:
        gc.enable()
    assert before > 10 * logits
    assert after == 0
    assert hidden < logits


def test_the_same_cast_twice_makes_logits_once():
    def program(m, x, y):
        z = m(x)
        return z.float().logsumexp(-1).sum() + z.float().square().sum() + z.double().exp().mean()

    assert both(program).logits_made == 1


STEPS_OF_TRAINING = {
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


@pytest.mark.slow
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
    return {id(x) for x in gc.get_objects() if type(x) in (LazyLogits, Passenger)}
