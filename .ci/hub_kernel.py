"""Write the layout that Hugging Face's `kernels` loads: ``python .ci/hub_kernel.py FOLDER``.

FOLDER may be pushed as a repository of type "kernel", or loaded as it is:
``kernels.get_local_kernel(Path(FOLDER)).fused_ce(...)``. The package needs no compiler, so the
variants of all backends hold the same files.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
BACKENDS = ("cpu", "cuda", "rocm", "xpu")
# `kernels` imports this file under a name of its own. The modules of the package import each other
# as `fusedce.X`, and its operators are registered once in a process, so that the package is loaded
# under its own name. An installed package of the same version is used instead.
LOADER = '''\
"""fusedce {version}, loaded from a kernel repository under its own name."""

import importlib.util
import sys
from pathlib import Path

_folder = Path(__file__).parent / "package"
if "fusedce" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "fusedce", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    sys.modules["fusedce"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["fusedce"])

import fusedce

if fusedce.__version__ != "{version}":
    raise ImportError(
        f"this is fusedce {version}, and fusedce {{fusedce.__version__}} is already imported: "
        f"install that version, or load the kernel before it is imported"
    )
__version__ = fusedce.__version__
__all__ = fusedce.__all__


def __getattr__(name):
    return getattr(fusedce, name)
'''


def write(folder: Path) -> list[Path]:
    """Write the layout below ``folder``, a variant for each backend; returns their folders."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ignored = shutil.ignore_patterns("__pycache__", "kernels")
    variants = [folder / "build" / f"torch-{backend}" for backend in BACKENDS]
    for backend, variant in zip(BACKENDS, variants, strict=True):
        shutil.copytree(ROOT / "fusedce", variant / "package", ignore=ignored)
        shutil.copytree(ROOT / "kernels", variant / "package" / "kernels", ignore=ignored)
        (variant / "__init__.py").write_text(LOADER.format(version=project["version"]))
        metadata = {
            "id": f"_fusedce_{backend}_{project['version'].replace('.', '_')}",
            "name": "fusedce",
            "version": 1,
            "license": project["license"],
            "upstream": project["urls"]["Homepage"],
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variants


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
