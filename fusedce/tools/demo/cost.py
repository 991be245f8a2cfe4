"""Time and memory of the loss alone for one real full batch, beside eager."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedce import fused_ce, shift_labels
from fusedce.measure import median_seconds, memory_method, peak_extra_bytes
from fusedce.tools.demo.data import Batch, hidden_states, pad


class Cost(NamedTuple):
    """The loss alone, forward and backward, at one shape."""

    seconds: dict[str, list[float]]  # of each repeat, sorted
    extra_bytes: dict[str, int]
    memory_method: str
    shape: dict[str, int]
    n_valid: int


class HeadInputs(NamedTuple):
    """Inputs of the loss."""

    hidden: Tensor  # (SEQUENCES, T, H)
    weight: Tensor  # (V, H)
    labels: Tensor  # (SEQUENCES, T) int64, shifted


def measure_cost(model: Any, batch: Batch, device: torch.device, repeats: int) -> Cost:
    """Time and memory of the loss of one real full batch, fused and eager, forward + backward."""
    with torch.no_grad():
        hidden = hidden_states(model, pad(batch, 0))
    inputs = HeadInputs(
        hidden.detach(), model.lm_head.weight.detach().clone(), shift_labels(pad(batch, -100))
    )
    seconds = median_seconds({name: partial(f, inputs) for name, f in LOSSES.items()}, repeats)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "inputs.pt")
        torch.save(tuple(x.cpu() for x in inputs), path)
        extra = {
            name: peak_extra_bytes(
                "fusedce.tools.demo.cost:prepare_loss",
                {"name": name, "path": path, "device": str(device)},
                device=str(device),
            )
            for name in LOSSES
        }
    B, T, H = inputs.hidden.shape
    return Cost(
        seconds=seconds,
        extra_bytes=extra,
        memory_method=memory_method(str(device)),
        shape={"N": B * T, "H": H, "V": len(inputs.weight)},
        n_valid=int((inputs.labels != -100).sum()),
    )


def prepare_loss(name: str, path: str, device: str) -> Callable[[], object]:
    """Load the inputs, warm up and return the call to measure; a fresh process runs this."""
    inputs = HeadInputs(*(x.to(device) for x in torch.load(path, weights_only=True)))
    LOSSES[name](HeadInputs(inputs.hidden[:1, :64], inputs.weight, inputs.labels[:1, :64]))
    return partial(LOSSES[name], inputs)


def fused_loss(inputs: HeadInputs) -> Tensor:
    """Mean loss by ``fused_ce``."""
    return fused_ce(*inputs).mean()


def eager_loss(inputs: HeadInputs) -> Tensor:
    """Mean loss by plain torch, on all rows."""
    hidden, weight, labels = inputs
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, -2), labels.flatten())


def eager_unpadded_loss(inputs: HeadInputs) -> Tensor:
    """Mean loss by plain torch on the valid rows, so that padding costs nothing."""
    hidden, weight, labels = inputs
    valid = labels != -100
    return F.cross_entropy(F.linear(hidden[valid], weight).float(), labels[valid])


def forward_backward(loss_of: Callable[[HeadInputs], Tensor], inputs: HeadInputs) -> list[Tensor]:
    """The loss, and its gradients of hidden state and weight."""
    wanted = (inputs.hidden.requires_grad_(), inputs.weight.requires_grad_())
    loss = loss_of(inputs)
    return [loss, *torch.autograd.grad(loss, wanted)]


LOSSES: dict[str, Callable[[HeadInputs], list[Tensor]]] = {
    "fused_ce": partial(forward_backward, fused_loss),
    "eager": partial(forward_backward, eager_loss),
    "eager, padding removed": partial(forward_backward, eager_unpadded_loss),
}
