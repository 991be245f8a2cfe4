"""Break compiled kernels on purpose, one place at a time, and show that the interpreter notices.

    python tests/mutate_compiled.py            # all; one line each, survivors at the end
    python tests/mutate_compiled.py bar.sync   # those whose name contains a word

The breakages are in the PTX that Triton made, not in a source: a barrier, a wait, a mask or a fence
is left out, or a number changed. A breakage is noticed where the run ends with an error or gives
other numbers. docs/kernels.md explains those that survive.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["TRITON_INTERPRET"] = "0"

from support.compiled import Broken, backend_on

ARCHS = ("sm_90", "sm_80")


def main() -> int:
    words, seen, survived, begin = sys.argv[1:], 0, [], time.monotonic()
    for arch in ARCHS:
        with backend_on(arch) as gpu:
            broken = Broken(gpu)
            for breakage in broken.all():
                if words and not any(word in breakage.name for word in words):
                    continue
                how = broken.noticed(breakage)
                seen += how is not None
                if how is None:
                    survived.append(f"{arch} {breakage.name}")
                print(
                    f"{'seen    ' if how else 'SURVIVED'} {arch} {breakage.name}: {how}", flush=True
                )
    print(f"{seen} of {seen + len(survived)} seen, in {time.monotonic() - begin:.0f} s; survived:")
    print("\n".join(f"  {name}" for name in survived))
    return 0


if __name__ == "__main__":
    sys.exit(main())
