"""Divergences from a teacher as they are compiled, between products of the CPU's BLAS."""

import dataclasses
from functools import partial

import pytest
import torch
from support.compiled import (
    ARCHS,
    BF16,
    DTYPES,
    FIRST_ARCH,
    FP16,
    FP32,
    assert_same_bits_in_every_order,
)
from support.pairs import EVERYTHING, Pair, check_pair
from support.params import slow

from fusedce import fused_kl

PAIR = Pair(N=10, H=24, teacher_H=40, V=515, dtype=BF16, ignored=0.2, spread=2.0, seed=2)


def in_blocks(gpu, classes):
    """Several blocks a row, of few classes: the interpreter's time goes with them."""
    gpu.row = gpu.row._replace(divergence_block_v=classes)


@FIRST_ARCH
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@DTYPES
def test_values_are_those_of_the_reference(on, arch, dtype, kind):
    gpu = on(arch)
    in_blocks(gpu, 256)
    pair = dataclasses.replace(PAIR, dtype=dtype, options={"divergence": kind})
    check_pair(partial(fused_kl, backend="triton"), pair)
    assert gpu.ran("divergence_rows_kernel") == 1


@ARCHS
@pytest.mark.parametrize("dtype", [BF16, slow(FP16), slow(FP32)], ids=["bf16", "fp16", "fp32"])
def test_every_option_at_once(on, arch, dtype):
    """The vocabulary has two of the architecture's blocks; a chunk has 3 tokens."""
    gpu = on(arch)
    options = EVERYTHING | {"divergence": "jsd"}
    pair = dataclasses.replace(
        PAIR, dtype=dtype, V=1300, bias=True, token_weight=True, options=options
    )
    check_pair(partial(fused_kl, backend="triton", chunk_tokens=3), pair)
    assert gpu.ran("divergence_rows_kernel") >= 2


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
    hidden, weight, *others = PAIR.tensors()[0]

    def gradients():
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        out = fused_kl(*leaves, *others, divergence="jsd", backend="triton")
        return torch.autograd.grad(out.loss_sum, leaves)

    assert_same_bits_in_every_order(gpu, gradients)
