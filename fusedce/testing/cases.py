"""Inputs of a loss, drawn at random: small and awkward."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from hypothesis import strategies as st
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "fusedce.testing needs hypothesis: pip install 'fusedce[testing]'", name="hypothesis"
    ) from None

LogitsKind = Literal["flat", "peaked", "huge"]
NAMES = ("hidden", "weight", "bias")
NUMBERS: dict[str, tuple[float, ...]] = {
    "softcap": (1.0, 5.0, 30.0),
    "logit_scale": (0.25, -1.5, 3.0),
    "label_smoothing": (0.1, 1.0),
    "z_loss": (1e-4, 0.3),
}
"""Values of numeric options; in half of the cases an option is left out."""
OPTIONS = ("bias", "ignore_index", "token_weight", *NUMBERS)
"""Options of :func:`fusedce.fused_ce` that :func:`cases` draws subsets of."""


@dataclass(frozen=True)
class Case:
    """Inputs of a loss, described by numbers so that a failure can be read and replayed.

    Attributes:
        leading: leading shape of ``hidden`` and ``labels``; H, V: hidden and vocabulary size.
        dtype: of hidden, weight and bias; label_dtype: int64 or int32.
        logits: "flat" (about normal), "peaked" (the label's probability near 0.999) or "huge"
            (up to about 1e4 in size).
        ignored: share of ignored labels, 0 to 1; the hidden rows of ignored labels hold NaN.
        contiguous: False takes every tensor as a strided view of a larger one.
        requires_grad: which of hidden, weight and bias require grad.
        upstream: gradient that arrives at ``loss_sum``.
        options: keyword arguments of the loss besides bias and the weights: ``ignore_index``, and
            those of :data:`NUMBERS`.
        token_weight, class_weight: draw these weights, between 0 (a quarter of the tokens and a few
            classes have it) and about 3, and give them to the loss.
        seed: of the random numbers.
    """

    leading: tuple[int, ...] = (5,)
    H: int = 16
    V: int = 33
    dtype: torch.dtype = torch.float32
    label_dtype: torch.dtype = torch.int64
    logits: LogitsKind = "flat"
    ignored: float = 0.0
    contiguous: bool = True
    with_bias: bool = False
    requires_grad: tuple[str, ...] = NAMES
    upstream: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    token_weight: bool = False
    class_weight: bool = False
    seed: int = 0

    def weights(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The case's ``token_weight (...)`` and ``class_weight (V,)``, by name."""
        rng = torch.Generator().manual_seed(self.seed + 1)
        w = 3 * torch.rand(self.leading, generator=rng)
        w[torch.rand(self.leading, generator=rng) < 0.25] = 0
        c = 3 * torch.rand(self.V, generator=rng)
        c[torch.rand(self.V, generator=rng) < 0.1] = 0
        found = {"token_weight": w} if self.token_weight else {}
        return {
            k: x.to(device)
            for k, x in (found | ({"class_weight": c} if self.class_weight else {})).items()
        }

    def tensors(
        self, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """``hidden, weight, labels, bias`` on ``device``, without requires_grad."""
        rng = torch.Generator().manual_seed(self.seed)
        N = int(torch.Size(self.leading).numel())
        labels = torch.randint(0, self.V, (N,), generator=rng)
        weight = torch.randn(self.V, self.H, generator=rng)
        hidden = torch.randn(N, self.H, generator=rng) / self.H**0.5
        if self.logits == "peaked":
            # The label's logit exceeds the others, which spread around 0 by gap / sqrt(H), so that
            # the sum of their exponentials is about a thousandth of its own.
            gap = math.log(1000.0 * self.V)
            gap *= 1 + min(gap / (2 * self.H), 0.5)
            unit = F.normalize(weight, dim=-1)
            weight, hidden = unit, 0.1 * hidden + gap * unit[labels]
        elif self.logits == "huge":
            hidden = hidden * 10.0 ** torch.randint(1, 5, (N, 1), generator=rng)
        bias = torch.randn(self.V, generator=rng) if self.with_bias else None

        ignore_index = self.options.get("ignore_index", -100)
        ignored = torch.rand(N, generator=rng) < self.ignored
        if ignore_index >= 0:  # a real class: its tokens are ignored as well
            ignored |= labels == ignore_index
        labels[ignored] = ignore_index
        hidden[ignored] = float("nan")

        def place(x: Tensor) -> Tensor:
            x = x.to(self.dtype) if x.is_floating_point() else x.to(self.label_dtype)
            x = x.to(device)
            if self.contiguous:
                return x.contiguous()
            wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
            view = wide[..., 1::2]
            view.copy_(x)
            return view

        return (
            place(hidden.reshape(*self.leading, self.H)),
            place(weight),
            place(labels.reshape(self.leading)),
            None if bias is None else place(bias),
        )


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    dtypes: Collection[torch.dtype] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    ),
    max_tokens: int = 40,
    max_vocabulary: int = 300,
    max_hidden: int = 70,
    options: Collection[str] = OPTIONS,
) -> Case:
    """Strategy of :class:`Case`: shapes, dtypes, strides, ignore patterns, logits and options.

    Args:
        dtypes: to draw from; max_tokens, max_vocabulary, max_hidden: largest N, V, H.
        options: options that the loss under test accepts: some of :data:`OPTIONS`, and
            "class_weight".
    """
    leading = draw(
        st.one_of(
            st.tuples(st.integers(0, max_tokens)),
            st.tuples(st.integers(1, 4), st.integers(0, max_tokens // 4)),
            st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, max_tokens // 6)),
            st.just(()),
        ),
        label="leading",
    )
    V = draw(st.one_of(st.sampled_from([1, 2, 127, 257]), st.integers(1, max_vocabulary)))
    V = min(V, max_vocabulary)
    classes = {"ignore_index": (-1, 0, V - 1, V + 5)}
    chosen: dict[str, Any] = {}
    for name, values in (NUMBERS | classes).items():
        if name in options:
            value = draw(st.sampled_from([None, None, *values]), label=name)
            chosen |= {} if value is None else {name: value}
    with_bias = "bias" in options and draw(st.booleans(), label="bias")
    inputs = NAMES if with_bias else NAMES[:2]
    return Case(
        leading=leading,
        H=draw(st.integers(1, max_hidden), label="H"),
        V=V,
        dtype=draw(st.sampled_from(list(dtypes))),
        label_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        logits=draw(st.sampled_from(["flat", "flat", "peaked", "huge"])),
        ignored=draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        contiguous=draw(st.booleans()) or not leading,
        with_bias=with_bias,
        requires_grad=tuple(x for x in inputs if draw(st.booleans(), label=f"{x} requires grad")),
        upstream=draw(st.sampled_from([1.0, 0.37, -2.0, 1 / 1234567])),
        options=chosen,
        token_weight="token_weight" in options and draw(st.booleans(), label="token_weight"),
        class_weight="class_weight" in options and draw(st.booleans(), label="class_weight"),
        seed=draw(st.integers(0, 2**16)),
    )
