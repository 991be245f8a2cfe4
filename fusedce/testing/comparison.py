"""Comparison of a loss with the reference, and the bounds of its error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import torch
from torch import Tensor

from fusedce.contract.rounding import acc_dtype
from fusedce.loss.reference import reference_ce
from fusedce.testing.cases import NAMES, Case, cases

Loss = Callable[..., tuple[Tensor, Tensor]]


def assert_matches_reference(
    fn: Loss,
    case: Case | None = None,
    *,
    max_examples: int = 100,
    device: torch.device | str = "cpu",
    **strategy: Any,
) -> None:
    """Assert that ``fn(hidden, weight, labels, **options)`` agrees with :func:`reference_ce`.

    Args:
        fn: returns ``(loss_sum, n_valid)``; takes ``bias`` and the options of the case as keywords.
        case: the one case to check; ``None`` lets hypothesis draw ``max_examples`` of them.
        device: where the inputs live.
        **strategy: arguments of :func:`cases`, e.g. ``options=()`` for a loss without options.

    Raises:
        AssertionError: naming the quantity, its error and the bound.
    """
    if case is not None:
        check(fn, case, device)
        return

    @hypothesis.settings(max_examples=max_examples, deadline=None)
    @hypothesis.given(case=cases(**strategy))
    def run(case: Case) -> None:
        check(fn, case, device)

    run()


def check(fn: Loss, case: Case, device: torch.device | str = "cpu") -> None:
    """Compare loss, count and gradients of one case: see :func:`assert_matches_reference`."""
    hidden, weight, labels, bias = case.tensors(device)
    ours = _run(fn, case, hidden, weight, labels, bias)
    eager = functools.partial(reference_ce, dtype=case.dtype)
    torchs = _run(eager, case, hidden, weight, labels, bias)
    exact = _run(
        reference_ce,
        case,
        hidden.double(),
        weight.double(),
        labels,
        None if bias is None else bias.double(),
    )
    # ---- results that must be exact
    assert ours["n_valid"].dtype == torch.int64, f"n_valid must be int64: {ours['n_valid'].dtype}"
    assert ours["n_valid"].dim() == 0, "n_valid must be 0-d"
    assert int(ours["n_valid"]) == int(exact["n_valid"]), (
        f"n_valid is {int(ours['n_valid'])}, reference {int(exact['n_valid'])} in {case}"
    )
    wide = acc_dtype(case.dtype)
    assert ours["loss_sum"].dtype == wide, f"loss_sum must be {wide}: {ours['loss_sum'].dtype}"
    assert ours["loss_sum"].dim() == 0, "loss_sum must be 0-d"

    # ---- bounds: logits are sums of H products, whose absolute values bound the rounding errors;
    # smoothing takes the mean of logits, z-loss multiplies by them, weights multiply the loss
    valid = labels.reshape(-1) != case.options.get("ignore_index", -100)
    h, w = hidden.reshape(-1, case.H)[valid].double().abs(), weight.double().abs()
    size = h @ w.T + (0 if bias is None else bias.double().abs())
    condition = 1 + abs(case.options.get("logit_scale", 1.0)) * (size.max() if size.numel() else 0)
    eps_acc = torch.finfo(wide).eps
    eps_out = torch.finfo(case.dtype).eps
    weights = case.weights(device)
    amplitude = 1.0
    for x in weights.values():
        amplitude *= max(float(x.max()) if x.numel() else 0.0, 1.0)
    z_loss = case.options.get("z_loss", 0.0)
    amplitude *= 1 + 2 * z_loss * float(condition)
    floors = {"loss_sum": 4 * eps_acc * float(condition) * amplitude * max(int(valid.sum()), 1)}
    for name in case.requires_grad:
        largest = float(exact[name].abs().max()) if exact[name].numel() else 0.0
        # Coefficients carry an error of a rounding of the logits, relative to p and to the target,
        # which sum to at most 2 over a row.
        spread = {
            "hidden": 4 * w.max(),
            "weight": h.sum(0).max() if len(h) else 0.0,
            "bias": float(valid.sum()),
        }[name]
        coefficient = (
            amplitude
            * eps_acc
            * float(condition)
            * abs(case.upstream * case.options.get("logit_scale", 1.0))
        )
        tiny = torch.finfo(case.dtype).smallest_normal * eps_out if eps_out > 1e-5 else 0.0
        if name == "weight":
            # The gradient of the mean logit is added to one that is rounded already.
            rounded = amplitude * abs(case.upstream * case.options.get("logit_scale", 1.0))
            largest += rounded * case.options.get("label_smoothing", 0.0) / case.V * float(spread)
        floors[name] = 2 * eps_out * largest + 4 * coefficient * float(spread) + 2 * tiny

    for name, floor in floors.items():
        x, t, e = (run[name].double() for run in (ours, torchs, exact))
        assert x.shape == e.shape, f"{name}: shape {tuple(x.shape)} for {tuple(e.shape)}"
        if not torch.isfinite(e).all():
            torch.testing.assert_close(x.isfinite(), e.isfinite())
            continue
        if not e.numel():
            continue
        error = float((x - e).abs().nan_to_num(nan=float("inf")).max())
        torch_error = float((t - e).abs().nan_to_num(nan=float("inf")).max())
        if not torch_error < float("inf"):  # eager overflows in fp16 where we do not
            torch_error = 0.0
        bound = 2 * torch_error + floor
        assert error <= bound, (
            f"{name}: error {error:.3e} exceeds {bound:.3e} (torch makes {torch_error:.3e}, "
            f"largest {float(e.abs().max()):.3e}) in {case}"
        )
    for name in set(NAMES) - set(case.requires_grad):
        assert ours[name] is None, f"{name} does not require grad but received one in {case}"


def _run(
    fn: Loss,
    case: Case,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
) -> dict[str, Any]:
    inputs = {"hidden": hidden, "weight": weight, "bias": bias}
    # detach keeps the strides, so that a strided input reaches the loss as it is
    leaves = {
        name: x if x is None else x.detach().requires_grad_(name in case.requires_grad)
        for name, x in inputs.items()
    }
    options = case.options | case.weights(hidden.device)
    if leaves["bias"] is not None:
        options["bias"] = leaves["bias"]
    loss_sum, n_valid = fn(leaves["hidden"], leaves["weight"], labels, **options)
    if case.requires_grad:
        (loss_sum * case.upstream).backward()
    grads = {name: None if x is None else x.grad for name, x in leaves.items()}
    return {"loss_sum": loss_sum.detach(), "n_valid": n_valid, **grads}
