"""The suite over eager: each pair computes the same, and its table."""

import pytest
import report
import torch
from lib import losses, problems


@pytest.mark.parametrize("name", losses.PAIRS)
def test_a_pair_computes_the_same(name):
    """With ignored labels, where the problem has some."""
    spec = problems.Spec(40, 16, 300, dtype="float32", ignored=0.25)
    found, expected = (f(*problems.make_inputs(spec)) for f in losses.PAIRS[name])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_is_slower_than_eager_is_bold():
    row = {"suite": "eager", "N": 8, "H": 4, "V": 16, "dtype": "float32", "mode": "train",
           "ignored": 0.0, "budget": None}  # fmt: skip
    times = {"ours: a": [3.0, 2.0], "eager: a": [2.1, 2.5], "ours: b": [2.0], "eager: b": [1.0],
             "ours: c": [1.0], "bare GEMMs": [1.0]}  # fmt: skip
    body = report.over_eager([row | {"name": n, "rounds": t} for n, t in times.items()])
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in body.splitlines()]
    assert lines[0] == ["N, H, V", "", "fp32 training"]
    assert lines[2:] == [["8, 4, 16", "a", "0.95"], ["", "b", "**2.00**"]]


def test_eager_in_float32_is_one_column():
    rows = [{"name": n, "dtype": d} for n in ("eager", "eager, plain") for d in ("float32", "bf16")]
    assert [(r["name"], r["dtype"]) for r in report.without_twins(rows)] == [
        ("eager", "float32"), ("eager", "bf16"), ("eager, plain", "bf16")
    ]  # fmt: skip
