"""Write a kernel repository for Hugging Face's `kernels`: ``python .ci/hub_kernel.py FOLDER``.

FOLDER may be pushed as a repository of type "kernel", or loaded as it is:
``kernels.get_local_kernel(Path(FOLDER)).fused_ce(...)``. No file is rewritten: imports inside the
package are relative, and its operators' namespace is the name that it is imported by. The package
needs no compiler, so the variants of all backends hold the same files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from base64 import b64encode
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
BACKENDS = ("cpu", "cuda", "rocm", "xpu")
BUILD = """\
[general]
name = "fusedce"
version = 1
edition = 5
license = "{license}"
upstream = "{upstream}"
backends = {backends}

[torch-noarch]

[kernel]
"""


def write(folder: Path) -> list[Path]:
    """Write the repository to ``folder``, a variant for each backend; returns their folders."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = {"license": project["license"], "upstream": project["urls"]["Homepage"]}
    source = folder / "torch-ext" / "fusedce"
    commands = shutil.ignore_patterns(
        "__pycache__", "cli.py", "__main__.py", "tools", "integrations"
    )
    shutil.copytree(ROOT / "fusedce", source, ignore=commands)
    (folder / "build.toml").write_text(BUILD.format(**about, backends=json.dumps(BACKENDS)))
    files = (path for path in sorted(source.rglob("*")) if path.is_file())
    digest = {str(path.relative_to(source)): _sha256(path) for path in files}
    of_content = hashlib.sha256(json.dumps(digest).encode()).hexdigest()[:8]
    variants = [folder / "build" / f"torch-{backend}" for backend in BACKENDS]
    for backend, variant in zip(BACKENDS, variants, strict=True):
        shutil.copytree(source, variant)
        metadata = {
            # The name by which `kernels` imports the package: another one for other content, so
            # that several versions live in one process.
            "id": f"_fusedce_{backend}_{of_content}",
            "name": "fusedce",
            "version": 1,
            **about,
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digest},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variants


def _sha256(path: Path) -> str:
    return b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
