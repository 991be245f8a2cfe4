"""Exponentials by one GEMM and by cuBLAS with a kernel after it: each is the other's test."""

import pytest
import torch
from support.bounds import STATISTIC
from support.params import slow

from fusedce.backends import plan
from fusedce.backends import triton as backend
from fusedce.backends.triton import archs, sum_grads
from fusedce.contract.problem import Outputs, Problem, Task
from fusedce.testing import Case

pytestmark = pytest.mark.usefixtures("no_small_calls")


def gradients(monkeypatch, problem, argmax, *, by_gemm):
    row = archs.BY_NAME["interpreter"]
    row = row._replace(
        two_bytes=row.two_bytes._replace(gemm_up_to=2**31 if by_gemm else 0),
    )
    monkeypatch.setattr(archs, "architecture", lambda device: row)
    wanted = Outputs(hidden=True, weight=True, bias=problem.bias is not None)
    return backend.loss_and_grads(Task(problem, wanted), argmax)


@pytest.mark.parametrize(
    ("dtype", "logits", "options"),
    [
        slow(torch.bfloat16, "flat", {"softcap": 5.0, "logit_scale": 0.7}),
        (torch.bfloat16, "peaked", {}),
        slow(torch.bfloat16, "huge", {"z_loss": 0.1}),
        slow(torch.float16, "flat", {"logit_scale": 3.0}),
        slow(torch.bfloat16, "flat", {"label_smoothing": 0.2}),
    ],
)
def test_cublas_and_one_gemm_agree(monkeypatch, dtype, logits, options):
    hidden, weight, labels, bias = Case(
        (37,), 64, 333, dtype, logits=logits, ignored=0.2, with_bias=bool(options)
    ).tensors()
    problem = Problem(hidden, weight, labels, bias=bias, chunk_tokens=20, **options)
    best, other = torch.empty(2, 37, dtype=torch.int64).unbind()
    one = gradients(monkeypatch, problem, best, by_gemm=True)
    two = gradients(monkeypatch, problem, other, by_gemm=False)
    assert torch.equal(best, other)
    torch.testing.assert_close(one.loss, two.loss, rtol=2 * STATISTIC, atol=0)  # of both
    rounding = 2 * torch.finfo(dtype).eps
    for a, b in zip(one[3:], two[3:], strict=True):
        assert (a.double() - b.double()).norm() <= rounding * b.double().norm()


def test_one_gemm_is_chosen_by_the_hidden_size(monkeypatch):
    """The loss then holds no tile of products, as the plan says."""
    hidden, weight, labels, _ = Case((37,), 96, 333, torch.bfloat16).tensors()
    asked = []

    def way(call, **more):
        asked.append(call.gemm_block)
        return plan.choose_plan(call, **more)

    monkeypatch.setattr(sum_grads, "choose_plan", way)
    row = archs.BY_NAME["interpreter"]
    row = row._replace(two_bytes=row.two_bytes._replace(gemm_up_to=64))
    monkeypatch.setattr(archs, "architecture", lambda device: row)
    for H in (64, 96):
        problem = Problem(hidden[:, :H].contiguous(), weight[:, :H].contiguous(), labels)
        sum_grads.loss_and_grads(problem, Outputs(weight=True), None)
    assert asked == [row.two_bytes.gemm.BLOCK_V, 0]
