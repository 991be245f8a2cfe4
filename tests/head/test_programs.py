"""Programs on a replaced head, as users, libraries and trainers write them.

They do what they do on the untouched model: each instruction after and before others that change
what lazy logits are, and random programs of several instructions.
"""

import copy
import functools
import os

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.attacks import function, hands_on, same_loss
from support.bounds import same_model
from support.copies import COPIES
from support.heads import MODES, V, ce, plain_model, tokens
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError, checkpoint

from fusedce import replace_loss_head, restore_loss_head

COUNT = int(os.environ.get("FUSEDCE_PROGRAMS", 300))


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.square().mean()

    @staticmethod
    def backward(ctx, g):
        z = ctx.saved_tensors[0]
        return 2 * z * g / z.numel()


through = function(lambda z: z * 2, lambda g: g * -0.5)  # its backward is another's derivative
clipped = function(lambda z: z.clone(), lambda g: g.clamp(-0.01, 0.01))
swapped = function(
    lambda z: z.transpose(0, 1), lambda g: g.reshape(g.shape[1], g.shape[0], g.shape[2])
)
without_first = function(lambda z: z[:, 1:], lambda g: F.pad(g, (0, 0, 1, 0)))

_LIBRARY = torch.library.Library("fusedce_test_writers", "DEF")
_LIBRARY.define("scale_unseen(Tensor x, Tensor[] more) -> ()")


@torch.library.impl(_LIBRARY, "scale_unseen", "CompositeExplicitAutograd")
def _scale_unseen(x, more):
    for t in (x, *more):
        t.mul_(0.5)


@functools.cache
def compiled(name):
    """Trainers compile their loss."""
    return torch.compile(COMPILED[name], backend="eager", dynamic=True)


COMPILED = {
    "lse": lambda z: z.logsumexp(-1).mean(),
    "loss": lambda z, y: F.cross_entropy(z.reshape(-1, V).float(), y.reshape(-1)),
    "write": lambda z: z.detach().mul_(2),
}


# Each takes logits (B, T, V) or (N, V) with their labels and gives such logits and labels.
SHAPES = {
    "flat": lambda z, y: (z.reshape(-1, V), y.reshape(-1)),
    "view": lambda z, y: (z.view(-1, V), y.reshape(-1)) if z.is_contiguous() else (z, y),
    "shift": lambda z, y: (z[..., :-1, :], y[..., 1:]) if y.shape[-1] > 1 else (z, y),
    "contiguous": lambda z, y: (z.contiguous(), y),
    "first": lambda z, y: (z[:1], y[:1]),
    "chunk": lambda z, y: (z.chunk(2)[0], y.chunk(2)[0]),
    "unbind": lambda z, y: (z.unbind(1)[0], y.unbind(1)[0]) if y.dim() == 2 else (z, y),
    "tensor_split": lambda z, y: (z.tensor_split(2)[0], y.tensor_split(2)[0]),
    "last of a split": lambda z, y: (z.split(1)[-1], y.split(1)[-1]),
    "swap": lambda z, y: (z.transpose(0, 1), y.transpose(0, 1)) if y.dim() == 2 else (z, y),
    "there and back": lambda z, y: (z.mT.movedim(-1, -2), y),
    "unsqueeze": lambda z, y: (z.unsqueeze(0).squeeze(0), y),
    "mask": lambda z, y: (z[y > 20], y[y > 20]) if (y > 20).any() else (z, y),
    "rows": lambda z, y: (z[[0, -1, 0]], y[[0, -1, 0]]),
    "select": lambda z, y: (z[0], y[0]) if y.dim() == 2 else (z, y),
    "squeeze": lambda z, y: (z[:1].squeeze((0,)), y[0]) if y.dim() == 2 else (z, y),
    "numpy index": lambda z, y: (z[np.int64(0)], y[0]) if y.dim() == 2 else (z, y),
    "index_select": lambda z, y: [torch.index_select(t, 0, torch.tensor([0, 0])) for t in (z, y)],
    "tensor index": lambda z, y: (
        (z[:, torch.tensor([1, 1])], y[:, [1, 1]]) if y.dim() == 2 else (z, y)
    ),
    "rows put together": lambda z, y: (torch.cat([z[:1].detach(), z[1:]]), y),
    "scaled by its loss": lambda z, y: (z * cross_entropy(z, y).detach(), y),
    "swapped by a function": lambda z, y: (
        (swapped(z), y.transpose(0, 1)) if y.dim() == 2 else (z, y)
    ),
    "sliced by a function": lambda z, y: (
        (without_first(z), y[:, 1:]) if y.dim() == 2 and y.shape[1] > 1 else (z, y)
    ),
}
VALUES = {
    "half": lambda z: z * 0.5,
    "third": lambda z: z / 3,
    "tensor factor": lambda z: torch.tensor(1.5) * z,
    "minus": lambda z: -z,
    "cap": lambda z: (z / 2).tanh() * 2,
    "float": lambda z: z.float(),
    "double": lambda z: z.double(),
    "bias": lambda z: z + torch.linspace(-1, 1, V),
    "clone": lambda z: z.clone(),
    "detach and back": lambda z: z.detach() * 0.1 + z,
    "relu": lambda z: z.relu(),
    "detach first": lambda z: z.detach() * 0.5 + z,
    "detached leaf": lambda z: z + z.detach().requires_grad_(),
    "twice": lambda z: z + z,
    "a sum of a sum": lambda z: (z * 0.5 + z) + z,
    "squares added": lambda z: z + 0.1 * z.square(),
    "tanh": lambda z: z.tanh(),
    "factor of a class": lambda z: z * torch.arange(V),
    "bias of a row": lambda z: z + torch.arange(len(z)).view(-1, *[1] * (z.dim() - 1)) / 2,
    "rows regrouped": lambda z: z.as_strided(z.shape, z.mT.contiguous().mT.stride()),
    "through": through,
    "through a view": lambda z: through(z.view(z.shape)),
    "clipped": clipped,
    "handed on": lambda z: hands_on(z) * 0.5,
    **{name: COPIES[name] for name in ("deepcopy", "pickle", "save")},
}


def mask_class(z):
    z[..., 3] = -5.0


def scale_view(z):
    z.view(-1).mul_(0.5) if z.is_contiguous() else z.mul_(0.5)


def write_data(z):
    z.data[..., 4] = 0.5


def no_grad_write(z):
    with torch.no_grad():
        z[0].clamp_(max=0.2)


def ban_in_float(z):
    z.float()[..., 3] = 50.0


def ban_in_rows(z):
    z.reshape(-1, V)[:, 3] = 50.0
    z[:, :-1].reshape(-1, V)[:, 4] = 60.0  # a copy


def shallow_written(z):
    """A shallow copy shares the memory, a deep one has its own."""
    copy.copy(z.detach())[..., 4] = 3.0
    copy.deepcopy(z.detach())[..., 3] = 2.0


def copies_written(z):
    for twin in (z.clone(), z.to(z.dtype, copy=True), z[[0, -1]], z * 1):
        twin.fill_(1.0)


@torch.no_grad()
def out_argument(z):
    torch.clamp(z.detach(), min=0, out=z.detach())
    torch._foreach_mul_([z], 2.0)


WRITES = {
    "scale": lambda z: z.mul_(0.5),
    "divide": lambda z: z.div_(2),
    "mask a class": mask_class,
    "scale a view": scale_view,
    "data": write_data,
    "without grad": no_grad_write,
    "add": lambda z: z.add_(0.1),
    "ban in float": ban_in_float,
    "ban in rows": ban_in_rows,
    "copies": copies_written,
    "shallow copy": shallow_written,
    "storage": lambda z: z.detach().untyped_storage().fill_(0),
    "compiled": lambda z: torch.no_grad()(compiled("write"))(z),
    "out": out_argument,
}


def sample_warped(z):
    """Temperature and top-k as generation applies them."""
    scores = z[:, -1:].to(copy=True, dtype=torch.float32, device="cpu") / 0.7
    least = torch.topk(scores, 5)[0][..., -1, None]
    return scores.masked_fill(scores < least, -float("inf")).softmax(-1), z[:, -1].float()


LOOKS = {
    "argmax": lambda z: z.argmax(-1).float(),
    "lse": lambda z: z.logsumexp(-1),
    "max": lambda z: z.detach().amax(-1),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy().copy()).sum(),
    "asarray": lambda z: torch.from_numpy(np.asarray(z.detach()).copy()),
    "dlpack": lambda z: torch.from_dlpack(z.detach().clone()),
    "safetensors": lambda z: safetensors.torch.load(
        safetensors.torch.save({"z": z.detach().contiguous()})
    )["z"],
    "storage": lambda z: torch.tensor(z.untyped_storage().tolist()),
    "bytes": lambda z: torch.tensor(list(bytes(z.detach().flatten()[:2].round().abs().byte()))),
    "map": lambda z: torch.ones(z.shape, dtype=z.dtype).map_(z.detach(), lambda a, b: a + b),
    "row": lambda z: z[0].detach().sum(),
    "warped": sample_warped,
    "elsewhere": lambda z: (
        z.cpu(), z.to("cpu"), z.to("cpu", torch.float64), z.type(torch.float64), z.to(z)
    ),
}  # fmt: skip


def zero_the_first(g):
    g[0] = 0


class OtherLayout(RuntimeError):
    """A gradient's strides, which nobody promises, do not allow a view."""


def views_of_views(g):
    if not g.is_contiguous():
        raise OtherLayout
    a, b = g.view(-1, V), g.detach()
    a.view(-1)[::2] = 1
    b.add_(0.5)
    return a.view(g.shape) * 2


def clamped_out(g):
    torch.clamp(g, -0.01, 0.01, out=g)


def gathered(g):
    dist.all_gather_into_tensor(g, torch.full(g.shape, 0.25, dtype=g.dtype))


HOOKS = {
    "double": lambda g: g * 2,
    "clamp": lambda g: g.clamp(-0.02, 0.02),
    "look": lambda g: None if g.abs().sum() >= 0 else g,
    "zero a row": lambda g: g.index_fill(0, torch.tensor([0]), 0.0),
    "write": zero_the_first,
    "flip": lambda g: g.flip(0),
    "views": views_of_views,
    "out": clamped_out,
    "gathered": gathered,
    "foreach": lambda g: (torch._foreach_mul_([g], 3.0), None)[1],
    "unseen": lambda g: torch.ops.fusedce_test_writers.scale_unseen(torch.ones(2), [g]),
    "keep": None,  # its gradient is read after backward
}


def cross_entropy(z, y, **options):
    if z.dim() > 2:
        z, y = z.movedim(-1, 1), y
    return F.cross_entropy(z, y, **options)


def per_token(z, y):
    return cross_entropy(z, y, reduction="none").square().sum()


LOSSES = {
    "mean": cross_entropy,
    "sum": lambda z, y: cross_entropy(z, y, reduction="sum"),
    "none": per_token,
    "smooth": lambda z, y: cross_entropy(z, y, label_smoothing=0.1),
    "weights": lambda z, y: cross_entropy(z, y, weight=torch.linspace(0.1, 1, V, dtype=z.dtype)),
    "ignore": lambda z, y: cross_entropy(z, y, reduction="sum", ignore_index=int(y.flatten()[0])),
    "log_softmax": lambda z, y: -z.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "squares": lambda z, y: Squares.apply(z),
    "checkpoint": lambda z, y: checkpoint(cross_entropy, z, y, use_reentrant=False),
    "reentrant": lambda z, y: checkpoint(cross_entropy, z, y, use_reentrant=True),
    "checkpointed lse": lambda z, y: checkpoint(
        lambda t: t.logsumexp(-1).mean(), z, use_reentrant=False
    ),
    "vmap": lambda z, y: torch.vmap(lambda t: t.softmax(-1).square().sum())(z).sum(),
    "module with a hook": lambda z, y: hooked(None)(z.reshape(-1, V), y.reshape(-1)),
    "hooked module times 3": lambda z, y: hooked(3)(z.reshape(-1, V), y.reshape(-1)),
    "compiled lse": lambda z, y: compiled("lse")(z),
    "compiled": lambda z, y: compiled("loss")(z, y),
    "used twice": lambda z, y: (lambda loss: loss * loss.detach() + loss)(cross_entropy(z, y)),
    "probabilities": lambda z, y: cross_entropy(
        z.reshape(-1, V), F.one_hot(y.reshape(-1), V).to(z.dtype)
    ),
    "some classes": lambda z, y: cross_entropy(z[..., 5:40], y % 35),
    "every second class": lambda z, y: cross_entropy(z[..., ::2], y // 2),
}


def hooked(factor):
    loss = torch.nn.CrossEntropyLoss()
    loss.register_full_backward_hook(lambda _, i, o: factor and (i[0] * factor, None))
    return loss


_KINDS = {
    "shape": SHAPES, "value": VALUES, "write": WRITES, "look": LOOKS, "hook": HOOKS,
    "loss": LOSSES, "keep": {"grad": None},
}  # fmt: skip

# (kind, name, of which of the logits there are)
INSTRUCTIONS = [(kind, x) for kind, of in _KINDS.items() for x in of]
programs = st.tuples(
    st.lists(st.tuples(st.sampled_from(INSTRUCTIONS), st.integers(0, 5)), min_size=1, max_size=8),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(["none", "sgd", "fused adamw"]),
    st.booleans(),  # bias of the head
)


def changes_after_a_checkpoint(program):
    """Whether the two runs of a checkpointed loss may find other logits: the second is refused.

    Between them logits are written into, their memory is handed out by ``numpy``, or their gradient
    is kept (``retain_grad``), which the second run must then make along the logits.
    """
    names = [name for (_, name), _ in program[0]]
    if "checkpoint" not in names:
        return False
    return any(
        kind in ("write", "keep") or name in ("numpy", "keep")
        for (kind, name), _ in program[0][names.index("checkpoint") :]
    )


NO_GRADIENT = torch.zeros(0)


def run(program, model, x, y, mode="grad"):
    """Everything observable: losses, looks, gradients, and the parameters after a step.

    Where torch refuses a program, the error's type. Modes without gradients leave out hooks and
    kept gradients, and all logits of the program are looked at once more outside of the mode.
    """
    if mode == "grad":
        return _run(program, model, x, y)
    steps = [step for step in program[0] if step[0][0] not in ("hook", "keep")]
    with MODES[mode]():
        result = _run((steps, *program[1:]), model, x, y, training=False)
    if isinstance(result, type):
        return result
    total, seen, there = result
    return total + 0, [s + 0 for s in seen], [z.double() for z in there]


def _run(program, model, x, y, training=True):
    steps, last, optimizer, _ = program
    there = [(model(x), y)]
    total, seen, kept, of_hooks = torch.zeros(()), [], [], []
    try:
        for (kind, name), at in steps:
            z, labels = there[at % len(there)]
            if kind == "shape":
                there.append(SHAPES[name](z, labels))
            elif kind == "value":
                there.append((VALUES[name](z), labels))
            elif kind == "write":
                WRITES[name](z)
            elif kind == "look":
                with torch.no_grad():
                    seen.extend(t + 0 for t in tree_leaves(LOOKS[name](z)))
            elif kind == "hook":
                z.grad_fn  # noqa: B018  # torch 2.13 crashes on a view's first hook after a write
                z.register_hook(of_hooks.append if name == "keep" else HOOKS[name])
            elif kind == "keep":
                z.grad_fn  # noqa: B018
                z.retain_grad()
                kept.append(z)
            else:
                total = total + LOSSES[name](z, labels).float()
        total = total + LOSSES[last](*there[-1]).float()
        if not training:
            return total, [s.double() for s in seen], [z for z, _ in there]
        total.backward()
    except (RuntimeError, ValueError, IndexError) as e:
        return type(e)
    of_hooks = [g.double() + 0 for g in of_hooks]
    grads = {n: p.grad for n, p in model.named_parameters()}
    grads = {n: NO_GRADIENT if g is None else g.clone() for n, g in grads.items()}
    if optimizer != "none":
        make = {"sgd": torch.optim.SGD, "fused adamw": torch.optim.AdamW}[optimizer]
        fused = {"fused": True} if optimizer != "sgd" else {}
        make(model.parameters(), lr=0.01, **fused).step()
    kept = [NO_GRADIENT if z.grad is None else z.grad.double() + 0 for z in kept]
    return total.detach(), [s.double() for s in seen], grads, kept + of_hooks


ONE_LOSS, LOOK, HOOK, WRITE = (
    ("loss", "mean"),
    ("look", "argmax"),
    ("hook", "look"),
    ("write", "scale"),
)
# What comes before an instruction and after it.
AROUND = {
    "alone": ([], []),
    "after a loss": ([ONE_LOSS], []),
    "after a look": ([LOOK], []),
    "after a hook": ([HOOK], []),
    "between hooks": ([("hook", "double")], [("hook", "double")]),
    "before a look and a write": ([], [LOOK, WRITE]),
    "before a write and a loss": ([], [WRITE, ONE_LOSS]),
    "kept": ([("keep", "grad")], [ONE_LOSS]),
    "its result is written into": ([], [WRITE]),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.filterwarnings("ignore")
def test_each_instruction(around, mode):
    before, after = AROUND[around]
    at = -1 if "its result" in around else 0
    for i, one in enumerate(INSTRUCTIONS):
        steps = [*((step, 0) for step in (*before, one)), *((step, at) for step in after)]
        check((steps, "mean", "none", i % 2 == 0), mode)  # with a bias and without


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=COUNT, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(programs)
def test_any_program(mode, program):
    check(program, mode)


def check(program, mode):
    """A replaced and an untouched model do the same; both are refused, or neither is."""
    native = plain_model(bias=program[3])
    with torch.no_grad():
        native[1].weight.mul_(2)
    replaced = replace_loss_head(copy.deepcopy(native))
    x, y = tokens(3, 5), tokens(3, 5, seed=1)
    expected = run(program, native, x, y, mode)
    got = run(program, replaced, x, y, mode)
    if OtherLayout in (expected, got):
        return
    if isinstance(expected, type):
        assert isinstance(got, type), f"torch refuses {program} with {expected}"
        return
    if got is CheckpointError and changes_after_a_checkpoint(program):
        return  # torch raises in the second run, which saves other tensors than the first
    assert not isinstance(got, type), f"{program} is refused with {got}"
    same_model(got, expected)
    restored = restore_loss_head(replaced)
    if "adamw" in program[2]:  # divides each gradient by its size: one of 1e-8 moves by its noise
        native.load_state_dict(restored.state_dict())
    logits = restored(x)
    assert type(logits) is torch.Tensor
    same_model(logits, native(x))


# ---- writes that no schema declares ---------------------------------------------------------


def product_reduced(z):
    dist.all_reduce(z.mul(1), op=dist.ReduceOp.PRODUCT)
    dist.all_reduce(z)  # of one rank, changes nothing: but it might have


def gathered_into_a_view(z):
    rows = torch.linspace(-1, 1, z[0].numel()).view(z[0].shape)
    dist.all_gather_into_tensor(z[0], rows)


def by_an_operator_in_a_list(z):
    torch.ops.fusedce_test_writers.scale_unseen(torch.ones(2), [torch.ones(1), z[1]])


def through_another_tensor(z):
    twin = torch.empty(0)
    twin.set_(z)
    twin.mul_(0.5)


UNSEEN = [
    product_reduced, gathered_into_a_view, by_an_operator_in_a_list, through_another_tensor,
]  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("write", UNSEEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_an_unseen_write_counts(write, mode):
    def loss(z, y):
        earlier = ce(z, y)
        with torch.no_grad():
            write(z)
        return ce(z, y) + 2 * ce(z[:, 1:], y[:, 1:]) + earlier

    same_loss(loss, mode)
