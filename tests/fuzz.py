"""Property tests on examples drawn at random, round after round, for a given time.

    python tests/fuzz.py 600            # seconds; what follows goes to pytest
    python tests/fuzz.py 60 tests/loss

Each round runs every property once, in a random order: losses, accumulators, programs over a
replaced head, schedules of ranks. It has a seed of its own, which is printed and repeats it. A
failing example is kept in `.hypothesis/` and tried first the next time, and ends the script with
status 1.
"""

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent


def command_of(seed: int, arguments: list[str]) -> list[str]:
    order = ("-p", "randomly", f"--randomly-seed={seed}", "--randomly-dont-reset-seed")
    drawn = ("--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", *order)
    options = (*drawn, "-m", "hypothesis")
    return [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *options, *arguments]


def one_round(seed: int, seconds: float, arguments: list[str]) -> int | None:
    """Exit status of pytest; ``None`` if the time is over before it ends."""
    environment = os.environ | {"FUSEDCE_SEED": str(seed)}
    process = subprocess.Popen(command_of(seed, arguments), cwd=TESTS.parent, env=environment)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return None


def main() -> int:
    seconds, arguments = float(sys.argv[1]), sys.argv[2:]
    end = time.monotonic() + seconds
    seeds, failed = [], False
    while not failed and (left := end - time.monotonic()) > 0:
        seeds.append(secrets.randbelow(2**32))
        print(f"== fuzz: seed {seeds[-1]}, {left:.0f} s left", flush=True)
        failed = bool(one_round(seeds[-1], left, arguments))
    print(f"== fuzz: seeds {', '.join(map(str, seeds))}")
    if failed:
        again = " ".join(["pytest", *command_of(seeds[-1], arguments)[3:]])
        print(f"== fuzz: seed {seeds[-1]} failed; again with\n   {again}")
    else:
        print(f"== fuzz: nothing found in {seconds:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
