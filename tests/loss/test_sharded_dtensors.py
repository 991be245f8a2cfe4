"""Functions for a whole vocabulary that are given a DTensor, sharded as torch does it."""

import functools

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.bounds import STATISTIC
from support.vocabulary import OPTIONS, class_weights, close, inputs, own_rows, truth
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fusedce import LossAccumulator, fused_argmax, fused_ce, fused_cross_entropy, fused_logprobs
from fusedce.sharded import sharded_ce

# ---- cases, each run by every rank ------------------------------------------------------------


def summed(V, options, tokens, rank):
    """Shards as torch makes them (V=9 on 4 ranks: 3, 3, 3 and none), and the public name."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = inputs(V, **options)
    weight = distribute_tensor(x["weight"], mesh, [Shard(0)]).requires_grad_()
    arguments = {k: v for k, v in x.items() if k not in ("hidden", "weight", "bias")}
    if "bias" in x:
        arguments["bias"] = distribute_tensor(x["bias"], mesh, [Shard(0)]).requires_grad_()
    placement = [Shard(0)] if tokens == "sharded" else [Replicate()]
    hidden = x["hidden"].clone()
    if tokens != "plain":
        hidden = distribute_tensor(hidden, mesh, placement)
        for name in ("labels", "token_weight"):
            if name in arguments:
                arguments[name] = distribute_tensor(arguments[name], mesh, placement)
    hidden.requires_grad_()
    out = (sharded_ce if options else fused_ce)(hidden, weight, **arguments)
    loss, n_valid, grads = truth(x)
    (out.loss_sum * 0.37).backward()
    assert type(out.loss_sum) is torch.Tensor
    assert int(out.n_valid) == n_valid
    close(out.loss_sum, loss)
    found = {"hidden": hidden.grad, "weight": weight.grad}
    if "bias" in x:
        found["bias"] = arguments["bias"].grad
    for name, grad in found.items():
        if name != "hidden" or tokens != "plain":
            assert isinstance(grad, DTensor)
            grad = grad.full_tensor()
        close(grad, grads[name])


def per_token(V, rank):
    """The functions for a whole vocabulary take a sharded one too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = inputs(V)
    every, _ = own_rows(x, [V], 0)
    weight = distribute_tensor(x["weight"], mesh, [Shard(0)]).requires_grad_()
    hidden = x["hidden"].clone().requires_grad_()
    c = class_weights(V)
    a = fused_cross_entropy(hidden, weight, x["labels"], class_weight=c, reduction="none")
    b = fused_cross_entropy(**every, class_weight=c, reduction="none")
    torch.testing.assert_close(a, b)
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(hidden.grad, every["hidden"].grad)
    torch.testing.assert_close(weight.grad.full_tensor(), every["weight"].grad)
    a, b = fused_logprobs(hidden, weight, x["labels"]), fused_logprobs(**every)
    torch.testing.assert_close(tuple(a), tuple(b))
    hidden = hidden.detach()[x["labels"] != -100]
    assert torch.equal(fused_argmax(hidden, weight), fused_argmax(hidden, x["weight"]))


def accumulates(rank):
    """Replicas of the same tokens are one rank for the denominator."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x = inputs(11, torch.float32)
    weight = distribute_tensor(x["weight"], mesh, [Shard(0)]).requires_grad_()
    acc = LossAccumulator.from_mesh(mesh, [])
    with acc.window([(x["labels"] != -100).sum()]):
        acc.backward(fused_ce(x["hidden"], weight, x["labels"]))
    loss, n, grads = truth(x, upstream=1 / int((x["labels"] != -100).sum()))
    close(weight.grad.full_tensor(), grads["weight"], torch.float32)
    m = acc.metrics()
    assert m["n_tokens"] == n
    assert m["loss"] == pytest.approx(float(loss) / n, rel=STATISTIC)


CASES = {
    "sum": functools.partial(summed, 11, {}, "plain"),
    "sum, empty shard": functools.partial(summed, 9, {}, "replicated"),
    "sum, all options": functools.partial(summed, 11, OPTIONS["everything"], "replicated"),
    "sum, sharded tokens": functools.partial(summed, 11, {}, "sharded"),
    "sum, sharded tokens, all options": functools.partial(
        summed, 11, OPTIONS["everything"], "sharded"
    ),
    "per token": functools.partial(per_token, 11),
    "per token, empty shard": functools.partial(per_token, 3),
    "accumulates": accumulates,
}


@functools.cache
def results(world):
    return ranks.run(CASES, world)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_vocabulary(name, world):
    ranks.of(results(world), name)
