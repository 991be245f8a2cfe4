"""Property tests on examples drawn at random, round after round, for a given time.

    python tests/fuzz.py 600            # seconds; what follows goes to pytest
    python tests/fuzz.py 60 tests/loss

Each round has a seed of its own, which is printed and repeats it. What failed is kept in
`.hypothesis/` and tried first the next time; a failure ends the script with 1.
"""

import secrets
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent


def one_round(seed: int, seconds: float, arguments: list[str]) -> int | None:
    """Exit status of pytest; ``None`` if the time is over before it ends."""
    command = [
        *(sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-m", "hypothesis"),
        *("--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", *arguments),
    ]
    process = subprocess.Popen(command, cwd=TESTS.parent)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return None


def main() -> int:
    seconds, arguments = float(sys.argv[1]), sys.argv[2:]
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        seed = secrets.randbelow(2**32)
        print(f"== fuzz: seed {seed}, {left:.0f} s left", flush=True)
        status = one_round(seed, left, arguments)
        if status:
            print(
                f"== fuzz: seed {seed} failed; again with\n   pytest -m hypothesis "
                f"--hypothesis-profile=fuzz --hypothesis-seed={seed} {' '.join(arguments)}"
            )
            return 1
    print(f"== fuzz: nothing found in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
