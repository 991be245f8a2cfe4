"""Results on disk, which are written after every problem, so that a run can be resumed."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results"
Row = dict[str, Any]
# cuBLAS, under the names that its wheel has had.
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13")
_PACKAGES = ("triton", "transformers", "liger-kernel", "cut-cross-entropy", "quack-kernels",
             "nvidia-cutlass-dsl", *_CUBLAS)  # fmt: skip
_CODE = ("fusedce", "kernels")
_PROBLEM = ("suite", "N", "H", "V", "dtype", "mode", "ignored", "budget")


def problem(row: Row) -> tuple[Any, ...]:
    """The fields that the rows of one comparison share."""
    return tuple(row.get(k) for k in _PROBLEM)


def source() -> str:
    """Twelve digits of a hash of the package's code, which identify what was measured."""
    digest = hashlib.sha256()
    for folder in _CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """The commit of the checkout, with a "+" if code of the package differs from it.

    What the environment's ``COMMIT`` says goes first: a copy's repository may say another.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        return found + ("+" if _git("status", "--porcelain", "--", *_CODE) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def stamp() -> dict[str, str]:
    """Name the code that results measure, and the day."""
    today = datetime.date.today().isoformat()
    return {"date": today, "source": source(), "commit": commit()}


def changed_since(of: str) -> int | None:
    """Files of kernels and launchers that differ from a commit; ``None`` if git lacks it.

    A file whose imports alone differ is not counted.
    """
    how, where = ("--numstat", "-I^ *(from|import) "), ("kernels", "fusedce/backends")
    try:
        changed = _git("diff", *how, of.rstrip("+"), "--", *where)
    except (OSError, subprocess.CalledProcessError):
        return None
    return len(changed.splitlines())


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = torch.version.cuda or torch.version.hip or "not installed"
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if torch.version.cuda is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found["driver"] = subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True, text=True, check=True, timeout=10,
            ).stdout.splitlines()[0]  # fmt: skip
    return found


def device_name(device: str) -> str:
    if torch.device(device).type != "cpu":
        return torch.get_device_module(device).get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    models = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    sets, threads = ", ".join(instruction_sets()), torch.get_num_threads()
    name = models[0] if models else platform.processor()
    return f"{name} ({sets}), {threads} thread{'s' if threads > 1 else ''}"


def instruction_sets() -> list[str]:
    """Names of the instruction sets that torch's products may use here."""
    found = [torch.backends.cpu.get_cpu_capability()]
    for name, probe in (("bf16", "_is_avx512_bf16_supported"), ("AMX", "_is_amx_tile_supported")):
        if getattr(torch.cpu, probe, bool)():
            found.append(name)
    return found


def caption(data: dict[str, Any], of: Callable[[str], str] = "commit {}".format) -> str:
    """One line with the device, versions and dates of the numbers; ``of`` words a commit."""
    known = [f"{k} {v}" for k, v in data["versions"].items() if v != "not installed"]
    stamped = [data, *data.get("rows", ())]
    dates = sorted({part["date"] for part in stamped if "date" in part})
    when = [" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []
    commits = {part["commit"] for part in stamped if "commit" in part}
    return "; ".join([data["device"], ", ".join(known), *when, *map(of, sorted(commits))])


def of_commit(of: str) -> str:
    """A commit, and how many files of kernels and launchers have changed since."""
    changed = changed_since(of)
    files = "file" if changed == 1 else "files"
    since = (
        "" if changed is None else f" ({changed} {files} of kernels and launchers changed since)"
    )
    return f"commit {of}{since}"


def write(path: Path, data: Any) -> None:
    """Write a file atomically, since a run may be killed at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.part")
    scratch.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(scratch, path)


def _place(data: dict[str, Any]) -> tuple[Any, ...]:
    return data["device"], *(data["versions"].get(k) for k in ("torch", "triton"))


class Results:
    """Rows of one file, by problem; all of one device and of this run's versions."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.stamp = stamp()
        self.data = {"device": device_name(device), "versions": versions(), "rows": []}
        if path.exists():
            old = json.loads(path.read_text())
            if _place(old) == _place(self.data):
                self.data = old | self.data | {"rows": old["rows"]}
            else:
                print(f"{path} is of another place and begun anew: {caption(old)}")

    def has(self, key: tuple[Any, ...]) -> bool:
        """Whether the problem was measured with this code."""
        found = [r for r in self.data["rows"] if problem(r) == key]
        return bool(found) and all(r.get("source") == self.stamp["source"] for r in found)

    def put(self, rows: Sequence[Row]) -> None:
        """Replace the rows of the problem they belong to, and write the file."""
        keys = {problem(row) for row in rows}
        kept = [r for r in self.data["rows"] if problem(r) not in keys]
        self.data["rows"] = kept + [row | self.stamp for row in rows]
        write(self.path, self.data)
