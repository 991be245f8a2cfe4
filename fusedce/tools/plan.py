"""`fusedce plan`: predicted memory and time of a model's loss, by eager, compiled and fused code.

Memory is counted beyond the model, the hidden states and their gradients. Ours is that of the
backend's own plan; that of the others follows from the logits they hold. Times, for GPUs in bf16
and fp16, come from :mod:`fusedce.prediction`. Only the look-up of a class needs torch.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fusedce.backends.plan import ONE_CHUNK, TILES, Way, least_bytes, way_of
from fusedce.prediction import DEVICES, Device, GiB, bare_gemms, call, fused_ce, predict
from fusedce.tools.model_sizes import Sizes, UserError, sizes

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
METHODS = ("eager", "compiled eager", "fused_ce")
STATE_BYTES = 16  # a parameter: bf16 weight and gradient, fp32 master weight, two moments of Adam
_MOST_TOKENS = 2**24  # that the largest batch may have
_MOST = 2**31 - 1  # tokens, GPUs and GiB of a call


@dataclass(frozen=True)
class Method:
    """One way to compute the loss, forward and backward."""

    name: str
    memory: dict[str, int]  # bytes beyond weights, hidden states and their gradients, by purpose
    milliseconds: float | None  # predicted; None where no figures of the device are known
    range: tuple[float, float] | None  # of these, as the least certain assumption is good or bad
    most_tokens: int | None  # the largest batch that fits; None where the memory is not known

    @property
    def bytes(self) -> int:
        """All of the memory."""
        return sum(self.memory.values())


class Point(NamedTuple):
    """Memory and predicted time that a memory budget gives."""

    budget: int  # bytes
    way: str  # "one chunk", "chunks" or "tiles"
    tokens: int  # of a chunk, or of a block of a tile
    classes: int  # of a tile
    bytes: int  # held beside inputs and gradients
    products: int  # matrix products of N * V * H multiplications each
    milliseconds: float | None  # predicted; None where no figures of the device are known


@dataclass(frozen=True)
class ModelPlan:
    """The prediction of :func:`plan`."""

    model: Sizes
    tokens: int  # of a micro-batch on one device
    dtype: str
    gpus: int
    device: str
    logits_bytes: int  # of one copy of the logits, in `dtype`
    chunk_tokens: int  # of a chunk of fused_ce
    states_bytes: int | None  # weights, gradients and Adam's moments on each device
    free_bytes: int | None  # left for the loss and the activations
    floor_milliseconds: float | None  # the three bare products, predicted
    methods: tuple[Method, ...]
    frontier: tuple[Point, ...]  # memory against time of fused_ce

    def data(self) -> dict[str, Any]:
        """The fields as JSON values."""
        found = asdict(self)
        found["model"] = self.model._asdict()
        found["frontier"] = [point._asdict() for point in self.frontier]
        for method, row in zip(self.methods, found["methods"], strict=True):
            row["bytes"] = method.bytes
        return found


def plan(
    model: str, *, tokens: int = 8192, dtype: str = "bf16", gpus: int = 1, device: str = "H200",
    free: float | None = None,
) -> ModelPlan:  # fmt: skip
    """Plan one micro-batch of ``tokens`` positions, all of them with a label.

    Args:
        model: see :mod:`fusedce.tools.model_sizes`; ``H,V`` will do.
        tokens: of a micro-batch on one device.
        dtype: of hidden states and head: "fp32", "bf16" or "fp16".
        gpus: over which weights, gradients and optimizer states are sharded (FSDP, ZeRO-3).
        device: a key of :data:`fusedce.prediction.DEVICES`, or "cpu".
        free: GiB that loss and activations may have together; by default what the device has less
            the states of a dense model trained in bf16 with Adam (16 bytes a parameter).

    The largest batch counts, beside the loss, one hidden state a layer: activation checkpointing.

    Raises:
        UserError: unknown model, device or dtype, or a size that is not positive.
    """
    for name, value in (("tokens", tokens), ("gpus", gpus)):
        if not 1 <= value <= _MOST:
            bound = "at least 1" if value < 1 else f"at most {_MOST}"
            raise UserError(f"{name} must be {bound}, got {value}")
    if free is not None and not 0 < free <= _MOST:
        raise UserError(f"free must be GiB above 0, at most {_MOST}, got {free}")
    if dtype not in BYTES:
        raise UserError(f"dtype must be one of {', '.join(BYTES)}, got {dtype!r}")
    if device != "cpu" and device not in DEVICES:
        raise UserError(f"device must be cpu or one of {', '.join(DEVICES)}, got {device!r}")
    of = sizes(model)
    known = DEVICES.get(device)
    b = BYTES[dtype]
    states = None if of.parameters is None else STATE_BYTES * of.parameters // gpus
    room = _room(known, states, free)
    methods = tuple(
        Method(
            name,
            memory(name, tokens, of.H, of.V, b, known),
            *_milliseconds(name, tokens, of, b, known),
            None if room is None else _most_tokens(name, of, b, known, room),
        )
        for name in METHODS
    )
    floor = None
    if known is not None and b == 2:
        floor = 1e3 * bare_gemms(tokens, of.H, of.V, known).seconds
    return ModelPlan(
        of, tokens, dtype, gpus, device, b * tokens * of.V, chunk(tokens, of.H, of.V, b, known),
        states, room, floor, methods, frontier(tokens, of.H, of.V, b, known),
    )  # fmt: skip


def device_here() -> str | None:
    """The key of :data:`fusedce.prediction.DEVICES` of this machine's GPU; ``None`` without one.

    nvidia-smi tells it, so that torch is not imported.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run(
        [program, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
    )
    return next((name for name in DEVICES if name in done.stdout), None)


def chunk(N: int, H: int, V: int, b: int, device: Device | None) -> int:
    """Tokens of a chunk of our training pass, for elements of ``b`` bytes."""
    return ours(N, H, V, b, device).tokens


def ours(
    N: int, H: int, V: int, b: int, device: Device | None, memory_budget: int | None = None
) -> Way:
    """The way that our training pass takes (:func:`fusedce.backends.plan.way_of`)."""
    asked = call(N, H, V, b, cpu=device is None, device=device)
    return way_of(asked, memory_budget=memory_budget)


def memory(name: str, N: int, H: int, V: int, b: int, device: Device | None) -> dict[str, int]:
    """Bytes at the peak of one forward and backward, by purpose."""
    if device is not None and b == 2:
        return dict(predict(name, N, H, V, device).memory)
    if name == "eager":
        return {"log-softmax, its gradient, the slope": 12 * N * V}
    if name == "compiled eager":
        return {"logits": b * N * V}
    return ours(N, H, V, b, device).held


def frontier(N: int, H: int, V: int, b: int, device: Device | None) -> tuple[Point, ...]:
    """Memory and time for rising budgets: the least one, then each twice the one before.

    The last is the first in which all logits are one chunk.
    """
    asked = call(N, H, V, b, cpu=device is None, device=device)
    budget, found = least_bytes(asked), list[Point]()
    while not found or found[-1].way != ONE_CHUNK:
        way = ours(N, H, V, b, device, budget)
        seconds = None
        if device is not None and b == 2:
            seconds = fused_ce(N, H, V, device, memory_budget=budget).seconds
        point = Point(
            budget, way.name, way.tokens, way.classes, way.bytes,
            4 if way.name == TILES else 3, None if seconds is None else 1e3 * seconds,
        )  # fmt: skip
        if not found or point.bytes != found[-1].bytes:
            found.append(point)
        budget *= 2
    return tuple(found)


def _milliseconds(
    name: str, N: int, of: Sizes, b: int, device: Device | None
) -> tuple[float | None, tuple[float, float] | None]:
    """The prediction and its range, where figures of the device are known."""
    if device is None or b != 2:
        return None, None
    found = predict(name, N, of.H, of.V, device)
    return 1e3 * found.seconds, (1e3 * found.low, 1e3 * found.high) if found.high else None


def _room(device: Device | None, states: int | None, free: float | None) -> int | None:
    if free is not None:
        return int(free * GiB)
    if device is None or states is None:
        return None
    return max(device.memory - states, 0)


def _most_tokens(name: str, of: Sizes, b: int, device: Device | None, room: int) -> int:
    """The largest batch by bisection: memory grows with it, up to steps of the chunk's size."""

    def needs(N: int) -> int:
        return sum(memory(name, N, of.H, of.V, b, device).values()) + activations(N)

    def activations(N: int) -> int:
        return b * N * of.H * ((of.layers or 0) + 2)  # and the last one's gradient

    if needs(1) > room:
        return 0
    low, high = 1, _MOST_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= room else (low, middle)
    return low
