"""Copies of logits and outputs, their memory, and the errors of copies that cannot be made."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.attacks import same
from support.copies import COPIES
from support.heads import MODES, V, ce, plain_model, tokens
from torch.autograd import forward_ad

from fusedce import replace_loss_head

WITHOUT_GRAD = [mode for mode in MODES if mode != "grad"]


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_copies_of_outputs(name, mode):
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    with MODES[mode]():
        native = model(x)
        out = SimpleNamespace(logits=replace_loss_head(model)(x), rows=[tokens(3)])
        out.last = out.logits[:, -1]
        for z in (COPIES[name](out).logits, COPIES[name](out.logits)):
            torch.testing.assert_close(z + 0, native)
            torch.testing.assert_close(ce(z, y), ce(native, y))
            torch.testing.assert_close(z[..., :3].argmax(-1), native[..., :3].argmax(-1))
        torch.testing.assert_close(COPIES[name](out).last + 0, native[:, -1])


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_writes_into_copies(mode, written):
    """A deep copy has a memory of its own, which its views share; a shallow one shares that."""
    results = []
    for model in (plain_model(), replace_loss_head(plain_model())):
        with MODES[mode]():
            z = model(tokens(3, 7))
            if written:
                z[0] = 1.0
            deep, shallow = copy.deepcopy({"z": z, "rows": z.view(-1, V)}), copy.copy(z)
            deep["z"][..., 3] = 2.0
            shallow[..., 4] = 3.0
            results.append([t + 0 for t in (z, *deep.values(), shallow)])
    torch.testing.assert_close(results[1], results[0])


def test_a_deep_copy_of_logits_with_a_graph_is_refused_as_torch_does():
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(replace_loss_head(plain_model())(tokens(3, 7)))
    z = replace_loss_head(plain_model())(tokens(3, 7)).detach().requires_grad_()
    ce(z, tokens(3, 7)).backward()
    twin = copy.deepcopy(z)
    assert twin.requires_grad
    torch.testing.assert_close(twin.grad + 0, z.grad + 0)


# ---- memory ---------------------------------------------------------------------------------


def of_safetensors(z):
    safetensors = pytest.importorskip("safetensors.torch")
    return safetensors.load(safetensors.save({"z": z.detach()}))["z"]


MEMORY = {
    "safetensors": of_safetensors,
    "untyped_storage": lambda z: torch.tensor(z.untyped_storage().tolist()),
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
    results = []
    for model in (plain_model(), replace_loss_head(plain_model())):
        with MODES[mode]():
            z = model(tokens(3, 7))
            seen = MEMORY[name](z)
            results.append((seen.detach() + 0, z.detach() + 0, ce(z, tokens(3, 7)).detach()))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_a_write_into_a_storage_counts(mode):
    results = []
    for model in (plain_model(), replace_loss_head(plain_model())):
        with MODES[mode]():
            z = model(tokens(3, 7))
            z.untyped_storage().fill_(0)
            results.append(ce(z, tokens(3, 7)))
    torch.testing.assert_close(results[1], results[0])


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


# ---- what is refused, and what is not -------------------------------------------------------


@pytest.mark.parametrize("of", ["logits", "hidden"])
@pytest.mark.parametrize("loss", [ce, lambda z, y: z.square().mean()])
def test_many_gradients_at_once_are_refused_in_words(of, loss):
    model = replace_loss_head(plain_model())
    h = model[0](tokens(3, 7))
    z = model[1](h)
    value = loss(z, tokens(3, 7, seed=1))
    if of == "logits" and loss is not ce:
        of = "hidden"
    with pytest.raises(RuntimeError, match=r"one gradient at a time.*restore_loss_head.*lazy"):
        torch.autograd.grad(value, {"logits": z, "hidden": h}[of], torch.ones(2),
                            is_grads_batched=True)  # fmt: skip


@pytest.mark.parametrize("of", ["hidden", "weight", "logits"])
def test_forward_mode(of):
    def tangent(m):
        with forward_ad.dual_level():
            h, w = m[0](tokens(3, 7)).detach(), m[1].weight.detach()
            if of == "weight":
                w = forward_ad.make_dual(w, torch.linspace(0, 1, w.numel()).view(w.shape))
                z = torch.func.functional_call(m[1], {"weight": w}, h)
            elif of == "hidden":
                z = m[1](forward_ad.make_dual(h, torch.linspace(0, 1, h.numel()).view(h.shape)))
            else:
                z = m[1](h).detach()
                z = forward_ad.make_dual(z, torch.linspace(0, 1, z.numel()).view(z.shape))
            return forward_ad.unpack_dual(ce(z, tokens(3, 7, seed=1))).tangent

    expected = tangent(plain_model())
    torch.testing.assert_close(tangent(replace_loss_head(plain_model())), expected)
