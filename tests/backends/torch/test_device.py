"""The torch backend as a GPU runs it, on a CPU: tiles, products with float32 results, few waits."""

from functools import partial

import pytest
import torch
from support.bounds import SAME_SUMS
from support.operators import Calls
from support.oracle import by_token, summed
from torch.utils._python_dispatch import _disable_current_modes

from fusedce import fused_ce, fused_cross_entropy, fused_kl, fused_logprobs
from fusedce.backends import plan
from fusedce.backends import torch as backend
from fusedce.backends.torch import logit_tiles, products, stats_and_grads, sum_grads
from fusedce.backends.torch.products import Products
from fusedce.contract.problem import Outputs, Problem, Task
from fusedce.testing import Case, check

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
H = 24


@pytest.fixture(params=[True, False], ids=["addmm widens", "addmm does not"])
def device(request, monkeypatch):
    """What asks whether a tensor is on a CPU hears no, and products have an ``out_dtype``.

    ``addmm`` has one from torch 2.11 on.
    """
    for module in (backend, logit_tiles, products, stats_and_grads, sum_grads):
        monkeypatch.setattr(module, "on_cpu", lambda x: False)
    monkeypatch.setattr(products, "widens", lambda name, *_: name == "mm" or request.param)
    for module in (stats_and_grads, sum_grads):
        of_device = partial(as_device, module.sizes_of)
        monkeypatch.setattr(module, "sizes_of", of_device)
    mm, addmm = torch.mm, torch.addmm

    def wide_mm(a, b, *, out_dtype=None, out=None):
        if out_dtype is not None:
            a, b = widened(a, b, out_dtype)
        return mm(a, b, out=out)

    def wide_addmm(total, a, b, *, out_dtype=None, out=None, **more):
        if out_dtype is not None:
            assert request.param
            a, b = widened(a, b, out_dtype)
        return addmm(total, a, b, out=out, **more)

    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)


def widened(a, b, dtype):
    with _disable_current_modes():  # a GPU makes no copies for it: they are not counted
        return a.to(dtype), b.to(dtype)


def as_device(sizes_of, *args, **options):
    return sizes_of(*args, **options)._replace(on_cpu=False)


def tiles_of(monkeypatch, classes, tokens):
    """Chunks of so many tokens and tiles of so many classes."""
    monkeypatch.setattr(sum_grads, "is_one_tile", lambda *_, **__: False)
    monkeypatch.setattr(
        sum_grads, "choose_plan", lambda call, **_: plan.chunked(call, tokens, classes)
    )
    monkeypatch.setattr(
        stats_and_grads, "plan_tiles", lambda call, **_: plan.by_tiles(call, tokens, classes)
    )


@pytest.mark.parametrize("loss", [summed, by_token])
@pytest.mark.parametrize("logits", ["flat", "peaked"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("device")
def test_losses_and_gradients_are_the_references(monkeypatch, dtype, logits, loss):
    """Several chunks and tiles, none of which divides the sizes."""
    tiles_of(monkeypatch, 100, 64)
    for options in (
        {"z_loss": 0.1, "logit_scale": -0.7}, {"label_smoothing": 0.1}, {"softcap": 5.0}
    ):  # fmt: skip
        case = Case((90,), H, 330, dtype, logits=logits, ignored=0.2, with_bias=True,
                    token_weight=True, options=options)  # fmt: skip
        check(partial(loss, backend="torch"), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("device")
def test_every_function_agrees_with_a_cpus(monkeypatch, dtype):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(80, H, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(700, H, generator=rng).to(dtype).requires_grad_()
    labels = torch.randint(700, (80,), generator=rng)
    labels[::5] = -100
    several = torch.randint(700, (80, 5), generator=rng)
    tiles_of(monkeypatch, 200, 64)

    def losses():
        yield fused_ce(hidden, weight, labels, backend="torch").mean()
        none = fused_cross_entropy(hidden, weight, labels, reduction="none", backend="torch")
        yield (none * 1e-3).square().sum()
        yield fused_logprobs(hidden, weight, labels, backend="torch").entropy.sum()
        yield fused_logprobs(hidden, weight, several, backend="torch").logprob.sum()
        yield fused_kl(
            hidden, weight, hidden.detach() / 2, weight.detach(), labels, ce_weight=0.5,
            backend="torch",
        ).mean()  # fmt: skip

    def everything():
        return [(x.detach(), *torch.autograd.grad(x, (hidden, weight))) for x in losses()]

    found = everything()
    monkeypatch.undo()
    for got, expected in zip(found, everything(), strict=True):
        torch.testing.assert_close(got[0], expected[0], rtol=2e-6, atol=0)
        for x, e in zip(got[1:], expected[1:], strict=True):
            assert (x - e).norm() <= max(2 * torch.finfo(dtype).eps, SAME_SUMS) * e.norm()


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e20])
@pytest.mark.parametrize("device", [True], indirect=True)
@pytest.mark.usefixtures("device")
def test_float16_holds_gradients_of_any_size(size):
    """A weight of 1e-30 would be 0 in float16, and one of 1e20 infinite."""
    hidden, weight, labels, _ = Case((40,), H, 500, torch.float16).tensors()
    problem = Problem(
        hidden, weight, labels, token_weight=torch.full((40,), size), backend="torch",
        expected_upstream=torch.tensor(1 / size),
    )  # fmt: skip
    assert Products.of(hidden).operands == torch.float16
    found = sum_grads.loss_and_grads(Task(problem, Outputs(hidden=True, weight=True)))
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    torch.nn.functional.cross_entropy(h @ w.T, labels, reduction="sum").backward()
    for x, e in ((found.d_hidden, h.grad), (found.d_weight, w.grad)):
        assert (x - e).norm() <= torch.finfo(torch.float16).eps * e.norm()


@pytest.mark.usefixtures("device")
def test_a_bad_label_makes_the_sum_nan_and_reads_nothing():
    hidden, weight, labels, _ = Case((70,), H, 300, torch.bfloat16).tensors()
    for bad in (-7, 300, 2**31 - 1):
        given = Problem(hidden, weight, labels.index_fill(0, torch.tensor([3]), bad))
        logits = sum_grads.Logits(sum_grads.Projection.of(given))
        call = sum_grads._Call(given, logits)
        for total in (
            sum_grads._one_tile(call, slice(0, 70)), sum_grads._tile_by_tile(call, slice(0, 70), 90)
        ):  # fmt: skip
            assert total.isnan()


@pytest.mark.parametrize("device", [True], indirect=True)
@pytest.mark.usefixtures("device")
def test_labels_are_not_rounded_in_a_second_chunk():
    """What two chunks add to a weight gradient in bfloat16 is rounded once in each."""
    rng = torch.Generator().manual_seed(0)
    weight, exact = torch.empty(90, H).bfloat16(), torch.zeros(90, H, dtype=torch.float64)
    made = Products.of(weight)
    for first in (True, False):
        exps = torch.rand(90, 40, generator=rng).bfloat16()
        scaled = torch.randn(40, H, generator=rng).bfloat16() + 3
        y = torch.randint(30, (40,), generator=rng)
        rows = torch.randn(40, H, generator=rng)
        for row in y.unique():  # the labels take away nearly all
            rows[y == row] -= exps[row].float() @ scaled.float() / (y == row).sum()
        sum_grads._add_to_weight(made, exps, scaled, weight, y, rows, first=first)
        exact += (exps.double() @ scaled.double()).index_add_(0, y, rows.double())
    once = exact[:30].bfloat16() - exact[:30]
    assert (weight[:30] - exact[:30]).norm() <= 2 * once.norm()


# ---- launches and waits -------------------------------------------------------------------------

VIEWS = {
    "t", "slice", "view", "split", "expand", "unsqueeze", "select", "alias", "detach", "transpose",
    "as_strided", "unflatten", "_unsafe_view", "permute", "unbind", "squeeze", "lift_fresh",
    "empty", "new_empty", "empty_like",
}  # fmt: skip
WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "is_nonzero", "item"}


def counted(monkeypatch, call):
    """Operators that launch, and waits for the device."""
    waits = 0
    with monkeypatch.context() as patch, Calls() as calls:
        original = torch.Tensor.tolist

        def tolist(x):
            nonlocal waits
            waits += 1
            return original(x)

        patch.setattr(torch.Tensor, "tolist", tolist)
        call()
    names = [str(operator).split(".")[1] for operator, *_ in calls.seen]
    for operator, args, _ in calls.seen:
        masks = args[1] if "index" in str(operator) and isinstance(args[1], list) else []
        waits += any(x is not None and x.dtype == torch.bool for x in masks)
    return [x for x in names if x not in VIEWS | WAITS], waits + sum(x in WAITS for x in names)


def sum_of(n, V, dtype, **options):
    hidden, weight, labels, _ = Case((n,), H, V, dtype, options=options).tensors()
    problem = Problem(hidden.detach(), weight.detach(), labels, backend="torch", **options)
    return lambda: sum_grads.loss_and_grads(Task(problem, Outputs(hidden=True, weight=True)))


def tokens_of(n, V, dtype):
    hidden, weight, labels, _ = Case((n,), H, V, dtype).tensors()
    problem = Problem(hidden.detach(), weight.detach(), labels, backend="torch")
    wanted = Outputs(hidden=True, weight=True, lse=True)
    one = torch.ones(n, dtype=torch.float64)
    stats = stats_and_grads.token_stats(problem, wanted, None)
    upstream = stats_and_grads.LogitGrad(one, None, None, torch.expm1(-stats.nll), one.bool())
    dtypes = sum_grads.saved_grad_dtypes(problem)

    def both():
        stats_and_grads.token_stats(problem, wanted, None)
        stats_and_grads.token_grads(problem, wanted, stats.lse, upstream, dtypes)

    return both


@pytest.mark.parametrize("device", [True], indirect=True)
@pytest.mark.parametrize(
    ("loss", "dtype", "most"),
    [
        (sum_of, torch.bfloat16, 7),
        (sum_of, torch.float32, 7),
        (sum_of, torch.float16, 34),  # by tokens, in two passes
        (tokens_of, torch.bfloat16, 28),
        (tokens_of, torch.float16, 34),
    ],
)
@pytest.mark.usefixtures("device")
def test_launches_of_a_tile_and_waits_of_a_chunk(monkeypatch, loss, dtype, most):
    """Labels, which cost a launch or two, are in every tile. By tokens there are two passes."""
    found = {}
    for tiles, chunks in ((2, 1), (6, 1), (2, 4)):
        tiles_of(monkeypatch, 64, 64)
        found[tiles, chunks] = counted(monkeypatch, loss(64 * chunks, 64 * tiles, dtype))
    names, waits = zip(*found.values(), strict=True)
    assert waits[0] == waits[1]
    assert waits[2] - waits[0] <= 2 * 3  # for each of three chunks more
    of_tile = (len(names[1]) - len(names[0])) / 4
    assert of_tile <= most


@pytest.mark.parametrize("device", [True], indirect=True)
@pytest.mark.usefixtures("device")
def test_exponentials_near_zero_are_not_shifted(monkeypatch):
    """Logits below 15 in size need no reference: a pass over each tile less."""
    tiles_of(monkeypatch, 64, 64)
    hidden, weight, labels, _ = Case((64,), H, 256, torch.bfloat16).tensors()

    def shifts(size):
        problem = Problem(size * hidden.detach(), weight.detach(), labels)
        call = partial(sum_grads.loss_and_grads, Task(problem, Outputs(hidden=True, weight=True)))
        return counted(monkeypatch, call)[0].count("sub")

    assert shifts(1) < shifts(50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.3712345, 1.0, torch.inf, torch.nan])
@pytest.mark.usefixtures("device")
def test_a_factor_is_multiplied_before_the_rounding(monkeypatch, dtype, factor):
    monkeypatch.setattr(backend, "_PART_OF_DEVICE", 7)
    x = torch.linspace(-1, 1, 51).to(dtype).view(3, 17)
    exact = (x.float() * factor).masked_fill(x == 0, 0).to(dtype)
    (found,) = backend.scaled([x], torch.tensor(factor), dtype)
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1024), (torch.float32, 2048)])
@pytest.mark.usefixtures("device")
def test_logits_are_kept_within_what_a_chunk_may_hold(dtype, most):
    """Of 2,048 tokens in the inputs' dtype; a quarter of more tokens in float32 never fits."""
    for N, kept in ((most, True), (most + 1, False), (8 * most, False)):
        hidden, weight = torch.empty(N, 2, dtype=dtype), torch.empty(16, 2, dtype=dtype)
        problem = Problem(hidden, weight, torch.zeros(N, dtype=torch.int64))
        assert (stats_and_grads.room_for_logits(problem) is not None) == kept
