"""Bounds of errors, derived from what the same computation errs in the same dtype and run."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

EXACT = {"rtol": 0, "atol": 0}
STATISTIC = 1e-6
"""Relative error of losses and statistics against float64, which the documentation promises."""
SAME_SUMS = 16 * torch.finfo(torch.float32).eps
"""Relative difference of two float32 results of the same terms, added or grouped differently."""

IN_FLOAT64 = dict.fromkeys(("rtol", "atol"), 512 * torch.finfo(torch.float64).eps)
"""Difference of two float64 computations of numbers near 1: 512 roundings of their terms."""

SAME_MODEL = 128 * torch.finfo(torch.float32).eps
"""Relative difference of losses and gradients of one float32 model, trained for a few steps.

The model has some 20 products, each of which either run may round its own way, and an optimizer's
step divides by small gradients; a token that is counted otherwise changes a percent.
"""


def same_model(got: object, expected: object) -> None:
    """Assert that tensors of one model, nested alike, differ by :data:`SAME_MODEL` at most.

    Each in the Euclidean norm; the rounding of the largest is a floor for small ones.
    """
    pairs = list(zip(tree_leaves(got), tree_leaves(expected), strict=True))
    pairs = [(x.detach().double(), y.detach().double()) for x, y in pairs]
    largest = max((float(y.norm()) for _, y in pairs), default=0.0)
    for at, (x, y) in enumerate(pairs):
        assert x.shape == y.shape, f"{at}: {x.shape}, {y.shape}"
        error = float((x - y).norm())
        bound = SAME_MODEL * float(y.norm()) + SAME_SUMS * largest
        assert error <= bound, f"tensor {at}: {error:.2e} exceeds {bound:.2e}"


def errs_like(
    got: Tensor | Sequence[Tensor],
    eager: Tensor | Sequence[Tensor],
    exact: Tensor | Sequence[Tensor],
    *,
    times: float = 2.0,
    roundings: float = 8.0,
) -> None:
    """Assert that each tensor errs at most ``times`` as much as eager code, both from ``exact``.

    Errors are Euclidean norms. ``eager`` has the dtype of ``got`` and ``exact`` is in float64; a
    floor of ``roundings`` of the dtype, of the size of ``exact``, is for where eager was lucky. A
    kernel makes eight: the logit, its product with log2(e), the difference from a reference, the
    power, the sum, its logarithm, back to nats, and the difference from the label's logit. All of
    them are float32's, also where the result has two bytes: it is rounded once, by half of eps.
    """
    if isinstance(got, Tensor):
        got, eager, exact = [got], [eager], [exact]
    for at, (x, y, e) in enumerate(zip(got, eager, exact, strict=True)):
        assert x.shape == y.shape == e.shape, f"{at}: {x.shape}, {y.shape}, {e.shape}"
        x, y, e = (t.detach().double() for t in (x, y, e))
        error, of_eager = float((x - e).norm()), float((y - e).norm())
        eps = torch.finfo(got[at].dtype).eps
        floor = roundings * eps if got[at].itemsize > 2 else eps / 2
        bound = times * of_eager + floor * float(e.norm())
        assert error <= bound, (
            f"tensor {at}: error {error:.2e} exceeds {bound:.2e} (eager makes {of_eager:.2e}, "
            f"norm {float(e.norm()):.2e})"
        )


def in_float64(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Floating tensors as new float64 leaves that require grad as these do; others as they are."""
    return tuple(
        x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in tensors
    )  # fmt: skip


def logit_rounding(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """The error of a float32 logit, of which H products are summed in any order: eps |h| |w|.

    That is three standard deviations where the terms are independent and summed one by one.
    """
    h, w = (x.detach().double().flatten(0, -2).norm(dim=1).max() for x in (hidden, weight))
    size = h * w + (0 if bias is None else bias.detach().double().abs().max())
    return float(torch.finfo(torch.float32).eps * size)
