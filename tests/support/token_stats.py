"""Statistics of tokens on any backend and device, beside those of eager code and of float64."""

import torch

from fusedce import fused_argmax, fused_logprobs
from fusedce.testing import assert_within
from support.oracle import finished_logits, token_stats


def several_classes(labels, V, K, ignore_index, rng):
    """``(..., K)`` classes: a fifth of them ignored, all of an ignored token, and one twice."""
    classes = torch.randint(V, (*labels.shape, K), generator=rng)
    classes[torch.rand(classes.shape, generator=rng) < 0.2] = ignore_index
    classes[labels == ignore_index] = ignore_index
    classes[..., -1] = classes[..., 0]
    return classes.to(labels.dtype)


DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")


def compare(
    case, backend, temperature=1.0, chunk_tokens=None, K=None, device="cpu", through=DIFFERENTIABLE
):
    """Values and gradients under random upstream ones: at most twice the eager error in bf16.

    ``temperature``: a number, or "each" for one a token. The loss is one of the outputs ``through``
    alone.
    """
    hidden, weight, labels, bias = case.tensors(device)
    hidden = hidden.nan_to_num()  # eager looks at ignored rows too
    ignore_index = case.options.get("ignore_index", -100)
    rng = torch.Generator().manual_seed(1)
    valid = labels != ignore_index
    if K is not None:
        labels = several_classes(labels.cpu(), case.V, K, ignore_index, rng).to(device)
        valid = (labels != ignore_index).any(-1)
    if temperature == "each":  # that of an ignored token may be anything
        drawn = 0.3 + 2 * torch.rand(valid.shape, generator=rng).to(device)
        temperature = torch.where(valid, drawn, 0)
    coldest = float(torch.as_tensor(temperature).clamp(min=0.3).min()) if valid.numel() else 1.0
    options = case.options | {"temperature": temperature}
    upstream = None

    def run(fn, cast=lambda x: x, **more):
        nonlocal upstream
        leaves = [
            cast(x).detach().requires_grad_() for x in (hidden, weight, bias) if x is not None
        ]
        bias_ = leaves[2] if len(leaves) > 2 else None
        out = fn(leaves[0], leaves[1], labels, bias=bias_, **options, **more)
        values = out.logprob, out.entropy, out.lse, out.mean_logit
        if upstream is None:
            upstream = [torch.randn(x.shape, generator=rng).to(device) for x in values]
            for u in upstream:  # for a third of the tokens 0
                u.view(-1)[::3] = 0
        loss = sum(
            (u.to(x.dtype) * x).sum()
            for name, u, x in zip(DIFFERENTIABLE, upstream, values, strict=True)
            if name in through
        )
        return out, values, torch.autograd.grad(loss, leaves)

    ours, values, d_ours = run(
        fused_logprobs, backend=backend, chunk_tokens=chunk_tokens, mean_logit=True
    )
    _, torchs, d_torchs = run(token_stats)
    _, exact, d_exact = run(token_stats, lambda x: x.double())
    scale = abs(case.options.get("logit_scale", 1.0)) / coldest
    size = hidden.double().abs() @ weight.double().abs().T
    size = size + (0 if bias is None else bias.double().abs())
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    condition = 1 + scale * (float(size.max()) if size.numel() else 0)
    rounding = 4 * torch.finfo(wide).eps * condition
    for at, (o, t, e) in enumerate(zip(values, torchs, exact, strict=True)):
        assert (o.dtype, o.shape) == (wide, e.shape)
        error, bound = (o - e).abs(), 2 * (t - e).abs().amax() if t.numel() else 0
        assert (error <= bound + rounding * (1 + e.abs())).all(), (at, error.max())
    eps = torch.finfo(case.dtype).eps
    for name, o, t, e in zip(("hidden", "weight", "bias"), d_ours, d_torchs, d_exact, strict=False):
        spread = {"hidden": weight, "weight": hidden.reshape(-1, case.H)}.get(name)
        spread = float(spread.double().abs().sum(0).max()) if spread is not None else labels.numel()
        floor = 2 * eps * float(e.abs().max()) if e.numel() else 0
        floor += 2 * rounding * condition * spread * scale * (K or 1)
        assert_within(name, o, t, e, floor, case)
    assert ours.argmax[~valid].eq(-1).all()
    given = {k: v for k, v in case.options.items() if k != "ignore_index"}
    wide_bias = None if bias is None else bias.double()
    z = finished_logits(hidden.double(), weight.double(), wide_bias, **given)
    alone = fused_argmax(hidden, weight, bias=bias, backend=backend, **given)
    for argmax, where in ((ours.argmax, valid), (alone, torch.ones_like(valid))):
        taken = z.gather(-1, argmax.clamp(min=0)[..., None])[..., 0]
        least = z.amax(-1) - rounding * coldest * (1 + z.abs().amax(-1))
        assert (taken >= least)[where].all()
