"""A user whose machine cannot build or launch the kernels gets torch's result, and one warning."""

import errno
import subprocess
import warnings

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

import fusedce
from fusedce.backends import choose, fallback
from fusedce.backends.triton import head_gradients, launch, sum_grads
from fusedce.testing import Case
from fusedce.tools import doctor


class PTXASError(Exception):
    """As Triton names it since 3.5."""


CANNOT = {
    "no compiler": (RuntimeError("Failed to find C compiler. Specify CC."), "install gcc"),
    "no headers": (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "python3-dev"),
    "no such compiler": (FileNotFoundError(2, "No such file or directory", "gcc"), "set CC"),
    "ptxas": (PTXASError("`ptxas` failed with error code 255"), "TRITON_PTXAS_PATH"),
    "LLVM": (RuntimeError("PassManager::run failed"), "another version of Triton"),
    "front end": (CompilationError("def f(): pass", None, "no"), "another version of Triton"),
    "shared memory": (OutOfResources(232448, 101376, "shared memory"), "report the card"),
    "no libcuda": (AssertionError("libcuda.so cannot found!"), "ldconfig"),
    "old driver": (
        RuntimeError("Triton Error [CUDA]: the provided PTX was compiled with an unsupported "
                     "toolchain."),
        "update the driver",
    ),
    "no driver": (RuntimeError("0 active drivers ([]). There should only be one."), "driver"),
    "no cache": (PermissionError(errno.EACCES, "denied", "/.triton"), "TRITON_CACHE_DIR"),
    "no exec": (ImportError("main.so: failed to map segment from shared object"), "be loaded"),
}  # fmt: skip
IS_AN_ERROR = {
    "argument": ValueError("hidden must be (N, H)"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "dead context": RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    "assertion": RuntimeError("CUDA error: device-side assert triggered"),
    "misaligned": RuntimeError("Triton Error [CUDA]: misaligned address"),
}


class Fails:
    """A kernel whose launch raises; counts how often it was tried."""

    __name__ = "some_kernel"

    def __init__(self, error):
        self.error, self.tried = error, 0

    def __getitem__(self, grid):
        return self

    def __call__(self, **_):
        self.tried += 1
        raise self.error


@pytest.fixture(autouse=True)
def by_default_triton(monkeypatch):
    """As on a GPU, where ``backend=None`` takes the kernels; each test starts with no failure."""
    monkeypatch.setattr(choose, "default_backend", lambda *_: "triton")
    monkeypatch.setattr(fallback, "_refused", {})


def step(backend=None, **options):
    hidden, weight, labels, _ = Case((30,), 32, 70, ignored=0.3).tensors()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = fusedce.fused_ce(*leaves, labels, backend=backend, **options).mean()
    return loss.detach(), *torch.autograd.grad(loss * 3, leaves)


@pytest.mark.parametrize("name", CANNOT)
def test_torch_computes_after_one_warning(monkeypatch, name):
    error, remedy = CANNOT[name]
    expected = step(backend="torch")
    kernel = Fails(error)
    monkeypatch.setattr(launch, "compact_kernel", kernel)
    with pytest.warns(UserWarning, match="do not run on cpu") as seen:
        found = step()
    assert remedy in str(seen[0].message)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()  # from then on, without a word and without another try
    assert kernel.tried == 1
    with pytest.raises(RuntimeError, match="some_kernel") as asked:
        step(backend="triton")
    assert remedy in str(asked.value)


@pytest.mark.parametrize("name", IS_AN_ERROR)
def test_other_errors_are_raised_as_they_are(monkeypatch, name):
    monkeypatch.setattr(launch, "compact_kernel", Fails(IS_AN_ERROR[name]))
    with pytest.raises(type(IS_AN_ERROR[name])) as found:
        step()
    assert found.value is IS_AN_ERROR[name]
    assert fallback.refused(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("module", "kernel"),
    [(sum_grads, "softmax_rows_kernel"), (head_gradients, "label_grad_kernel")],
)
def test_a_later_kernel_leaves_nothing_half_done(monkeypatch, module, kernel):
    error, _ = CANNOT["shared memory"]
    found, expected = torch.full((30,), 7), torch.full((30,), 7)
    step(backend="torch", argmax_out=expected)
    monkeypatch.setattr(module, kernel, Fails(error))
    with pytest.warns(UserWarning, match="do not run"):
        got = step(argmax_out=found)
    torch.testing.assert_close(got, step(backend="torch"), rtol=0, atol=0)
    assert found.equal(expected)


def test_a_kernel_that_fails_in_backward(monkeypatch):
    from fusedce.backends import triton

    expected = step(backend="torch")
    monkeypatch.setattr(triton, "scale_kernel", Fails(CANNOT["ptxas"][0]))
    with pytest.warns(UserWarning, match="do not run"):
        found = step()
    torch.testing.assert_close(found, expected)


def test_functions_of_tokens_and_divergences(monkeypatch):
    hidden, weight, labels, _ = Case((30,), 32, 70).tensors()
    weight.requires_grad_()

    def all_of_them(backend):
        tokens = fusedce.fused_logprobs(hidden, weight, labels, backend=backend)
        kl = fusedce.fused_kl(hidden, weight, hidden.flip(0), weight.detach(), backend=backend)
        total = tokens.logprob.sum() + tokens.entropy.sum() + kl.loss_sum
        return tokens.logprob, tokens.argmax, *torch.autograd.grad(total, weight)

    expected = all_of_them("torch")
    monkeypatch.setattr(launch, "compact_kernel", Fails(CANNOT["no compiler"][0]))
    with pytest.warns(UserWarning, match="do not run"):
        found = all_of_them(None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda h, w, y: fusedce.fused_cross_entropy(h, w, y, reduction="none").sum(),
        lambda h, w, y: fusedce.fused_ce(h, w, y, monitor=("entropy", "z_loss")).loss_sum,
        lambda h, w, y: fusedce.fused_ce(h, w, y, label_smoothing=0.1, z_loss=0.1).loss_sum,
        lambda h, w, y: fusedce.fused_cross_entropy(h, w, y, class_weight=torch.ones(70)),
    ],
    ids=["none", "monitor", "options", "class weights"],
)  # fmt: skip
def test_losses_once_torch_computes(monkeypatch, loss):
    hidden, weight, labels, _ = Case((30,), 32, 70).tensors()
    weight.requires_grad_()
    monkeypatch.setattr(choose, "default_backend", lambda *_: "torch")
    expected = loss(hidden, weight, labels)
    (exact,) = torch.autograd.grad(expected, weight)
    monkeypatch.setattr(choose, "default_backend", lambda *_: "triton")
    monkeypatch.setattr(launch, "compact_kernel", Fails(CANNOT["no compiler"][0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):  # the one that finds out, and one after it
            found = loss(hidden, weight, labels)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(found, weight)[0], exact)
        with torch.no_grad():
            torch.testing.assert_close(loss(hidden, weight, labels), expected)


def test_every_function_of_a_backend_falls_back():
    wanted = {name for name in vars(choose.Backend) if not name.startswith("_")}
    assert set(vars(fallback.BACKEND)) == wanted


def test_a_budget_is_that_of_the_kernels():
    """By default as on request, so that a plan holds."""
    least = []
    for backend in (None, "triton"):
        with pytest.raises(ValueError, match="at least") as error:
            step(backend=backend, memory_budget=1)
        least.append(str(error.value))
    assert least[0] == least[1]


def test_doctor_says_it(monkeypatch):
    monkeypatch.setattr(doctor, "default_backend", lambda *_: "triton")
    monkeypatch.setattr(launch, "compact_kernel", Fails(CANNOT["no compiler"][0]))
    with pytest.warns(UserWarning, match="do not run"):
        said = doctor.text(doctor.report())
    assert "torch backend; the Triton kernels do not run here" in said
    assert "install gcc" in said
