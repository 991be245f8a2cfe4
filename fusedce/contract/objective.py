"""What a token's loss is made of, and its derivatives by the statistics of its logits.

Every option beyond plain cross-entropy is a function of three numbers per token, each of them a
by-product of the log-sum-exp: the negative log-probability of the label ``nll``, the log-sum-exp
``lse`` and the mean logit ``zmean = sum_v c_v z_v / V`` (``c``: class weights, or 1). Torch's
label smoothing, with ``s`` the smoothing, and the z-loss (PaLM, arXiv:2204.02311) are

    loss = w * ((1 - s) * c_label * nll + s * (mean(c) * lse - zmean) + z_loss * lse**2)

Kept in terms of ``nll``, which is exact at p -> 1, rather than of ``lse - z_label``, which is not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Objective(NamedTuple):
    """Options of the loss beyond plain cross-entropy; numbers are checked before they come here."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    token_weight: Tensor | None = None  # (N,) fp32 or fp64
    class_weight: Tensor | None = None  # (V,) fp32 or fp64

    @property
    def plain(self) -> bool:
        return not (self.label_smoothing or self.z_loss) and self.unweighted

    @property
    def unweighted(self) -> bool:
        return self.token_weight is None and self.class_weight is None

    def folded(self, labels: Tensor) -> Objective:
        """The same, with class weights as token weights where they are nothing else.

        A token of weight 0 is then left out as a whole, with whatever its logits hold.
        """
        if self.class_weight is None or self.label_smoothing or self.z_loss:
            return self
        c = self.class_weight.double()[labels.long().clamp(0, len(self.class_weight) - 1)]
        w = c if self.token_weight is None else self.token_weight * c
        return self._replace(token_weight=w, class_weight=None)

    def rows(self, chosen: Tensor | slice) -> Objective:
        """Of the tokens at ``chosen``."""
        if self.token_weight is None:
            return self
        return self._replace(token_weight=self.token_weight[chosen])


PLAIN = Objective()


class Stats(NamedTuple):
    """Per token; 0 at positions that are ignored or have weight 0 (``argmax``: -1)."""

    nll: Tensor  # (N,) -log p(label), fp32 or fp64
    lse: Tensor  # (N,)
    entropy: Tensor  # (N,), or (0,) where not asked for
    zmean: Tensor  # (N,) sum_v c_v z_v / V, or (0,)
    argmax: Tensor  # (N,) int64, or (0,)
    n_valid: Tensor  # () int64


class Upstream(NamedTuple):
    """What turns a token's logits into their gradient, (N,) each.

    ``g = p * (alpha - beta * log p) + gamma * c``, but ``at_label`` at the label.
    """

    alpha: Tensor
    beta: Tensor | None
    gamma: Tensor | None
    at_label: Tensor
    used: Tensor  # bool: any of it is not 0


def token_losses(
    objective: Objective,
    y: Tensor,  # (n,) labels, in range
    nll: Tensor,  # (n,)
    lse: Tensor,  # (n,)
    zmean: Tensor | None,  # (n,), with label smoothing only
) -> Tensor:
    """``(n,)`` losses, differentiable in nll, lse and zmean."""
    smoothing, z_loss, token_weight, class_weight = objective
    loss = nll
    if class_weight is not None:
        c = class_weight.to(loss)[y]
        loss = loss.masked_fill(c == 0, 0) * c  # not inf * 0
    if smoothing and zmean is not None:
        loss = (1 - smoothing) * loss + smoothing * (_mean_class(objective) * lse - zmean)
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss if token_weight is None else loss * token_weight.to(loss)


def slopes(
    objective: Objective,
    y: Tensor,  # (n,) labels, in range
    lse: Tensor,  # (n,)
) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """Derivatives of :func:`token_losses` by nll, lse and zmean: ``(n,)``, or one number for all.

    Their sum over a row of logits, ``u_nll * (p - onehot) + u_lse * p + u_zmean * c / V``, is the
    gradient of the logits.
    """
    smoothing, z_loss, token_weight, class_weight = objective
    u_nll: Tensor | float = 1 - smoothing
    u_lse: Tensor | float = smoothing * _mean_class(objective) if smoothing else 0.0
    u_zmean: Tensor | float = -smoothing
    if class_weight is not None:
        u_nll = u_nll * class_weight.to(lse)[y]
    if z_loss:
        u_lse = u_lse + 2 * z_loss * lse
    if token_weight is not None:
        w = token_weight.to(lse)
        return w * u_nll, w * u_lse, w * u_zmean
    return u_nll, u_lse, u_zmean


def _mean_class(objective: Objective) -> Tensor | float:
    c = objective.class_weight
    return 1.0 if c is None else c.mean(dtype=torch.float64)
