"""A student and a teacher, for divergences."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedce import reference_kl
from fusedce.contract.problem import ACC_DTYPE
from fusedce.testing import NAMES, Loss, assert_within
from support.bounds import in_float64

EVERYTHING = {
    "temperature": 1.7, "softcap": 5.0, "teacher_softcap": 8.0, "logit_scale": 0.7,
    "teacher_logit_scale": -1.3, "ce_weight": 0.4, "beta": 0.3,
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A student and a teacher, described by numbers so that a failure can be read and replayed.

    Attributes:
        N, H, teacher_H, V: positions, hidden sizes, vocabulary size.
        dtype, teacher_dtype: of each head; ``None``: the student's.
        ignored: share of ignored labels, 0 to 1; both hidden states hold NaN there.
        spread: standard deviation of the logits.
        bias, token_weight: give these to the loss; weights have both signs, and some are 0.
        options: further keyword arguments of the loss.
        seed: of the random numbers.
    """

    N: int = 9
    H: int = 12
    teacher_H: int = 20
    V: int = 131
    dtype: torch.dtype = torch.float32
    teacher_dtype: torch.dtype | None = None
    ignored: float = 0.0
    spread: float = 1.0
    bias: bool = False
    token_weight: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def tensors(
        self, device: torch.device | str = "cpu"
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """``(hidden, weight, teacher_hidden, teacher_weight, labels)`` and keyword arguments."""
        rng = torch.Generator().manual_seed(self.seed)
        of_teacher = self.teacher_dtype or self.dtype

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng)

        hidden = draw(self.N, self.H) * self.spread / self.H**0.5
        there = draw(self.N, self.teacher_H) * self.spread / self.teacher_H**0.5
        labels = torch.randint(self.V, (self.N,), generator=rng)
        ignored = torch.rand(self.N, generator=rng) < self.ignored
        labels[ignored] = -100
        hidden[ignored] = there[ignored] = math.nan
        options = dict(self.options)
        if self.bias:
            options["bias"] = draw(self.V).to(self.dtype)
            options["teacher_bias"] = draw(self.V).to(of_teacher)
        if self.token_weight:
            options["token_weight"] = draw(self.N) * (torch.rand(self.N, generator=rng) < 0.7)
        tensors = (
            hidden.to(self.dtype),
            draw(self.V, self.H).to(self.dtype),
            there.to(of_teacher),
            draw(self.V, self.teacher_H).to(of_teacher),
            labels,
        )
        on_device = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in options.items()}
        return tuple(x.to(device) for x in tensors), on_device


def check_pair(fn: Loss, pair: Pair, device: torch.device | str = "cpu") -> None:
    """Compare one pair. Gradients may have twice torch's error in the same dtype, plus roundings.

    The loss may have the rounding errors of its logits, which are sums of H products.
    """
    tensors, options = pair.tensors(device)
    loss, n_valid, grads = gradients_of(fn, tensors, options)
    wide = in_float64(*tensors)
    wide_options = dict(zip(options, in_float64(*options.values()), strict=True))
    exact, count, exact_grads = gradients_of(reference_kl, wide, wide_options)
    eager = partial(reference_kl, dtype=torch.float32)
    _, _, eager_grads = gradients_of(eager, tensors, options)
    assert int(n_valid) == int(count), f"n_valid is {int(n_valid)}, reference {int(count)}: {pair}"
    acc = ACC_DTYPE[pair.dtype]
    assert loss.dtype == acc, f"loss_sum must be {acc}, got {loss.dtype}"
    eps, out = torch.finfo(acc).eps, torch.finfo(pair.dtype).eps
    size = 1 + 30 * pair.spread
    # weights of both signs may cancel in the sum, so that the bound takes their absolute values
    weights = max([1.0, *options.get("token_weight", torch.ones(1)).abs().tolist()])
    floor = 8 * eps * size * (float(exact.abs()) + pair.N * weights)
    assert_within("loss_sum", loss, exact, exact, floor, pair)
    for name, ours, truth, theirs in zip(NAMES, grads, exact_grads, eager_grads, strict=False):
        assert ours.dtype == pair.dtype, f"{name}: gradient of {ours.dtype} for {pair.dtype}"
        largest = float(truth.abs().max()) if truth.numel() else 0.0
        floor = 2 * out * largest + 4 * eps * size * weights
        assert_within(name, ours, theirs, truth, floor, pair)


def gradients_of(
    fn: Loss, tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``loss_sum``, ``n_valid``, and gradients of the mean by hidden, weight and bias."""
    hidden, weight, *rest = tensors
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    if "bias" in options:
        leaves.append(options["bias"].detach().requires_grad_())
        options = options | {"bias": leaves[-1]}
    loss_sum, n_valid = fn(*leaves[:2], *rest, **options)
    grads = torch.autograd.grad(loss_sum / n_valid.clamp(min=1), leaves)
    return loss_sum.detach(), n_valid, list(grads)
