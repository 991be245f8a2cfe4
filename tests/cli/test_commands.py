"""The command `fusedce` answers fast, is plain when piped, and prints no trace for wrong calls."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.bounds import SAME_MODEL
from support.command_line import answer, call

import fusedce
from fusedce.cli import main

ROOT = Path(__file__).parents[2]


# ---- quick, and without torch ------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "64,1000"]])
def test_what_needs_no_torch_comes_at_once(arguments):
    """It takes little processor time, which does not depend on other programs."""
    code = (
        "import sys; from fusedce.cli import main; main(sys.argv[1:], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    assert done.stdout
    assert not done.stderr


def test_it_is_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "fusedce", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"fusedce {fusedce.__version__}\n"


def test_every_command_explains_itself():
    """In the list with its whole summary, on the page of commands, with ``--json`` and a test.

    `run` leaves standard output to the script.
    """
    listed = " ".join(call("--help").output.split())
    page = (ROOT / "docs" / "commands.md").read_text()
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name, command in main.commands.items():
        assert f"{name} {command.help.partition(chr(10))[0]}" in listed
        assert f"## `fusedce {name}" in page
        assert f'answer("{name}"' in tests or name == "run"
        assert ("--report" if name == "run" else "--json") in call(name, "--help").output


def test_sizes_and_dtypes_are_understood_as_people_write_them():
    found = answer("plan", "4096x128256", "--dtype", "bfloat16")
    assert found == answer("plan", "4096,128256", "--dtype", "bf16") | {"model": found["model"]}
    assert (found["model"]["H"], found["model"]["V"]) == (4096, 128256)


WRONG_NUMBERS = ["", "x", "0", "-1", "1.5", "nan", "inf"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "no/such/folder"], "there is no folder or file 'no/such/folder'"),
        (["plan", "LlamaForCausal"], "did you mean LlamaForCausalLM"),
        *[(["plan", "64,1000", f"--tokens={n}"], "'--tokens'") for n in WRONG_NUMBERS],
        (["plan", "64,1000", "--tokens", "9" * 20], "'--tokens'"),
        *[(["plan", x], "H,V must be integers, each at least 1") for x in ("0,5", "0,8")],
        (["plan", ""], "''"),
        *[(["plan", x], x) for x in ("-x", "1,2,3", "nan,8")],
        (["plan", "vit"], "names no hidden size and vocabulary"),
        *[
            (["plan", "64,1000", f"--device={x}"], "device must be cpu or one of A100")
            for x in ("H300", "0")
        ],
        (["plan"], "Missing argument 'MODEL'"),
        *[(["audit", f"--steps={n}"], "--steps") for n in WRONG_NUMBERS],
        *[(["plan", "64,1000", f"--dtype={x}"], "--dtype") for x in ("", "fp64")],
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_a_mistake_is_named_without_a_trace(arguments, words):
    """No measurement, training or download begins."""
    done = call(*arguments)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert words in done.stderr
    assert "Traceback" not in done.output
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), 1, "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "out/x"), 1, "out/x"),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), 1, "rich is missing: pip"),
        (ModuleNotFoundError("No module named 'x.y'", name="x.y"), 1, "pip install 'x'"),
        (KeyboardInterrupt(), 1, "Aborted!"),
    ],
)
def test_what_stops_a_command_is_one_line(monkeypatch, raised, status, words):
    from fusedce.tools import plan

    def stopped(*args, **kwargs):
        raise raised

    monkeypatch.setattr(plan, "plan", stopped)
    done = call("plan", "64,1000")
    assert done.exit_code == status
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.output


def looked_up(monkeypatch, outcome):
    """The hub answers with ``outcome``; the list of the names it is asked for."""
    transformers = pytest.importorskip("transformers")
    asked = []

    def from_pretrained(name, *, local_files_only, trust_remote_code):
        assert not local_files_only
        assert not trust_remote_code
        asked.append(name)
        if isinstance(outcome, Exception):
            raise outcome
        return transformers.LlamaConfig(**outcome)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    return asked


@pytest.mark.parametrize("raised", [OSError("offline"), ModuleNotFoundError("huggingface_hub")])
def test_a_name_on_a_hub_that_cannot_be_looked_up(monkeypatch, tmp_path, raised):
    monkeypatch.chdir(tmp_path)
    looked_up(monkeypatch, raised)
    done = call("plan", "org/name")
    assert done.exit_code == 2
    words = " ".join(done.stderr.split())
    assert "hf download org/name config.json --local-dir name; then give that folder" in words


def test_a_name_on_a_hub_is_looked_up(monkeypatch):
    asked = looked_up(monkeypatch, {"hidden_size": 64, "vocab_size": 1000})
    found = answer("plan", "org/name")
    assert asked == ["org/name"]
    assert (found["model"]["H"], found["model"]["V"]) == (64, 1000)


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = call("plan", str(tmp_path))
    assert done.exit_code == 2
    assert f"cannot read {tmp_path}" in " ".join(done.stderr.split())


# ---- doctor --------------------------------------------------------------------------------------


def test_the_doctor_reports():
    lines = answer("doctor")["lines"]
    assert call("doctor").output.splitlines() == lines
    assert any(line.startswith("cpu: ") for line in lines)
    assert any(line.startswith("  bfloat16: torch; not Triton's kernels: ") for line in lines)


def test_the_doctor_says_that_kernels_do_not_run(monkeypatch):
    from fusedce.tools import doctor

    monkeypatch.setattr(doctor, "default_backend", lambda *_: "triton")
    monkeypatch.setattr(doctor, "why_not_triton", lambda *_: None)
    for why in (None, "RuntimeError: Failed to find C compiler"):
        monkeypatch.setattr(doctor, "why_no_kernels", lambda device, why=why: why)
        said = "\n".join(doctor.report())
        assert ("float32: Triton's kernels, and torch where H is no" in said) == (why is None)
        assert f"float32: torch; not Triton's kernels: {why}" in said or why is None


def test_versions_stand_beside_those_that_were_tested(monkeypatch):
    from fusedce.tools import doctor

    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.8.0+cu128")
    assert "torch         2.8.0+cu128    (tested: 2.8.0 to 2.15.0)" in call("doctor").output


def test_tested_versions_are_those_of_the_constraints():
    from fusedce.tools.doctor import TESTED

    root = Path(__file__).parents[2]
    pinned = {}
    for name in ("constraints-oldest.txt", "constraints.txt", "constraints-newest.txt"):
        lines = (root / name).read_text().splitlines()
        for line in lines:
            package, _, version = line.partition("==")
            if package in TESTED:
                pinned.setdefault(package, []).append(version)
    assert {p: (v[0], v[-1]) for p, v in pinned.items()} == TESTED


# ---- audit ----------------------------------------------------------------------------


def test_the_audit_tells_a_wrong_loop_from_a_right_one():
    found = answer("audit", "--steps", "1")
    wrong, right = found.values()
    assert (wrong["right"], right["right"]) == (False, True)
    assert "micro-batches are averaged" in wrong["verdict"]
    assert wrong["steps"][0]["spread"] > 2
    assert right["steps"][0]["spread"] == pytest.approx(1, rel=SAME_MODEL)
    assert right["steps"][0]["scale"] == pytest.approx(1, rel=SAME_MODEL)
    assert wrong["steps"][0]["loss"] == pytest.approx(right["steps"][0]["loss"], rel=SAME_MODEL)
    assert "| at the right one" in call("audit", "--steps", "1", "--picture").output
