"""What an installation brings: names at first use, extras that are named, a clean tree."""

import re
import shutil
import subprocess
import sys
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
    assert set(fusedce.__all__) == set(fusedce._HOME)
    with pytest.raises(AttributeError, match=r"module 'fusedce' has no attribute 'fused_cd'"):
        _ = fusedce.fused_cd


def test_names_are_those_that_type_checkers_see():
    source = (ROOT / "fusedce" / "__init__.py").read_text()
    seen = re.search(r"if TYPE_CHECKING:\n(.*?)\n\n", source, re.DOTALL)[1]
    for name, home in fusedce._HOME.items():
        assert re.search(rf"from {home} import [\w, ]*\b{name}\b", seen), name


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


def test_a_submodule_does_not_hide_the_function_of_its_name():
    done = run("import fusedce.auditing, fusedce.check, fusedce.plan, fusedce; "
               "assert callable(fusedce.audit)")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {fusedce.__version__}\n" in citation
    assert f'version = "{fusedce.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_building_leaves_nothing_behind(tmp_path):
    """From a copy of the tracked files: the wheel has the kernels, the tree is as before."""
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
    (wheel,) = wheels.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert "fusedce/kernels/forward.py" in names
    assert "fusedce/py.typed" in names
    assert {n.split("/")[0] for n in names} == {
        "fusedce", f"fusedce-{fusedce.__version__}.dist-info"
    }  # fmt: skip
