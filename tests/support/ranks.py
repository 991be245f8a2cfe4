"""Real gloo processes for tests: one start, many cases."""

import contextlib
import faulthandler
import functools
import os
import re
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SOON, TIMEOUT = 10, 120  # seconds: until all ranks raise, and until the process group gives up


def run(cases, ranks=2, *, timeout=TIMEOUT, backend="gloo"):
    """``{name: [result of rank 0, 1, ...]}`` of ``cases``: ``{name: function(rank)}``, in order.

    A case that raises on a rank gives its traceback as :class:`Failed`; later cases, whose
    collectives may be out of step by then, are not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = (folder, ranks, cases, timeout, backend)
        try:
            mp.start_processes(_worker, args, nprocs=ranks, start_method="fork")
        except mp.ProcessExitedException as e:
            raise AssertionError(Path(folder, f"{e.error_index}.stack").read_text()) from e
        per_rank = [torch.load(Path(folder) / str(r), weights_only=False) for r in range(ranks)]
    missing = Failed("not run: a case before this one failed")
    return {name: [results.get(name, missing) for results in per_rank] for name in cases}


def of(results, name):
    """The results of a case on all ranks; fails the test with the traceback if one raised."""
    for rank, result in enumerate(results[name]):
        assert not isinstance(result, Failed), f"rank {rank}:\n{result}"
    return results[name]


class Failed(str):
    """A traceback."""


def shared(cases, world=2, **options):
    """A function of a name: its results on all ranks. All cases run at the first call."""
    results = functools.cache(lambda: run(cases, world, **options))
    return lambda name: of(results(), name)


def together(world=2, **options):
    """A decorator: the test runs on each rank, and all tests of the decorator in one start.

    One that a mark below the decorator skips does not run there either.
    """
    cases = {}
    found = shared(cases, world, **options)

    def decorated(test):
        marks = getattr(test, "pytestmark", ())
        if not any(mark.name == "skipif" and mark.args[0] for mark in marks):
            cases[test.__name__] = test

        @functools.wraps(test)
        def on_all_ranks():
            found(test.__name__)

        del on_all_ranks.__wrapped__  # pytest would read its parameters
        return on_all_ranks

    return decorated


def die():
    """End this process at once, as if it was killed; its results are those of earlier cases."""
    _save()
    os._exit(0)


def error_of(f, *args, **kwargs):
    """``"ErrorType: message"`` of a call that must raise; ``None`` if it does not."""
    try:
        f(*args, **kwargs)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


def anywhere(words):
    """An error message without the number of the rank that failed."""
    return words and re.sub(r" \(on rank \d+\)$", "", words)


def timed(f, *args, **kwargs):
    """``(error_of(f), seconds)``."""
    begin = time.perf_counter()
    error = error_of(f, *args, **kwargs)
    return error, time.perf_counter() - begin


def _worker(rank, folder, ranks, cases, timeout, backend):
    faulthandler.enable(open(Path(folder, f"{rank}.stack"), "w"))  # noqa: SIM115  while it lives
    # A forked process has none of its parent's threads, and would wait for them. Accelerate asks
    # for more where the variable is not set.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    global _save
    results = {}
    _save = functools.partial(torch.save, results, Path(folder) / str(rank))
    try:
        for name, case in cases.items():
            results[name] = case(rank)
    except Exception:
        results[name] = Failed(traceback.format_exc())
    _save()
    with contextlib.suppress(RuntimeError):  # a rank that has failed is gone already
        dist.barrier()  # one that leaves while another one talks to it aborts that one
