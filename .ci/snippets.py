"""Run every Python snippet of Markdown files: ``python snippets.py FILE ...``.

Each snippet runs in a process and an empty folder of its own, with the interpreter that runs this
script, so that it must hold its own imports and need nothing but what is installed there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path


def main(files: list[str]) -> int:
    failed = total = 0
    for file in files:
        snippets = re.findall(r"```python\n(.*?)```", Path(file).read_text(), re.DOTALL)
        for number, snippet in enumerate(snippets, start=1):
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [sys.executable, "-c", snippet], cwd=folder, capture_output=True, text=True
                )
            print(f"{file}, snippet {number}: {'ran' if done.returncode == 0 else 'FAILED'}")
            total += 1
            if done.returncode:
                failed += 1
                print(done.stderr)
    return failed or (0 if total else 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
