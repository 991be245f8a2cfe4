"""Errors on awkward inputs stay within what docs/accuracy.md promises."""

import re

import pytest
import torch
from support import numerics

CELL = re.compile(r"(\S+); (\S+) (\S+) (\S+)")


def within(found, name, dtype, backend):
    for way in set(found) - {"eager"}:
        of = found[way]
        assert of.loss <= numerics.LOSS, (backend, dtype, name, way)
        for at, (error, eager) in enumerate(
            zip(of.gradients, found["eager"].gradients, strict=True)
        ):
            most = numerics.bound(name, dtype, backend, eager)
            assert error <= most, (backend, dtype, name, way, numerics.NAMES[at], error, most)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", numerics.DTYPES, ids=str)
@pytest.mark.parametrize("name", numerics.INPUTS)
def test_torch(name, dtype):
    within(numerics.measure(name, dtype, "torch"), name, dtype, "torch")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peaked, p = 1 - 1e-7", "a quarter of classes at -inf"])
def test_triton(name, monkeypatch):
    monkeypatch.setitem(numerics.SEEDS, "triton", 1)
    within(numerics.measure(name, torch.bfloat16, "triton"), name, torch.bfloat16, "triton")


def pages():
    """``(backend, dtype, inputs, {column: Errors})`` of each row of the page."""
    backend = dtype = columns = None
    for line in numerics.PAGE.read_text().split(numerics.BEGIN)[1].splitlines():
        if line.startswith("#### "):
            backend, name = line.removeprefix("#### ").split(", ")
            dtype = getattr(torch, name)
        elif line.startswith("| inputs"):
            columns = [cell.strip() for cell in line.strip("|").split("|")][1:]
        elif line.startswith("| "):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            matches = {c: CELL.fullmatch(cell) for c, cell in zip(columns, cells, strict=True)}
            yield backend, dtype, name, {
                column: numerics.Errors(*map(float, match.groups()))
                for column, match in matches.items()
                if match
            }  # fmt: skip


def test_the_figures_of_the_page_are_within_its_bounds():
    rows = list(pages())
    assert [(backend, dtype, name) for backend, dtype, name, _ in rows] == [
        (backend, dtype, name)
        for backend in numerics.SIZES
        for dtype in numerics.DTYPES
        for name in numerics.INPUTS
    ]
    for backend, dtype, name, found in rows:
        assert len(found) >= 2
        within(found, name, dtype, backend)


def test_an_error_beyond_the_bounds_is_found():
    found = numerics.measure("flat", torch.bfloat16, "torch")
    found["one chunk"] = found["one chunk"]._replace(weight=1.4)
    with pytest.raises(AssertionError):
        within(found, "flat", torch.bfloat16, "torch")
