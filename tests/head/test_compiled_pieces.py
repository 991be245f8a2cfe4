"""Compiled functions that are handed lazy logits, as trainers compile their loss."""

import pytest
import torch
import torch.nn.functional as F
from support.attacks import both
from support.heads import V, ce, compiled


def compiled_loss(z, y):
    return F.cross_entropy(z.flatten(0, 1).float(), y.flatten())


@pytest.mark.parametrize("view", [lambda z: z, lambda z: z * 0.5, lambda z: z[:, :]])
def test_a_compiled_loss(view):
    run = compiled(compiled_loss)
    both(lambda m, x, y: run(view(m(x)), y))


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


def test_a_compiled_loss_twice_in_a_row_compiles_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(compiled_loss, backend=counter)
    for _ in range(3):
        both(lambda m, x, y: run(m(x), y))
    assert counter.frame_count <= 2  # real logits and lazy ones


def test_a_compiled_function_of_what_the_loss_is_differentiated_by():
    run = compiled(lambda g: g.square().sum())

    def program(m, x, y):
        z = m(x)
        loss = ce(z, y)
        (g,) = torch.autograd.grad(loss, z, retain_graph=True)
        return loss, run(g)

    both(program)


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
