"""Ranks of one vocabulary that pass different or wrong arguments raise the same error at once."""

import functools

import pytest
import torch
import torch.distributed as dist
from support import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fusedce import fused_ce, fused_cross_entropy, fused_kl, fused_kl_tokens, fused_logprobs
from fusedce import fused_topk as top_classes
from fusedce.ranks import agreement
from fusedce.ranks.agreement import _checksum
from fusedce.sharded import sharded_argmax, sharded_ce, sharded_cross_entropy, sharded_logprobs

N, H, V = 7, 4, 6


class Odd(torch.Tensor):
    """A user's tensor subclass that raises in some methods."""

    @property
    def is_nested(self):
        raise KeyError("odd")


def inputs(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(N, H, generator=rng),
        "weight": torch.randn(V // 2, H, generator=rng, requires_grad=True),
        "labels": torch.randint(V, (N,), generator=rng),
    }


def of_whole(hidden, weight, labels, **options):
    """A call without a teacher's or a group's words, as a user of a whole vocabulary writes it."""
    return fused_ce(hidden, weight, labels, **options)


def divergence(hidden, weight, labels, function=fused_kl, **options):
    teacher = {"teacher_hidden": hidden.detach(), "teacher_weight": weight.detach()}
    return function(hidden, weight, labels=labels, **teacher | options)


def teacher_placed(hidden, weight, labels, **options):
    """The teacher's head alone as a DTensor."""
    placed = distribute_tensor(torch.randn(V, H), init_device_mesh("cpu", (2,)), [Shard(0)])
    del options["process_group"]
    return fused_kl(hidden, torch.randn(V, H), hidden, placed, labels, **options)


def topk(hidden, weight, labels, k=2, **options):
    return top_classes(hidden, weight, k, **options)


def argmax(hidden, weight, labels, **options):
    return sharded_argmax(hidden, weight, **options)


def of_placements(hidden, weight, labels, process_group, placed="weight", at=0, **options):
    """With one DTensor, placed as `at` says: along a dimension, or replicated."""
    mesh = init_device_mesh("cpu", (2,))
    of = {"hidden": hidden, "weight": torch.randn(V, H)}
    placement = [Replicate() if at is None else Shard(at)]
    of[placed] = distribute_tensor(of[placed], mesh, placement)
    if placed == "hidden" and at:
        of["weight"] = distribute_tensor(of["weight"], mesh, [Shard(0)])
    return options.pop("function", fused_ce)(**of, labels=labels, **options)


X = inputs()
NONE = {"reduction": "none"}
LOSS, STATS = sharded_cross_entropy, sharded_logprobs
TWO, OTHERS = torch.zeros(N, 2, dtype=torch.int64), torch.ones(N, 2, dtype=torch.int64)
WHOLE = torch.zeros(N, H, dtype=torch.float64), torch.zeros(V // 2, H, dtype=torch.float64)
IN_FLOAT64 = dict(zip(("hidden", "weight"), WHOLE, strict=True))
TWO_BYTES = {"hidden": X["hidden"].bfloat16(), "weight": X["weight"].detach().bfloat16()}
OWN = {"tokens_sharded": True}
SHARED = "must be the same on all ranks that share the vocabulary"
TOO_LARGE = "labels must hold class indices in 0 <= label < V=6"


def c(*numbers):
    return {"class_weight": torch.tensor(numbers), "reduction": "none"}


def of_class(label):
    return {"labels": torch.full((N,), label)}


# What the error says, the function, and what rank 0 and rank 1 pass beside or instead of `inputs`.
DIFFERENT = [
    *((f"{name} {SHARED}", sharded_ce, {}, {name: value}) for name, value in {
        "softcap": 3, "logit_scale": 2, "label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": 2,
        "chunk_tokens": 3, "bias": torch.zeros(V // 2), "token_weight": torch.ones(N),
    }.items()),
    (f"memory_budget {SHARED}", of_whole, {"memory_budget": 2**24},
     {"memory_budget": 2**24 + 1}),
    (f"hidden.requires_grad {SHARED}", sharded_ce, {},
     {"hidden": X["hidden"].clone().requires_grad_()}),
    (f"hidden.dtype {SHARED}", sharded_ce, OWN, OWN | TWO_BYTES),
    (f"tokens_sharded {SHARED}, here it is [True, False]", sharded_ce, OWN, {}),
    (f"token_weight {SHARED}, here their values", sharded_ce, {"token_weight": torch.ones(N)},
     {"token_weight": torch.full((N,), 0.5)}),
    (f"class_weight {SHARED}", LOSS, {"class_weight": torch.ones(V)},
     {"class_weight": torch.ones(V + 1)}),
    (f"class_weight {SHARED}", LOSS, c(*range(V)), NONE),
    (f"class_weight {SHARED}", LOSS, c(*range(V)), c(0, 1, 2, 3, 5, 4)),
    (f"temperature {SHARED}, here their values", STATS, {"temperature": torch.ones(N)},
     {"temperature": torch.arange(1.0, 1 + N)}),
    (f"temperature {SHARED}", STATS, {"temperature": torch.ones(N)}, {}),
    (f"logit_scale / temperature {SHARED}", STATS, {"temperature": 0.5}, {}),
    (f"reduction {SHARED}, here it is ['sum', 'mean']", LOSS, {"reduction": "sum"},
     {"reduction": "mean"}),
    (f"function {SHARED}, here it is ['losses of tokens', 'a sum of losses']", LOSS, NONE, {}),
    ("['losses of tokens', 'statistics of tokens']", (LOSS, STATS), NONE, {}),
    ("['statistics of tokens', 'a sum of losses']", (STATS, sharded_ce), {}, {}),
    (f"mean_logit {SHARED}", STATS, {}, {"mean_logit": True}),
    ("['statistics of tokens, 2 classes each', 'statistics of tokens']", STATS, {"labels": TWO},
     {}),
    ("labels must be the same on all ranks", STATS, {"labels": TWO}, {"labels": OTHERS}),
    ("labels must be the same on all ranks", sharded_ce, {}, {"labels": X["labels"].roll(1)}),
    ("weight.requires_grad must be the same on all ranks", STATS, {},
     {"weight": X["weight"].detach()}),
    ("ValueError: weight.requires_grad must be the same on all ranks", sharded_ce,
     {"backend": "triton"}, {"backend": "triton", "weight": X["weight"].detach()}),
    ("argmax_out", of_whole, {}, {"argmax_out": torch.empty(N, dtype=torch.int64)}),
    ("monitor", of_whole, {}, {"monitor": ["correct"]}),
    ("backend", of_whole, {}, {"backend": "triton"}),
    ("k must be", topk, {"k": 2}, {"k": "2"}),
    (f"k {SHARED}", topk, {"k": 2}, {"k": 3}),
    *((name, divergence, mine, theirs) for name, mine, theirs in (
        ("teacher_softcap", {}, {"teacher_softcap": 5.0}),
        ("teacher_logit_scale", {}, {"teacher_logit_scale": 2.0}),
        ("divergence", {}, {"divergence": "reverse"}),
        ("beta", {"divergence": "jsd", "beta": 0.2}, {"divergence": "jsd", "beta": 0.3}),
        ("ce_weight", {}, {"ce_weight": 1.0}),
        ("temperature", {}, {"temperature": 2.0}),
        ("teacher_bias", {}, {"teacher_bias": torch.zeros(V // 2)}),
        ("reduction", {}, {"function": fused_kl_tokens}),
        ("monitor", {}, {"monitor": ("entropy",)}),
    )),
]  # fmt: skip
# The same of an argument that is wrong on rank 1 alone, so that it raises before the ranks meet.
WRONG_ON_ONE = [
    ("labels", sharded_ce, {"labels": X["labels"][:3]}),
    ("labels must be int64", sharded_ce, {"labels": X["labels"].float()}),
    ("weight must be", sharded_ce, {"weight": X["weight"].detach()[:, :2]}),
    ("softcap", sharded_ce, {"softcap": -1.0}),
    ("vocab_size must be an int", sharded_ce, {"vocab_size": 2.5}),
    ("labels must be the same on all ranks", sharded_ce, of_class(99)),
    ("pass a shorter vocab_size, now 1000", sharded_ce, {"vocab_size": 10**900}),
    ("KeyError", sharded_ce, {"hidden": X["hidden"].as_subclass(Odd)}),
    ("backend", of_whole, {"backend": "nope"}),
    ("class_weight must not require grad", LOSS, c(*[1.0] * V) | {
        "class_weight": torch.ones(V, requires_grad=True)}),
    ("reduction must be one of 'mean', 'sum', 'none'", LOSS, {"reduction": "median"}),
    ("temperature must be positive, at least 1e-30", STATS, {"temperature": 0.0}),
    ("hidden must be a tensor", argmax, {"hidden": None}),
]  # fmt: skip
# And on all ranks.
WRONG = [
    (TOO_LARGE, sharded_ce, of_class(V)),
    ("got 6 at flattened position 3", sharded_ce,
     {"labels": X["labels"].index_fill(0, torch.tensor(3), V)}),
    (TOO_LARGE, STATS, of_class(V)),
    ("vocab_size must be 1 to 6 (all rows), got 7", sharded_ce, {"vocab_size": 7}),
    ("TypeError: vocab_size must be an int", sharded_ce, {"vocab_size": 3.0}),
    ("ValueError: label_smoothing must be in [0, 1], got 1.5", sharded_ce,
     {"label_smoothing": 1.5}),
    ("TypeError: process_group must be a process group", sharded_ce, {"process_group": "tp"}),
    ("RuntimeError: backend='triton' cannot run", of_whole, IN_FLOAT64 | {"backend": "triton"}),
    ("RuntimeError: backend='triton' cannot run", LOSS, NONE | IN_FLOAT64 | {"backend": "triton"}),
    ("backend must be None, 'torch' or 'triton'", of_whole, {"backend": "nope"}),
    ("backend must be None, 'torch'", LOSS, NONE | {"backend": "cuda"}),
    ("token_weight must not require grad", of_whole,
     {"token_weight": torch.ones(N, requires_grad=True)}),
    ("TypeError: token_weight must be real numbers", of_whole,
     {"token_weight": torch.ones(N, dtype=torch.complex64)}),
    ("class_weight must be (V,) = (6,), the weights of all ranks", LOSS, c(1, 2, 3)),
    ("labels must have the leading shape of hidden (7,), got (7, 2)", LOSS, NONE | {"labels": TWO}),
    ("temperature must be positive and finite, got 0.0 at flattened position 0", STATS,
     {"temperature": torch.zeros(N)}),
    ("k must be in [1, V] with V=6", topk, {"k": 7}),
    ("teacher_weight", divergence, {"teacher_weight": torch.zeros(V, H)}),
    ("backend='torch'", divergence, {"backend": "triton"}),
    ("pass weight.redistribute(placements=[Shard(0)])", of_placements, {"at": 1}),
    ("ValueError: weight must have Shard(0)", of_placements, {"at": 1}),
    ("or weight.full_tensor()", of_placements, {"at": None}),
    ("pass hidden.redistribute(placements=[Replicate()])", of_placements,
     {"placed": "hidden", "at": 1}),
    ("TypeError: teacher_weight must be a plain tensor", teacher_placed, {}),
    ("TypeError: hidden must be a plain tensor here, got a DTensor", of_placements,
     {"placed": "hidden", "function": fused_cross_entropy}),
    ("TypeError: hidden must be a plain tensor here, got a DTensor", of_placements,
     {"placed": "hidden", "function": fused_logprobs}),
]  # fmt: skip
ROWS = [
    *DIFFERENT,
    *((words, function, {}, wrong) for words, function, wrong in WRONG_ON_ONE),
    *((words, function, wrong, wrong) for words, function, wrong in WRONG),
    # each rank has tokens of its own; one of rank 1 is out of range
    ("labels must hold class indices", sharded_ce, OWN, OWN | of_class(99)),
]


def differ(function, mine, theirs, rank):
    """The error, and the seconds it took; afterwards both ranks are in step."""
    if isinstance(function, tuple):
        function = function[rank]
    group = {"process_group": dist.group.WORLD}
    found = ranks.timed(function, **inputs() | group | (theirs if rank else mine))
    after = sharded_ce(**inputs(), **group)
    return *found, int(after.n_valid)


@functools.cache
def results():
    return ranks.run({i: functools.partial(differ, *row[1:]) for i, row in enumerate(ROWS)})


@pytest.mark.parametrize("row", range(len(ROWS)), ids=lambda i: f"{i} {ROWS[i][0]}")
def test_all_ranks_raise_the_same(row):
    (a, fast, after), (b, fast_too, _) = ranks.of(results(), row)
    assert a == b
    assert ROWS[row][0] in a
    assert max(fast, fast_too) < ranks.SOON
    assert after == N


def test_torch_distributed_must_be_initialised():
    for function in (sharded_ce, sharded_cross_entropy, sharded_logprobs):
        with pytest.raises(ValueError, match=r"process_group: torch.distributed must be init"):
            function(**inputs())
    with pytest.raises(TypeError, match="process_group must be a process group"):
        fused_cross_entropy(**inputs(), process_group="tp")


# ---- a weight that is replicated over a dimension of its mesh -----------------------------------

WORDS = "weight is replicated over a dimension of its mesh over which the"
# What the second replica holds, or only the last rank of it, and the error of that.
REPLICAS = {
    "same": ({}, None),
    "noise": ({"times": 1.001}, None),  # another order of sums
    "ignored": ({"ignored": 3.0}, None),
    "labels": ({"other": ["labels"]}, f"{WORDS} labels differ"),
    "labels of one": ({"other": ["labels"], "from": 3}, f"{WORDS} labels differ"),
    "bad": (
        {"bad": True},
        "labels must be int64 or int32 class indices, got torch.float32 (on rank 3)",
    ),
}


def mesh_2d(change, rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = inputs()
    x["labels"][1] = -100
    if rank >= change.get("from", 2):
        x |= {name: inputs(1)[name] for name in change.get("other", ())}
        x["hidden"] = x["hidden"] * change.get("times", 1)
        x["hidden"][1] += change.get("ignored", 0)
    if rank == 3 and "bad" in change:
        x["labels"] = x["labels"].float()
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(V, H), mesh, [Replicate(), Shard(0)]).requires_grad_()
    hidden = x["hidden"].requires_grad_()
    error = ranks.error_of(lambda: sharded_ce(hidden, weight, x["labels"]).mean().backward())
    return error, None if error else weight.grad.full_tensor()


def test_a_weight_replicated_over_other_tokens_is_refused():
    cases = {name: functools.partial(mesh_2d, change) for name, (change, _) in REPLICAS.items()}
    found = ranks.run(cases, 4)
    for name, (_, words) in REPLICAS.items():
        if words is not None:
            (error,) = {error for error, _ in ranks.of(found, name)}
            assert words in error, name
            continue
        for error, grad in ranks.of(found, name):
            assert error is None
            # "noise" is a thousandth in the logits
            torch.testing.assert_close(grad, found[name][0][1], rtol=0.02, atol=1e-3)


def test_an_error_is_sent_from_where_the_group_can_send(monkeypatch):
    """NCCL sends nothing from the host, where wrong labels may lie."""
    sent = []
    keep = lambda mine, _: sent.append(mine.device.type)  # noqa: E731
    monkeypatch.setattr(agreement, "all_gather_rows", keep)
    monkeypatch.setattr(agreement, "error_text", str)
    monkeypatch.setattr(agreement, "device_for", lambda group, device: torch.device("meta"))
    with agreement.tell_peers_on_error([object()], torch.device("cpu")):
        raise ValueError("labels must be on the device of hidden")
    with agreement.tell_peers_on_error([object()], None):
        raise TypeError("labels must be a tensor")
    assert sent == ["meta", "meta"]


def test_checksums_tell_values_and_order_apart():
    x = torch.tensor([4, 9, 0, -7])
    others = [[9, 9, -3, -7], [9, 6, 0, -7], [9, 4, 0, -7], [4, 9, -7, 0], [4, 9, 0, 6]]
    others += [[~4, 9, 0, -7], [-4, -9, 0, 7], [4, 9 ^ -(2**63), 0, -7]]
    found = {int(_checksum(torch.tensor(other))) for other in others}
    assert len(found | {int(_checksum(x))}) == len(others) + 1
    assert int(_checksum(x.clone())) == int(_checksum(x))
    halves = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    assert int(_checksum(halves)) != int(_checksum(halves.flip(0)))
