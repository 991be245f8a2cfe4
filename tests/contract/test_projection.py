"""Logits of the output projection, by whichever library multiplies."""

import pytest
import torch

from fusedce.contract.projection import Projection

H = 96


def operands(dtype, transposed):
    rng = torch.Generator().manual_seed(0)
    weight, h = torch.randn(70, H, generator=rng), torch.randn(23, H, generator=rng)
    if transposed:  # of the same values, stored the other way
        weight, h = (x.t().contiguous().t() for x in (weight, h))
    return weight.to(dtype), h.to(dtype).to(torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("onednn", [True, False])
def test_products_of_the_inputs_are_exact(onednn, dtype, transposed, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", onednn)
    weight, h = operands(dtype, transposed)
    wide = h.dtype
    exact = weight[5:66].double() @ h.double().t()
    given = torch.empty(61, 23, dtype=wide)
    head = Projection(weight, None, 1.0, None)
    z = head.logits(h, 5, 66)
    assert head.logits(h, 5, 66, out=given) is given
    assert z.dtype == wide
    bound = 4 * torch.finfo(wide).eps * H**0.5 * exact.abs().mean().item()
    torch.testing.assert_close(z.double(), exact, rtol=0, atol=bound)
    torch.testing.assert_close(given, z, rtol=0, atol=0)


@pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()),
    reason="needs oneDNN and MKL",
)
def test_onednn_multiplies_for_bfloat16_unless_it_is_switched_off(monkeypatch):
    def asked(dtype):
        weight, h = operands(dtype, transposed=False)
        with torch.profiler.profile() as trace:
            Projection(weight, None, 1.0, None).logits(h, 0, 70)
        return any("mkldnn" in event.name for event in trace.events())

    assert asked(torch.bfloat16)
    assert not asked(torch.float32)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not asked(torch.bfloat16)
