"""Ranks that share a vocabulary and pass different arguments raise the same error at once."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.bounds import EXACT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fusedce import fused_ce, fused_cross_entropy, fused_logprobs
from fusedce.backends.shards import agreement
from fusedce.backends.shards.agreement import _checksum, _signs
from fusedce.sharded import sharded_ce, sharded_cross_entropy, sharded_logprobs

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


def differ(change, rank):
    """Rank 1 passes another argument; afterwards both are in step."""
    x = inputs()
    if rank:
        change(x)
    error, seconds = ranks.timed(sharded_ce, **x, process_group=dist.group.WORLD)
    after = sharded_ce(**inputs(), process_group=dist.group.WORLD)
    return error, seconds, int(after.n_valid)


OPTIONS = {
    "softcap": {"softcap": 3},
    "logit_scale": {"logit_scale": 2},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-3},
    "ignore_index": {"ignore_index": 2},
    "chunk_tokens": {"chunk_tokens": 3},
    "bias": {"bias": torch.zeros(V // 2)},
    "token_weight": {"token_weight": torch.ones(N)},
}
CASES = {
    name: functools.partial(differ, lambda x, option=option: x.update(option))
    for name, option in OPTIONS.items()
}
CASES["hidden.requires_grad"] = functools.partial(differ, lambda x: x["hidden"].requires_grad_())
BAD = {
    "labels": (lambda x: x.update(labels=x["labels"][:3]), "labels"),
    "float labels": (lambda x: x.update(labels=x["labels"].float()), "labels must be int64"),
    "weight": (lambda x: x.update(weight=x["weight"][:, :2]), "weight must be"),
    "softcap < 0": (lambda x: x.update(softcap=-1.0), "softcap"),
    "vocab_size": (lambda x: x.update(vocab_size=2.5), "vocab_size must be an int"),
    "label": (lambda x: x["labels"].fill_(99), "labels must be the same on all ranks"),
    "long number": (lambda x: x.update(vocab_size=10**900), "pass a shorter vocab_size, now 1000"),
    "error of a tensor": (lambda x: x.update(hidden=x["hidden"].as_subclass(Odd)), "KeyError"),
}
CASES |= {name: functools.partial(differ, change) for name, (change, _) in BAD.items()}


def bad_label_of_a_shard(rank):
    """Each rank has tokens of its own; one of rank 1 is out of range."""
    x = inputs(rank)
    if rank:
        x["labels"][3] = 99
    return ranks.timed(sharded_ce, **x, process_group=dist.group.WORLD, tokens_sharded=True)


CASES["bad label"] = bad_label_of_a_shard


def kinds_of_asking(mine, theirs, rank):
    """Each rank calls a function or an option of another kind; afterwards both are in step."""
    function, options = theirs if rank else mine
    error, seconds = ranks.timed(function, **inputs(), **options, process_group=dist.group.WORLD)
    after = sharded_ce(**inputs(), process_group=dist.group.WORLD)
    return error, seconds, int(after.n_valid)


HALF = {"token_weight": torch.full((N,), 0.5)}
ASKED = {
    "tokens_sharded": (
        (sharded_ce, {"tokens_sharded": True}),
        (sharded_ce, {}),
        "tokens_sharded must be the same on all ranks that share the vocabulary, here it is "
        "[True, False]",
    ),
    "token_weight": (
        (sharded_ce, {"token_weight": torch.ones(N)}),
        (sharded_ce, HALF),
        "token_weight must be the same on all ranks that share the vocabulary, here their values",
    ),
    "class_weight": (
        (sharded_cross_entropy, {"class_weight": torch.ones(V)}),
        (sharded_cross_entropy, {"class_weight": torch.tensor([1.0] * V + [0.0])}),
        "class_weight must be the same on all ranks that share the vocabulary",
    ),
    "temperature": (
        (sharded_logprobs, {"temperature": torch.ones(N)}),
        (sharded_logprobs, {"temperature": torch.arange(1.0, 1 + N)}),
        "temperature must be the same on all ranks that share the vocabulary, here their values",
    ),
    "reduction": (
        (sharded_cross_entropy, {"reduction": "sum"}),
        (sharded_cross_entropy, {"reduction": "mean"}),
        "reduction must be the same on all ranks that share the vocabulary, here it is "
        "['sum', 'mean']",
    ),
    "function": (
        (sharded_cross_entropy, {"reduction": "none"}),
        (sharded_logprobs, {}),
        "function must be the same on all ranks that share the vocabulary, here it is ['losses of "
        "tokens', 'statistics of tokens']",
    ),
}
CASES |= {
    f"asked {name}": functools.partial(kinds_of_asking, *case[:2]) for name, case in ASKED.items()
}


def kinds_that_differ(rank):
    """Each rank has tokens of its own, their labels and weights in another dtype than the other's.

    The same loss and gradients as with one kind on both.
    """
    found = []
    same = (torch.int64, torch.int64), (torch.float32, torch.float32)
    for kinds in (same, ((torch.int64, torch.int32), (torch.int16, torch.float64))):
        x = inputs(rank)
        x["weight"] = inputs()["weight"].detach().requires_grad_()
        x["labels"] = x["labels"].to(kinds[0][rank])
        x["token_weight"] = (torch.arange(N) % 3).to(kinds[1][rank])
        loss = sharded_ce(**x, process_group=dist.group.WORLD, tokens_sharded=True).loss_sum
        found.append((loss.detach(), *torch.autograd.grad(loss, x["weight"])))
    return found


CASES["kinds"] = kinds_that_differ


def hidden_of_another_dtype(rank):
    x = inputs()
    if rank:
        x |= {name: x[name].detach().bfloat16() for name in ("hidden", "weight")}
        x["weight"].requires_grad_()
    return ranks.timed(sharded_ce, **x, process_group=dist.group.WORLD, tokens_sharded=True)


def what_a_whole_vocabulary_has(option, rank):
    x = inputs()
    return ranks.timed(fused_ce, **x, **(option if rank else {}), process_group=dist.group.WORLD)


WHOLE = {
    "argmax_out": {"argmax_out": torch.empty(N, dtype=torch.int64)},
    "monitor": {"monitor": ["correct"]},
    "backend": {"backend": "triton"},
    "backend ": {"backend": "nope"},
}
CASES |= {
    f"whole {name}": functools.partial(what_a_whole_vocabulary_has, option)
    for name, option in WHOLE.items()
}
CASES["dtype"] = hidden_of_another_dtype


def plain_inputs():
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng, requires_grad=True)
    weight = torch.randn(V, H, generator=rng, requires_grad=True)
    return hidden, weight, torch.randint(1, V, (N,), generator=rng)


def masked_label(rank):
    """A class whose logit is -inf, as a label: the same gradients as with a whole vocabulary."""
    hidden, weight, labels = plain_inputs()
    bias = torch.zeros(V)
    bias[labels[0]] = -math.inf
    whole = fused_ce(hidden, weight, labels, bias=bias).loss_sum
    wanted = torch.autograd.grad(whole, (hidden, weight))
    rows = slice(0, 2) if rank == 0 else slice(2, V)
    shard = weight.detach()[rows].requires_grad_()
    loss = fused_ce(hidden, shard, labels, bias=bias[rows], process_group=dist.group.WORLD).loss_sum
    grads = torch.autograd.grad(loss, (hidden, shard))
    torch.testing.assert_close((loss, *grads), (whole, wanted[0], wanted[1][rows]))


def checks(rank):
    hidden, weight, labels = plain_inputs()
    group = dist.group.WORLD
    weights = {
        "grad": torch.ones(N, requires_grad=True),
        "complex": torch.ones(N, dtype=torch.complex64),
    }
    found = {
        name: ranks.error_of(
            fused_ce, hidden, weight, labels, process_group=group, token_weight=token_weight
        )
        for name, token_weight in weights.items()
    }
    found["backend"] = ranks.error_of(
        fused_ce, hidden, weight, labels, process_group=group, backend="nope"
    )
    sharded = distribute_tensor(hidden.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    for function in (fused_cross_entropy, fused_logprobs):
        found[function.__name__] = ranks.error_of(function, sharded, weight, labels)
    return found


CASES |= {"masked label": masked_label, "checks": checks}


def mesh_2d(change, rank):
    """``change`` what the second replica holds, or only the last rank of it."""
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

    def step():
        sharded_ce(hidden, weight, x["labels"]).mean().backward()

    error = ranks.error_of(step)
    return error, None if error else (weight.grad.full_tensor(), weight.grad.placements)


@functools.cache
def results():
    return ranks.run(CASES)


@pytest.mark.parametrize("name", [*OPTIONS, "hidden.requires_grad"])
def test_options_that_differ(name):
    (a, fast, after), (b, fast_too, _) = ranks.of(results(), name)
    assert a == b
    assert f"{name} must be the same on all ranks that share the vocabulary" in a
    assert max(fast, fast_too) < ranks.SOON
    assert after == N


@pytest.mark.parametrize("name", BAD)
def test_a_rank_that_raises_before_they_meet(name):
    (a, fast, after), (b, fast_too, _) = ranks.of(results(), name)
    assert a == b
    assert BAD[name][1] in a
    assert max(fast, fast_too) < ranks.SOON
    assert after == N


@pytest.mark.parametrize("name", ASKED)
def test_ranks_that_ask_for_other_things(name):
    (a, fast, after), (b, fast_too, _) = ranks.of(results(), f"asked {name}")
    assert a == b
    assert ASKED[name][2] in a
    assert max(fast, fast_too) < ranks.SOON
    assert after == N


def test_a_bad_label_of_one_shard():
    (a, fast), (b, fast_too) = ranks.of(results(), "bad label")
    assert a == b
    assert "labels must hold class indices" in a
    assert max(fast, fast_too) < ranks.SOON


@pytest.mark.parametrize("name", WHOLE)
def test_a_rank_that_asks_for_what_a_whole_vocabulary_has(name):
    (a, fast), (b, fast_too) = ranks.of(results(), f"whole {name}")
    assert a == b
    assert name.strip() in a
    assert "(on rank 1)" in a or "must be the same on all ranks" in a
    assert max(fast, fast_too) < ranks.SOON


def test_labels_and_weights_of_another_dtype_on_each_rank():
    for uniform, mixed in ranks.of(results(), "kinds"):
        torch.testing.assert_close(mixed, uniform, **EXACT)


def test_hidden_states_of_another_dtype_on_each_rank():
    (a, fast), (b, fast_too) = ranks.of(results(), "dtype")
    assert a == b
    assert "hidden.dtype must be the same on all ranks that share the vocabulary" in a
    assert "torch.float32', 'torch.bfloat16" in a
    assert max(fast, fast_too) < ranks.SOON


def test_a_weight_replicated_over_other_tokens_is_refused():
    found = ranks.run({k: functools.partial(mesh_2d, v) for k, v in REPLICAS.items()}, 4)
    for name in ("same", "noise", "ignored"):
        grads = [grad for error, grad in ranks.of(found, name) if error is None]
        assert len(grads) == 4, ranks.of(found, name)
        for grad, _ in grads:
            # "noise" is a thousandth in the logits
            torch.testing.assert_close(grad, grads[0][0], rtol=0.02, atol=1e-3)
    for name, words in REFUSED.items():
        (error,) = {error for error, _ in ranks.of(found, name)}
        assert words in error, name


def test_an_error_is_sent_from_where_the_group_can_send(monkeypatch):
    """NCCL sends nothing from the host, where wrong labels may lie."""
    sent = []
    monkeypatch.setattr(agreement, "_meet", lambda mine, _: sent.append(mine.device.type))
    monkeypatch.setattr(agreement, "words_of", str)
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


def test_signs_have_no_pattern():
    signs = _signs(torch.arange(100_000)).double()
    assert set(signs.tolist()) == {1, -1}
    assert abs(float(signs.mean())) < 0.01  # three deviations of a mean of 1e5
    for apart in (1, 2, 3, 4, 8, 64, 4096):
        assert abs(float((signs[:-apart] * signs[apart:]).mean())) < 0.015  # five
    assert len({tuple(row) for row in signs[:64].view(8, 8).tolist()}) == 8


REPLICAS = {
    "same": {},
    "noise": {"times": 1.001},  # another order of sums
    "ignored": {"ignored": 3.0},
    "labels": {"other": ["labels"]},
    "hidden": {"other": ["hidden"]},
    "hidden, 3%": {"times": 1.03},
    "hidden of one": {"other": ["hidden"], "from": 3},
    "bad": {"bad": True},
}
WORDS = "weight is replicated over a dimension of its mesh over which the"
REFUSED = {
    "labels": f"{WORDS} labels differ",
    "hidden": f"{WORDS} hidden states differ",
    "hidden, 3%": f"{WORDS} hidden states differ",
    "hidden of one": f"{WORDS} hidden states differ",
    "bad": "labels must be int64 or int32 class indices, got torch.float32 (on rank 3)",
}


def test_a_masked_label_with_a_sharded_vocabulary():
    ranks.of(results(), "masked label")


def test_a_sharded_vocabulary_checks_what_a_whole_one_does():
    for found in ranks.of(results(), "checks"):
        assert "ValueError: token_weight must not require grad" in found["grad"]
        assert "TypeError: token_weight must be real numbers" in found["complex"]
        assert "ValueError: backend must be None, 'torch' or 'triton'" in found["backend"]
        for name in ("fused_cross_entropy", "fused_logprobs"):
            assert "TypeError: hidden must be a plain tensor here, got a DTensor" in found[name]
