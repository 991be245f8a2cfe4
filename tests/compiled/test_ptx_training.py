"""The training pass as it is compiled: its kernels between products of the CPU's BLAS."""

import pytest
import torch
from support.bounds import STATISTIC
from support.compiled import (
    ARCHS,
    BF16,
    TWO_BYTES,
    assert_same_bits_in_every_order,
)
from support.oracle import summed

import fusedce
from fusedce.backends import plan
from fusedce.backends import triton as backend
from fusedce.backends.triton import archs
from fusedce.contract.problem import Outputs, Problem, Task
from fusedce.testing import Case, check


def train(hidden, weight, labels, **options):
    loss = fusedce.fused_ce if options.get("class_weight") is None else summed
    return loss(hidden, weight, labels, backend="triton", **options)


def case(N, H, V, dtype=BF16, **more):
    inputs = ("hidden", "weight", "bias") if more.get("with_bias") else ("hidden", "weight")
    return Case((N,), H, V, dtype, requires_grad=inputs, **more)


def by_gemm(gpu, **fields):
    """The architecture's row with exponentials by one GEMM of ours."""
    walks = gpu.row.two_bytes
    changed = {k: getattr(walks, k)._replace(**fields) for k in ("gemm", "gemm_with_options")}
    gpu.row = gpu.row._replace(two_bytes=walks._replace(gemm_up_to=2**31, **changed))


# ---- values -----------------------------------------------------------------------------------


@ARCHS
def test_a_small_call(on, arch):
    """The gradient of the logits is stored over them, in half the bytes."""
    gpu = on(arch)
    gpu.small_calls.close()
    check(train, case(24, 72, 2100, ignored=0.2, logits="peaked", token_weight=True))
    assert [launch.kernel for launch in gpu.launches[:2]] == [
        "small_rows_kernel", "small_finish_kernel",
    ]  # fmt: skip


@TWO_BYTES
@pytest.mark.parametrize("V", [1, 2, 7])
def test_a_vocabulary_of_less_than_16_classes(on, dtype, V):
    """Rows are padded to 16, and a block of a maximum is no narrower."""
    on("sm_90")
    check(train, case(9, 24, V, dtype))


def test_rows_that_are_not_aligned_are_multiplied_by_cublas(on):
    """The one GEMM would spill 464 bytes at 128x256, as nothing is copied ahead."""
    gpu = on("sm_90")
    by_gemm(gpu)
    check(train, case(40, 65, 333))
    assert gpu.ran("walk_kernel") == 0


def test_the_likeliest_class_of_a_row_of_nan_is_read_in_bounds(on):
    """Three whole blocks of classes, the fourth of the kernel's is padding."""
    on("sm_80")
    hidden, weight, _, _ = case(2, 64, 3 * archs.BY_NAME["sm_80"].exp_block_v).tensors()
    hidden[1] = torch.nan
    found = fusedce.fused_ce(hidden, weight.requires_grad_(), torch.zeros(2, dtype=torch.int64),
                             monitor=("correct",), backend="triton")  # fmt: skip
    assert found.loss_sum.isnan()


@pytest.mark.parametrize("chunk_tokens", [None, 15])
@pytest.mark.parametrize("gemm", [False, True], ids=["tiles", "gemm"])
def test_chunks_tiles_and_the_likeliest_classes(on, monkeypatch, chunk_tokens, gemm):
    """Several tiles a chunk, launched again without asking Triton; argmax; runs of one label."""
    gpu = on("sm_90")
    if gemm:
        by_gemm(gpu)
    monkeypatch.setattr(plan, "TILE_ELEMENTS", (2**13, 2**13))
    gpu.row = gpu.row._replace(exp_block_v=256)
    hidden, weight, labels, _ = case(40, 64, 600, logits="peaked").tensors()
    labels[::3] = 17
    labels[5] = -100
    argmax = torch.empty(40, dtype=torch.int64)
    problem = Problem(hidden, weight, labels, chunk_tokens=chunk_tokens,
                      expected_upstream=torch.ones(()))  # fmt: skip
    found = backend.loss_and_grads(Task(problem, Outputs(hidden=True, weight=True)), argmax)
    x = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    exact = fusedce.reference_ce(*x, labels).loss_sum
    torch.testing.assert_close(found.loss.double(), exact, rtol=STATISTIC, atol=0)
    for ours, theirs in zip((found.d_hidden, found.d_weight), torch.autograd.grad(exact, x),
                            strict=True):  # fmt: skip
        once = (theirs.to(ours.dtype).double() - theirs).norm()
        # two roundings: of the chunk's coefficients, and of the result
        assert (ours.double() - theirs).norm() <= 2 * once + 2**-9 * theirs.norm()
    best = (x[0] @ x[1].T).argmax(1)
    best[5] = -1
    assert argmax.equal(best)
    assert gpu.ran("hidden_grad_kernel") >= 1 + (chunk_tokens is not None)


@pytest.mark.parametrize("above", [50.0, 1000.0])
@TWO_BYTES
def test_rows_whose_blocks_have_references_of_their_own(on, dtype, above):
    """Such a row is gone over again where one of its entries has been taken out."""
    gpu = on("sm_90")
    gpu.row = gpu.row._replace(exp_block_v=256)
    hidden, weight, labels, _ = case(12, 64, 600, dtype).tensors()
    bias = torch.zeros(600, dtype=dtype)
    bias[[301, 381]] = above  # loaded by different warps; the one that is taken out is stored to
    bias[520:525] = above - 3
    labels %= 256
    problem = Problem(hidden, weight, labels, bias=bias, expected_upstream=torch.ones(()))
    found = backend.loss_and_grads(
        Task(problem, Outputs(hidden=True, weight=True, bias=True)), None
    )
    x = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    exact = torch.autograd.grad(fusedce.reference_ce(*x[:2], labels, bias=x[2]).loss_sum, x)
    for ours, theirs in zip(found[3:], exact, strict=True):
        assert (ours.double() - theirs).norm() <= 4 * torch.finfo(dtype).eps * theirs.norm()


@ARCHS
def test_gradients_depend_neither_on_the_order_of_ctas_nor_on_when_copies_land(on, arch):
    gpu = on(arch)
    by_gemm(gpu)
    hidden, weight, labels, _ = case(24, 128, 515).tensors()
    labels[::3] = 17
    problem = Problem(hidden, weight, labels, expected_upstream=torch.ones(()))

    def gradients():
        return tuple(backend.loss_and_grads(Task(problem, Outputs(hidden=True, weight=True)), None))

    assert_same_bits_in_every_order(gpu, gradients)


def test_a_bad_label_poisons_its_row_alone(on):
    on("sm_90")
    hidden, weight, labels, _ = case(12, 64, 300).tensors()
    labels[5] = 300
    found = backend.loss_and_grads(
        Task(Problem(hidden, weight, labels), Outputs(hidden=True)), None
    )
    assert found.loss.isnan()
    assert found.d_hidden.isnan().any(1).nonzero().tolist() == [[5]]
