"""The loss of a token, and its derivatives by the statistics of its logits.

Every option beyond plain cross-entropy is a function of three numbers per token, each of them a
by-product of the log-sum-exp: the negative log-probability of the label ``nll``, the log-sum-exp
``lse`` and the mean logit ``zmean = sum_v c_v z_v / V`` (``c``: class weights, or 1). Torch's
label smoothing, with ``s`` the smoothing, and the z-loss (PaLM, arXiv:2204.02311) are

    loss = w * ((1 - s) * c_label * nll + s * (mean(c) * lse - zmean) + z_loss * lse**2)

It is written in terms of ``nll``, which is exact at p -> 1, and not of ``lse - z_label``, which
loses all digits there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Problem


class Stats(NamedTuple):
    """Statistics of each token; 0 at positions that are ignored or have weight 0."""

    nll: Tensor  # (N,) -log p(label), fp32 or fp64
    lse: Tensor  # (N,) fp64 from backends, or (0,) where it is not wanted, like the two below
    entropy: Tensor
    zmean: Tensor  # sum_v c_v z_v / V
    n_valid: Tensor  # () int64
    argmax: Tensor | None = None  # (N,) int64, where it is wanted; -1 at those positions
    top: Tensor | None = None  # (N,) the largest logit, where argmax or a backward pass needs it


class LogitGrad(NamedTuple):
    """Factors that turn a token's probabilities into the gradient of its logits, (N,) each.

    ``g = p * (alpha - beta * log p) + gamma * c``, except at the label, where it is ``at_label``
    (if the label is a row of weight).
    """

    alpha: Tensor
    beta: Tensor | None
    gamma: Tensor | None
    at_label: Tensor
    used: Tensor  # bool: tokens with a factor other than 0
    classes: Tensor | None = None  # (N, K) rows of weight, -1 for none
    at_classes: Tensor | None = None  # (N, K) fp32 or fp64: added to the gradient of raw products
    top: Tensor | None = None  # (N,) the largest logit, if backward's may differ in the last bits


class Slopes(NamedTuple):
    """Derivatives of a token's loss, ``(n,)`` each or one number for all.

    The gradient of a row of logits is ``nll * (p - onehot) + lse * p - zmean * c / V``.
    """

    nll: Tensor | float
    lse: Tensor | float
    zmean: Tensor | float = 0.0  # minus the derivative


def fold_class_weight(problem: Problem) -> Problem:
    """Turn class weights into token weights if the loss is the label's ``nll`` alone.

    Tokens of weight 0 are then left out completely, even if their logits are not finite.
    """
    c = problem.class_weight
    if c is None or not problem.is_nll_only():
        return problem
    w = _of_labels(c, problem)
    if problem.token_weight is not None:
        w = problem.token_weight * w
    return problem.replace(token_weight=w, class_weight=None)


def token_losses(
    problem: Problem,
    y: Tensor,  # (n,) labels, in range
    nll: Tensor,  # (n,)
    lse: Tensor,  # (n,), read where the loss is not of nll alone
    zmean: Tensor | None = None,  # (n,), with label smoothing only
) -> Tensor:
    """``(n,)`` losses, differentiable in nll, lse and zmean."""
    loss = nll
    smoothing = problem.label_smoothing
    weights = problem.class_weight
    if weights is not None:
        c = weights.to(loss)[y]
        loss = loss.masked_fill(c == 0, 0) * c  # not inf * 0
    if smoothing and zmean is not None:
        mean: Tensor | float = 1.0 if weights is None else weights.mean(dtype=torch.float64)
        loss = (1 - smoothing) * loss + smoothing * (mean * lse - zmean)
    if problem.z_loss:
        loss = loss + problem.z_loss * lse.square()
    return loss if problem.token_weight is None else loss * problem.token_weight.to(loss)


def slopes(
    problem: Problem,
    y: Tensor,  # (n,) labels, in range
    lse: Tensor,  # (n,)
) -> Slopes:
    """The :class:`Slopes` of :func:`token_losses`: of the form ``a + b * lse``, as kernels ask."""
    c, w, smoothing = problem.class_weight, problem.token_weight, problem.label_smoothing
    by_nll = 1.0 if c is None else c.to(lse)[y]
    by_lse = 2 * problem.z_loss * lse if problem.z_loss else 0.0
    if smoothing:
        mean: Tensor | float = 1.0 if c is None else c.mean(dtype=torch.float64)
        by_nll, by_lse = (1 - smoothing) * by_nll, by_lse + smoothing * mean
    if w is None:
        return Slopes(by_nll, by_lse, smoothing)
    w = w.to(lse)
    return Slopes(w * by_nll, w * by_lse, w * smoothing)


def weights_and_count(problem: Problem) -> tuple[Tensor, Tensor]:
    """Sum of the valid tokens' class weights (1 without any), and their number: ``()`` float64."""
    valid, c = problem.valid(), problem.class_weight
    count = valid.sum().double()
    if c is None:
        return count, count
    return torch.where(valid, _of_labels(c, problem), 0.0).sum(), count


def _of_labels(c: Tensor, problem: Problem) -> Tensor:
    """``(N,)`` float64 weight of each label's class; of any class where the label is ignored."""
    return c.double()[problem.labels.long().clamp(0, c.shape[0] - 1)]
