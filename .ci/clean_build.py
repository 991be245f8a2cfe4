"""setuptools as the build backend, without what it leaves in the tree (build/, *.egg-info).

What was there before stays.
"""

from __future__ import annotations

import shutil
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


build_wheel = _wrapped("build_wheel")
build_sdist = _wrapped("build_sdist")
build_editable = _wrapped("build_editable")
prepare_metadata_for_build_wheel = _wrapped("prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = _wrapped("prepare_metadata_for_build_editable")
