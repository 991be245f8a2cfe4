"""Break the code on purpose, one place at a time, and show that the tests notice.

    python tests/mutate.py                     # all, two at a time
    python tests/mutate.py ticket              # those whose name contains a word
    python tests/mutate.py --only kernels      # an area of mutants.jsonl
    python tests/mutate.py --jobs 1
    python tests/mutate.py --quick             # by the tests of `make test` alone

Each mutant is a copy of the package with one piece of text replaced. Its tests must fail by
failing tests that pass without it, or crash the interpreter: a mutant that survives, that cannot
even be collected, or whose test fails with the code as it is, ends the script with 1.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mutants
from mutants import Mutant

# Tests of a mutant run in a process of their own, forked from one that has imported what they all
# need: importing takes longer than most of them. Not triton, which must be told to interpret first.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["numpy", "pytest", "hypothesis", "torch", "transformers"])


def kill(mutant: Mutant, *, quick: bool = False) -> str:
    """A line about the mutant; its first word is "killed" if the tests noticed."""
    try:
        file, test = mutants.place(mutant, mutants.sources()), mutants.suite(mutant)
    except ValueError as error:
        return f"STALE    {error}"
    text = mutants.sources()[file].replace(mutant.old, mutant.new)
    arguments = [str(test), *mutant.tests.split()[1:], *(["-m", "not slow"] if quick else [])]
    status, output = run_tests(file, text, arguments)
    if status is not None and status < 0:  # a signal has ended the interpreter
        if run_tests(file, mutants.sources()[file], arguments)[0] != 0:
            return f"BROKEN   {mutant.name}: {mutant.tests} fails without the mutant, too"
        return f"killed   {mutant.name}: a crash of the interpreter (signal {-status})"
    failed = [x for x in output.splitlines() if x.startswith("FAILED")]
    if status != 1 or not failed:
        return f"SURVIVED {mutant.name}: {mutant.tests}\n{output[-2000:]}"
    test = failed_test(failed[0])
    if not passes(test):
        return f"BROKEN   {mutant.name}: {test} fails without the mutant, too"
    return f"killed   {mutant.name}: {test}"


def failed_test(line: str) -> str:
    """The test that a line of pytest's summary names, from the folder of the tests."""
    file, _, name = line.split(" - ")[0].split(maxsplit=1)[-1].partition("::")
    return "::".join(x for x in (file.rsplit("tests/")[-1], name) if x)


@functools.cache
def passes(test: str) -> bool:
    """Whether a test that has failed passes with the code as it is, in the same kind of process."""
    file, text = next(iter(mutants.sources().items()))
    return run_tests(file, text, [str(mutants.ROOT / "tests" / test)])[0] == 0


def run_tests(
    file: Path, text: str, arguments: list[str], seconds: float | None = None
) -> tuple[int | None, str]:
    """pytest's exit status (``None``: not within ``seconds``) and its output, with another file.

    ``text`` takes the place of ``file``, a path from the package's folder, in a copy of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "fusedce"
        shutil.copytree(mutants.ROOT / "fusedce", copy, symlinks=False)
        (copy / file).write_text(text)
        arguments = ["-x", "-q", "-p", "no:cacheprovider", *arguments]
        process = _FORKS.Process(target=_pytest, args=(folder, arguments))
        process.start()
        process.join(seconds)
        status = process.exitcode
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)  # and the ranks that its test has started
            process.join()
        return status, (Path(folder) / "output").read_text()


def _pytest(folder: str, arguments: list[str]) -> None:
    """Run a test in a new process with the package in ``folder``, which receives the output."""
    os.setsid()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    sys.path.insert(0, folder)
    with open("output", "w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    import pytest

    status = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(status)  # skips torch's clean-up at the end of a forked process


def run(chosen: Iterable[Mutant], jobs: int, quick: bool) -> Counter[str]:
    """How many have which verdict (`kill`'s first word); prints a line about each as it comes."""
    verdicts: Counter[str] = Counter()
    with ThreadPoolExecutor(jobs) as pool:
        for line in pool.map(functools.partial(kill, quick=quick), chosen):
            print(line, flush=True)
            verdicts[line.split(maxsplit=1)[0]] += 1
    return verdicts


def main() -> int:
    areas = mutants.by_area()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of them")
    parser.add_argument("--only", action="append", choices=areas, metavar="AREA",
                        help=f"only this area, may be given again: {', '.join(areas)}")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--quick", action="store_true", help="by the tests of `make test` alone")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    total: Counter[str] = Counter()
    begin = time.monotonic()
    for area in given.only or areas:
        chosen = [
            m for m in areas[area] if not given.words or any(w in m.name for w in given.words)
        ]
        if not chosen:
            continue
        verdicts = run(chosen, given.jobs, given.quick)
        print(f"-- {area}: {verdicts['killed']} of {len(chosen)} killed", flush=True)
        total += verdicts
    print(
        f"{total['killed']} of {total.total()} mutants killed, {total['SURVIVED']} survived, "
        f"{total['STALE']} stale, {total['BROKEN']} with a broken test, "
        f"in {time.monotonic() - begin:.0f} s"
    )
    return 0 if total.total() and total["killed"] == total.total() else 1


if __name__ == "__main__":
    sys.exit(main())
