"""`fusedce bench`: time and memory of the loss of one shape, beside the peers installed here.

Times are interleaved and memory comes from fresh processes, as :mod:`fusedce.measure` says. The
scripts in ``bench/`` of the repository measure more, and more carefully.

Each implementation takes ``hidden (N, H)``, ``weight (V, H)``, ``labels (N,)`` and options, and
returns the mean loss over valid tokens, ready for ``backward``. A peer is imported at its first
call; the table says which are not installed.
"""

from __future__ import annotations

import functools
import statistics
import textwrap
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedce.measure import median_seconds, memory_method, peak_extra_bytes
from fusedce.tools import Countdown, table
from fusedce.tools.doctor import device_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Progress = Callable[[str], None]
_PROCESS = 6.0  # seconds until a new process has imported torch and drawn its inputs


def bench(
    shape: tuple[int, int, int], *, dtype: str, device: str, repeats: int,
    compiled: bool, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Time and memory of every implementation that runs here, forward and backward.

    Args:
        shape: N tokens, a quarter of them ignored, H hidden size, V vocabulary.
        dtype: "fp32", "bf16" or "fp16"; device: of torch; repeats: timed calls of each.
        compiled: ``torch.compile`` of the eager loss as well (it takes most of a minute).
        progress: called with a line before each step.
    """
    on_cpu = torch.device(device).type == "cpu"
    names = [n for n in (ON_CPU if on_cpu else tuple(IMPLEMENTATIONS)) if compiled or n != COMPILED]
    target: dict[str, Any] = {"shape": shape, "dtype": dtype, "device": device}
    calls, failed = {FLOOR: prepare(FLOOR, **target)}, dict[str, str]()
    method = memory_method(device)
    countdown = Countdown(len(names) * (2 if method else 1) + repeats + 1, progress)
    once = dict[str, float]()  # seconds of a call
    for name in names:
        countdown.step(f"preparing {name}")
        try:
            call = prepare(name, **target)
            begin = time.monotonic()
            call()
            calls[name], once[name] = call, time.monotonic() - begin
        except ModuleNotFoundError as problem:
            failed[name] = f"{problem.name} is not installed"
        except Exception as problem:  # a peer that fails is a row of the table
            if name == "fused_ce":
                raise
            failed[name] = f"{type(problem).__name__}: {str(problem).strip().splitlines()[:1]}"
    countdown.n -= len(failed) if method else 0
    a_round = sum(once.values()) + max(once.values())  # the bare products are no slower

    def before_round(i: int) -> None:
        left = (repeats + 1 - i) * a_round + (memory(list(once)) if method else 0)
        countdown.step(f"timing {len(calls)} implementations, round {i} of {repeats}", left)

    def memory(names: list[str]) -> float:
        """Estimated seconds: processes that start, draw inputs and call once."""
        return sum(_PROCESS + 2 * once[name] for name in names)

    seconds = median_seconds(calls, repeats, before_round=before_round)
    rows: list[dict[str, Any]] = [
        {"name": name, "seconds": found, "extra_bytes": None} for name, found in seconds.items()
    ]
    for i, row in enumerate(rows[1:] if method else ()):
        left = memory(list(once)[i:])
        countdown.step(f"memory of {row['name']}, in a process of its own", left)
        row["extra_bytes"] = peak_extra_bytes(
            "fusedce.tools.bench:prepare", {"name": row["name"], **target}, device=device
        )
    machine = device_name(torch.device(device))
    where = f"{machine}; torch {torch.__version__}; {repeats} rounds; a quarter of labels ignored"
    return {
        "shape": shape,  # N, H, V
        "dtype": dtype,
        "device": device,
        "where": where,
        "memory_method": method or "not measured on this system",
        "rows": rows,  # the bare products first
        "skipped": failed,  # why an implementation did not run
    }


def prepare(
    name: str, shape: tuple[int, int, int], dtype: str, device: str
) -> Callable[[], object]:
    """The call to measure, on random inputs (:func:`make_call`)."""
    N, H, V = shape
    rng = torch.Generator().manual_seed(0)
    make = functools.partial(torch.randn, generator=rng)
    hidden = make(N, H).to(device, DTYPES[dtype])
    weight = (make(V, H) / H**0.5).to(device, DTYPES[dtype])
    labels = torch.randint(V, (N,), generator=rng)
    labels[torch.randperm(N, generator=rng)[: N // 4]] = -100
    return make_call(name, hidden, weight, labels.to(device))


def make_call(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mode: str = "train",
    loss: Callable[..., Tensor] | None = None,
    **options: Any,
) -> Callable[[], object]:
    """A call that computes one loss and drops its gradients; warmed up on a few rows.

    Args:
        name: of :data:`IMPLEMENTATIONS`, or :data:`FLOOR`.
        hidden, weight, labels: ``(N, H)``, ``(V, H)`` and ``(N,)``.
        mode: "forward": the loss; "train": also the gradients of hidden and weight.
        loss: in place of the one of that name; options: of the loss.
    """
    if name == FLOOR:
        return bare_gemms(hidden, weight, labels, mode)
    loss = loss or IMPLEMENTATIONS[name]
    for x in (hidden, weight):
        x.requires_grad_(mode == "train")

    @torch.set_grad_enabled(mode != "forward")
    def run(hidden: Tensor, labels: Tensor, **options: Any) -> None:
        out = loss(hidden, weight, labels, **options)
        if out.requires_grad:  # a loss in chunks has done it
            out.backward()
        hidden.grad = weight.grad = None

    # Libraries and thread pools that the first call of a process loads are not counted as memory.
    if name != COMPILED:  # which would compile twice
        run(hidden.detach()[:16].clone().requires_grad_(hidden.requires_grad), labels[:16])
    return functools.partial(run, hidden, labels, **options)


def text(found: dict[str, Any]) -> str:
    """The measurements, for a terminal."""
    N, H, V = found["shape"]
    caption = f"Forward + backward, N={N}, H={H}, V={V}, {found['dtype']}. {found['where']}"
    memory = f"Medians of the rounds. Memory: {found['memory_method']}, beyond the inputs."
    floor, rows = statistics.median(found["rows"][0]["seconds"]), []
    for row in found["rows"]:
        ms, extra = [1e3 * x for x in row["seconds"]], row["extra_bytes"]
        rows.append({
            "": row["name"],
            "ms": f"{statistics.median(ms):.1f}",
            "range": f"{min(ms):.1f} to {max(ms):.1f}",
            "/ GEMMs": f"{statistics.median(ms) / 1e3 / floor:.2f}",
            "extra MiB": "" if extra is None else f"{extra / 2**20:.0f}",
        })  # fmt: skip
    return "\n".join(
        (
            *textwrap.wrap(caption, 80),
            table(rows),
            *(f"{name}: {why}" for name, why in found["skipped"].items()),
            *textwrap.wrap(memory, 80),
        )
    )


# ---- the implementations --------------------------------------------------------------------


def fused_ce(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """:func:`fusedce.fused_ce`."""
    import fusedce

    return fusedce.fused_ce(hidden, weight, labels, **options).mean()


def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Torch's own loss on float32 logits, as models of transformers compute it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(eager)  # here, since the compiler's import takes seconds


def torch_chunked(
    hidden: Tensor, weight: Tensor, labels: Tensor, batch_chunk_size: int | None = None
) -> Tensor:
    """``F.linear_cross_entropy``, of torch 2.12 and later; tokens of a chunk, or its own choice."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=batch_chunk_size)
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger-Kernel's fused loss in Triton."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)


def cut_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, filter_eps: float | str | None = "high"
) -> Tensor:
    """Cut-cross-entropy; ``filter_eps=None`` computes all gradients."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, labels, filter_eps=filter_eps)


def quack(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """QuACK's chunked loss."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(hidden, weight, labels, reduction="mean")


def bare_gemms(
    hidden: Tensor, weight: Tensor, labels: Tensor, mode: str = "train"
) -> Callable[[], object]:
    """The products on the valid rows that every method needs, 2 N V H FLOPs each.

    In the mode "forward" the logits, in "train" both gradients too.
    """
    h, w = hidden.detach()[labels != -100].clone(), weight.detach()

    def gemms() -> None:
        logits = torch.mm(h, w.t())
        if mode == "train":
            torch.mm(logits, w)
            torch.mm(logits.t(), h)

    return gemms


FLOOR = "bare GEMMs"
COMPILED = "compiled eager"
IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "fused_ce": fused_ce,
    "eager": eager,
    COMPILED: lambda *inputs: _compiled()(*inputs),
    "F.linear_cross_entropy": torch_chunked,
    "Liger-Kernel": liger,
    "cut-cross-entropy": cut_cross_entropy,
    "QuACK": quack,
}
ON_CPU = tuple(IMPLEMENTATIONS)[:4]
