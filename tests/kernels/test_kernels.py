"""The Triton kernels: odd shapes under the interpreter, real compilation for every architecture."""

import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.params import slow

import fusedce
from fusedce.backends import triton as launch
from fusedce.backends.triton import archs, forward, small_sums, sum_grads
from fusedce.contract.labels import bad_label_message
from fusedce.contract.problem import Outputs, Problem, Task
from fusedce.testing import Case, check


@pytest.mark.parametrize(
    ("N", "H", "V"),
    [
        shape if shape in ((1, 1, 2), (1, 123, 327), (97, 123, 127)) else slow(*shape)
        for shape in itertools.product([1, 97], [1, 96, 123], [1, 2, 127, 327])
    ],
)
def test_odd_shapes_match_the_reference(N, H, V):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = Case(
            (N,), H, V, dtype, ignored=0.3 if N > 1 else 0.0, with_bias=True,
            options={"softcap": 5.0, "logit_scale": 0.7},
        )  # fmt: skip
        for need in ((), ("hidden", "weight", "bias")):
            fn = functools.partial(fusedce.fused_ce, backend="triton", chunk_tokens=40)
            check(fn, dataclasses.replace(case, requires_grad=need))


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("bad", [slow(-7), 300, slow(2**31 - 1)])
def test_bad_label_is_nan_with_a_code_on_the_device(bad, small, monkeypatch, request):
    """A bad label on a GPU gives NaN and its code, without an assert or a read out of bounds."""
    if not small:
        request.getfixturevalue("no_small_calls")
    for module in (forward, small_sums, sum_grads):
        monkeypatch.setattr(module, "raise_on_cpu", lambda *args: None)
    hidden, weight, labels, _ = Case((70,), 24, 300).tensors()
    labels[41] = labels[60] = bad
    problem = Problem(hidden, weight, labels)
    loss_sum, n_valid = launch.loss(problem)
    assert loss_sum.isnan()
    beyond = " or beyond" if bad == 2**31 - 1 else ""  # the largest that the code can tell
    message = bad_label_message(int(n_valid))
    assert f"got {bad}{beyond} at flattened position 41" in message
    summed = launch.loss_and_grads(Task(problem, Outputs(hidden=True, weight=True)), None)
    loss_sum, n_valid, d_hidden = summed.loss, summed.n_valid, summed.d_hidden
    assert loss_sum.isnan()
    assert n_valid < 0
    assert d_hidden[41].isnan().all()
    assert not d_hidden[40].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.37, 0.0])
@pytest.mark.parametrize("blocks", [0, 1, 50])  # of 24 programs
def test_one_launch_scales_all_gradients_and_rounds_once(dtype, factor, blocks):
    """What has the result's dtype stays where it is."""
    sizes, kinds = (7, blocks * launch.SCALE_BLOCK + 5, 3), (torch.float32, dtype, dtype)
    given = [torch.randn(n).to(kind) for n, kind in zip(sizes, kinds, strict=True)]
    exact = [x.double() * torch.tensor(factor).double() for x in given]
    with mock.patch.object(launch, "launch_grid", wraps=launch.launch_grid) as run:
        made = launch.scaled(given, torch.tensor(factor), dtype)
    (called,) = run.call_args_list
    assert called.args[1] == (min(blocks + 1, 24),)
    # half a unit of the last place, that of a subnormal number among the small ones
    info = torch.finfo(dtype)
    close = {"rtol": info.eps / 2 * (1 + info.eps), "atol": info.smallest_normal * info.eps / 2}
    for x, out, e in zip(given, made, exact, strict=True):
        assert out.dtype == dtype
        assert (out is x) == (x.dtype == dtype)
        torch.testing.assert_close(out.double(), e, **close)


@pytest.mark.parametrize("factor", [torch.inf, torch.nan, -torch.inf])
def test_a_gradient_of_zero_stays_zero(factor):
    """Whoever divides by a count of 0 gets torch's gradients."""
    given = [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]).bfloat16()]
    for out in launch.scaled(given, torch.tensor(factor), torch.bfloat16):
        assert out[0] == 0
        assert not out[1].isfinite()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # one to four minutes where nothing else runs
@pytest.mark.parametrize("arch", [row.name for row in archs.ARCHITECTURES if row.compiler])
def test_every_kernel_compiles(arch):
    """Everything fits and nothing spills, ptxas serialises no wgmma; on sm_90 access is wide.

    On the others fp16, whose blocks are bf16's, and options of fp32 are left out: half the time.
    """
    script = Path(__file__).parents[2] / "bench" / "compiler_report.py"
    whole, wide = arch == "sm_90", "^(exp_tile|token_grad) (bf16|fp16)"
    match = "" if whole else r"^\S+ (bf16|fp32(?!.*(bias|options|V=)))"
    sass = wide if whole else "^$"  # (reading it takes as long as to compile it)
    # Blocks were chosen for the registers that these versions of Triton need.
    known = version("triton").startswith(("3.6.", "3.7."))
    faults = ["--faults"] if known else []
    command = [sys.executable, str(script), "--arch", arch, "--json", *faults]
    command += ["--match", match, "--sass", sass]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    if "has no compiler for it" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    rows = {row["kernel"]: row for row in json.loads(done.stdout[done.stdout.index("[\n") :])}
    assert {name.split()[0] for name in rows} == {
        "forward", "exp_gemm", "label_logit", "exp_tile", "softmax_rows", "hidden_grad",
        "label_grad", "token_grad", "stats", "merge_stats", "scale", "compact",
        "divergence_rows", "small_rows", "small_finish",
    }  # fmt: skip
    kinds = ("bf16", "fp16", "fp32 tf32")
    tensor_cores = tuple(
        f"{kernel} {kind}" for kernel in ("forward", "stats", "exp_gemm") for kind in kinds
    )
    for name, row in rows.items():
        assert row["shared"] <= row["shared_limit"], name
        assert row["warnings"] == [], name  # C75xx: ptxas serialises wgmma
        if name.startswith(tensor_cores):
            assert row["matrix"], f"no tensor-core instruction in {name} on {arch}"
    if not whole:
        return
    if not known:
        pytest.skip("registers were chosen with Triton 3.6 and 3.7")
    for name in (
        "forward bf16", "forward fp16", "forward fp32 tf32", "stats bf16 tokens",
        "forward bf16 bias+scale+cap", "forward fp16 bias+scale+cap",
    ):  # fmt: skip
        assert "wgmma.mma_async" in rows[name]["matrix"], name
        assert rows[name]["async"] >= 15, name
    for row in (row for name, row in rows.items() if re.search(wide, name)):  # whatever V is
        assert row["stores"].get("16", 0) >= 2, row["kernel"]
        assert "2" not in row["stores"], row["kernel"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_are_copied_are_said_to_be_once(dtype):
    from fusedce.backends.triton import forward, launch

    launch.warn_once.cache_clear()
    hidden, weight, labels, _ = Case((20,), 64, 70, dtype).tensors()
    exact = forward.loss(Problem(hidden, weight, labels))[0]
    shifted = torch.empty(weight.numel() + 1, dtype=dtype)[1:].view_as(weight).copy_(weight)
    wide = hidden.new_empty(20, 128)[:, ::2].copy_(hidden)
    for h, w, message in (
        (hidden, shifted, "weight is copied on .* not aligned to 16 bytes"),
        (wide, weight, "hidden is copied on .* not aligned to 16 bytes"),
        (hidden[:, :40], weight[:, :40], "hidden is copied on .* no multiple of 32 long"),
    ):
        with pytest.warns(UserWarning, match=message):
            first = forward.loss(Problem(h, w, labels))[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            forward.loss(Problem(h, w, labels))
        if h.shape == hidden.shape:
            assert first == exact  # to the bit
