"""Divergences from a teacher as they are compiled, between products of the CPU's BLAS."""

import dataclasses

import pytest
import torch
from support.bounds import STATISTIC, in_float64
from support.compiled import (
    ARCHS,
    BF16,
    DTYPES,
    FIRST_ARCH,
    FP16,
    FP32,
    assert_same_bits_in_every_order,
)
from support.pairs import EVERYTHING, Pair
from support.params import slow

from fusedce import fused_kl, reference_kl

KINDS = ("forward", "reverse", "jsd")
PAIR = Pair(N=10, H=24, teacher_H=40, V=515, dtype=BF16, ignored=0.2, spread=2.0, seed=2)


def gradients(fn, tensors, **options):
    """The loss, and its gradients by hidden and weight."""
    leaves = [x.detach().requires_grad_() for x in tensors[:2]]
    loss = fn(*leaves, *tensors[2:], **options).loss_sum
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def compare(kind, chunk_tokens=None, **pair):
    """The loss to float32's rounding, gradients to a few roundings of their own dtype."""
    pair = dataclasses.replace(PAIR, **pair)
    tensors, options = pair.tensors()
    options["divergence"] = kind
    ours = gradients(fused_kl, tensors, backend="triton", chunk_tokens=chunk_tokens, **options)
    wide_options = dict(zip(options, in_float64(*options.values()), strict=True))
    exact = gradients(reference_kl, in_float64(*tensors), **wide_options)
    of_two_heads = 2 * STATISTIC  # each head's log-sum-exp keeps what is promised of one
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=of_two_heads, atol=of_two_heads)
    # Of float32: logits of both heads, of size up to 10, are rounded, and then subtracted.
    rounding = max(4 * torch.finfo(pair.dtype).eps, 80 * torch.finfo(torch.float32).eps)
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
    compare(kind, dtype=dtype)
    assert gpu.ran("divergence_rows_kernel") == 1


@ARCHS
@pytest.mark.parametrize("dtype", [BF16, slow(FP16), slow(FP32)], ids=["bf16", "fp16", "fp32"])
def test_every_option_at_once(on, arch, dtype):
    """The vocabulary has two of the architecture's blocks; a chunk has 3 tokens."""
    gpu = on(arch)
    more = {"bias": True, "token_weight": True, "options": EVERYTHING}
    compare("jsd", chunk_tokens=3, dtype=dtype, V=1300, **more)
    assert gpu.ran("divergence_rows_kernel") == 3


def test_a_bad_label_poisons_its_row_alone(on):
    """A GPU gives a NaN and an error code, and no device assert."""
    on("sm_90")
    (hidden, *others, labels), _ = PAIR.tensors()
    labels[5] = PAIR.V
    out = fused_kl(hidden.requires_grad_(), *others, labels, backend="triton")
    (grad,) = torch.autograd.grad(out.loss_sum, hidden)
    assert out.loss_sum.isnan()
    assert out.n_valid < 0
    assert grad[5].isnan().all()
    assert grad.isnan().any(1).nonzero().tolist() == [[5]]


def test_bits_depend_not_on_the_order_of_ctas(on):
    gpu = on("sm_90")
    in_blocks(gpu, 256)
    assert_same_bits_in_every_order(
        gpu, lambda: gradients(fused_kl, PAIR.tensors()[0], divergence="jsd", backend="triton")
    )
