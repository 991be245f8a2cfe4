"""Property tests of a loss against the reference: ours, your own head, or a fork.

    from fusedce.testing import assert_matches_reference

    def test_my_loss():
        assert_matches_reference(my_loss)      # my_loss(hidden, weight, labels, **options)

:func:`cases` draws small, awkward inputs with hypothesis: odd shapes, every dtype, strides,
ignored and peaked rows, huge logits, options. :func:`check` compares loss, count and gradients of
one case with :func:`fusedce.reference_ce`, and allows twice the error that torch itself makes in
the same dtype, plus a floor of a few roundings. Needs hypothesis: ``pip install
'fusedce[testing]'``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract.checks import DTYPES
from .contract.problem import ACC_DTYPE
from .loss.reference import reference_ce

try:
    import hypothesis
    from hypothesis import strategies as st
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "fusedce.testing needs hypothesis: pip install 'fusedce[testing]'", name="hypothesis"
    ) from None

__all__ = ["OPTIONS", "Case", "assert_matches_reference", "cases", "check"]

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
        token_weight, class_weight: whether the loss gets such weights: from 0 (a quarter of the
            tokens, a tenth of the classes) to about 3.
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
        found = {}
        for name, shape, zeros, given in (
            ("token_weight", self.leading, 0.25, self.token_weight),
            ("class_weight", (self.V,), 0.1, self.class_weight),
        ):
            w = 3 * torch.rand(shape, generator=rng)
            w[torch.rand(shape, generator=rng) < zeros] = 0
            if given:
                found[name] = w.to(device)
        return found

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
    dtypes: Collection[torch.dtype] = DTYPES,
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
    chosen = draw_numbers(draw, NUMBERS | classes, options)
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


# ---- comparison with the reference -----------------------------------------------------------

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
    @hypothesis.given(cases(**strategy))
    def run(drawn: Case) -> None:
        check(fn, drawn, device)

    run()


def draw_numbers(
    draw: st.DrawFn, numbers: dict[str, tuple[Any, ...]], options: Collection[str]
) -> dict[str, Any]:
    """Values of those numeric options that are among ``options``; half of them are left out."""
    drawn = {
        name: draw(st.sampled_from([None, None, *values]), label=name)
        for name, values in numbers.items()
        if name in options
    }
    return {name: value for name, value in drawn.items() if value is not None}


def check(fn: Loss, case: Case, device: torch.device | str = "cpu") -> None:
    """Compare loss, count and gradients of one case: see :func:`assert_matches_reference`."""
    hidden, weight, labels, bias = case.tensors(device)
    ours = _run(fn, case, hidden, weight, labels, bias)
    eager = functools.partial(reference_ce, dtype=case.dtype)
    torchs = _run(eager, case, hidden, weight, labels, bias)
    wide_bias = None if bias is None else bias.double()
    exact = _run(reference_ce, case, hidden.double(), weight.double(), labels, wide_bias)
    # ---- results that must be exact
    n, truth, wide = ours["n_valid"], exact["n_valid"], ACC_DTYPE[case.dtype]
    assert (n.dtype, n.dim()) == (torch.int64, 0), f"n_valid must be () int64, got {n!r}"
    assert int(n) == int(truth), f"n_valid is {int(n)}, reference {int(truth)} in {case}"
    loss = ours["loss_sum"]
    assert (loss.dtype, loss.dim()) == (wide, 0), f"loss_sum must be () {wide}, got {loss!r}"

    # ---- bounds: logits are sums of H products, whose absolute values bound the rounding errors;
    # smoothing takes the mean of logits, z-loss multiplies by them, weights multiply the loss
    valid = labels.reshape(-1) != case.options.get("ignore_index", -100)
    h, w = hidden.reshape(-1, case.H)[valid].double().abs(), weight.double().abs()
    size = h @ w.T + (0 if bias is None else bias.double().abs())
    condition = 1 + abs(case.options.get("logit_scale", 1.0)) * (size.max() if size.numel() else 0)
    eps_acc = torch.finfo(wide).eps
    eps_out = torch.finfo(case.dtype).eps
    weights = case.weights(device)
    amplitude = math.prod(max([1.0, *x.flatten().tolist()]) for x in weights.values())
    z_loss = case.options.get("z_loss", 0.0)
    amplitude *= 1 + 2 * z_loss * float(condition)
    # a log-sum-exp is rounded at its own size, up to the largest logit and log V
    of_token = 4 * eps_acc * (float(condition) + math.log(case.V)) * amplitude
    floors = {"loss_sum": of_token * max(int(valid.sum()), 1)}
    slope = amplitude * abs(case.upstream * case.options.get("logit_scale", 1.0))
    for name in case.requires_grad:
        largest = float(exact[name].abs().max()) if exact[name].numel() else 0.0
        # Coefficients carry an error of a rounding of the logits, relative to p and to the target,
        # which sum to at most 2 over a row.
        spread = {
            "hidden": 4 * w.max(),
            "weight": h.sum(0).max() if len(h) else 0.0,
            "bias": float(valid.sum()),
        }[name]
        coefficient = slope * eps_acc * float(condition)
        tiny = torch.finfo(case.dtype).smallest_normal * eps_out if eps_out > 1e-5 else 0.0
        if name == "weight":
            # The gradient of the mean logit is added to one that is rounded already.
            largest += slope * case.options.get("label_smoothing", 0.0) / case.V * float(spread)
        floors[name] = 2 * eps_out * largest + 4 * coefficient * float(spread) + 2 * tiny

    for name, floor in floors.items():
        assert_within(name, ours[name], torchs[name], exact[name], floor, case)
    for name in set(NAMES) - set(case.requires_grad):
        assert ours[name] is None, f"{name} does not require grad but received one in {case}"


def assert_within(
    name: str, ours: Tensor, torchs: Tensor, exact: Tensor, floor: float, case: Any
) -> None:
    """Assert that ``ours`` errs by at most ``floor`` more than twice what torch does."""
    ours, torchs, exact = (x.double() for x in (ours, torchs, exact))
    assert ours.shape == exact.shape, f"{name}: shape {tuple(ours.shape)} for {tuple(exact.shape)}"
    if not torch.isfinite(exact).all():
        torch.testing.assert_close(ours.isfinite(), exact.isfinite())
    elif exact.numel():
        error, torch_error = (
            float((x - exact).abs().nan_to_num(nan=float("inf")).max()) for x in (ours, torchs)
        )
        if not torch_error < float("inf"):  # eager overflows in fp16 where we do not
            torch_error = 0.0
        bound = 2 * torch_error + floor
        assert error <= bound, (
            f"{name}: error {error:.3e} exceeds {bound:.3e} (torch makes {torch_error:.3e}, "
            f"largest {float(exact.abs().max()):.3e}) in {case}"
        )


def _run(
    fn: Loss, case: Case, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
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
