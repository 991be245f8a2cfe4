"""An installation: names at first use, errors that name missing extras, a clean tree."""

import ast
import importlib.metadata
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
import torch

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
    assert "Did you mean: 'fused_ce'?" in run("import fusedce; fusedce.fused_cd").stderr


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


def test_extras_are_named_in_the_install_page():
    extras = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n",
                       (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]  # fmt: skip
    named = set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))
    page = (ROOT / "docs" / "install.md").read_text()
    assert {x for x in named if f"'fusedce[{x}]'" not in page} == set()


def test_a_submodule_does_not_hide_the_function_of_its_name():
    done = run("import fusedce.auditing, fusedce.tools.check, fusedce.tools.plan, fusedce; "
               "assert callable(fusedce.audit)")  # fmt: skip
    assert done.returncode == 0, done.stderr


def licence_of(name):
    """The licence that an installed distribution states."""
    about = importlib.metadata.metadata(name)
    kinds = [x for x in about.get_all("Classifier") or [] if x.startswith("License ::")]
    given = about.get("License-Expression") or (kinds[0] if kinds else about["License"])
    return given.split(" :: ")[-1].removesuffix(" License")


def test_the_page_holds_the_licences_of_all_dependencies():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer reads pyproject.toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {"": project["dependencies"]} | {
        name: extras[name] for name in ("transformers", "cli", "testing")
    }
    by_extra: dict[str, set[str]] = {}
    for extra, lines in needed.items():
        for name in (re.match(r"[\w-]+", line)[0] for line in lines):
            if name != "fusedce":
                by_extra.setdefault(name, set()).add(extra)
    page = (ROOT / "docs/trust.md").read_text().split("<!-- licences -->")[1]
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in page.strip().splitlines()]
    said = {row[0]: (row[1], row[2]) for row in rows[2:]}
    pinned = (ROOT / "constraints.txt").read_text().split()
    assert said.keys() == by_extra.keys()
    for name, extra in by_extra.items():
        assert said[name][0] == (", ".join(sorted(extra)) or "always"), name
        version = importlib.metadata.version(name).partition("+")[0]
        if f"{name}=={version}" in pinned:
            assert said[name][1] == licence_of(name), name


def test_nothing_runs_what_a_file_holds():
    """No call of the package unpickles, evaluates or executes data."""
    never = {"eval", "exec", "compile", "__import__", "pickle", "marshal", "shelve", "dill", "yaml",
             "cloudpickle", "joblib", "runpy"}  # fmt: skip
    found = []
    for file in [*ROOT.glob("fusedce/**/*.py"), *ROOT.glob("kernels/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [x.name for x in node.names] + [getattr(node, "module", None) or ""]
            elif isinstance(node, ast.Call):
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                called = ast.unparse(node.func)
                names = [called] if isinstance(node.func, ast.Name) else []
                if called == "torch.load" and keywords.get("weights_only") != "True":
                    names.append("eval")
                if called.endswith("from_pretrained") and (
                    keywords.get("trust_remote_code") != "False"
                ):
                    names.append("eval")
                if keywords.get("shell", "False") != "False":
                    names.append("eval")
            found += [(file.name, node.lineno) for x in names if x.split(".")[0] in never]
    assert found == []


@pytest.mark.slow
def test_a_model_folder_runs_no_code(tmp_path):
    """Neither a pickle among its weights nor a class that its configuration names."""
    from support.command_line import call

    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11,
    }))  # fmt: skip
    ran = tmp_path / "ran"
    torch.save({"lm_head.weight": Runs(str(ran))}, tmp_path / "pytorch_model.bin")
    done = call("check", str(tmp_path), "--full")
    assert done.exit_code != 0
    assert "Traceback" not in done.output
    own = {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own"}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    for arguments in (["check", "--full"], ["plan"]):
        done = call(*arguments, str(tmp_path))
        assert done.exit_code == 2, done.output
    assert not ran.exists()


class Runs:
    """A pickle that creates a file where it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {fusedce.__version__}\n" in citation
    assert f'version = "{fusedce.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


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
    assert {"fusedce/kernels/walk.py", "fusedce/py.typed"} <= set(names)
    assert {n.split("/")[0] for n in names} == {
        "fusedce", f"fusedce-{fusedce.__version__}.dist-info"
    }  # fmt: skip
