"""Divergences from a teacher as they are compiled, between products of the CPU's BLAS."""

import math

import pytest
import torch
from support.bounds import STATISTIC
from support.compiled import (
    ARCHS,
    BF16,
    DTYPES,
    FIRST_ARCH,
    FP16,
    FP32,
    assert_same_bits_in_every_order,
)

from fusedce import fused_kl, reference_kl

KINDS = ("forward", "reverse", "jsd")
EVERYTHING = {
    "temperature": 1.7, "softcap": 5.0, "teacher_softcap": 8.0, "logit_scale": 0.7,
    "teacher_logit_scale": -1.3, "ce_weight": 0.4, "beta": 0.3,
}  # fmt: skip


def pair(dtype, N=10, H=24, teacher_H=40, V=515):
    """``hidden, weight, teacher_hidden, teacher_weight, labels``; one position is ignored."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=rng)

    labels = torch.randint(V, (N,), generator=rng)
    labels[3] = -100
    states = draw(N, H) * 2 / H**0.5, draw(N, teacher_H) * 2 / teacher_H**0.5
    for x in states:
        x[3] = math.nan
    tensors = (states[0], draw(V, H), states[1], draw(V, teacher_H))
    return [*(x.to(dtype) for x in tensors), labels]


def gradients(fn, tensors, **options):
    """The loss, and its gradients by hidden and weight."""
    leaves = [x.detach().requires_grad_() for x in tensors[:2]]
    loss = fn(*leaves, *tensors[2:], **options).loss_sum
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def compare(dtype, kind, tensors, chunk_tokens=None, **options):
    """The loss to float32's rounding, gradients to a few roundings of their own dtype."""
    ours = gradients(
        fused_kl, tensors, divergence=kind, backend="triton", chunk_tokens=chunk_tokens, **options
    )
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    exact_options = {
        k: x.double() if isinstance(x, torch.Tensor) else x for k, x in options.items()
    }
    exact = gradients(reference_kl, wide, divergence=kind, **exact_options)
    of_two_heads = 2 * STATISTIC  # each head's log-sum-exp keeps what is promised of one
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=of_two_heads, atol=of_two_heads)
    # Of float32: logits of both heads, of size up to 10, are rounded, and then subtracted.
    rounding = max(4 * torch.finfo(dtype).eps, 80 * torch.finfo(torch.float32).eps)
    for a, b in zip(ours[1:], exact[1:], strict=True):
        assert (a.double() - b).norm() <= rounding * b.norm()


def in_blocks(gpu, classes):
    """Several blocks a row, of few classes: the interpreter's time goes with them."""
    gpu.row = gpu.row._replace(divergence_block_v=classes)


@FIRST_ARCH
@pytest.mark.parametrize("kind", KINDS)
@DTYPES
def test_values_are_those_of_the_reference(on, arch, dtype, kind):
    gpu = on(arch)
    in_blocks(gpu, 256)
    compare(dtype, kind, pair(dtype))
    assert gpu.ran("divergence_rows_kernel") == 1


@ARCHS
@pytest.mark.parametrize(
    "dtype",
    [
        BF16,
        pytest.param(FP16, marks=pytest.mark.slow),
        pytest.param(FP32, marks=pytest.mark.slow),
    ],
    ids=["bf16", "fp16", "fp32"],
)
def test_every_option_at_once(on, arch, dtype):
    """The vocabulary has two of the architecture's blocks; a chunk has 4 tokens."""
    gpu = on(arch)
    tensors = pair(dtype, V=1300)
    more = {name: (torch.randn(1300) * 0.1).to(dtype) for name in ("bias", "teacher_bias")}
    more["token_weight"] = torch.linspace(-1, 1, 10)
    compare(dtype, "jsd", tensors, chunk_tokens=4, **EVERYTHING, **more)
    assert gpu.ran("divergence_rows_kernel") == 3


def test_a_bad_label_poisons_its_row_alone(on):
    on("sm_90")
    tensors = pair(BF16, V=300)
    tensors[4][5] = 300
    loss, d_hidden, _ = gradients(fused_kl, tensors, backend="triton")
    assert loss.isnan()
    assert d_hidden.isnan().any(1).nonzero().tolist() == [[5]]


def test_bits_depend_not_on_the_order_of_ctas(on):
    gpu = on("sm_90")
    in_blocks(gpu, 256)
    assert_same_bits_in_every_order(
        gpu, lambda: gradients(fused_kl, pair(BF16), divergence="jsd", backend="triton")
    )
