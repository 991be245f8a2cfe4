"""Inputs at the edge: what is ignored stays ignored, and what cannot be done is said."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks

from fusedce import LossAccumulator, fused_ce, fused_cross_entropy, fused_logprobs, reference_ce

BACKENDS = ["torch", "triton"]
N, H, V = 6, 8, 13


def inputs(dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng).to(dtype).requires_grad_()
    labels = torch.randint(1, V, (N,), generator=rng)
    labels[2] = -100
    return hidden, weight, labels


# ---- ignored positions contaminate nothing --------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 5.0}, {"z_loss": 0.1}])
def test_the_weight_of_an_ignored_position_may_be_anything(options, backend):
    hidden, weight, labels = inputs()
    token_weight = torch.linspace(0.5, 2, N)
    expected = reference_ce(hidden, weight, labels, token_weight=token_weight, **options).loss_sum
    wanted = torch.autograd.grad(expected, (hidden, weight))
    token_weight[2] = math.nan
    options = {**options, "token_weight": token_weight, "backend": backend}
    with torch.no_grad():
        evaluated = fused_ce(hidden, weight, labels, **options).loss_sum
    trained = fused_ce(hidden, weight, labels, **options).loss_sum
    each = fused_cross_entropy(hidden, weight, labels, reduction="none", **options)
    assert each[2] == 0
    for loss in (evaluated, trained, each.sum()):
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for loss in (trained, each.sum()):
        grads = torch.autograd.grad(loss, (hidden, weight))
        torch.testing.assert_close(grads, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_weight_of_an_absent_class_may_be_anything(reduction, backend):
    """1 / frequency of a class that never occurs; ignored labels are not of class 0 either."""
    hidden, weight, labels = inputs()
    class_weight = torch.linspace(0.5, 2, V)
    class_weight[0] = math.inf
    expected = F.cross_entropy(F.linear(hidden, weight), labels, class_weight, reduction=reduction)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            loss = fused_cross_entropy(
                hidden, weight, labels, class_weight=class_weight, reduction=reduction,
                backend=backend,
            )  # fmt: skip
        torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected.sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), (hidden, weight)), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_computed_where_nothing_is_valid(backend, monkeypatch):
    from fusedce.contract.projection import Projection

    hidden, weight, labels = inputs()
    labels.fill_(-100)
    if backend == "torch":
        monkeypatch.setattr(Projection, "logits", None)
    with torch.no_grad():
        assert fused_ce(hidden, weight, labels, backend=backend).loss_sum == 0
    statistics = fused_logprobs(hidden, weight, labels, backend=backend)
    grads = torch.autograd.grad(statistics.logprob.sum(), (hidden, weight))
    assert not any(grad.any() for grad in grads)


# ---- what cannot be done is said ------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_beyond_float32_are_refused(backend):
    arguments = {**dict(zip(("hidden", "weight", "labels"), inputs(), strict=True))}
    arguments["backend"] = backend
    for name, value in (("softcap", 1e39), ("softcap", 1e-46), ("logit_scale", -1e39)):
        with pytest.raises(ValueError, match=f"{name} must be .*range of float32"):
            fused_ce(**arguments, **{name: value})
    for softcap in (1e-37, 1e38):
        loss = fused_ce(**arguments, softcap=softcap).loss_sum
        grads = torch.autograd.grad(loss, (arguments["hidden"], arguments["weight"]))
        assert all(torch.isfinite(x).all() for x in (loss, *grads))


def test_an_ignore_index_must_fit_the_labels():
    hidden, weight, labels = inputs()
    with pytest.raises(
        ValueError, match=r"ignore_index must fit the dtype of labels, torch\.int32"
    ):
        fused_ce(hidden, weight, labels.int(), ignore_index=2**40)
    with pytest.raises(ValueError, match="ignore_index must fit"):
        fused_ce(hidden, weight, labels, ignore_index=2**63)


def test_denominators_are_numbers_and_never_0():
    out = fused_ce(*inputs())
    own, whole = out.mean(), out.loss_sum
    assert own == whole / 5
    for number in (0, 0.0, torch.tensor(0), torch.tensor([0.0])):
        assert out.mean(number) == own
    for number in (0.5, torch.tensor(0.5)):
        assert out.mean(number) == whole
    assert out.mean(torch.tensor(20)) == out.mean(20) == whole / 20
    for number in (-3, math.nan, math.inf):
        with pytest.raises(ValueError, match="denominator must be"):
            out.mean(number)
    with pytest.raises(TypeError, match="denominator must be a number, got str"):
        out.mean("a")


# ---- memory -----------------------------------------------------------------------------------


# ---- the accumulator ------------------------------------------------------------------------


def test_an_empty_first_micro_batch_does_not_overflow():
    """A first estimate of one token would let the sums of the next micro-batches leave fp16."""
    hidden, labels = torch.rand(40000, H).half() + 6, torch.zeros(40000, dtype=torch.int64)
    for empty_window in (False, True):
        weight = torch.randn(V, H, generator=torch.Generator().manual_seed(0)).half()
        exact = weight.clone().requires_grad_()
        (fused_ce(hidden, exact, labels).loss_sum / 40000).backward()
        weight.requires_grad_()
        acc = LossAccumulator()
        acc.backward(fused_ce(hidden[:9], weight, torch.full((9,), -100)))
        if empty_window:
            acc.finish([weight])
            weight.grad = None
        acc.backward(fused_ce(hidden, weight, labels))
        acc.finish([weight])
        torch.testing.assert_close(weight.grad, exact.grad, rtol=1e-2, atol=1e-3)


def test_parameters_are_not_one_tensor():
    _, weight, _ = inputs()
    acc = LossAccumulator()
    acc.backward(fused_ce(*inputs()))
    with pytest.raises(TypeError, match=r"iterable of tensors, such as .*, got Tensor"):
        acc.finish(weight)


def without_gradient(rank):
    hidden, weight, labels = inputs()
    acc = LossAccumulator()
    acc.backward(fused_ce(hidden, weight, labels))
    if rank == 0:
        weight.grad = None
    return ranks.error_of(acc.finish, [weight])


def masked_label(rank):
    """A class whose logit is -inf, as a label: the same gradients as with a whole vocabulary."""
    hidden, weight, labels = inputs()
    bias = torch.zeros(V)
    bias[labels[0]] = -math.inf
    whole = fused_ce(hidden, weight, labels, bias=bias).loss_sum
    wanted = torch.autograd.grad(whole, (hidden, weight))
    rows = slice(0, 5) if rank == 0 else slice(5, V)
    shard = weight.detach()[rows].requires_grad_()
    loss = fused_ce(hidden, shard, labels, bias=bias[rows], process_group=dist.group.WORLD).loss_sum
    grads = torch.autograd.grad(loss, (hidden, shard))
    torch.testing.assert_close((loss, *grads), (whole, wanted[0], wanted[1][rows]))


def checks(rank):
    hidden, weight, labels = inputs()
    group = dist.group.WORLD
    weights = {
        "grad": torch.ones(N, requires_grad=True),
        "complex": torch.ones(N, dtype=torch.complex64),
    }
    found = {
        name: ranks.error_of(
            fused_ce, hidden, weight, labels, process_group=group, token_weight=token_weight
        )
        for name, token_weight in weights.items()
    }
    found["backend"] = ranks.error_of(
        fused_ce, hidden, weight, labels, process_group=group, backend="nope"
    )
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(hidden.detach(), mesh, [Shard(0)])
    for function in (fused_cross_entropy, fused_logprobs):
        found[function.__name__] = ranks.error_of(function, sharded, weight, labels)
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return ranks.run({f.__name__: f for f in (masked_label, checks, without_gradient)})


def test_a_rank_without_gradients_does_not_leave_the_others_waiting(two_ranks):
    first, second = ranks.of(two_ranks, "without_gradient")
    assert "no parameter given has a .grad" in first
    assert first == second


def test_a_masked_label_with_a_sharded_vocabulary(two_ranks):
    ranks.of(two_ranks, "masked_label")


def test_a_sharded_vocabulary_checks_what_a_whole_one_does(two_ranks):
    for found in ranks.of(two_ranks, "checks"):
        assert "ValueError: token_weight must not require grad" in found["grad"]
        assert "TypeError: token_weight must be real numbers" in found["complex"]
        assert "ValueError: backend must be None, 'torch' or 'triton'" in found["backend"]
        for name in ("fused_cross_entropy", "fused_logprobs"):
            assert "TypeError: hidden must be a plain tensor here, got a DTensor" in found[name]
