"""Copies of logits, and what reads their memory."""

import copy
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from support.attacks import alike, same
from support.heads import MODES, V, ce, plain_model, tokens

from fusedce import replace_loss_head

WITHOUT_GRAD = [mode for mode in MODES if mode != "grad"]


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_writes_into_copies(mode, written):
    """A deep copy has a memory of its own, which its views share; a shallow one shares that."""

    def use(model):
        z = model(tokens(3, 7))
        if written:
            z[0] = 1.0
        deep, shallow = copy.deepcopy({"z": z, "rows": z.view(-1, V)}), copy.copy(z)
        deep["z"][..., 3] = 2.0
        shallow[..., 4] = 3.0
        return z, deep, shallow

    alike(use, mode)


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_what_is_computed_after_a_write_into_a_shallow_copy_sees_it(mode):
    def use(model):
        z = model(tokens(3, 7))
        copy.copy(z).mul_(0.5)
        wide = z.double()
        del z
        return wide.norm()

    alike(use, mode)


def test_a_deep_copy_of_logits_with_a_graph_is_refused_as_torch_does():
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(replace_loss_head(plain_model())(tokens(3, 7)))
    z = replace_loss_head(plain_model())(tokens(3, 7)).detach().requires_grad_()
    ce(z, tokens(3, 7)).backward()
    twin = copy.deepcopy(z)
    assert twin.requires_grad
    torch.testing.assert_close(twin.grad + 0, z.grad + 0)


def of_safetensors(z):
    return safetensors.torch.load(safetensors.torch.save({"z": z.detach()}))["z"]


MEMORY = {
    "safetensors": of_safetensors,
    "untyped_storage": lambda z: torch.tensor(z.untyped_storage().tolist()),
    "a storage written into": lambda z: (z.detach().untyped_storage().fill_(0), z.detach())[1],
    "storage": lambda z: torch.tensor(z.storage().tolist()),
    "bytes": lambda z: torch.tensor(list(bytes(z.detach().flatten()[:2].round().abs().byte()))),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "asarray": lambda z: torch.from_numpy(np.asarray(z.detach())),
    "dlpack": lambda z: torch.from_dlpack(z.detach()),
    "shared": lambda z: z.detach().share_memory_(),
    "apply_": lambda z: z.detach().apply_(lambda v: 2 * v),
    "map_": lambda z: torch.ones(3, 7, V).map_(z.detach(), lambda a, b: a + b),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("mode", MODES)
def test_the_memory_of_logits(name, mode):
    def use(model):
        z = model(tokens(3, 7))
        return MEMORY[name](z), z, ce(z, tokens(3, 7))

    alike(use, mode)


PACKS = {
    "numpy": (lambda t: t.detach().numpy(), torch.from_numpy),
    "save": (lambda t: pickle.dumps(t.detach()), pickle.loads),
}


@pytest.mark.parametrize("name", PACKS)
@same
def test_hooks_on_saved_tensors_that_read_memory(m, x, y, name):
    with torch.autograd.graph.saved_tensors_hooks(*PACKS[name]):
        z = m(x)
        loss = ce(z, y) + (z * torch.linspace(0, 1, V)).sum()
        return loss + z.square().mean() + z.exp().mean()
