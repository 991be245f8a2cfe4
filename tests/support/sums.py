"""Cases of a loss sum for `tests/gpu`: on a device, or smaller in Triton's interpreter."""

import contextlib
from functools import partial

import pytest
import torch

import fusedce
from fusedce.testing import Case, check
from support.device import current, exponentials_by
from support.params import slow

COMPILED = current().type != "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EACH_DTYPE = pytest.mark.parametrize(
    "dtype", [x if COMPILED or x is torch.bfloat16 else slow(x) for x in DTYPES]
)
LOGITS = ["flat", "peaked", "huge"]
OPTIONS = [
    {"bias": True}, {"softcap": 5.0}, {"logit_scale": 0.7}, {"label_smoothing": 0.1},
    {"z_loss": 0.01}, {"token_weight": True},
]  # fmt: skip
ALL_OPTIONS = {name: value for option in OPTIONS for name, value in option.items()}
FEW, MANY = ({"chunk_tokens": n} for n in ((128, 32) if COMPILED else (8, 4)))
WAYS = {  # whether by one GEMM, and arguments of the call
    "small": (True, {}),
    "one GEMM": (True, {"chunk_tokens": 1024}),
    "tiles": (False, {"chunk_tokens": 1024}),
    "few chunks by one GEMM": (True, FEW),
    "chunks by one GEMM": (True, MANY),
    "chunks by tiles": (False, MANY),
    "least budget by one GEMM": (True, {"memory_budget": "least"}),
    "least budget": (False, {"memory_budget": "least"}),
}


def sized(large, small):
    """Sizes for a device, or for the interpreter."""
    return large if COMPILED else small


def quick(*values, on_interpreter):
    """A case that the interpreter leaves to `make test-slow` unless it is one of those named."""
    return values if COMPILED or on_interpreter else slow(*values)


def least_budget(case, device):
    """The least budget of a case, from the words of the error about a smaller one."""
    with pytest.raises(ValueError, match="memory_budget must be at least") as error:
        check(partial(fusedce.fused_ce, backend="triton", memory_budget=1), case, device)
    return int(str(error.value).split("at least ")[1].split()[0])


def check_sum(way, dtype, device, *, N, H, V, logits="flat", need=("hidden", "weight"), **options):
    """Compare loss and gradients of one case, computed in one way (None: the default)."""
    options = dict(options)
    bias, token_weight = options.pop("bias", False), options.pop("token_weight", False)
    need = (*need, "bias") if bias and need else need
    case = Case(
        (N,), H, V, dtype, logits=logits, ignored=0.3, with_bias=bias, requires_grad=need,
        options=options, token_weight=token_weight,
    )  # fmt: skip
    one_gemm, given = WAYS[way] if way else (None, {})
    with exponentials_by(one_gemm) if way else contextlib.nullcontext():
        if given.get("memory_budget") == "least":
            given = {"memory_budget": least_budget(case, device)}
        check(partial(fusedce.fused_ce, backend="triton", **given), case, device)
