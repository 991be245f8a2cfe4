"""Streaming: in range and exact in every dtype, corrected once, without reading a device."""

import pytest
import torch
from support.bounds import SAME_SUMS
from support.loops import (
    batches,
    check_correction,
    distance,
    new_weight,
    out_of,
    run_streaming,
    weight_and_grad,
)

from fusedce import LossAccumulator, fused_ce


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_streaming_stays_in_range(dtype):
    """Gradients of sums leave fp16 through a GradScaler's 2**16; pre-scaled ones do not."""
    micro = batches([700, 0, 1300])
    master, exact, _ = weight_and_grad(micro)
    optimizer = torch.optim.SGD([master], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    acc = LossAccumulator([master], grad_scaler=scaler)

    def largest_gradient(scale):
        """Run the micro-batches; return the largest gradient that the low precision held."""
        largest = []
        for hidden, labels in micro:
            weight = master.to(dtype)
            weight.register_hook(lambda g: largest.append(g.abs().max().float()))
            scaler.scale(scale(fused_ce(hidden.to(dtype), weight, labels))).backward()
        return max(largest)

    assert largest_gradient(acc.scale) < 0.2 * torch.finfo(torch.float16).max
    assert acc.finish()
    scaler.unscale_(optimizer)
    assert distance(master.grad, exact) < 0.5 * torch.finfo(dtype).eps
    scaler.step(optimizer)
    scaler.update()
    if dtype == torch.float16:
        assert largest_gradient(lambda out: out.loss_sum).isinf()


def test_clipping_after_finish_sees_the_true_norm():
    """A parameter given twice, tied and listed by both of its modules, is corrected once."""
    micro = batches([1, 30, 4])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    for one in micro:
        acc.backward(out_of(weight, one))
    assert distance(weight.grad, exact) > 0.9  # before finish the norm means nothing
    acc.finish([weight, weight])
    assert distance(weight.grad, exact) <= SAME_SUMS
    torch.nn.utils.clip_grad_norm_([weight], 0.1)
    rounding = SAME_SUMS + 1e-6 / exact.norm()  # which torch adds to norms
    assert distance(weight.grad, exact * (0.1 / exact.norm())) <= rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_correction_is_not_rounded(dtype):
    check_correction(dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_correction_is_exact(dtype):
    """A factor that is rounded to bfloat16 errs up to 0.4%, one rounded to float32 1e-8."""
    micro = [(h.to(dtype), y) for h, y in batches([7, 3])]
    weight = new_weight().detach().to(dtype).requires_grad_()
    hidden, labels = (torch.cat(x) for x in zip(*micro, strict=True))
    wide = weight.detach().double().requires_grad_()
    fused_ce(hidden.double(), wide, labels).mean().backward()
    run_streaming(LossAccumulator(), weight, micro)
    roundings = 1 if dtype == torch.bfloat16 else 16  # in float64 the reference rounds as much
    assert distance(weight.grad, wide.grad) < roundings * torch.finfo(dtype).eps
    acc, ones = LossAccumulator(), torch.ones(4, dtype=dtype, requires_grad=True)
    for n in (1, 300):
        acc.backward((ones.float().sum() * n, torch.tensor(n)))
    acc.finish([ones])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ones.grad.double(), torch.ones(4).double(), rtol=eps, atol=0)
