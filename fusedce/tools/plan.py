"""`fusedce plan`: memory of a model's loss, by eager, compiled and fused code.

Memory is the peak beyond the model and the hidden states, less the bytes of their gradients, as
docs/benchmarks.md measures it. That of fused_ce is the backend's own plan; that of the others
follows from the logits they hold. At eager's peak its gradients do not exist yet: they use that
memory again. Only looking up a model class needs torch.
"""

from __future__ import annotations

import textwrap
from typing import Any, NamedTuple

from ..backends.plan import EXP_GEMM_H, TILES, Sizes, choose_plan, device_budget, least_bytes
from .model_sizes import UserError, sizes

MiB, GiB = 2**20, 2**30
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Device(NamedTuple):
    """What of a device decides the memory of a loss."""

    memory: int  # bytes
    gemm_block: int = 0  # classes of a block where one GEMM makes the exponentials
    gemm_up_to: int = 2**31  # largest H for which one does


DEVICES = {
    "A100": Device(80 * GiB),
    "H100": Device(80 * GiB, 256),
    "H200": Device(139 * GiB, 256),
    "B200": Device(180 * GiB, 256, EXP_GEMM_H),
    "MI300X": Device(192 * GiB),
    "RTX 4090": Device(24 * GiB),
}


def plan(
    model: str, *, tokens: int = 8192, dtype: str = "bf16", device: str = "H200"
) -> dict[str, Any]:
    """Plan one micro-batch of ``tokens`` positions, all of them with a label.

    Args:
        model: see :mod:`fusedce.tools.model_sizes`; ``H,V`` will do.
        tokens: of a micro-batch on one device.
        dtype: of hidden states and head: "fp32", "bf16" or "fp16".
        device: a key of :data:`DEVICES`, or "cpu".

    Raises:
        UserError: unknown model or device, or a size that is not positive.
    """
    if device != "cpu" and device not in DEVICES:
        raise UserError(f"device must be cpu or one of {', '.join(DEVICES)}, got {device!r}")
    (H, V), b = sizes(model), BYTES[dtype]
    asked = call(tokens, H, V, b, DEVICES.get(device))
    ours, logits = choose_plan(asked), b * tokens * V
    # The gradient of the hidden states waits in its own dtype under a budget, but for float16.
    limited = asked._replace(wide_hidden=dtype == "fp16")
    eager = max(12 * tokens * V - b * (tokens + V) * H, logits)
    return {
        "model": {"name": model, "H": H, "V": V},
        "tokens": tokens,
        "dtype": dtype,
        "device": device,
        "logits_bytes": logits,  # of one copy
        "chunk_tokens": ours.tokens,  # of a chunk of fused_ce
        "least_budget": least_bytes(limited),
        # the least budget with which a step is as fast as without one
        "recommended_budget": ours.bytes,
        "by_budget": by_budget(limited, ours.bytes),
        # bytes beyond weights, hidden states and their gradients, by purpose
        "methods": {
            "eager": {"log-softmax, its gradient, the slope": eager},
            "compiled eager": {"logits": logits},
            "fused_ce": ours.held,
        },
    }


def by_budget(asked: Sizes, most: int) -> list[dict[str, int]]:
    """Products of the head's size, and tokens of a chunk or block, for whole MiB up to ``most``.

    Counted, for no hardware: small chunks also have slower products, and add to the weight gradient
    more often.
    """
    budget, steps = -(-least_bytes(asked) // MiB) * MiB, []
    while True:
        way = choose_plan(asked, memory_budget=budget)
        products = 4 if way.name == TILES else 3
        steps.append({"budget": budget, "products": products, "tokens": way.tokens})
        if budget >= most:
            return steps
        budget = min(2 * budget, most)


def call(N: int, H: int, V: int, b: int, device: Device | None) -> Sizes:
    """Sizes for the plan of a device, ``None`` being a CPU, which computes in float32.

    ``b``: bytes of an element. All labels are valid.
    """
    if device is None:
        return Sizes(N, N, V, H, b, 4, on_cpu=True, triton=False, budget=device_budget(None))
    block = device.gemm_block if device.gemm_up_to >= H else 0
    return Sizes(N, N, V, H, b, b, budget=device_budget(device.memory), gemm_block=block)


def text(found: dict[str, Any]) -> str:
    """The plan, for a terminal."""
    of, tokens = found["model"], found["tokens"]
    sums = {name: sum(held.values()) for name, held in found["methods"].items()}
    lines = [
        f"{of['name']}: H={of['H']}, V={of['V']}; {tokens} tokens, {found['dtype']}, "
        f"{found['device']}",
        f"  one copy of the logits         {size(found['logits_bytes'])}",
        f"  tokens of a chunk of fused_ce  {found['chunk_tokens']} of {tokens}",
        f"  least memory_budget            {size(found['least_budget'])}",
        f"  recommended memory_budget      {size(found['recommended_budget'])}",
        "Work by memory_budget (a step without a limit: 3 products):",
        *(
            f"  {size(step['budget'])}: {step['products']} products of {step['tokens']} tokens"
            for step in found["by_budget"]
        ),
        "Memory of the loss, counted from sizes:",
    ]  # fmt: skip
    for name, held in found["methods"].items():
        purposes = ", ".join(f"{purpose} {size(count)}" for purpose, count in held.items())
        line = f"  {name}: {size(sums[name])} ({purposes})"
        lines += textwrap.wrap(line, 80, subsequent_indent="    ")
    return "\n".join([*lines, *textwrap.wrap(_verdict(found, sums), 80)])


def size(count: int) -> str:
    """A number of bytes, for a reader."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _verdict(found: dict[str, Any], sums: dict[str, int]) -> str:
    """What fused_ce saves against each other method, and the budget with which it holds less."""
    ours, least = sums["fused_ce"], -(-found["least_budget"] // MiB)
    saved = ", ".join(
        f"{size(abs(other - ours))} {'less' if other > ours else 'more'} than {name}"
        for name, other in sums.items()
        if name != "fused_ce"
    )
    price = "at a fourth product" if found["by_budget"][0]["products"] == 4 else "in smaller chunks"
    less = f"; memory_budget={least} * 2**20 for less, {price}" if least * MiB < ours else ""
    return f"fused_ce holds {saved}{less}."
