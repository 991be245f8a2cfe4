"""Compiled functions that are handed lazy logits, as trainers compile their loss."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both
from support.heads import V, ce, compiled, plain_model, tokens

from fusedce import head_report, replace_loss_head


def compiled_loss(z, y):
    return F.cross_entropy(z.flatten(0, 1).float(), y.flatten())


@pytest.mark.parametrize("view", [lambda z: z, lambda z: z * 0.5, lambda z: z[:, :]])
def test_a_compiled_loss(view):
    run = compiled(compiled_loss)
    both(lambda m, x, y: run(view(m(x)), y))


def test_a_compiled_loss_of_transposed_logits(no_logits):
    model, x, y = replace_loss_head(plain_model()), tokens(3, 7), tokens(3, 7, seed=1)
    run = compiled(lambda x, y: F.cross_entropy(model(x).mT, y))
    torch.testing.assert_close(run(x, y), ce(plain_model()(x), y))


@pytest.mark.parametrize("first", ["compiled", "fused"])
def test_a_compiled_function_and_a_fused_loss(first):
    run = compiled(lambda z: z.logsumexp(-1).square().mean())

    def program(m, x, y):
        z = m(x)
        if first == "compiled":
            return run(z) + ce(z, y)
        loss = ce(z, y)
        return loss + run(z)

    both(program)


def test_a_compiled_function_of_a_view_of_what_was_looked_at():
    run = compiled(lambda z: z.exp().sum())

    def program(m, x, y):
        z = m(x)
        seen = z.argmax(-1).float()
        return run(z.view(-1, V)) + ce(z, y) + run(z[:, 1:]), seen

    both(program)


def test_a_compiled_function_that_writes_into_logits():
    run = compiled(lambda z: z.detach().mul_(2))

    def program(m, x, y):
        z = m(x)
        with torch.no_grad():
            run(z)
        return z.square().sum() + ce(z, y)

    both(program)


def test_lazy_logits_are_not_compiled_and_their_loss_is_fused():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(compiled_loss, backend=counter)
    for _ in range(3):
        both(lambda m, x, y: run(m(x), y))
    assert counter.frame_count <= 1  # that of real logits
    model = replace_loss_head(plain_model())
    run(model(tokens(3, 7)), tokens(3, 7, seed=1)).backward()
    report = head_report(model)
    assert (report.losses_fused, report.logits_made) == (1, 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")
def test_inductor_is_handed_lazy_logits():
    """Generated code reads memory by its address, and lazy logits have none."""
    torch._dynamo.reset()
    run = torch.compile(compiled_loss)
    both(lambda m, x, y: run(m(x), y))


def test_a_compiled_function_of_what_the_loss_is_differentiated_by():
    run = compiled(lambda g: g.square().sum())

    def program(m, x, y):
        z = m(x)
        loss = ce(z, y)
        (g,) = torch.autograd.grad(loss, z, retain_graph=True)
        return loss, run(g)

    both(program)


@pytest.mark.slow
@pytest.mark.parametrize("again", [1, 2])
def test_a_compiled_loss_of_a_compiled_models_logits(again):
    run_loss = torch.compile(compiled_loss, backend="aot_eager")
    torch._dynamo.reset()

    def program(m, x, y):
        run = torch.compile(m, backend="aot_eager")
        loss = sum(run_loss(run(x), y) for _ in range(again))
        z = run(x)
        return loss + run_loss(z, y) + ce(z.detach() + z, y)

    both(program)


FACTORS = {
    "product": lambda z, t: z * t,
    "first": lambda z, t: t * z,
    "in place": lambda z, t: z.mul_(t),
    "divisor": lambda z, t: z / t,
    "twice": lambda z, t: t * (z * 0.5) / (t * t),
    "before a cap": lambda z, t: 2 * torch.tanh(z * t / 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FACTORS)
def test_factors_without_dimensions_stay_lazy_in_compiled_models(name, bias, request):
    results = []
    for model in (plain_model(bias=bias), replace_loss_head(plain_model(bias=bias))):

        def program(x, y, t, m=model):
            return ce(FACTORS[name](m(x), t), y)

        run = program
        if results:
            request.getfixturevalue("no_logits")
            run = compiled(program, fullgraph=True)
        for number in (0.7, 1.3):  # one graph for both
            model.zero_grad()
            trained = torch.tensor(number, dtype=torch.float64).requires_grad_()
            loss = run(tokens(3, 7), tokens(3, 7, seed=1), trained)
            loss.backward()
        results.append((loss, trained.grad, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_a_compiled_model_is_given_may_be_written_into_later():
    results = []
    for model in (plain_model(), replace_loss_head(plain_model())):

        @torch.no_grad()
        def program(x, y, t, bias, m=model):
            t, bias, rows = t * 1, bias * 1, y > 10
            z = (m(x) * t + bias)[rows]
            t.add_(1), bias.mul_(2), rows.logical_not_()
            return ce(z, y[y > 10]), z.amax(-1)

        run = compiled(program) if results else program
        results.append(
            run(tokens(3, 7), tokens(3, 7, seed=1), torch.tensor(0.5), torch.linspace(0, 1, V))
        )
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")
def test_a_model_and_a_loss_that_inductor_compiles(no_logits):
    """Generated code does what the graph says: forward, backward, a soft-cap and a factor."""
    results = []
    for model in (plain_model(bias=True), replace_loss_head(plain_model(bias=True))):

        def program(x, y, t, m=model):
            return ce(2 * torch.tanh(m(x) * t / 2)[:, 1:], y[:, 1:])

        if results:
            torch._dynamo.reset()
        run = torch.compile(program, backend="inductor", fullgraph=True) if results else program
        t = torch.tensor(0.7, requires_grad=True)
        loss = run(tokens(3, 7), tokens(3, 7, seed=1), t)
        loss.backward()
        results.append((loss, t.grad, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
