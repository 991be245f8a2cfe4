"""Errors on awkward inputs, against float64, stay within what docs/accuracy.md promises.

python tests/loss/test_numerics.py          # writes the tables of docs/accuracy.md
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedce import fused_ce, reference_ce
from fusedce.backends.gradients import saved_grad_dtypes, sizes_of
from fusedce.backends.plan import CHUNKS, FEW_CHUNKS, ONE_CHUNK, TILES, choose_plan, least_bytes
from fusedce.contract.problem import Outputs, Problem

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"
BEGIN, END = "<!-- numerics -->", "<!-- end -->"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHOWN = (torch.bfloat16,)  # on the page
SIZES = {"torch": (64, 48, 700), "triton": (40, 32, 1500)}  # N, H, V
SEEDS = {"torch": 5, "triton": 2}  # draws of each input, whose errors are taken together
WAYS = (ONE_CHUNK, FEW_CHUNKS, CHUNKS, TILES)
NAMES = ("hidden", "weight", "bias")
ROUNDINGS_OF_A_LOGIT = 2.4
"""A float32 rounding of 1, relative to the rounding error of a gradient, 2.5e-8 of its norm."""
EXCEPTIONS = {("triton", "label_smoothing=1"): 1.5}
"""Backend and inputs whose gradients in bfloat16 or float16 may exceed 1.3 roundings, to what."""
NOISE = 1.02
"""Two norms of thousands of independent errors of one size, over each other."""
LOSS = 2e-6
"""What the relative error of the loss may be."""


class Inputs(NamedTuple):
    """Inputs of a loss in float32."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor  # (V,)
    labels: Tensor  # (N,)
    options: dict[str, float]

    def cast(self, dtype: torch.dtype) -> Inputs:
        return self._replace(**{k: getattr(self, k).to(dtype) for k in NAMES})


Draw = Callable[[int, int, int, int], Inputs]  # of N, H, V and a seed


def flat(N: int, H: int, V: int, seed: int) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(N, H, generator=rng), torch.randn(V, H, generator=rng)
    bias, labels = torch.randn(V, generator=rng), torch.randint(V, (N,), generator=rng)
    return Inputs(hidden / H**0.5, weight, bias, labels, {})


def peaked(N: int, H: int, V: int, seed: int) -> Inputs:
    """The label's probability is 1 - 1e-7 before the inputs are rounded."""
    x = flat(N, H, V, seed)
    unit = F.normalize(x.weight, dim=1)
    gap = math.log(1e7 * V)
    return x._replace(hidden=gap * unit[x.labels], weight=unit, bias=torch.zeros(V))


def huge(N: int, H: int, V: int, seed: int) -> Inputs:
    x = flat(N, H, V, seed)
    return x._replace(hidden=x.hidden * (1e4 / float((x.hidden @ x.weight.T).abs().max())))


def tiny(N: int, H: int, V: int, seed: int) -> Inputs:
    x = flat(N, H, V, seed)
    return x._replace(hidden=1e-4 * x.hidden, bias=1e-4 * x.bias)


def constant(N: int, H: int, V: int, seed: int) -> Inputs:
    x = flat(N, H, V, seed)
    return x._replace(weight=x.weight[:1].expand(V, H).contiguous(), bias=torch.zeros(V))


def one_hot_rows(N: int, H: int, V: int, seed: int) -> Inputs:
    x = flat(N, H, V, seed)
    return x._replace(hidden=8 * F.one_hot(torch.arange(N) % H, H).float())


def masked_classes(N: int, H: int, V: int, seed: int) -> Inputs:
    x = flat(N, H, V, seed)
    masked = torch.arange(V) % 4 == 1
    labels = torch.where(masked[x.labels], x.labels - 1, x.labels)
    return x._replace(bias=x.bias.masked_fill(masked, -math.inf), labels=labels)


def near_duplicates(N: int, H: int, V: int, seed: int) -> Inputs:
    x = flat(N, H, V, seed)
    weight = x.weight.clone()
    weight[1::2] = weight[: V - 1 : 2] * (1 + 2**-7)
    return x._replace(hidden=6 * x.hidden, weight=weight)


def shared_mean(N: int, H: int, V: int, seed: int) -> Inputs:
    """Rows of the head have a mean cosine of 0.9."""
    x = flat(N, H, V, seed)
    mean = torch.randn(H, generator=torch.Generator().manual_seed(seed + 1000))
    return x._replace(hidden=6 * x.hidden, weight=0.1**0.5 * x.weight + 0.9**0.5 * mean)


def smoothed(share: float) -> Draw:
    return lambda *given: flat(*given)._replace(options={"label_smoothing": share})


INPUTS: dict[str, Draw] = {
    "flat": flat,
    "peaked, p = 1 - 1e-7": peaked,
    "huge, up to 1e4": huge,
    "tiny, up to 1e-4": tiny,
    "constant logits": constant,
    "one-hot hidden states": one_hot_rows,
    "a quarter of classes at -inf": masked_classes,
    "near-duplicate classes": near_duplicates,
    "shared mean of the head": shared_mean,
    "V = 1": lambda N, H, V, seed: flat(N, H, 1, seed),
    "N = 1": lambda N, H, V, seed: flat(1, H, V, seed),
    "label_smoothing=0.1": smoothed(0.1),
    "label_smoothing=0.5": smoothed(0.5),
    "label_smoothing=1": smoothed(1.0),
}


class Errors(NamedTuple):
    """Of the loss, relative; of gradients, over the error of rounding the exact ones once."""

    loss: float
    hidden: float
    weight: float
    bias: float

    @property
    def gradients(self) -> tuple[float, float, float]:
        return self.hidden, self.weight, self.bias


Loss = Callable[[Inputs], Tensor]  # the mean over tokens


def errors(drawn: Sequence[Inputs], dtype: torch.dtype, loss: Loss) -> Errors:
    """Errors of ``loss`` on inputs cast to ``dtype``; the exact result is that of the cast ones.

    Squares of the norms are summed over the draws. Where rounding the exact gradient has no error
    to compare with, the labels' part of it is rounded instead: a gradient that cancels to 0 but for
    float64's own roundings (constant logits), and one that the dtype holds exactly (multiples of
    1/N, where each token has one class).
    """
    made = [[0.0, 0.0] for _ in Errors._fields]
    for x in drawn:
        given = x.cast(dtype)
        wide = given.cast(torch.float64)
        got, exact = _results(given, loss), _results(wide, _exact)
        made[0][0] += float(got[0].double() - exact[0]) ** 2
        made[0][1] += float(exact[0]) ** 2
        parts = (wide.weight[wide.labels], wide.hidden, torch.ones(len(x.labels)))
        for total, g, e, part in zip(made[1:], got[1:], exact[1:], parts, strict=True):
            half, size = torch.finfo(dtype).eps / 2, float(part.norm()) / len(x.labels)
            once, norm = float((e.to(dtype).double() - e).norm()), float(e.norm())
            if norm < 1e-12 * size or once < 1e-3 * half * norm:
                once = half * size
            total[0] += float((g.double() - e).norm()) ** 2
            total[1] += once**2
    return Errors(*(math.sqrt(a / b) if b else math.inf if a else 0.0 for a, b in made))


def _results(inputs: Inputs, loss: Loss) -> list[Tensor]:
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in NAMES}
    value = loss(inputs._replace(**leaves))
    return [value.detach(), *torch.autograd.grad(value, list(leaves.values()))]


def _exact(x: Inputs) -> Tensor:
    return reference_ce(*x[:2], x.labels, bias=x.bias, **x.options).mean()


def _eager(x: Inputs) -> Tensor:
    """The loss as it is usually written: logits in the inputs' dtype, then float32."""
    z = F.linear(x.hidden, x.weight, x.bias).float()
    return F.cross_entropy(z, x.labels, **x.options)


def ways(inputs: Inputs, dtype: torch.dtype, backend: str) -> Iterator[tuple[str, Loss]]:
    """Each way to compute, chosen by the option that selects it."""
    x = inputs.cast(dtype)
    N = len(x.labels)
    triton, wanted = backend == "triton", Outputs(hidden=True, weight=True, bias=True)
    problem = Problem(*x[:2], x.labels, bias=x.bias, memory_budget=0, **x.options)
    call = sizes_of(
        problem, wanted, N, saved_grad_dtypes(problem), logit=None if triton else 4, triton=triton
    )
    options = {
        ONE_CHUNK: {"chunk_tokens": N},
        FEW_CHUNKS: {"chunk_tokens": max(N // 4, 1)},
        CHUNKS: {"chunk_tokens": max(N // 8, 1)},
        # Room for a backward pass that leaves out a token, as smoothed losses need.
        TILES: {"memory_budget": least_bytes(call._replace(N=N + 1))},
    }
    for way in WAYS:
        if choose_plan(call, **options[way]).name == way:

            def loss(x: Inputs, chosen: dict[str, int] = options[way]) -> Tensor:
                more = {**x.options, **chosen, "backend": backend}
                return fused_ce(*x[:2], x.labels, bias=x.bias, **more).mean()

            yield way, loss


def measure(name: str, dtype: torch.dtype, backend: str) -> dict[str, Errors]:
    """Errors of each way to compute that these sizes allow, and of eager code."""
    drawn = [INPUTS[name](*SIZES[backend], seed) for seed in range(SEEDS[backend])]
    found = {way: errors(drawn, dtype, loss) for way, loss in ways(drawn[0], dtype, backend)}
    found["eager"] = errors(drawn, dtype, _eager)
    return found


def bound(name: str, dtype: torch.dtype, backend: str, eager: float) -> float:
    """What the error of a gradient may be, in roundings of the exact one."""
    if dtype != torch.float32:
        return max(EXCEPTIONS.get((backend, name), 1.3), NOISE * eager)
    x = INPUTS[name](*SIZES[backend], 0)
    z = F.linear(x.hidden, x.weight, x.bias)
    largest = float(z[z.isfinite()].abs().max())
    return 1.3 * max(eager, (1 + largest) * ROUNDINGS_OF_A_LOGIT)


CELL = re.compile(r"(\S+); (\S+) (\S+) (\S+)")


def within(found, name, dtype, backend):
    for way in set(found) - {"eager"}:
        of = found[way]
        assert of.loss <= LOSS, (backend, dtype, name, way)
        for at, (error, eager) in enumerate(
            zip(of.gradients, found["eager"].gradients, strict=True)
        ):
            most = bound(name, dtype, backend, eager)
            assert error <= most, (backend, dtype, name, way, NAMES[at], error, most)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_torch(name, dtype):
    within(measure(name, dtype, "torch"), name, dtype, "torch")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peaked, p = 1 - 1e-7", "a quarter of classes at -inf"])
def test_triton(name, monkeypatch):
    monkeypatch.setitem(SEEDS, "triton", 1)
    within(measure(name, torch.bfloat16, "triton"), name, torch.bfloat16, "triton")


@pytest.mark.parametrize("backend", SIZES)
def test_these_sizes_have_every_way(backend):
    """Few chunks are a GPU's; elsewhere a weight gradient is added in float32."""
    found = dict(ways(INPUTS["flat"](*SIZES[backend], 0), torch.bfloat16, backend))
    assert list(found) == [way for way in WAYS if backend == "triton" or way != FEW_CHUNKS]


def pages():
    """``(backend, dtype, inputs, {column: Errors})`` of each row of the page."""
    backend = dtype = columns = None
    for line in PAGE.read_text().split(BEGIN)[1].splitlines():
        if line.startswith("#### "):
            backend, name = line.removeprefix("#### ").split(", ")
            dtype = getattr(torch, name)
        elif line.startswith("| inputs"):
            columns = [cell.strip() for cell in line.strip("|").split("|")][1:]
        elif line.startswith("| "):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            matches = {c: CELL.fullmatch(cell) for c, cell in zip(columns, cells, strict=True)}
            yield backend, dtype, name, {
                column: Errors(*map(float, match.groups()))
                for column, match in matches.items()
                if match
            }  # fmt: skip


def test_the_figures_of_the_page_are_within_its_bounds():
    rows = list(pages())
    assert [(backend, dtype, name) for backend, dtype, name, _ in rows] == [
        (backend, dtype, name) for backend in SIZES for dtype in SHOWN for name in INPUTS
    ]
    for backend, dtype, name, found in rows:
        assert len(found) >= 2
        within(found, name, dtype, backend)


def test_an_error_beyond_the_bounds_is_found():
    found = measure("flat", torch.bfloat16, "torch")
    found["one chunk"] = found["one chunk"]._replace(weight=1.4)
    with pytest.raises(AssertionError):
        within(found, "flat", torch.bfloat16, "torch")


# ---- the tables of the page


def table(backend: str, dtype: torch.dtype) -> str:
    columns = ["one chunk", *(["few chunks"] if backend == "triton" else []), "tiles", "eager"]
    rows = [f"| inputs | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in INPUTS:
        found = measure(name, dtype, backend)
        cells = [_cell(found[c]) if c in found else "" for c in columns]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


def _cell(of: Errors) -> str:
    gradients = " ".join(f"{x:.2f}" if x < 100 else f"{x:.0e}" for x in of.gradients)
    return f"{of.loss:.0e}; {gradients}"


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":  # which is read when triton is imported
        again = [sys.executable, *sys.argv]
        os.execve(sys.executable, again, os.environ | {"TRITON_INTERPRET": "1"})
    import triton
    from lib.results import device_name, stamp
    from support.interpreter import as_on_hardware

    torch.set_num_threads(1)
    text = ""
    with as_on_hardware():
        for backend, (N, H, V) in SIZES.items():
            for dtype in SHOWN:
                text += f"#### {backend}, {str(dtype).removeprefix('torch.')}\n\n"
                text += f"N={N}, H={H}, V={V}.\n\n{table(backend, dtype)}\n\n"
    versions = f"torch {torch.__version__}, triton {triton.__version__}, interpreted"
    text += "{}; {}; {date}, commit {commit}\n".format(device_name("cpu"), versions, **stamp())
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{text}{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    sys.path[:0] = [str(PAGE.parents[1] / folder) for folder in ("tests", "bench")]
    main()
