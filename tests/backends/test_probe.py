"""A machine that cannot build or launch kernels gets torch's results, and one warning."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fusedce
from fusedce.backends import choose
from fusedce.backends.triton import launch, sum_grads
from fusedce.testing import Case

pytestmark = pytest.mark.usefixtures("no_small_calls")
NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC.")


class Fails:
    """A kernel whose launch raises; counts how often it was tried."""

    def __init__(self, error):
        self.error, self.tried = error, 0

    def __getitem__(self, grid):
        return self

    def __call__(self, **_):
        self.tried += 1
        raise self.error


@pytest.fixture(autouse=True)
def by_default_triton(monkeypatch):
    """As on a GPU, where ``backend=None`` takes the kernels; no device has been probed."""
    monkeypatch.setattr(choose, "default_backend", lambda *_: "triton")
    monkeypatch.setattr(choose, "_kernel_errors", {})


def step(backend=None):
    hidden, weight, labels, _ = Case((30,), 32, 70, ignored=0.3).tensors()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = fusedce.fused_ce(*leaves, labels, backend=backend).mean()
    return loss.detach(), *torch.autograd.grad(loss * 3, leaves)


@pytest.mark.parametrize(
    "error", [NO_COMPILER, ImportError("main.so: failed to map segment"), OSError(13, "denied")]
)
def test_torch_computes_after_one_warning(monkeypatch, error):
    kernel = Fails(error)
    monkeypatch.setattr(launch, "compact_kernel", kernel)
    first = str(error).splitlines()[0]
    with pytest.warns(UserWarning, match="kernels do not run on cpu .*C compiler") as seen:
        found = step()
    assert first in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = step()  # without a word and without another try
    assert kernel.tried == 1
    for got in (found, again):
        torch.testing.assert_close(got, step(backend="torch"), rtol=0, atol=0)
    with pytest.raises(type(error)):
        step(backend="triton")


def test_a_device_is_probed_once():
    assert choose.why_no_kernels(torch.device("cpu")) is None
    assert choose._kernel_errors == {torch.device("cpu"): None}
    torch.testing.assert_close(step(), step(backend="triton"), rtol=0, atol=0)


def test_a_kernel_that_fails_later_is_an_error(monkeypatch):
    step()
    monkeypatch.setattr(sum_grads, "softmax_rows_kernel", Fails(NO_COMPILER))
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        step()


def test_it_is_not_probed_where_a_compiler_or_a_mode_traces(monkeypatch):
    probed = []
    monkeypatch.setattr(launch, "probe", probed.append)
    hidden, weight, labels, _ = Case((30,), 32, 70).tensors()

    def loss(h):
        return fusedce.fused_ce(h, weight, labels).loss_sum

    torch.compile(loss, backend="eager", fullgraph=True)(hidden)
    with FlopCounterMode(display=False):
        loss(hidden)
    with FakeTensorMode() as mode:
        fusedce.fused_ce(*(mode.from_tensor(x) for x in (hidden, weight, labels)))
    torch.jit.trace(loss, hidden, check_trace=False)
    assert probed == []
    loss(hidden)
    assert probed == [hidden.device]


def test_it_is_not_probed_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(launch, "probe", lambda device: pytest.fail("probed"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        hidden = torch.empty(3, 16, device="cuda")
    monkeypatch.setattr(choose, "is_fake", lambda x: False)
    assert choose.resolve_backend(None, hidden) == "triton"
    assert choose._kernel_errors == {}
