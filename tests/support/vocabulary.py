"""Inputs, reference and comparisons for a loss whose vocabulary is spread over ranks."""

import contextlib

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from fusedce import reference_ce
from fusedce.agreement import ALL_GATHER
from fusedce.backends.shards.collectives import REDUCE_SCATTER

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
    # A row that is ignored or has weight 0 changes no result, whatever it holds.
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
    # as many roundings as a gradient's sums and exponentials take; one of the result in two bytes
    roundings = {torch.float64: 4096, torch.float32: 16}.get(dtype, 1)
    tolerance = roundings * torch.finfo(dtype).eps
    b = b.to(torch.float64)
    error = (a.double() - b).norm() / b.norm().clamp(min=1e-3)
    assert error <= slack * tolerance, f"{float(error):.1e} > {slack * tolerance:.1e}"


def compare(local, rows, out, exact, dtype=torch.float64, upstream=0.37, slack=1.0):
    loss, n_valid, grads = exact
    (out.loss_sum * upstream).backward()
    assert out.loss_sum.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.n_valid.dtype == torch.int64
    assert int(out.n_valid) == n_valid
    close(out.loss_sum, loss, torch.float64 if dtype == torch.float64 else torch.float32)
    for name, grad in grads.items():
        got = local[name].grad
        assert got.dtype == dtype
        close(got, grad if name == "hidden" else grad[rows], dtype, slack)


def class_weights(V):
    found = torch.rand(V, generator=torch.Generator().manual_seed(2)) + 0.1
    found[1] = 0
    return found


def answers(function, x, **options):
    """A function's results, and gradients of its outputs under one upstream factor per token."""
    leaves = {k: x[k] for k in ("hidden", "weight", "bias") if k in x}
    found = function(**x, **options)
    found = (found,) if isinstance(found, torch.Tensor) else tuple(found)
    rng = torch.Generator().manual_seed(1)
    loss = 0
    for out in found:
        upstream = torch.randn(out.shape, generator=rng, dtype=torch.float64)
        upstream.view(-1)[::4] = 0  # of no interest
        if out.requires_grad:
            loss = loss + (out * upstream.to(out)).sum()
    loss.backward()
    return [x.detach() for x in found], {k: v.grad for k, v in leaves.items()}


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def near(a, b, exact, floor, name, whole=None):
    """Errors of ``a`` are at most twice those of ``b``, or ``floor`` of the size of ``exact``.

    Where ``exact`` is rows of ``whole``, it counts as no smaller than these many rows of it are: a
    row that nearly cancels has addends, and rounding errors, of the size of the others.
    """
    if not a.is_floating_point():
        assert torch.equal(a, b), name
        return
    if not a.numel():
        return
    error, theirs = (a.double() - exact).norm(), (b.double() - exact).norm()
    size = exact.norm()
    if whole is not None and whole.numel():
        size = max(size, whole.norm() * (exact.numel() / whole.numel()) ** 0.5)
    assert error <= 2 * theirs + floor * size, f"{name}: {error:.1e} against {theirs:.1e}"


def compare_to_whole(
    x, sharded, whole, sizes, options, backend, rank, floors, name="", skipped=None, **of_shards
):
    """Compare ``sharded`` with ``whole``; return the results of this rank.

    Errors are at most twice those of ``whole``, both against float64, plus a floor by dtype.
    ``skipped`` is the position of a result that the caller compares; ``of_shards`` holds options of
    the sharded call alone.
    """
    dtype = x["hidden"].dtype
    local, rows = own_rows(x, sizes, rank)
    group = dist.group.WORLD
    asked = options | of_shards
    out, grads = answers(sharded, local, process_group=group, backend=backend, **asked)
    every, _ = own_rows(x, [sum(sizes)], 0)
    theirs, their_grads = answers(whole, every, backend=backend, **options)
    exact, _ = own_rows({k: wide(v) for k, v in x.items()}, [sum(sizes)], 0)
    truth, true_grads = answers(whole, exact, backend="torch", **options)
    of_results = floors[torch.float32 if dtype == torch.bfloat16 else dtype]
    for at, (a, b, c) in enumerate(zip(out, theirs, truth, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if at != skipped:
            near(a, b, c, of_results, f"{name} result {at}")
    for of, grad in grads.items():
        part = slice(None) if of == "hidden" else rows
        assert grad.dtype == dtype, name
        both = their_grads[of][part], true_grads[of][part]
        near(grad, *both, floors[dtype], f"{name} {of}", true_grads[of])
    return out


class Largest(TorchDispatchMode):
    """Tokens of the largest matrix that has a row for each class of the shard."""

    def __init__(self, classes):
        super().__init__()
        self.classes, self.tokens = classes, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusedce":  # a mode does not see inside of operators
            function = OPDEFS[function._schema.name]._init_fn
            with self:
                out = function(*args, **(kwargs or {}))
        else:
            out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and len(out) == self.classes:
            self.tokens = max(self.tokens, out.shape[1])
        return out


@contextlib.contextmanager
def watched_collectives():
    """``[(name, elements of the result, whether it runs beside)]`` of this rank, as they come."""
    calls, kept = [], {}
    for name in (ALL_GATHER, REDUCE_SCATTER, "all_reduce", "broadcast", "all_gather"):
        kept[name] = getattr(dist, name)

        def spy(out, *args, _name=name, **kwargs):
            calls.append((_name, out.numel(), kwargs.get("async_op", False)))
            return kept[_name](out, *args, **kwargs)

        setattr(dist, name, spy)
    try:
        yield calls
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)
