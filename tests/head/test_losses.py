"""Losses of lazy logits: which are fused, which take real logits, which are observed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support.attacks import hands_on, same
from support.bounds import STATISTIC, same_model
from support.heads import MODES, V, ce, loss_and_grads, plain_model, tokens
from torch import nn

import fusedce
from fusedce import replace_loss_head
from fusedce.head.observe import LossObserver


def rows(z, y, **options):
    return F.cross_entropy(z.flatten(0, -2), y.flatten(), **options)


LOSSES = {
    "view": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1)),
    "module": lambda z, y: nn.CrossEntropyLoss()(z.view(-1, z.size(-1)), y.view(-1)),
    "sum": lambda z, y: rows(z, y, reduction="sum"),
    "shift": lambda z, y: ce(z[..., :-1, :].contiguous(), y[..., 1:]),
    "slices": lambda z, y: rows(z[:, :-1], y[:, 1:]),
    "one position": lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    "mask": lambda z, y: F.cross_entropy(z[y > 10], y[y > 10]),
    "transpose": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "permute": lambda z, y: F.cross_entropy(z.permute(0, 2, 1).float(), y),
    "time first": lambda z, y: F.cross_entropy(z.transpose(0, 1).reshape(-1, V), y.t().reshape(-1)),
    "squeeze": lambda z, y: F.cross_entropy(z[:1].squeeze(0), y[0]),
    "scale": lambda z, y: ce(z * 0.3, y),
    "divide": lambda z, y: ce((z / 1.7).float(), y),
    "cap": lambda z, y: ce(torch.tanh(z / 2.0) * 2.0, y),
    "scaled cap": lambda z, y: ce(((3 * z) / 2.0).tanh().mul(-2.0), y),
    "added bias": lambda z, y: ce((z + torch.linspace(-1, 1, V)[None]).float() * 2, y),
    "bias added to": lambda z, y: ce(torch.linspace(-1, 1, V) + z, y),
    "some classes": lambda z, y: rows(z[..., 5:40], y % 35),
    "ignore": lambda z, y: rows(z, y, ignore_index=int(y[0, 0])),
    "none": lambda z, y: (
        F.cross_entropy(z.transpose(1, 2), y, reduction="none").square()[y > 10].sum()
    ),
    "smoothing": lambda z, y: rows(z, y, label_smoothing=0.1),
    "smoothed cap": lambda z, y: rows(torch.tanh(z / 2.0) * 2.0, y, label_smoothing=0.1),
    "class weight": lambda z, y: rows(
        z.float(), y, weight=torch.linspace(0, 1, V), label_smoothing=0.2
    ),
    "one token": lambda z, y: F.cross_entropy(z[0, 0], y[0, 0], label_smoothing=0.1),
    "mask of bytes": lambda z, y: F.cross_entropy(z[(y > 10).byte()], y[(y > 10).byte()]),
    "chunk": lambda z, y: sum(map(ce, z.chunk(2), y.chunk(2))),
    "split": lambda z, y: sum(map(ce, z.split([3, 4], 1), y.split([3, 4], 1))),
    "tensor_split": lambda z, y: ce(z.tensor_split(3, dim=1)[1], y.tensor_split(3, dim=1)[1]),
    "unbind": lambda z, y: sum(map(ce, z.unbind(1), y.unbind(1))),
    "select": lambda z, y: ce(z.select(0, -1), y.select(0, -1)),
    "iteration": lambda z, y: sum(map(ce, z, y)),
    "mT": lambda z, y: F.cross_entropy(z.mT, y),
    "negation": lambda z, y: ce(-(-z * 0.5), y),
    "0-d factor": lambda z, y: ce(z * torch.tensor(0.5), y),
    "0-d divisor": lambda z, y: ce(z / torch.tensor(1.7, dtype=torch.float64), y),
    "several losses": lambda z, y: ce(z, y) + 2 * ce(z[:, 1:], y[:, 1:]) + ce(z * 0.5, y),
    "handed on": lambda z, y: ce(hands_on(z) * 0.5, y),
    "list of rows": lambda z, y: ce(z[[0, 2]], y[[0, 2]]),
    "index_select": lambda z, y: ce(
        z.index_select(1, torch.tensor([4, 0])), y.index_select(1, torch.tensor([4, 0]))
    ),
    "long way": lambda z, y: rows(
        z.to(torch.float32).unsqueeze(0).squeeze(0).type_as(z).clone(), y
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_fused(name, bias, mode, request):
    model, x, y = plain_model(bias), tokens(3, 7), tokens(3, 7, seed=1)
    native = loss_and_grads(model, x, y, LOSSES[name], mode)
    replace_loss_head(model)
    request.getfixturevalue("no_logits")
    fused = loss_and_grads(model, x, y, LOSSES[name], mode)
    same_model(fused, native)


@pytest.mark.parametrize("of", [lambda z, t: z + t, lambda z, t: z * t[0] + t[0]])
@same
def test_a_trained_bias_and_temperature_get_their_gradients(m, x, y, of):
    t = torch.linspace(0.5, 1, V).requires_grad_()
    z = of(m(x), t)
    loss = ce(z * 0.5, y) + ce(z[:, 1:], y[:, 1:])
    loss.backward(retain_graph=True)
    m.zero_grad()
    return loss, t.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, no_logits):
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    replace_loss_head(model)
    with torch.autocast("cpu", dtype):
        z = model(x)
        inside = F.cross_entropy(z.view(-1, V), y.view(-1))
    after = F.cross_entropy(z.float().view(-1, V), y.view(-1))  # as accelerate does
    assert z.dtype == dtype
    assert inside.dtype == after.dtype == torch.float32
    torch.testing.assert_close(inside, after)
    hidden = model[0](x).to(dtype)
    exact = fusedce.reference_ce(hidden, model[1].weight.to(dtype), y).mean()
    torch.testing.assert_close(inside.double(), exact, rtol=STATISTIC, atol=0)
    after.backward()
    assert model[1].weight.grad.dtype == torch.float32


@same
def test_a_sum_of_nothing_over_0_tokens_trains_nothing(m, x, y):
    """As transformers computes a step without labels: the loss is NaN, its gradients are 0."""
    (rows(m(x), torch.full_like(y, -100), reduction="sum") / 0).backward()
    return m[0].weight.grad.sum()


@pytest.mark.parametrize("weight", [None, torch.linspace(0, 1, V)])
@same
def test_the_mean_of_a_sequence_without_labels_is_nan(m, x, y, weight):
    y[0] = -100
    losses = [F.cross_entropy(z, labels, weight) for z, labels in zip(m(x), y, strict=True)]
    assert losses[0].isnan()
    return torch.stack(losses).nanmean()


@pytest.mark.parametrize("at_first", [True, False])
@same
def test_a_head_frozen_when_it_ran_or_when_the_loss_is_computed(m, x, y, at_first):
    m[1].requires_grad_(not at_first)
    z = m(x)
    m[1].requires_grad_(at_first)
    loss = ce(z, y)
    m[1].requires_grad_(True)
    return loss


# ---- losses that are observed, and their denominator ------------------------------------------


def test_an_observer_is_of_its_thread_alone():
    """A model that is evaluated in another thread keeps its own denominator, and is not counted."""
    model = replace_loss_head(plain_model())
    x, y = tokens(3, 5), tokens(3, 5, seed=1)
    with LossObserver(torch.tensor(3.0)) as observer, ThreadPoolExecutor(1) as pool:
        there = pool.submit(lambda: ce(model(x), y)).result()
        assert not observer.losses
        here = ce(model(x), y)
        assert len(observer.losses) == 1
    torch.testing.assert_close(there, ce(plain_model()(x), y))
    torch.testing.assert_close(here * 3, there * 15)


def test_an_observer_holds_what_it_monitors():
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    with torch.no_grad():
        y[0, :5] = model[1](model[0](x)).argmax(-1)[0, :5]
        correct = int((model(x).argmax(-1) == y).sum())
    with LossObserver(monitor=("correct",)) as observer:
        LOSSES["view"](model(x), y).backward()
    assert [int(m["correct"]) for m in observer.monitors] == [correct]


def times_its_probability(z, y, **options):
    nll = F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="none", **options)
    n = (y != options.get("ignore_index", -100)).sum()
    return (nll * (-nll).detach().exp()).sum() / n


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (2, 1)])  # the second computes gradients in backward
@pytest.mark.parametrize(
    ("asked", "exact"),
    [({"label_smoothing": 0.2}, lambda z, y, **o: rows(z, y, label_smoothing=0.2, **o)),
     ({"token_scaled": True}, times_its_probability)],
)  # fmt: skip
def test_an_observer_asks_for_another_loss(asked, exact, shape, reads):
    """Also where other losses wait for backward, and where a hook reads the gradient."""
    model, plain = replace_loss_head(plain_model()), plain_model()
    x, y = tokens(*shape), tokens(*shape, seed=1)
    y[0, 0] = 7
    for m, loss in ((model, rows), (plain, exact)):
        z = m(x)
        first = ce(m(tokens(4, 20)), tokens(4, 20, seed=1))  # waits for backward
        if reads:
            z.register_hook(lambda g: g + 0)
        with LossObserver(**asked) as observer:
            value = loss(z, y, ignore_index=7)
        (first + value).backward()
        if m is model:
            ours = value
            ((_, n_valid, reduction),) = observer.losses
            assert (int(n_valid), reduction) == (int((y != 7).sum()), "mean")
    torch.testing.assert_close(ours, value)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# ---- real logits ----------------------------------------------------------------------------


REAL = {
    "float8": lambda h, head, y: ce(head(h * 9).to(torch.float8_e4m3fn).float(), y),
    "logits of one position added": lambda h, head, y: ce(head(h) + head(h[:, :1]), y),
    "a row added to its sequence": lambda h, head, y: ce(head(h)[:, -1:] + head(h), y),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("grad", [True, False])
def test_a_loss_that_the_rules_do_not_cover_takes_real_logits(name, grad):
    y, results = tokens(3, 7, seed=1), []
    for model in (plain_model(), replace_loss_head(plain_model())):
        with torch.set_grad_enabled(grad):
            loss = REAL[name](model[0](tokens(3, 7)), model[1], y)
        if grad:
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if grad)])
    same_model(results[1], results[0])


@pytest.mark.parametrize("grad", [False, True])
def test_a_head_of_one_hidden_state(grad):
    for loss in (lambda z: F.cross_entropy(z, torch.tensor(3)), lambda z: z.logsumexp(-1)):
        results = []
        for model in (plain_model(True), replace_loss_head(plain_model(True))):
            with torch.set_grad_enabled(grad):
                value = loss(model(torch.tensor(5)))
            if grad:
                value.backward()
            results.append([value.detach(), *(p.grad for p in model.parameters() if grad)])
        same_model(results[1], results[0])
