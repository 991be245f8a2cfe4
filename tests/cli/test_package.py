"""An installation: names at first use, errors that name missing extras, a clean tree."""

import json
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
    for name in [*fusedce.__all__, "recipes", "sharded", "testing", "trainer_rl"]:
        assert getattr(fusedce, name) is not None
    assert set(fusedce.__all__) <= set(dir(fusedce))
    with pytest.raises(AttributeError, match=r"module 'fusedce' has no attribute 'fused_cd'"):
        _ = fusedce.fused_cd


def test_names_are_those_that_type_checkers_see():
    source = (ROOT / "fusedce" / "__init__.py").read_text()
    seen = re.search(r"if TYPE_CHECKING:\n(.*?)\n\n", source, re.DOTALL)[1]
    for name, home in fusedce._HOME.items():
        assert re.search(rf"from fusedce\.{home} import [(\s]*{name} as {name}\b", seen), name


@pytest.mark.slow
def test_importing_the_package_imports_no_torch():
    done = run("import fusedce, sys; assert 'torch' not in sys.modules; print(fusedce.fused_ce)")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nor does torch warn about a missing numpy


@pytest.mark.slow
def test_a_missing_extra_is_named():
    code = "import sys; sys.modules['hypothesis'] = None; import fusedce; fusedce.testing"
    done = run(code)
    assert done.returncode == 1
    assert "fusedce.testing needs hypothesis: pip install 'fusedce[testing]'" in done.stderr
    done = run(code.replace("fusedce.testing", "print(fusedce.sharded.sharded_ce)"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_layout_of_a_kernel_repository_loads(tmp_path):
    """Import the variant's file under another name, as Hugging Face's `kernels` does."""
    pytest.importorskip("tomllib", reason="the layout is written with Python 3.11 or newer")
    script = ROOT / ".ci" / "hub_kernel.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    variants = sorted(p.name for p in (tmp_path / "build").iterdir())
    assert variants == ["torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"]
    variant = tmp_path / "build" / "torch-cpu"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cpu"}
    load = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location({metadata["id"]!r}, {str(variant / "__init__.py")!r})
loss = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loss)
import torch, fusedce.kernels.forward
assert fusedce.__file__.startswith({str(variant)!r}), fusedce.__file__
assert fusedce.kernels.forward.__file__.startswith({str(variant)!r})
print(loss.fused_ce(torch.zeros(3, 4), torch.zeros(7, 4), torch.tensor([1, -100, 6])).n_valid)
"""
    done = run(load)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tensor(2)\n"
    done = run(f"import fusedce; fusedce.__version__ = '0.0'\n{load}")
    assert "fusedce 0.0 is already imported" in done.stderr


def test_extras_are_named_in_the_install_page():
    extras = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n",
                       (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]  # fmt: skip
    named = set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE)) - {"dev"}
    page = (ROOT / "docs" / "install.md").read_text()
    assert {x for x in named if f"'fusedce[{x}]'" not in page} == set()


def test_a_submodule_does_not_hide_the_function_of_its_name():
    done = run("import fusedce.auditing, fusedce.tools.check, fusedce.tools.plan, fusedce; "
               "assert callable(fusedce.audit)")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {fusedce.__version__}\n" in citation
    assert f'version = "{fusedce.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_building_leaves_nothing_behind(tmp_path):
    """A wheel built from the tracked files has the kernels, and leaves no file in the tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    tree, wheels = tmp_path / "tree", tmp_path / "wheels"
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists() and not name.startswith("docs/"):
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    before = {p for p in tree.rglob("*") if "__pycache__" not in p.parts}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--wheel-dir", str(wheels), str(tree)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {p for p in tree.rglob("*") if "__pycache__" not in p.parts} == before
    (wheel,) = wheels.glob("*.whl")
    build = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, wheels], cwd=tree, check=True, capture_output=True)
    (sdist,) = wheels.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:  # whole tests or none: these have none
        assert not [n for n in archive.getnames() if "/tests" in n]
    names = zipfile.ZipFile(wheel).namelist()
    assert "fusedce/kernels/forward.py" in names
    assert "fusedce/py.typed" in names
    assert {n.split("/")[0] for n in names} == {
        "fusedce", f"fusedce-{fusedce.__version__}.dist-info"
    }  # fmt: skip
