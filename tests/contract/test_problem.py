"""All loss functions, the reference and the tests' strategies have every option."""

import inspect
from typing import get_type_hints

import pytest
import torch

from fusedce import FusedLinearCrossEntropyLoss, fused_ce, fused_cross_entropy, linear_cross_entropy
from fusedce.contract.checks import autocast, check_problem, flattened, tempered
from fusedce.contract.objective import slopes, token_losses
from fusedce.contract.problem import NUMBERS, Divergence, Outputs, Problem, Shard, Task
from fusedce.loss.reference import reference_ce
from fusedce.sharded import sharded_ce, sharded_cross_entropy
from fusedce.testing import OPTIONS

LOSSES = (
    fused_ce,
    fused_cross_entropy,
    linear_cross_entropy,
    FusedLinearCrossEntropyLoss,
    sharded_ce,
    sharded_cross_entropy,
    reference_ce,
)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_every_number_is_an_option_of_every_loss(loss):
    assert set(NUMBERS) <= inspect.signature(loss).parameters.keys()
    assert set(NUMBERS) <= set(OPTIONS)  # those that are drawn


# ---- every field survives every step ------------------------------------------------------------


def own_values(record):
    """A record whose every field has a value of its own, right in type."""
    made = {}
    for number, (name, hint) in enumerate(get_type_hints(record).items(), start=3):
        text = str(hint)
        if "Tensor" in text:
            made[name] = torch.full((), float(number))
        else:
            kind = next(x for x in (bool, int, float, str) if x.__name__ in text)
            made[name] = number % 2 == 0 if kind is bool else kind(number)
    return record(**made)


def own_problem(*unset):
    """A right problem of 6 tokens, whose fields have values of their own, but those ``unset``."""
    return own_values(Problem).replace(
        hidden=torch.randn(2, 3, 4), weight=torch.randn(9, 4), labels=torch.arange(6).view(2, 3),
        bias=torch.randn(9), token_weight=torch.rand(2, 3), class_weight=torch.rand(9),
        temperature=1 + torch.rand(2, 3), label_smoothing=0.25, **dict.fromkeys(unset),
    )  # fmt: skip


def assert_same(before, after):
    for name, old, new in zip(before._fields, before, after, strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(old.flatten(), new.flatten()), name
        else:
            assert old == new, name


STEPS = {
    "replace": lambda problem: problem.replace(bias=problem.bias),
    "flattened": flattened,
    "checked": lambda problem: flattened(check_problem(problem)),
    "tempered": lambda problem: tempered(problem, problem.temperature),
    "autocast": lambda problem: autocast(problem.replace(bias=problem.bias.double())),
    "rows": lambda problem: problem.rows(slice(None)),
}


@pytest.mark.parametrize("unset", ["chunk_tokens", "memory_budget"])  # one of them may be given
@pytest.mark.parametrize("step", STEPS)
def test_every_field_survives_every_step(step, unset):
    problem = own_problem(unset)
    after = STEPS[step](problem)
    if step == "autocast":  # to the widest dtype
        wide = {name: getattr(problem, name).double() for name in ("hidden", "weight", "bias")}
        problem = problem.replace(**wide)
    assert_same(problem, after)


@pytest.mark.parametrize("shard", [None, own_values(Shard)])
@pytest.mark.parametrize("divergence", [None, own_values(Divergence)])
def test_every_field_survives_an_operator(divergence, shard):
    task = Task(own_values(Problem), own_values(Outputs), divergence, shard)
    (after,) = Task.of(task.flat())
    for record, same in zip(task, after, strict=True):
        assert (record is None) == (same is None)
        if record is not None:
            assert_same(record, same)


def test_slopes_are_the_losses_derivatives_and_affine_in_the_log_sum_exp():
    """Triton's kernels are given two values of them, before they know a log-sum-exp."""
    problem = flattened(check_problem(own_problem("memory_budget", "chunk_tokens", "backend")))
    rng = torch.Generator().manual_seed(0)

    def found(lse):
        return torch.stack([torch.as_tensor(x).expand(6) for x in slopes(problem, y, lse)])

    y = problem.labels
    inputs = torch.randn(3, 6, dtype=torch.float64, generator=rng).requires_grad_()
    losses = token_losses(problem, y, *inputs)
    by_nll, by_lse, by_zmean = torch.autograd.grad(losses.sum(), inputs)[0]
    expected = torch.stack([by_nll, by_lse, -by_zmean])
    torch.testing.assert_close(found(inputs[1].detach()), expected)
    at_0, at_1, at_2 = (found(torch.full((6,), x, dtype=torch.float64)) for x in (0.0, 1.0, 2.0))
    assert not torch.equal(at_0, at_1)
    torch.testing.assert_close(at_2 - at_1, at_1 - at_0)
