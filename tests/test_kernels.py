"""The Triton kernels: odd shapes under the interpreter, real compilation for every architecture."""

import os
import subprocess
import sys

import pytest
import torch

import fusedce
from fusedce.labels import bad_label_message
from fusedce.testing import Case, check

BLOCKS = (32, 64, 32)  # what the interpreter's configuration uses; none divides the shapes below


@pytest.mark.parametrize("V", [1, 2, 127, 1031])
@pytest.mark.parametrize("H", [1, 96, 123])
@pytest.mark.parametrize("N", [1, 257])
def test_odd_shapes(V, H, N):
    heavy = N * V > 100_000
    for dtype in (torch.float32,) if heavy else (torch.float32, torch.bfloat16, torch.float16):
        case = Case(
            (N,), H, V, dtype, ignored=0.3 if N > 1 else 0.0, with_bias=True,
            options={"softcap": 5.0, "logit_scale": 0.7},
        )  # fmt: skip
        for need in ((), ("hidden", "weight", "bias")):

            def fn(*args, **kwargs):
                return fusedce.fused_ce(*args, backend="triton", chunk_tokens=100, **kwargs)

            check(fn, Case(**{**vars(case), "requires_grad": need}))


def test_lse_is_returned_and_zero_where_ignored():
    from fusedce.backends import launch

    hidden, weight, labels, _ = Case((70,), 24, 300, ignored=0.4).tensors()
    _, n_valid, lse = launch.loss(hidden, weight, labels, None, -100, None, 1.0)
    valid = labels != -100
    assert n_valid == valid.sum()
    assert lse[~valid].eq(0).all()
    exact = (hidden[valid].double() @ weight.double().T).logsumexp(-1)
    torch.testing.assert_close(lse[valid].double(), exact, rtol=1e-6, atol=1e-6)


def test_loss_of_a_token_does_not_depend_on_its_batch():
    from fusedce.backends import launch

    hidden, weight, labels, _ = Case((70,), 24, 300).tensors()
    _, _, together = launch.loss(hidden, weight, labels, None, -100, None, 1.0)
    for i in (0, 33, 69):
        _, _, alone = launch.loss(
            hidden[i : i + 1], weight, labels[i : i + 1], None, -100, None, 1.0
        )
        assert alone.item() == together[i].item()


@pytest.mark.parametrize("bad", [-7, 300, 2**31 - 1])
def test_bad_label_is_nan_with_a_code_on_the_device(bad, monkeypatch):
    """What a GPU does: no read out of bounds, no assert, a NaN and the evidence."""
    from fusedce.backends import launch

    monkeypatch.setattr(launch, "_raise_on_cpu", lambda *args: None)
    hidden, weight, labels, _ = Case((70,), 24, 300).tensors()
    labels[41] = labels[60] = bad
    loss_sum, n_valid, _ = launch.loss(hidden, weight, labels, None, -100, None, 1.0)
    assert loss_sum.isnan()
    assert f"got {bad} at flattened position 41" in bad_label_message(int(n_valid))
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    loss_sum, n_valid = launch.loss_and_grads(
        hidden, weight, labels, None, -100, None, 1.0, None, d_hidden, d_weight, None
    )
    assert loss_sum.isnan()
    assert n_valid < 0
    assert d_hidden[41].isnan().all()
    assert not d_hidden[40].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.37, 0.0])
def test_scale_in_place(dtype, factor):
    from fusedce.backends import configs, launch

    x = torch.randn(3, configs.SCALE_BLOCK // 2 + 1).to(dtype)
    exact = x.double() * torch.tensor(factor).double()
    launch.scale_(x, torch.tensor(factor))
    # The interpreter truncates to bf16, where hardware rounds: a whole unit instead of half.
    torch.testing.assert_close(x.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_compiles(arch):
    """In a process of its own: the interpreter replaces the compiler in this one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = os.path.join(os.path.dirname(__file__), "compile_kernels.py")
    done = subprocess.run(
        [sys.executable, script, arch], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for kernel in ("forward", "grad_rows", "compact", "scale"):
        assert f"{kernel} " in done.stdout
    if arch == "sm_90":
        line = next(x for x in done.stdout.splitlines() if x.startswith("forward bf16"))
        assert "wgmma" in line


@pytest.mark.gpu
def test_on_a_gpu():
    device = torch.accelerator.current_accelerator()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for chunk_tokens in (None, 60):
            case = Case((257,), 123, 1031, dtype, ignored=0.3, with_bias=True)

            def fn(*args, chunk_tokens=chunk_tokens, **kwargs):
                return fusedce.fused_ce(*args, chunk_tokens=chunk_tokens, **kwargs)

            check(fn, case, device)
