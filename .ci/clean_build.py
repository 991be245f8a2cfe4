"""Build backend around setuptools that leaves no file in the tree and builds the same bytes twice.

Files in a wheel and an sdist have the time of SOURCE_DATE_EPOCH (1980 where it is not set), owner
0, and the mode of a plain file. Folders build/ and *.egg-info that it has made are removed.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta

get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable


def _left() -> set[Path]:
    return {path for path in (Path("build"), Path("fusedce.egg-info")) if path.exists()}


@contextmanager
def _cleanly() -> Iterator[None]:
    before = _left()
    try:
        yield
    finally:
        for path in _left() - before:
            shutil.rmtree(path)


def _wrapped(name: str) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        with _cleanly():
            return getattr(build_meta, name)(*args, **kwargs)

    return hook


def build_wheel(wheel_directory: str, *args: Any, **kwargs: Any) -> str:
    name: str = _wrapped("build_wheel")(wheel_directory, *args, **kwargs)
    path = Path(wheel_directory) / name
    with zipfile.ZipFile(path) as old:
        contents = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for inside, content in contents.items():
            info = zipfile.ZipInfo(inside, time.gmtime(_epoch())[:6])
            info.external_attr = 0o100644 << 16
            new.writestr(info, content, zipfile.ZIP_DEFLATED, 9)
    return name


def build_sdist(sdist_directory: str, *args: Any, **kwargs: Any) -> str:
    name: str = _wrapped("build_sdist")(sdist_directory, *args, **kwargs)
    path = Path(sdist_directory) / name
    inside = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=inside, mode="w") as new:
        for info in sorted(old.getmembers(), key=lambda info: info.name):
            content = old.extractfile(info) if info.isfile() else None
            info.mtime, info.uid, info.gid, info.uname, info.gname = _epoch(), 0, 0, "", ""
            info.mode, info.pax_headers = 0o644 if info.isfile() else 0o755, {}
            new.addfile(info, content)
    path.write_bytes(gzip.compress(inside.getvalue(), mtime=_epoch()))
    return name


def _epoch() -> int:
    """Seconds; a zip file begins in 1980."""
    return max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800)


build_editable = _wrapped("build_editable")
prepare_metadata_for_build_wheel = _wrapped("prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = _wrapped("prepare_metadata_for_build_editable")
