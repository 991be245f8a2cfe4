"""Parts of the scripts. Where the package is not installed, that of the checkout is imported.

The root itself does not go on the path: its folder kernels/ would hide the Hugging Face package.
"""

import atexit
import importlib.util
import sys
import tempfile
from pathlib import Path

if importlib.util.find_spec("fusedce") is None:
    _folder = tempfile.TemporaryDirectory()
    atexit.register(_folder.cleanup)
    (Path(_folder.name) / "fusedce").symlink_to(Path(__file__).parents[2] / "fusedce")
    sys.path.append(_folder.name)
