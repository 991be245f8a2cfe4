"""Which errors of a launch are about the machine, what they mean, and what to do about them."""

from __future__ import annotations

import errno
import re

# A pattern of an error's type and words, and what it means. An error of none of these kinds is not
# about the machine.
_CAUSES = (
    (
        r"find C compiler|CalledProcessError|FileNotFoundError.*'(\S*/)?(gcc|cc|clang)'",
        "Triton's launcher was not built, for want of a working C compiler or of Python's headers: "
        "install gcc and python3-dev, or set CC",
    ),
    (
        r"libcuda",
        "libcuda.so was not found: run ldconfig, or add the driver's folder to LD_LIBRARY_PATH "
        "(in a container, start it with the GPU's runtime)",
    ),
    (r"OutOfResources", "a kernel needs more of the GPU than it has: please report the card"),
    (
        r"unsupported toolchain|unsupported PTX version|PTX JIT|no kernel image"
        r"|kernel image is invalid|driver version is insufficient|active drivers",
        "the GPU's driver is too old for this Triton, or none is active: update the driver, or "
        "install an older Triton",
    ),
    (
        r"PTXASError|ptxas|PTX codegen|PassManager::run|CompilationError|translate module",
        "this Triton does not compile a kernel for the GPU: install another version of Triton "
        "(`fusedce doctor` lists those tested), or set TRITON_PTXAS_PATH to another ptxas",
    ),
    (r"ImportError", "a module that Triton built, or Triton itself, cannot be loaded"),
)
_FOLDER = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC))


class CannotLaunch(RuntimeError):
    """A kernel cannot be built or launched on this machine; the words name cause and remedy."""


def why(error: BaseException) -> str | None:
    """Cause and remedy, if an error of a launch is about the machine and not about the call."""
    said = f"{' '.join(c.__name__ for c in type(error).__mro__)}: {error}"
    if isinstance(error, OSError) and error.errno in _FOLDER:
        found = (
            "Triton cannot write its cache: set TRITON_CACHE_DIR to a folder that can be written"
        )
    else:
        found = next((means for words, means in _CAUSES if re.search(words, said)), "")
    first = str(error).strip().splitlines()[:1]
    return f"{found} ({': '.join([type(error).__name__, *first])})" if found else None
