"""The training pass: references of its exponentials, and entries kept out of the chunk."""

import pytest
import torch
from support.bounds import SAME_SUMS, logit_rounding
from support.device import exponentials_by
from support.params import slow

import fusedce
from fusedce.backends import plan
from fusedce.backends import triton as backend
from fusedce.backends.triton import divergence_chunks, sum_grads, vocab_tiles
from fusedce.contract.problem import Outputs, Problem, Task
from fusedce.testing import Case

pytestmark = pytest.mark.usefixtures("no_small_calls")

H = 64
V = 700  # three blocks of the interpreter's row


def inputs(dtype, size, right, n=100):
    """Logits of standard deviation ``size``, of which a share ``right`` is highest at the label."""
    rng = torch.Generator().manual_seed(0)
    hidden = (size * torch.randn(n, H, generator=rng)).to(dtype)
    weight = (torch.randn(V, H, generator=rng) / H**0.5).to(dtype)
    labels = torch.randint(V, (n,), generator=rng)
    best = (hidden.double() @ weight.double().T).argmax(1)
    return hidden, weight, torch.where(torch.rand(n, generator=rng) < right, best, labels)


DTYPES = [slow(torch.float32), torch.bfloat16, slow(torch.float16)]


def gradients(problem):
    """Gradients of the sum times its expected factor, and exact gradients."""
    wanted = Outputs(hidden=True, weight=True, bias=problem.bias is not None)
    found = backend.loss_and_grads(Task(problem, wanted), None)
    x = [problem.hidden, problem.weight] + ([] if problem.bias is None else [problem.bias])
    x = [t.double().requires_grad_() for t in x]
    names = ("softcap", "logit_scale", "z_loss")
    options = {name: getattr(problem, name) for name in names}
    bias = x[2] if len(x) == 3 else None
    exact = fusedce.reference_ce(x[0], x[1], problem.labels, bias=bias, **options)
    exact = torch.autograd.grad(exact.loss_sum * found.factor.double(), x)
    return (found.d_hidden, found.d_weight, found.d_bias), exact


def error(x, exact):
    return float((x.double() - exact).norm() / exact.norm())


def rounding(hidden, weight, bias):
    """The largest relative error of a gradient: of its own dtype, and of float32 logits."""
    finite = bias[bias.isfinite()]
    of_logits = 2 * logit_rounding(hidden, weight, finite)
    return max(4 * torch.finfo(hidden.dtype).eps, of_logits)


@pytest.mark.parametrize(
    ("size", "right", "options", "chunk_tokens"),
    [
        slow(1, 0.0, {}, 40),
        (3, 0.5, {}, None),
        slow(8, 0.0, {}, 40),
        slow(8, 1.0, {}, None),
        slow(8, 0.6, {"z_loss": 0.01}, 40),
        slow(8, 0.6, {"softcap": 5.0}, 40),
        slow(8, 0.6, {"softcap": 30.0, "logit_scale": 2.0}, None),
        (8, 0.6, {"logit_scale": 2.0, "z_loss": 0.01}, None),
        slow(40, 0.6, {}, 40),
    ],
)
def test_bf16_gradients_err_no_more_than_eager(size, right, options, chunk_tokens):
    """Or no more than one rounding, and what float32 adds to it.

    A wrong class that has nearly all the probability is rounded, as its row's factor is: up to 2.5
    roundings.
    """
    hidden, weight, labels = inputs(torch.bfloat16, size, right)
    problem = Problem(hidden, weight, labels, chunk_tokens=chunk_tokens, **options)
    found, exact = gradients(problem)
    x = [hidden.requires_grad_(), weight.requires_grad_()]
    logits = torch.nn.functional.linear(*x).float()
    eager = fusedce.reference_ce(logits, torch.eye(V), labels, **options).loss_sum / len(labels)
    for a, b, c in zip(found, exact, torch.autograd.grad(eager, x), strict=False):
        assert error(a.bfloat16(), b) <= max(1.1 * error(b.bfloat16(), b), error(c, b))


def zipf_inputs():
    """As of text: a few classes are the labels of most tokens, and likely everywhere."""
    hidden, weight, _ = inputs(torch.bfloat16, 3, 0.0)
    often = 1 / torch.arange(1, V + 1)
    hidden[:, 0] = 1
    weight[:, 0] = often.log().bfloat16()
    rng = torch.Generator().manual_seed(2)
    return hidden, weight, torch.multinomial(often, len(hidden), True, generator=rng)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("way", ["chunks", "tiles", "tiles by one GEMM"])
@pytest.mark.parametrize("logits", ["flat", "peaked", "Zipf"])
def test_few_chunks_and_their_tiles_err_no_more_than_eager(monkeypatch, logits, way, chunks):
    """Each chunk rounds the weight's gradient once, which at most four chunks do."""
    drawn = {"flat": (1, 0.0), "peaked": (8, 0.6)}
    hidden, weight, labels = (
        zipf_inputs() if logits == "Zipf" else inputs(torch.bfloat16, *drawn[logits])
    )
    make = plan.chunked if way == "chunks" else plan.tiled_chunks
    monkeypatch.setattr(sum_grads, "choose_plan", lambda call, **_: make(call, 100 // chunks, 256))
    with exponentials_by("GEMM" in way):
        found, exact = gradients(Problem(hidden, weight, labels))
    x = [hidden.requires_grad_(), weight.requires_grad_()]
    eager = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*x).float(), labels)
    for a, b, c in zip(found, exact, torch.autograd.grad(eager, x), strict=False):
        assert error(a.bfloat16(), b) <= error(c, b)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("way", ["chunks", "tiles", "tiles by one GEMM"])
@pytest.mark.parametrize("classes", [8, V])
def test_rows_of_frequent_labels_err_no_more_than_eager(monkeypatch, classes, way, chunks):
    """Hidden states share a mean, labels are as likely as the head says: a row's parts cancel."""
    rng = torch.Generator().manual_seed(3)
    mean = torch.randn(H, generator=rng)
    hidden = mean + 0.5 * torch.randn(600, H, generator=rng)
    often = -torch.arange(1.0, classes + 1).log() if classes > 8 else torch.zeros(classes)
    weight = 0.05 * torch.randn(classes, H, generator=rng) + often[:, None] * mean / (mean @ mean)
    x = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    probabilities = (x[0].double() @ x[1].double().T).softmax(1)
    labels = torch.multinomial(probabilities, 1, generator=rng).flatten()
    make = plan.chunked if way == "chunks" else plan.tiled_chunks
    monkeypatch.setattr(sum_grads, "choose_plan", lambda call, **_: make(call, 600 // chunks, 256))
    with exponentials_by("GEMM" in way):
        found, exact = gradients(Problem(*(t.detach() for t in x), labels))
    eager = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*x).float(), labels)
    theirs = torch.autograd.grad(eager, x)[1]
    print(
        error(found[1], exact[1]) / error(exact[1].bfloat16(), exact[1]),
        error(theirs, exact[1]) / error(exact[1].bfloat16(), exact[1]),
    )
    assert error(found[1], exact[1]) <= error(theirs, exact[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("above", [50.0, 90.0, 1000.0])
def test_blocks_far_above_the_label_take_references_of_their_own(dtype, above):
    """Logits of 0 in the label's block, of ``above`` in another, of a little less in the third."""
    hidden, weight, labels = inputs(dtype, 1, 0.0, n=20)
    labels %= 256
    bias = torch.zeros(V, dtype=dtype)
    bias[300:310] = above
    bias[600:605] = above - 3
    found, exact = gradients(Problem(hidden, weight, labels, bias=bias, chunk_tokens=7))
    for a, b in zip(found, exact, strict=True):
        assert error(a, b) <= rounding(hidden, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("classes", "masked", "level"),
    [(1, 0, -1000.0), (257, 0, -1000.0), slow(257, 0, -85.0), slow(513, 0, -92.0),
     (700, 512, -1000.0), slow(700, 512, -85.0)],
)  # fmt: skip
def test_a_block_with_no_other_class_has_no_say(dtype, classes, masked, level):
    """The label alone in the last block, or a block of classes that are masked; all logits low."""
    hidden, weight, labels = inputs(dtype, 1, 0.0, n=20)
    weight, labels = weight[:classes], labels % classes
    labels[:10] = classes - 1
    bias = torch.full((classes,), level, dtype=dtype)
    if masked:
        bias[masked:], labels = -torch.inf, labels % masked
    found, exact = gradients(Problem(hidden, weight, labels, bias=bias, chunk_tokens=7))
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).norm() <= rounding(hidden, weight, bias) * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_impossible_label_costs_infinity_and_has_a_gradient(dtype):
    hidden, weight, labels = inputs(dtype, 1, 0.0, n=20)
    bias = torch.zeros(V, dtype=dtype)
    bias[labels[3]] = -torch.inf
    found = backend.loss_and_grads(
        Task(Problem(hidden, weight, labels, bias=bias), Outputs(hidden=True, weight=True)), None
    )
    assert found.loss == torch.inf
    x = hidden.double().requires_grad_()
    logits = x @ weight.double().T + bias.double()
    (exact,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), x)
    assert error(found.d_hidden, exact) <= rounding(hidden, weight, bias)


@pytest.mark.parametrize(
    ("chunk_tokens", "dtype"), [(5, torch.bfloat16), (2, torch.bfloat16), (1, torch.float32)]
)
def test_up_to_four_chunks_are_summed_in_the_gradients_own_dtype(monkeypatch, chunk_tokens, dtype):
    """A large head's float32 buffer would be twice its gradient."""
    seen = []
    add = sum_grads.add_product

    def add_and_look(total, *args, **options):
        if len(total) == V:  # not the rows of frequent labels
            seen.append(total.dtype)
        return add(total, *args, **options)

    monkeypatch.setattr(sum_grads, "add_product", add_and_look)
    problem = Problem(*inputs(torch.bfloat16, 1, 0.0, n=5), chunk_tokens=chunk_tokens)
    found = backend.loss_and_grads(
        Task(problem, Outputs(hidden=False, weight=True, bias=False)), None
    )
    assert set(seen) == {dtype}
    assert found.d_weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "chunk_tokens", "ignored"),
    [(torch.bfloat16, 40, 0.3), slow(torch.bfloat16, None, 0.0), slow(torch.float16, 40, 1.0),
     slow(torch.float16, None, 0.3), slow(torch.float32, 40, 0.0), slow(torch.float32, None, 1.0)],
)  # fmt: skip
def test_training_inside_a_graph_is_training_outside(monkeypatch, dtype, chunk_tokens, ignored):
    """There the valid rows cannot be counted: all take part, and the result must not show it."""
    hidden, weight, labels, bias = Case(
        (90,), 24, 200, dtype, ignored=ignored, with_bias=True
    ).tensors()

    def run():
        one = torch.ones(())  # as inside, where the host knows no factor
        options = {"softcap": 5.0, "logit_scale": 0.7, "chunk_tokens": chunk_tokens}
        problem = Problem(hidden, weight, labels, bias=bias, expected_upstream=one, **options)
        wanted = Outputs(hidden=True, weight=True, bias=True)
        return tuple(backend.loss_and_grads(Task(problem, wanted), None))

    outside = run()
    monkeypatch.setattr(sum_grads, "capturing", lambda device: True)
    # the rows that take part there add zeros, in other places of a sum
    for x, y in zip(run(), outside, strict=True):
        eps = max(torch.finfo(x.dtype).eps, SAME_SUMS) if x.is_floating_point() else 0
        atol = eps * float(y.abs().max()) if y.numel() else 0
        torch.testing.assert_close(x, y, rtol=eps, atol=atol)


def statistics(hidden, weight, labels, **options):
    stats = fusedce.fused_logprobs(hidden, weight, labels, chunk_tokens=40, **options)
    return (stats.logprob + stats.entropy).sum()


def divergence_of(kind):
    teacher, other, _, _ = Case((90,), 24, 200, seed=1).tensors()
    return lambda h, w, y, **options: fusedce.fused_kl(
        h, w, teacher.to(h), other.to(h), y, divergence=kind, **options
    ).mean()


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [(statistics, torch.float32), slow(statistics, torch.bfloat16),
     slow(statistics, torch.float16), (divergence_of("forward"), torch.float32),
     (divergence_of("jsd"), torch.float32)],
)  # fmt: skip
def test_a_loss_inside_a_graph_is_one_outside(monkeypatch, loss, dtype):
    hidden, weight, labels, bias = Case(
        (90,), 24, 200, dtype, ignored=0.3, with_bias=True
    ).tensors()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def run():
        value = loss(hidden, weight, labels, bias=bias, backend="triton")
        return value.detach(), *torch.autograd.grad(value, leaves)

    outside = run()
    for module in (sum_grads, divergence_chunks, vocab_tiles):
        monkeypatch.setattr(module, "capturing", lambda device: True)
    # the same terms; rows are added, whose gradients are 0
    eps = max(torch.finfo(dtype).eps, SAME_SUMS)
    for x, y in zip(run(), outside, strict=True):
        torch.testing.assert_close(x, y, rtol=eps, atol=eps * float(y.abs().max()))
