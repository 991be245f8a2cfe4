"""Undeclared writes: collectives, foreign operators, new data, shapes changed in place."""

import pytest
import torch
import torch.distributed as dist
from support.attacks import same
from support.heads import MODES, V, ce, loss_and_grads, plain_model, tokens

from fusedce import replace_loss_head

_LIBRARY = torch.library.Library("fusedce_test_writers", "DEF")
_LIBRARY.define("scale_unseen(Tensor x, Tensor[] more) -> ()")
_LIBRARY.define("sum_of(Tensor x) -> Tensor")


@torch.library.impl(_LIBRARY, "scale_unseen", "CompositeExplicitAutograd")
def _scale_unseen(x, more):
    for t in (x, *more):
        t.mul_(0.5)


@torch.library.impl(_LIBRARY, "sum_of", "CompositeExplicitAutograd")
def _sum_of(x):
    return x.sum()


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def product_reduced(z):
    dist.all_reduce(z.mul(1), op=dist.ReduceOp.PRODUCT)
    dist.all_reduce(z)  # of one rank, changes nothing: but it might have


def gathered_into(z):
    dist.all_gather_into_tensor(z, torch.full(z.shape, 0.25))


def scattered_into(z):
    dist.scatter(z, [torch.linspace(-1, 1, z.numel()).view(z.shape)])


def gathered_later(z):
    work = dist.all_gather_into_tensor(z, torch.full(z.shape, 0.25), async_op=True)
    work.wait()


def gathered_into_a_view(z):
    rows = torch.linspace(-1, 1, z[0].numel()).view(z[0].shape)
    dist.all_gather_into_tensor(z[0], rows)


def by_an_operator_in_a_list(z):
    torch.ops.fusedce_test_writers.scale_unseen(torch.ones(2), [torch.ones(1), z[1]])


def through_another_tensor(z):
    twin = torch.empty(0)
    twin.set_(z)
    twin.mul_(0.5)


WRITERS = [
    product_reduced, gathered_into, scattered_into,
    gathered_later, gathered_into_a_view, by_an_operator_in_a_list,
    through_another_tensor,
]  # fmt: skip


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_a_write_counts(write, mode):
    def loss(z, y):
        earlier = ce(z, y)
        with torch.no_grad():
            write(z)
        return ce(z, y) + 2 * ce(z[:, 1:], y[:, 1:]) + earlier

    x, y = tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(plain_model(), x, y, loss, mode)
    found = loss_and_grads(replace_loss_head(plain_model()), x, y, loss, mode)
    torch.testing.assert_close(found, native)


@same
def test_what_an_operator_reads_is_right(m, x, y):
    z = m(x)
    with torch.no_grad():
        seen = torch.ops.fusedce_test_writers.sum_of(z)
    return ce(z, y), seen


def clamped_out(g):
    torch.clamp(g, -0.01, 0.01, out=g)


def many_at_once(g):
    torch._foreach_mul_([g], 3.0)


def of_a_list(g):
    torch.ops.fusedce_test_writers.scale_unseen(torch.ones(2), [g])


def reduced(g):
    dist.all_gather_into_tensor(g, torch.full(g.shape, 0.25))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("write", [clamped_out, many_at_once, of_a_list, reduced])
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
        lambda z: z.transpose_(0, 1),
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
