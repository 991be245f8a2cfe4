"""An installation: names at first use, errors that name missing extras, a clean tree."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fusedce

ROOT = Path(__file__).parents[2]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_every_public_name_is_there():
    for name in [*fusedce.__all__, "recipes", "sharded", "testing"]:
        assert getattr(fusedce, name) is not None
    assert set(fusedce.__all__) <= set(dir(fusedce))
    with pytest.raises(AttributeError, match=r"module 'fusedce' has no attribute 'fused_cd'"):
        _ = fusedce.fused_cd
    assert "Did you mean: 'fused_ce'?" in run("import fusedce; fusedce.fused_cd").stderr


def test_names_are_those_that_type_checkers_see():
    source = (ROOT / "fusedce" / "__init__.py").read_text()
    seen = re.search(r"if TYPE_CHECKING:\n(.*?)\n\n", source, re.DOTALL)[1]
    for name, home in fusedce._HOME.items():
        assert re.search(rf"from \.{home} import [(\s]*{name} as {name}\b", seen), name


def test_the_checkout_hides_no_package_called_kernels(tmp_path):
    """Such as Hugging Face's, where the checkout goes before it on the path."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("get_kernel = 'theirs'")
    done = subprocess.run(
        [sys.executable, "-c", "from kernels import get_kernel as x; import fusedce.kernels.tile"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_model_folder_runs_no_code(tmp_path):
    """A class that its configuration names is not read."""
    from support.command_line import call

    ran = tmp_path / "ran"
    own = {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own"}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    done = call("plan", str(tmp_path))
    assert done.exit_code == 2, done.output
    assert not ran.exists()


# As Hugging Face's `kernels` 0.16 and 0.17 import a variant. A mode of tensors sees operators.
TWO_VERSIONS = """
import importlib, importlib.util, json, pathlib, pkgutil, sys, torch
from torch.utils.flop_counter import FlopCounterMode
inputs = torch.ones(3, 4), torch.ones(7, 4, requires_grad=True), torch.tensor([1, -100, 6])
for folder in map(pathlib.Path, sys.argv[1:]):
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    with FlopCounterMode(display=False):
        kernel.fused_ce(*inputs).mean().backward()
        kernel.fused_logprobs(*inputs).logprob.sum().backward()
    print(kernel.__version__)
    for module in pkgutil.walk_packages(kernel.__path__, f"{name}."):
        importlib.import_module(module.name)
assert "fusedce" not in sys.modules
operators = [x.split("::") for x in torch._C._dispatch_get_all_op_names() if "fusedce" in x]
print(len({namespace for namespace, _ in operators}), len({name for _, name in operators}))
"""


def test_two_versions_of_a_kernel_repository_live_in_one_process(tmp_path, monkeypatch):
    pytest.importorskip("tomllib", reason="new in Python 3.11")
    monkeypatch.syspath_prepend(ROOT / ".ci")
    hub, folders = importlib.import_module("hub_kernel"), []
    for version in ("1", "2"):
        tree = tmp_path / version
        shutil.copytree(ROOT / "fusedce", tree / "fusedce")
        shutil.copy(ROOT / "pyproject.toml", tree)
        names = tree / "fusedce" / "__init__.py"
        names.write_text(names.read_text().replace(fusedce.__version__, version))
        monkeypatch.setattr(hub, "ROOT", tree)
        folders.append(hub.write(tree / "repository")[0])
    command = [sys.executable, "-c", TWO_VERSIONS, *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "2", "2", "3"], done.stderr


@pytest.mark.slow
def test_two_builds_are_the_same_bytes_and_leave_nothing_behind(tmp_path):
    """Two copies of a checkout, of other times, places and masks; the wheel has the kernels."""
    pytest.importorskip("hatchling", reason="the group dev of pyproject.toml is not installed")
    built = []
    for number, mask in enumerate((0o022, 0o077)):
        tree, out = tmp_path / f"tree{number}", tmp_path / f"out{number}"
        for name in ("fusedce", "kernels"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        for path in (*ROOT.glob("*.md"), *ROOT.glob("*.cff"), ROOT / "LICENSE"):
            shutil.copy(path, tree)
        shutil.copy(ROOT / "pyproject.toml", tree)
        before = set(tree.rglob("*"))
        for path in before:
            if path.is_file() and not path.is_symlink():
                path.chmod(0o644 & ~mask)
                os.utime(path, (10**9 + 3600 * number,) * 2)
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-d", out], cwd=tree, umask=mask,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert set(tree.rglob("*")) == before
        built.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert built[0] == built[1]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:  # an sdist with some of the tests would be incomplete
        named = archive.getnames()
    assert not [name for name in named if "/tests" in name]
    assert f"fusedce-{fusedce.__version__}/fusedce/kernels/walk.py" in named
    names = zipfile.ZipFile(wheel).namelist()
    of_index = (
        zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("/METADATA"))).decode()
    )
    links = re.findall(r"\]\(([^)]+)\)", of_index.split("\n\n", 1)[1])
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)  # which are relative in the README
    assert "https://raw.githubusercontent.com/fusedce/fusedce/main/docs/demo.png" in links
    assert {"fusedce/kernels/walk.py", "fusedce/py.typed"} <= set(names)
    assert {n.split("/")[0] for n in names} == {
        "fusedce", f"fusedce-{fusedce.__version__}.dist-info"
    }  # fmt: skip
