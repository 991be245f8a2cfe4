"""Inputs, layouts and comparisons for a head whose vocabulary is spread over ranks."""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._library.custom_ops import OPDEFS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fusedce.agreement import ALL_GATHER

N, H, K = 29, 6, 4
UNEQUAL = {2: (3, 8), 4: (1, 7, 0, 5)}  # rows of each rank, by the number of ranks
OF_ROWS = ("weight", "bias", "teacher_weight", "teacher_bias")
OF_TOKENS = ("hidden", "labels", "token_weight", "temperature", "teacher_hidden")
ROUNDINGS = (
    (torch.float64, 512), (torch.float32, 4), (torch.bfloat16, 0.5), (torch.float16, 0.5),
)  # fmt: skip
FLOORS = {dtype: n * torch.finfo(dtype).eps for dtype, n in ROUNDINGS}  # where both are lucky


class Layout(NamedTuple):
    """How a head and the tokens lie on the ranks."""

    sizes: dict[int, tuple[int, ...]] = UNEQUAL
    own_tokens: bool = False  # each rank has other tokens, and one has none
    padded: bool = False  # the last rows are no classes; one rank has nothing else
    hidden: str | None = None  # the head is a DTensor, and hidden states are "plain" or "placed"

    def real(self, world):
        """The number of classes."""
        sizes = self.sizes[world]
        return sum(sizes) - (sizes[-1] + 1 if self.padded else 0)

    def held(self, x, rank):
        """A rank's inputs, of which parameters require grad; its slices of rows and tokens."""
        world = dist.get_world_size()
        sizes, n = self.sizes[world], len(x["hidden"])
        first = sum(sizes[:rank])
        rows, tokens = slice(first, first + sizes[rank]), slice(0, n)
        if self.own_tokens:
            borders = {2: (0, 0, n), 4: (0, n // 6, n // 6, 2 * n // 3, n)}[world]
            tokens = slice(borders[rank], borders[rank + 1])
        return part(x, rows, tokens), rows, tokens


def part(x, rows, tokens=slice(None)):
    """Some rows of the head and some tokens, as leaves."""
    found = dict(x)
    for name, value in x.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in OF_ROWS:
            found[name] = value[rows].clone()
        if name in OF_TOKENS:
            found[name] = value[tokens].clone()
        if name in ("hidden", "weight", "bias"):
            found[name].requires_grad_()
    return found


def whole(x):
    """All rows and tokens, as leaves."""
    return part(x, slice(None))


def inputs(V, dtype=torch.float64, n=N, seed=0, *, kind="indices", **options):
    """Keyword arguments of a loss.

    ``kind`` of labels: "indices" or "several" ``(n, K)``. Tensors replace options that are
    ``True``. A row that is ignored or of weight 0 holds NaN.
    """
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V, (n,), generator=rng)
    labels[: min(V, n)] = torch.arange(V)[:n]  # every class, so every shard, has its label
    labels[torch.rand(n, generator=rng) < 0.3] = options.get("ignore_index", -100)
    hidden = torch.randn(n, H, generator=rng).to(dtype)
    found = {"weight": torch.randn(V, H, generator=rng).to(dtype)}

    for name, shape in (("bias", (V,)), ("teacher_hidden", (n, 5)), ("teacher_weight", (V, 5))):
        if options.pop(name, False):
            found[name] = torch.randn(shape, generator=rng).to(dtype)
    if options.pop("token_weight", False):
        found["token_weight"] = torch.rand(n, generator=rng) - 0.3
        found["token_weight"][::5] = 0
        hidden[::5] = float("nan")
    if options.get("temperature") is True:
        found["temperature"] = 0.5 + torch.rand(n, generator=rng)
        options.pop("temperature")
    if options.pop("class_weight", False):
        found["class_weight"] = torch.rand(V, generator=rng) + 0.1
        found["class_weight"][1] = 0
    if kind == "indices":
        hidden[labels == options.get("ignore_index", -100)] = float("nan")
    else:  # classes of all ranks, ignored ones, one twice, and a token of none
        labels = torch.randint(V, (n, K), generator=rng)
        labels[torch.rand(n, K, generator=rng) < 0.2] = -100
        labels[1] = -100
        labels[2, 3] = labels[2, 0]
        hidden = hidden.nan_to_num(0.3)
        hidden[1] = float("nan")
    return {"hidden": hidden, "labels": labels} | found | options


def sure(x, gap):
    """Inputs with p -> 1 at the label, or where ``gap`` is negative at another class.

    Entries are multiples of 2^-7, so that float32 products are exact in any order: ``1 - p`` is
    as wrong as the logit, which another order of sums would round elsewhere.
    """
    V, dtype = len(x["weight"]), x["weight"].dtype
    unit = (128 * F.normalize(x["weight"].float(), dim=-1)).round() / 128
    labels = torch.arange(len(x["labels"])) * 37 % V
    near_to = labels if gap > 0 else (labels + V // 2) % V
    hidden = abs(gap) * unit[near_to]
    return x | {"weight": unit.to(dtype), "labels": labels, "hidden": hidden.to(dtype)}


def answers(function, x, tokens=slice(None), n=N):
    """Results, and gradients under upstream factors that are 0 for a quarter of ``n`` tokens."""
    leaves = {k: x[k] for k in ("hidden", "weight", "bias") if k in x}
    found = function(**x)
    found = (found,) if isinstance(found, torch.Tensor) else tuple(found)
    rng = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for out in found:
        if out.dim():
            upstream = torch.randn((n, *out.shape[1:]), generator=rng, dtype=torch.float64)
            upstream.view(-1)[::4] = 0
            upstream = upstream[tokens]
        else:
            upstream = torch.tensor(0.37)
        if out.requires_grad:
            loss = loss + (out * upstream.to(out)).sum()
    if loss.requires_grad:
        loss.backward()
    return [x.detach() for x in found], {k: v.grad for k, v in leaves.items()}


def near(a, b, exact, floor, name, of=None):
    """Errors of ``a`` are at most twice those of ``b``, or ``floor`` of the size of ``exact``.

    Where ``exact`` is rows of ``of``, it counts as no smaller than these many rows of it are: a row
    that nearly cancels has addends, and rounding errors, of the size of the others.
    """
    assert (a.dtype, a.shape) == (b.dtype, b.shape), name
    if not a.is_floating_point():
        assert torch.equal(a, b), name
        return
    if not a.numel():
        return
    error, theirs = (a.double() - exact).norm(), (b.double() - exact).norm()
    size = exact.norm()
    if of is not None and of.numel():
        size = max(size, of.norm() * (exact.numel() / of.numel()) ** 0.5)
    assert error <= 2 * theirs + floor * size, f"{name}: {error:.1e} against {theirs:.1e}"


def compare(x, function, layout, rank):
    """Compare ``function`` on shards with the whole head; return the results of this rank.

    Errors are at most twice those of the whole, both against float64, plus a floor by dtype; the
    same without gradients.
    """
    dtype, n, V = x["hidden"].dtype, len(x["hidden"]), len(x["weight"])
    real = layout.real(dist.get_world_size())
    local, rows, tokens = layout.held(x, rank)
    if layout.hidden:
        local = placed(local, x, layout)
    else:
        asked = {"tokens_sharded": layout.own_tokens, "process_group": dist.group.WORLD}
        local |= asked | ({"vocab_size": real} if layout.padded else {})
    out, grads = answers(function, local, tokens, n)
    classes = {k: v[:real] if k in OF_ROWS else v for k, v in x.items()}
    theirs, their_grads = answers(function, whole(classes), n=n)
    wide = {k: v.double() if is_floating(v) else v for k, v in classes.items()}
    exact, exact_grads = answers(function, whole(wide | {"backend": "torch"}), n=n)
    with torch.no_grad():
        alone, _ = answers(function, local, tokens, n)
    of_results = FLOORS[torch.float64 if dtype == torch.float64 else torch.float32]
    for at, results in enumerate(zip(out, alone, theirs, exact, strict=True)):
        a, without, b, e = (y[tokens] if y.dim() and i > 1 else y for i, y in enumerate(results))
        near(a, b, e, of_results, f"result {at}")
        near(without, b, e, of_results, f"result {at} without gradients")
    for of, grad in grads.items():
        if grad is None and their_grads[of] is None:  # a result without a gradient
            continue
        if layout.hidden and (of != "hidden" or layout.hidden == "placed"):
            assert isinstance(grad, DTensor), of
            grad = grad.to_local()
        both = (padded(g[of], V) if of in OF_ROWS else g[of] for g in (their_grads, exact_grads))
        b, e = (g[tokens if of == "hidden" else rows] for g in both)
        assert grad.dtype == dtype, of
        near(grad, b, e, FLOORS[dtype], of, exact_grads[of])
    return out


def is_floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def padded(grad, V):
    """Gradients of ``V`` rows, of which the last have none."""
    found = grad.new_zeros(V, *grad.shape[1:])
    found[: len(grad)] = grad
    return found


def placed(local, x, layout):
    """The inputs of a rank as DTensors: the head's rows, and what is of tokens unless "plain"."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = dict(local)
    for name in {*OF_ROWS, *(OF_TOKENS if layout.hidden == "placed" else ())} & {*x}:
        sharded = name in OF_ROWS or layout.own_tokens
        leaf = DTensor.from_local(
            local[name].detach(), mesh, [Shard(0) if sharded else Replicate()],
            shape=x[name].shape, stride=x[name].stride(),
        )  # fmt: skip
        found[name] = leaf.requires_grad_(local[name].requires_grad)
    return found


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
    for name in (ALL_GATHER, "all_reduce", "broadcast", "all_gather"):
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
