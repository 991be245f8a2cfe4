"""Writes into logits count, declared or not, and real logits are computed once they are read."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.attacks import same, same_loss
from support.heads import MODES, V, ce, loss_and_grads, plain_model, tokens

from fusedce import replace_loss_head

_LIBRARY = torch.library.Library("fusedce_test_writers", "DEF")
_LIBRARY.define("scale_unseen(Tensor x, Tensor[] more) -> ()")


@torch.library.impl(_LIBRARY, "scale_unseen", "CompositeExplicitAutograd")
def _scale_unseen(x, more):
    for t in (x, *more):
        t.mul_(0.5)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def masked_after_a_look(z, y):
    """Some models mask classes in place before the loss; metrics may have looked before that."""
    with torch.no_grad():
        z.argmax(-1)
    z[..., :5] = torch.finfo(z.dtype).min
    return ce(z, y.clamp(min=5))


def root_written_after_a_copy(z, y):
    shifted, other = z[:, :-1].contiguous(), z * 2
    z[..., 3] = 1.0
    return ce(shifted, y[:, 1:]) + ce(z, y) + ce(other, y)


def copies_written(z, y):
    for twin in (z.clone(), z.to(z.dtype, copy=True), z[y > 10], z[[0, 1]], z * 1):
        twin.fill_(1.0)
    return ce(z, y)


def own_type_is_no_copy(z, y):
    z.to(z.dtype).contiguous().float()[..., 3] = 1.0
    return ce(z, y)


def out_argument(z, y):
    with torch.no_grad():
        torch.clamp(z.detach(), min=0, out=z.detach())
        torch._foreach_mul_([z], 2.0)
    return ce(z, y)


def odd_shapes(z, y):
    assert z[:1].squeeze((0,)).shape == (7, V)
    first = z[np.int64(0)]
    first.mul_(2)
    return ce(z, y)


WRITES = [
    masked_after_a_look, root_written_after_a_copy, copies_written, own_type_is_no_copy,
    out_argument, odd_shapes,
]  # fmt: skip


@pytest.mark.parametrize("loss", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_a_write_counts(loss, mode):
    same_loss(loss, mode, bias=True)


# ---- writes that no schema declares ---------------------------------------------------------


def product_reduced(z):
    dist.all_reduce(z.mul(1), op=dist.ReduceOp.PRODUCT)
    dist.all_reduce(z)  # of one rank, changes nothing: but it might have


def gathered_into_a_view(z):
    rows = torch.linspace(-1, 1, z[0].numel()).view(z[0].shape)
    dist.all_gather_into_tensor(z[0], rows)


def by_an_operator_in_a_list(z):
    torch.ops.fusedce_test_writers.scale_unseen(torch.ones(2), [torch.ones(1), z[1]])


def through_another_tensor(z):
    twin = torch.empty(0)
    twin.set_(z)
    twin.mul_(0.5)


UNSEEN = [
    product_reduced, gathered_into_a_view, by_an_operator_in_a_list, through_another_tensor,
]  # fmt: skip


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("write", UNSEEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_an_unseen_write_counts(write, mode):
    def loss(z, y):
        earlier = ce(z, y)
        with torch.no_grad():
            write(z)
        return ce(z, y) + 2 * ce(z[:, 1:], y[:, 1:]) + earlier

    same_loss(loss, mode)


def clamped(g):
    torch.clamp(g, -0.01, 0.01, out=g)


def reduced(g):
    dist.all_gather_into_tensor(g, torch.full(g.shape, 0.25))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "write",
    [
        clamped,
        reduced,
        lambda g: (torch._foreach_mul_([g], 3.0), None)[1],
        lambda g: torch.ops.fusedce_test_writers.scale_unseen(torch.ones(2), [g]),
    ],
)
@same
def test_a_hook_that_writes_into_the_gradient_unseen(m, x, y, write):
    z = m(x)
    z.register_hook(write)
    return ce(z, y)


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


# ---- parts, and what is written later -------------------------------------------------------

PARTS = {
    "chunk": lambda z: z.chunk(2)[0],
    "split": lambda z: torch.split(z, [2, 1])[1],
    "unbind": lambda z: z.unbind(1)[3],
    "tensor_split": lambda z: z.tensor_split(2)[1],
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", MODES)
def test_writing_into_a_part_is_right_or_refused_where_torch_refuses_it(part, mode):
    def loss(z, y):
        PARTS[part](z).mul_(2)
        return ce(z, y)

    results = []
    for model in (plain_model(), replace_loss_head(plain_model())):
        try:
            found = loss_and_grads(model, tokens(3, 7), tokens(3, 7, seed=1), loss, mode)
        except RuntimeError as e:
            found = "returns multiple views" in str(e)
        results.append(found)
    torch.testing.assert_close(results[1], results[0])
    assert (results[0] is True) == (mode == "grad" and part != "tensor_split")


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
