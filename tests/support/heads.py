"""A model as small as can be with an output head, and how it is run."""

import torch
import torch.nn.functional as F
from torch import nn

V, H = 50, 16
MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def plain_model(bias=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, H), nn.Linear(H, V, bias=bias))


def tokens(*shape, seed=0):
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


def ce(z, y):
    return F.cross_entropy(z.reshape(-1, V), y.reshape(-1))


def loss_and_grads(model, x, y, loss, mode="grad"):
    """The loss and, in the mode with gradients, the gradients of all parameters."""
    model.zero_grad()
    with MODES[mode]():
        value = loss(model(x), y)
    if mode != "grad":
        return [value + 0]
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters())]
