"""Derivatives are exact in float64, scaled without a rounding, and errors where there is none."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from support.bounds import EXACT
from torch import func
from torch.autograd import forward_ad

from fusedce import (
    fused_argmax,
    fused_ce,
    fused_cross_entropy,
    fused_kl,
    fused_kl_tokens,
    fused_logprobs,
    fused_topk,
)
from fusedce.autograd import sums, tokens
from fusedce.testing import Case

NO_TANGENT = "no forward-mode derivative"
LOSSES = {
    "sum": lambda *x, **o: fused_ce(*x, **o).loss_sum,
    "mean": lambda *x, **o: fused_ce(*x, **o).mean(),
    "none": lambda *x, **o: fused_cross_entropy(*x, reduction="none", **o),
    "logprob": lambda *x, **o: fused_logprobs(*x, **o).logprob,
    "entropy": lambda *x, **o: fused_logprobs(*x, **o).entropy,
    "several": lambda h, w, y, **o: fused_logprobs(
        h, w, y[:, None].expand(-1, 2).clamp(min=0), **o
    ).logprob,
    "divergence": lambda h, w, y, **o: fused_kl(h, w, h.detach() / 2, w.detach(), y, **o).mean(),
    "divergences": lambda h, w, y, **o: fused_kl_tokens(h, w, h.detach() / 2, w.detach(), y, **o),
}  # fmt: skip
EACH_LOSS = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def inputs(N=9, H=12, V=37, dtype=torch.float32):
    hidden, weight, labels, _ = Case((N,), H, V, dtype, ignored=0.3).tensors()
    return hidden.nan_to_num().requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize(
    ("dtype", "most"),
    # 3200 roundings of 2**-9 in all directions leave less than a tenth of bf16's error below
    [(torch.bfloat16, 2e-4), (torch.float64, 4 * torch.finfo(torch.float64).eps)],
)
def test_an_upstream_gradient_is_not_rounded(dtype, most):
    """1/1234567 in bf16 is off by 0.1%, the same for every element of what waits in bf16."""
    hidden, weight, labels = inputs(64, 32, 100, dtype)
    loss = fused_cross_entropy(hidden, weight, labels, reduction="sum")
    leaves = (hidden, weight)
    ones = torch.autograd.grad(loss, leaves, retain_graph=True)
    for one, small in zip(ones, torch.autograd.grad(loss / 1234567, leaves), strict=True):
        norm = one.double().norm()
        assert abs((small.double() * 1234567).norm() - norm) <= most * norm


# ---- derivatives that do not exist ----------------------------------------------------------


@EACH_LOSS
@pytest.mark.parametrize("at", [0, 1])
def test_tangents_of_inputs_are_refused(loss, at):
    given = [x.detach() for x in inputs()]
    with forward_ad.dual_level():
        dual = list(given)
        dual[at] = forward_ad.make_dual(given[at], given[at])
        with pytest.raises(RuntimeError, match=NO_TANGENT):
            loss(*dual)
        loss(*given)


@pytest.mark.parametrize("name", ["token_weight", "class_weight", "temperature"])
def test_tangents_of_weights_and_temperatures_are_refused(name):
    *leaves, labels = (x.detach() for x in inputs())
    ones = torch.ones(len(leaves[1]) if name == "class_weight" else len(labels))
    losses = {"token_weight": ("sum", "none", "divergence"), "class_weight": ("none",),
              "temperature": ("logprob",)}[name]  # fmt: skip
    for loss in losses:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(1.5 * ones, ones)
            with pytest.raises(RuntimeError, match=NO_TANGENT):
                LOSSES[loss](*leaves, labels, **{name: dual})
            LOSSES[loss](*leaves, labels, **{name: ones})


@EACH_LOSS
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_second_derivatives_are_refused(loss, backend):
    hidden, weight, labels = inputs()
    value = loss(hidden, weight, labels, backend=backend).sum()
    with pytest.raises(RuntimeError, match="not differentiable"):
        torch.autograd.grad(value, hidden, create_graph=True)


# ---- torch.func, and several gradients of one graph ------------------------------------------

TRANSFORMS = {
    "grad": lambda f, h: func.grad(lambda h: f(h).sum())(h),
    "vmap": lambda f, h: func.vmap(f)(torch.stack([h, h])),
    "vmap of grad": lambda f, h: func.vmap(func.grad(lambda h: f(h).sum()))(torch.stack([h, h])),
    "jacrev": lambda f, h: func.jacrev(f)(h),
    "jacfwd": lambda f, h: func.jacfwd(f)(h),
    "jvp": lambda f, h: func.jvp(f, (h,), (h,)),
    "hessian": lambda f, h: func.hessian(lambda h: f(h).sum())(h),
    "compiled grad": lambda f, h: torch.compile(func.grad(lambda h: f(h).sum()), backend="eager")(
        h
    ),
}
WITHOUT_GRADIENT = {
    "topk": lambda h, w, y, **o: fused_topk(h, w, 3, **o).index,
    "argmax": lambda h, w, y, **o: fused_argmax(h, w, **o),
    "count": lambda h, w, y, **o: fused_ce(h, w, y, **o).n_valid,
}


@pytest.mark.parametrize("name", [*LOSSES, *WITHOUT_GRADIENT])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_of_torch_func_is_refused(name, transform):
    hidden, weight, labels = (x.detach() for x in inputs())
    loss = (LOSSES | WITHOUT_GRADIENT)[name]
    with pytest.raises(RuntimeError, match=r"no transform of torch\.func.*F\.cross_entropy\("):
        TRANSFORMS[transform](lambda h: loss(h, weight, labels), hidden)


BATCHES = {
    "is_grads_batched": lambda value, x, given: torch.autograd.grad(
        value, x, given, is_grads_batched=True
    ),
    "vmap of autograd.grad": lambda value, x, given: func.vmap(
        lambda g: torch.autograd.grad(value, x, g)
    )(given),
}


@EACH_LOSS
@pytest.mark.parametrize("way", BATCHES)
@pytest.mark.parametrize("by_operators", [False, True])
def test_a_batch_of_gradients_is_refused(loss, way, by_operators, monkeypatch):
    if by_operators:  # as modes and tensor subclasses see a loss
        for module in (sums, tokens):
            monkeypatch.setattr(module, "in_eager_mode", lambda problem: False)
    hidden, weight, labels = inputs()
    value = loss(hidden, weight, labels)
    with pytest.raises(RuntimeError, match=r"one gradient at a time.*F\.cross_entropy\("):
        BATCHES[way](value, (hidden, weight), torch.ones(3, *value.shape))


def test_a_jacobian_takes_one_gradient_after_another():
    hidden, weight, labels = inputs(dtype=torch.float64)

    def eager(h):
        return F.cross_entropy(h @ weight.T, labels, reduction="none")

    def ours(h):
        return fused_cross_entropy(h, weight, labels, reduction="none")

    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(ours, hidden), jacobian(eager, hidden))
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        jacobian(ours, hidden, vectorize=True)


@EACH_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_users_hooks_hand_back_is_left_as_it_is(loss, dtype):
    given = inputs(dtype=dtype)
    kept = []

    def pack(x):
        kept.append((x, x.clone()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = (loss(*given) * 3).sum()
    got = torch.autograd.grad(out, given[:2])
    assert kept
    for x, before in kept:  # memory for logits holds anything at ignored positions, NaN as well
        torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got, torch.autograd.grad((loss(*given) * 3).sum(), given[:2]))


@pytest.mark.parametrize("name", ["sum", "none", "entropy"])
def test_threads_differentiate_one_graph(name):
    """``retain_graph`` lets several threads do so, and each gets the whole gradient.

    torch 2.13 shortens ``ctx.needs_input_grad`` of a custom operator while its backward runs, for
    all threads, and a thread that meets a shorter one leaves that one behind.
    """
    *leaves, labels = inputs()
    loss = LOSSES[name](*leaves, labels).sum()
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    found, threads = [], 8
    together = threading.Barrier(threads)

    def work():
        together.wait()
        for _ in range(20):
            found.append(torch.autograd.grad(loss, leaves, retain_graph=True))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = [threading.Thread(target=work) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 20 * threads
    for grads in found:
        torch.testing.assert_close(grads, expected, **EXACT)
