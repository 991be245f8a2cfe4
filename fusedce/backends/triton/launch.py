"""Arguments of kernels, packing of the rows that count, and launches on the right device.

The arguments of the walk over the vocabulary are derived here and nowhere else (:func:`walk`).
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from ...contract.labels import bad_label_message
from ...contract.problem import Problem, Projection
from ...kernels.compact import compact_kernel
from ...kernels.walk import EXPONENTIALS, STATISTICS, SUMS, walk_kernel
from ..devices import type_of
from ..gradients import is_row_major
from ..plan import multiple_of_16
from .archs import Blocks, vocabulary_splits

# Triton's interpreter, which takes a GPU's tensors as well, multiplies bfloat16 as integers.
INTERPRETED = not isinstance(walk_kernel, triton.JITFunction)
# Triton 3.4 reads shared memory and lets TMA overwrite it without a proxy fence between.
TMA = not triton.__version__.startswith("3.4.")


def walk(
    problem: Problem,
    blocks: Blocks,
    epilogue: Any,
    *,
    stride_split: int | None = None,
    **given: Any,
) -> None:
    """Launch the walk over the vocabulary; a forgotten argument of the epilogue is a TypeError.

    ``stride_split``: between the splits of maxima, sums and the like; None: N.
    """
    hidden = of_whole_steps("hidden", problem.hidden, blocks.BLOCK_H)
    weight = of_whole_steps("weight", problem.weight, blocks.BLOCK_H)
    (V, H), N = weight.shape, len(hidden)
    tiles_per_split, splits = vocabulary_splits(V, blocks)
    hidden_tiles = weight_tiles = None
    if blocks.DESCRIPTOR and TMA:
        weight_tiles = TensorDescriptor.from_tensor(weight, [blocks.BLOCK_V, blocks.BLOCK_H])
        if given.get("rows") is None:  # else the rows of a block are not one after another
            hidden_tiles = TensorDescriptor.from_tensor(hidden, [blocks.BLOCK_N, blocks.BLOCK_H])
    common = {
        "hidden": hidden,
        "weight": weight,
        "hidden_tiles": hidden_tiles,
        "weight_tiles": weight_tiles,
        "labels": problem.labels,
        "N": N,
        "H": H,
        "V": V,
        "stride_hn": hidden.stride(0),
        "stride_wv": weight.stride(0),
        "stride_split": N if stride_split is None else stride_split,
        "tiles_per_split": tiles_per_split,
        "splits": splits,
        **pointwise(Projection.of(problem)),
        "EPILOGUE": epilogue.value,
        "GRAD_SCALE": 1.0,
        "BLOCK_N": blocks.BLOCK_N,
        "BLOCK_V": blocks.BLOCK_V,
        "BLOCK_H": blocks.BLOCK_H,
        "GROUP_N": blocks.GROUP_N,
        "INPUT_PRECISION": input_precision(hidden),
        "UPCAST": INTERPRETED,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }
    launch_grid(
        walk_kernel,
        (-(-N // blocks.BLOCK_N) * splits,),
        **(dict.fromkeys(_NOT_OF[epilogue.value]) | common | given),
    )


# An epilogue never reads these. All else must be given, if only as None.
_NOT_OF = {
    SUMS.value: (
        "best", "factors", "class_weight", "temperature", "moments", "zsums", "exps", "width",
        "stride_ec",
    ),
    STATISTICS.value: (
        "factors", "block_losses", "tickets", "loss_sum", "lse", "exps", "width", "stride_ec",
    ),
    EXPONENTIALS.value: (
        "rows", "count", "block_losses", "tickets", "loss_sum", "lse", "class_weight",
        "temperature", "moments", "zsums",
    ),
}  # fmt: skip


def pointwise(head: Projection) -> dict[str, Any]:
    """Arguments of the pointwise steps after the product; ``None`` for a step that is left out."""
    return {
        "bias": None if head.bias is None else head.bias.contiguous(),
        "scale": None if head.scale == 1.0 else head.scale,
        "softcap": head.softcap,
    }


def has_options(problem: Problem) -> bool:
    """Whether a bias, scale or soft-cap follows the product."""
    return any(x is not None for x in pointwise(Projection.of(problem)).values())


def padded(x: Tensor) -> Tensor:
    """``x (V,)`` with zeros up to a :func:`multiple_of_16`."""
    return pad(x, (0, multiple_of_16(len(x)) - len(x)))


def of_whole_steps(name: str, x: Tensor, step: int) -> Tensor:
    """``x (n, H)``, or a copy, so that rows are aligned and a multiple of ``step`` long.

    Rows are padded with zeros. The main loop then needs no masks, and its loads are wide.
    """
    if has_whole_steps(x, step):
        return x
    more = -x.shape[1] % step
    why = f"rows are no multiple of {step} long" if more else "rows are not aligned to 16 bytes"
    warn_once(f"{name} is copied on every call, since its {why}")
    return pad(x, (0, more)) if more else x.clone(memory_format=torch.contiguous_format)


def has_whole_steps(x: Tensor, step: int) -> bool:
    """Whether ``x (n, H)`` can be walked over as it is."""
    return is_row_major(x, step) and x.data_ptr() % 16 == 0


@functools.cache
def warn_once(what: str) -> None:
    """Warn once per message about a slower path."""
    warnings.warn(f"fusedce: {what}; this is slower, the result is the same", stacklevel=5)


def input_precision(x: Tensor) -> str:
    """Precision of the kernels' products: TF32 for float32 where torch's own products use it."""
    tf32 = x.dtype == torch.float32 and type_of(x.device).tf32 and tf32_allowed()
    return "tf32" if tf32 else "ieee"


def tf32_allowed() -> bool:
    """Torch's setting. Reading the older attribute raises once the newer one was used."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # torch 2.9
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


class Rows(NamedTuple):
    """The rows that count, packed, and their numbers."""

    rows: Tensor  # (N,) int32, of which `used` are written
    used: Tensor  # () int32
    n_valid: Tensor  # () int64: with those of weight 0; negative for a bad label
    loss_sum: Tensor  # () fp32, 0


def compact(
    problem: Problem,
    tickets: Tensor | None = None,
    used: Tensor | None = None,
) -> Rows:
    """Pack the rows with a label to predict and a weight (or ``used (N,)``) other than 0.

    ``tickets (...)`` int32 are set to 0.
    """
    labels, device = problem.labels, problem.labels.device
    N = labels.shape[0]  # (len asks for four times as long)
    weights = problem.token_weight if used is None else used
    packed = Rows(
        torch.empty(N, dtype=torch.int32, device=device),
        torch.empty((), dtype=torch.int32, device=device),
        torch.empty((), dtype=torch.int64, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )
    launch_grid(
        compact_kernel,
        (1,),
        labels=labels,
        rows=packed.rows,
        count=packed.used,
        n_valid=packed.n_valid,
        loss_sum=packed.loss_sum,
        tickets=tickets,
        token_weight=None if weights is None else weights.contiguous(),
        N=N,
        V=problem.weight.shape[0],
        ignore_index=problem.ignore_index,
        n_tickets=0 if tickets is None else len(tickets),
        BLOCK_N=1024,
    )
    return packed


def probe(device: torch.device) -> None:
    """Compile and run a small kernel on ``device``; what Triton or the device raises goes on."""
    with device_guard(device):
        weight = torch.zeros(1, 16, dtype=torch.float32, device=device)
        compact(Problem(weight, weight, torch.zeros(1, dtype=torch.int64, device=device)))
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()


def raise_on_cpu(n_valid: Tensor, problem: Problem) -> None:
    """Raise ValueError for a bad label on a CPU; on a GPU the code in ``n_valid`` reports it."""
    if n_valid.device.type == "cpu" and n_valid.item() < 0:
        V = problem.weight.shape[0]
        raise ValueError(bad_label_message(int(n_valid), V, problem.ignore_index, problem.labels))


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Context in which ``device`` is the current one, on which Triton launches."""
    if device.type == "cpu":
        return nullcontext()
    return getattr(torch, device.type).device(device)


def launch_grid(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launch ``kernel``.

    Products and sums are fused: Triton 3.10 does so only when asked, and without it the forward
    kernel spills.
    """
    kernel[grid](**arguments, enable_fp_fusion=True)
