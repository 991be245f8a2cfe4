"""Inputs of a loss whose vocabulary is spread over ranks, and the whole truth about them."""

import torch

from fusedce import reference_ce

N, H = 29, 6
UNEQUAL = {2: (3, 8), 4: (1, 7, 0, 5)}  # rows of each rank
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "scale": {"logit_scale": -1.5},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.3},
    "weights": {"token_weight": True},
    "bias": {"bias": True},
    "everything": {
        "softcap": 3.0,
        "logit_scale": 0.7,
        "label_smoothing": 0.2,
        "z_loss": 0.05,
        "token_weight": True,
        "bias": True,
        "ignore_index": 2,
    },
}


def inputs(V, dtype=torch.float64, n=N, seed=0, **options):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V, (n,), generator=rng)
    labels[: min(V, n)] = torch.arange(V)[:n]  # every class, so every shard, has its label
    labels[torch.rand(n, generator=rng) < 0.3] = options.get("ignore_index", -100)
    found = {
        "hidden": torch.randn(n, H, generator=rng).to(dtype),
        "weight": torch.randn(V, H, generator=rng).to(dtype),
        "labels": labels,
    }
    if options.pop("bias", False):
        found["bias"] = torch.randn(V, generator=rng).to(dtype)
    if options.pop("token_weight", False):
        options["token_weight"] = torch.rand(n, generator=rng) - 0.3
        options["token_weight"][::5] = 0
        found["hidden"][::5] = float("nan")
    # A row that is ignored, or of weight 0, reaches nobody, whatever it holds.
    found["hidden"][labels == options.get("ignore_index", -100)] = float("nan")
    return found | options


def truth(x, upstream=0.37, real=None):
    """Loss and gradients of the reference over all logits, or the first ``real`` ones."""
    leaf = {
        k: x[k].double().detach().requires_grad_() for k in ("hidden", "weight", "bias") if k in x
    }
    classes = {k: leaf[k][:real] for k in ("weight", "bias") if k in leaf}
    loss, n_valid = reference_ce(**x | leaf | classes)
    (loss * upstream).backward()
    return loss.detach(), int(n_valid), {k: v.grad for k, v in leaf.items()}


def own_rows(x, sizes, rank):
    """The local inputs of a rank that holds ``sizes[rank]`` rows; parameters require grad."""
    first = sum(sizes[:rank])
    local = dict(x)
    local["hidden"] = x["hidden"].clone().requires_grad_()
    for name in ("weight", "bias"):
        if name in x:
            local[name] = x[name][first : first + sizes[rank]].clone().requires_grad_()
    return local, slice(first, first + sizes[rank])


def close(a, b, dtype=torch.float64, slack=1.0):
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype) or torch.finfo(dtype).eps
    b = b.to(torch.float64)
    error = (a.double() - b).norm() / b.norm().clamp(min=1e-3)
    assert error <= slack * tolerance, f"{float(error):.1e} > {slack * tolerance:.1e}"


def compare(local, rows, out, exact, dtype=torch.float64, upstream=0.37):
    loss, n_valid, grads = exact
    (out.loss_sum * upstream).backward()
    assert out.loss_sum.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.n_valid.dtype == torch.int64
    assert int(out.n_valid) == n_valid
    close(out.loss_sum, loss, torch.float64 if dtype == torch.float64 else torch.float32)
    for name, grad in grads.items():
        got = local[name].grad
        assert got.dtype == dtype
        close(got, grad if name == "hidden" else grad[rows], dtype)
