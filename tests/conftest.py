"""Set-up of every test: the interpreter, seeds, hypothesis, GPUs."""

import gc
import getpass
import os
import random
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

# The same examples on every machine and day, and the line that repeats a failure with it;
# `make fuzz` draws others.
settings.register_profile("default", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("fuzz", derandomize=False, print_blob=True, deadline=None)
settings.load_profile("default")

# inductor's cache does not ask which instructions the code in it is for: one an instruction set.
_CACHE = f"torchinductor_{getpass.getuser()}_{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / _CACHE))

# In a forked rank, a process group among its parent's garbage would wait for the parent's threads.
os.register_at_fork(after_in_child=gc.freeze)

COMPILED = Path(__file__).parent / "compiled"
GPU = Path(__file__).parent / "gpu"


def pytest_addoption(parser):
    parser.addoption(
        "--jitter", type=int, default=0, metavar="SEED",
        help="sum products in an order drawn from SEED, as another CPU would (0: as they are)",
    )  # fmt: skip


def pytest_configure(config):
    """Choose, before triton is imported, what runs its kernels in this process.

    ===========================  ================================================================
    only tests of `tests/gpu`    the GPU, if there is one
    only tests of `compiled`     an interpreter of PTX; no GPU is seen
    others                       Triton's interpreter; no GPU is seen
    ===========================  ================================================================
    """
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]

    def only(folder):
        return bool(asked) and all(path.is_relative_to(folder) for path in asked)

    if only(GPU) and torch.accelerator.is_available():
        os.environ["TRITON_INTERPRET"] = "0"
    else:
        from support.device import hide_gpus

        hide_gpus()
        os.environ["TRITON_INTERPRET"] = "0" if only(COMPILED) else "1"
    if seed := config.getoption("--jitter"):
        from support import jitter

        jitter.install(seed)


@pytest.fixture(autouse=True, scope="session")
def interpreter_as_on_hardware():
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from support.interpreter import as_on_hardware

    with as_on_hardware():
        yield


@pytest.fixture(params=["grad", "no_grad", "inference_mode"])
def each_mode(request):
    """The test runs in each mode of autograd."""
    from support.heads import MODES

    with MODES[request.param]():
        yield request.param


@pytest.fixture
def no_logits(monkeypatch):
    """Fail the test if real logits of a replaced head are computed."""
    from fusedce.head.linear_call import LinearCall

    def logits(self, *_):
        raise AssertionError("real logits were computed")

    monkeypatch.setattr(LinearCall, "materialize", logits)


@pytest.fixture
def no_small_calls():
    """Few tokens are computed by chunks, as many are."""
    from support import device

    with device.no_small_calls():
        yield


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before any fixture: what a test draws depends neither on the day nor on other tests."""
    torch.manual_seed(0)
    random.seed(0)


def pytest_terminal_summary(terminalreporter, config):
    """Name the tests that failed, for `make test`'s last line, and the order that repeats them."""
    failed = terminalreporter.getreports("failed") + terminalreporter.getreports("error")
    path = os.environ.get("FAILED_TESTS")
    if path and not hasattr(config, "workerinput"):  # xdist's workers come here, too
        with open(path, "a") as f:
            f.writelines(f"{report.nodeid}\n" for report in failed)
    seed = config.getoption("--jitter")
    if not seed or not failed:
        return
    terminalreporter.section(f"products were summed in the order of --jitter {seed}")
    for report in failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        where = f"{crash.path}:{crash.lineno}" if crash else report.nodeid
        terminalreporter.line(f"{where}: repeat with pytest --jitter {seed} '{report.nodeid}'")


def pytest_collection_modifyitems(config, items):
    if os.environ["TRITON_INTERPRET"] == "0" and torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU that this process sees: `make gpu`")
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords are also names of folders
            item.add_marker(skip)
