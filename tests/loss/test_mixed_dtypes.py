"""A hidden state and a head of different dtypes: computed in the wider, gradients in their own."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.bounds import EXACT
from torch.overrides import TorchFunctionMode

import fusedce

N, H, V = 6, 8, 23
LABELS = torch.tensor([3, 0, -100, 22, 7, 3])
CALLS = {
    "fused_ce": lambda h, w, **o: fusedce.fused_ce(h, w, LABELS, **o).loss_sum,
    "fused_cross_entropy": lambda h, w, **o: fusedce.fused_cross_entropy(h, w, LABELS, **o),
    "linear_cross_entropy": lambda h, w, **o: fusedce.linear_cross_entropy(h, w, LABELS, **o),
    "fused_logprobs": lambda h, w, **o: fusedce.fused_logprobs(h, w, LABELS, **o).logprob,
    "fused_topk": lambda h, w, **o: fusedce.fused_topk(h, w, 3, **o).logprob,
    "fused_kl": lambda h, w, **o: fusedce.fused_kl(h, w, h.bfloat16(), w.float(), **o).loss_sum,
    "fused_kl_tokens": lambda h, w, **o: fusedce.fused_kl_tokens(h, w, h, w.half(), **o),
    "distillation_loss": lambda h, w, **o: (
        fusedce.recipes.distillation_loss(
            h, w, LABELS.clamp(0)[:, None], torch.full((N, 1), -0.5), **o
        ).loss_sum
    ),
}
PAIRS = [
    *itertools.permutations((torch.float32, torch.bfloat16), 2),
    (torch.float16, torch.bfloat16),
]


def inputs(of_hidden, of_weight):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng).to(of_hidden).requires_grad_()
    weight, bias = (torch.randn(s, generator=rng).to(of_weight) for s in ((V, H), (V,)))
    return hidden, weight.requires_grad_(), bias.requires_grad_()


def results(call, leaves, wide=None, **options):
    """Value and gradients; of operands cast to ``wide`` by hand where it is given."""
    hidden, weight, bias = leaves if wide is None else (x.to(wide) for x in leaves)
    value = call(hidden, weight, bias=bias, **options)
    upstream = torch.linspace(0.5, 1, max(value.numel(), 1)).view(value.shape).to(value)
    return value.detach(), *torch.autograd.grad((value * upstream).sum(), leaves)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_operands_are_promoted_and_gradients_come_in_their_own_dtype(name, dtypes, backend):
    leaves = inputs(*dtypes)
    found = results(CALLS[name], leaves, backend=backend)
    by_hand = results(CALLS[name], leaves, torch.float32, backend=backend)
    torch.testing.assert_close(found, by_hand, **EXACT)
    assert [x.dtype for x in found[1:]] == [x.dtype for x in leaves]


def test_autocast_and_the_argmax():
    hidden, weight, bias = inputs(torch.float32, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = fusedce.fused_ce(hidden, weight, LABELS, bias=bias).loss_sum
    expected = fusedce.fused_ce(hidden.bfloat16(), weight, LABELS, bias=bias).loss_sum
    torch.testing.assert_close(found, expected, **EXACT)
    best = fusedce.fused_argmax(hidden, weight)
    assert best.equal((hidden.double() @ weight.double().T).argmax(-1))


class Products(TorchFunctionMode):
    """Notes at each product whether autocast is on, which casts more operations on a GPU."""

    def __init__(self):
        super().__init__()
        self.cast = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.mm, torch.addmm):
            self.cast.append(torch.is_autocast_enabled("cpu"))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("name", "backend"),
    [("fused_ce", "torch"), ("fused_ce", "triton"), ("fused_logprobs", "torch")],
)
def test_autocast_is_off_where_a_loss_computes(name, backend):
    hidden, weight, _ = inputs(torch.float32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), Products() as seen:
        out = getattr(fusedce, name)(hidden, weight, LABELS, backend=backend)
        out[0].sum().backward()
    assert seen.cast
    assert not any(seen.cast)


def test_one_float64_makes_all_float64():
    hidden, weight, bias = inputs(torch.float64, torch.bfloat16)
    found = results(CALLS["fused_ce"], (hidden, weight, bias))
    assert found[0].dtype == torch.float64
    assert found[2].dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="float64"):
        fusedce.fused_ce(hidden, weight, LABELS, backend="triton")


SHARDED = ("fused_ce", "fused_logprobs", "fused_topk")


def sharded(dtypes, backend, rank):
    """As with the whole vocabulary, of which this rank has some rows."""
    leaves = inputs(*dtypes)
    rows = (slice(0, 5), slice(5, V))[rank]
    local = leaves[0], *(x[rows].detach().requires_grad_() for x in leaves[1:])
    for name in SHARDED:
        value, d_hidden, *of_rows = results(CALLS[name], leaves, backend=backend)
        found = results(CALLS[name], local, process_group=dist.group.WORLD, backend=backend)
        torch.testing.assert_close(found, (value, d_hidden, *(x[rows] for x in of_rows)))


def test_shards():
    cases = {
        str((*dtypes, backend)): functools.partial(sharded, dtypes, backend)
        for dtypes, backend in itertools.product(PAIRS, ("torch", "triton"))
    }
    found = ranks.run(cases)
    for case in cases:
        ranks.of(found, case)
