"""The command `fusedce`: quick to answer, plain when piped, no trace for a user's mistake."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fusedce
from fusedce.cli import main

COMMANDS = ["audit", "bench", "check", "completion", "demo", "doctor", "plan"]


def call(*args):
    return CliRunner().invoke(main, list(args))


def answer(*args, status=0):
    """JSON on standard output, which must hold nothing else."""
    done = call(*args, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- quick, and without torch ------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--help"]])
def test_help_comes_at_once(arguments):
    """In seconds of the processor, which do not depend on who else is running."""
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


def test_a_plan_from_sizes_needs_no_torch():
    code = (
        "import sys; from fusedce.cli import main; main(['plan', '64,1000'], "
        "standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_it_is_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "fusedce", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"fusedce {fusedce.__version__}\n"


def test_every_command_explains_itself():
    listed = call("--help").output
    for command in COMMANDS:
        assert f"  {command} " in listed
        done = call(command, "--help")
        assert done.exit_code == 0
        if command != "completion":
            assert "--json" in done.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete(shell):
    done = call("completion", shell)
    assert done.exit_code == 0
    assert "_FUSEDCE_COMPLETE" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "no/such/folder"], "there is no folder or file 'no/such/folder'"),
        (["plan", "LlamaForCausal"], "did you mean LlamaForCausalLM"),
        (["plan", "64,1000", "--tokens", "0"], "tokens must be at least 1, got 0"),
        (["plan", "64,1000", "--device", "H300"], "device must be cpu or one of A100"),
        (["plan"], "Missing argument 'MODEL'"),
        (["check", "no/such/folder"], "there is no folder or file"),
        (["check", "64,1000"], "is no folder, file, class or model type"),
        (["bench", "--shape", "1,2"], "--shape must be N,H,V"),
        (["bench", "--shape", "0,8,9"], "sizes and repeats must be at least 1"),
        (["bench", "--device", "toaster"], "cannot use 'toaster' here"),
        (["demo", "--steps", "0"], "'--steps'"),
        (["demo", "--out", "/proc/nothing"], "cannot write to --out /proc/nothing"),
        (["completion", "cmd"], "is not one of"),
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_a_mistake_is_named_without_a_trace(arguments, words):
    done = call(*arguments)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert words in done.stderr
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = call("plan", str(tmp_path))
    assert done.exit_code == 2
    assert f"cannot read {tmp_path / 'config.json'} as JSON" in done.stderr
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = call("plan", str(tmp_path))
    assert done.exit_code == 2
    assert "names no hidden size and vocabulary" in done.stderr


# ---- plan --------------------------------------------------------------------------------------


def test_a_plan_reads_a_configuration(llama):
    found = answer("plan", str(llama), "--tokens", "4096", "--device", "A100")
    assert (found["model"]["H"], found["model"]["V"]) == (2048, 128256)
    # Llama 3.2 1B as published: 1.24 billion parameters, its head tied.
    assert found["model"]["parameters"] == pytest.approx(1.236e9, rel=0.01)
    assert found["logits_bytes"] == 2 * 4096 * 128256
    assert found["states_bytes"] == 16 * found["model"]["parameters"]
    eager, compiled, ours = found["methods"]
    assert eager["bytes"] == 12 * 4096 * 128256
    assert ours["bytes"] < 1.2 * compiled["bytes"] < eager["bytes"]
    assert eager["most_tokens"] < ours["most_tokens"]
    assert found["floor_milliseconds"] < ours["milliseconds"] < eager["milliseconds"]


def test_the_most_tokens_are_those_that_fit(llama):
    """One token more would not: checked against the memory that the plan itself names."""
    from fusedce import plan

    found = answer("plan", str(llama), "--free", "8", "--device", "A100")
    of = plan.sizes(str(llama))
    device = plan.DEVICES["A100"]
    for method in found["methods"]:
        if method["name"] == "fused_ce":  # grows in steps of a chunk
            continue

        def needs(N, name=method["name"]):
            held = sum(plan.memory(name, N, of.H, of.V, 2, device).values())
            return held + 2 * N * of.H * (of.layers + 2)

        assert needs(method["most_tokens"]) <= 8 * 2**30 < needs(method["most_tokens"] + 1)


def test_more_devices_leave_more_room(llama):
    one, eight = (answer("plan", str(llama), "--gpus", n)["free_bytes"] for n in ("1", "8"))
    assert eight > one


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "fp32"), ("cpu", "bf16"), ("H100", "fp32"), ("RTX 4090", "fp16")],
)
def test_a_plan_for_every_device_and_dtype(device, dtype):
    found = answer("plan", "2304,256000", "--device", device, "--dtype", dtype)
    eager, _, ours = found["methods"]
    assert 0 < ours["bytes"] < eager["bytes"]
    timed = device != "cpu" and dtype != "fp32"
    assert (ours["milliseconds"] is not None) == timed


def test_the_planned_chunk_is_the_one_the_backend_takes(monkeypatch):
    """On a CPU, where it can be watched."""
    from fusedce import plan
    from fusedce.backends.torch import training

    sizes = []

    def watched(*args, **kwargs):
        sizes.append(original(*args, **kwargs))
        return sizes[-1]

    original = training.chunk_size
    monkeypatch.setattr(training, "chunk_size", watched)
    N, H, V = 3000, 8, 30000
    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    fusedce.fused_ce(hidden, weight, torch.randint(V, (N,))).mean().backward()
    assert set(sizes) == {plan.chunk(N, H, V, 4, None)}
    assert sizes[0] < N


def test_text_is_plain(llama):
    done = call("plan", str(llama))
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "Predicted from bytes and FLOPs, not measured" in done.output


# ---- check -------------------------------------------------------------------------------------


def test_a_class_is_checked():
    found = answer("check", "LlamaForCausalLM")
    assert found["equal"]
    assert found["fused"]
    assert found["why_not"] == []
    assert found["loss_error"] <= 1e-6
    assert found["bytes_at_4096_tokens"]["fused_ce"] < found["bytes_at_4096_tokens"]["eager"]


def test_a_folder_keeps_its_own_scales(tmp_path):
    config = {"model_type": "gemma2", "final_logit_softcapping": 2.5}
    config |= {"hidden_size": 2304, "vocab_size": 256000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from fusedce.models import class_of, config_of
    from fusedce.small import small_config

    of = config_of(str(tmp_path))
    assert class_of(str(tmp_path), of).__name__ == "Gemma2ForCausalLM"
    small = small_config(of, {}, steps=False)
    assert (small.final_logit_softcapping, small.hidden_size) == (2.5, 32)
    assert answer("check", str(tmp_path))["fused"]


def test_adapters_and_low_precision_are_checked(llama):
    found = answer("check", str(llama), "--peft", "--dtype", "bf16")
    assert found["equal"]
    assert found["fused"]
    assert found["native_errors"][0] > 0


def test_a_wrong_loss_is_found(monkeypatch):
    """Status 1 for a head that scales its gradient: the exit code is what CI reads."""
    from fusedce import check

    def broken(model):
        model.get_output_embeddings().weight.register_hook(lambda grad: 1.001 * grad)
        return fusedce.replace_loss_head(model)

    monkeypatch.setattr(check, "replace_loss_head", broken)
    found = answer("check", "llama", status=1)
    assert not found["equal"]
    assert found["grad_error"] > 1e-5
    assert "NO, do not use it" in call("check", "llama").output


def test_real_logits_are_named():
    """ProphetNet takes a log-softmax of its own: right, and not fused."""
    found = answer("check", "ProphetNetForCausalLM", status=3)
    assert found["equal"]
    assert not found["fused"]
    assert found["why_not"]


def test_weights_of_a_folder_are_loaded(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=120, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    found = answer("check", str(tmp_path), "--full")
    assert found["fused"]
    small = answer("check", str(tmp_path))
    assert small["parameters"] != found["parameters"]
    done = call("check", "llama", "--full")
    assert done.exit_code == 2
    assert "there are none in llama" in done.stderr


# ---- doctor and bench --------------------------------------------------------------------------


def test_the_doctor_answers():
    found = answer("doctor")
    assert found["right"]
    assert [c["dtype"] for c in found["devices"][0]["checks"]] == ["float32", "bfloat16", "float16"]
    text = call("doctor").output
    assert "self-check float32   ok" in text
    assert "\x1b" not in text


def test_a_sick_machine_is_found(monkeypatch):
    from fusedce import doctor

    def twice(*args, **kwargs):
        return 2 * fusedce.reference_ce(*args, **kwargs)

    assert doctor.self_check(torch.device("cpu")) < 1e-5
    monkeypatch.setattr(fusedce, "fused_ce", twice)
    answer("doctor", status=1)
    assert "FAILED" in call("doctor").output


def test_tested_versions_are_those_of_the_constraints():
    from fusedce.doctor import TESTED

    root = Path(__file__).parents[2]
    pinned = {}
    for name in ("constraints-oldest.txt", "constraints.txt", "constraints-newest.txt"):
        lines = (root / name).read_text().splitlines()
        for line in lines:
            package, _, version = line.partition("==")
            if package in TESTED:
                pinned.setdefault(package, []).append(version)
    assert {p: (v[0], v[-1]) for p, v in pinned.items()} == TESTED


@pytest.mark.slow
def test_a_shape_is_measured(tmp_path):
    picture = tmp_path / "bench.png"
    found = answer("bench", "--shape", "64,16,500", "--repeats", "2", "--picture", str(picture))
    rows = {row["name"]: row for row in found["rows"]}
    assert next(iter(rows)) == "bare GEMMs"
    for name in ("fused_ce", "eager"):
        assert len(rows[name]["seconds"]) == 2
        assert rows[name]["extra_bytes"] >= 0
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- audit and demo ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_audit_tells_a_wrong_loop_from_a_right_one():
    found = answer("audit", "--steps", "1")
    wrong, right = found.values()
    assert "micro-batches are averaged" in wrong["verdict"]
    assert wrong["steps"][0]["spread"] > 2
    assert right["steps"][0]["spread"] == pytest.approx(1, abs=1e-3)
    assert right["steps"][0]["scale"] == pytest.approx(1, abs=1e-3)
    assert wrong["steps"][0]["loss"] == pytest.approx(right["steps"][0]["loss"], rel=1e-5)


@pytest.mark.slow
def test_the_demo_runs_and_estimates(tmp_path, monkeypatch):
    """In small: few and short sequences; what it must show stays the same."""
    from fusedce.demo import run

    monkeypatch.setattr(run, "QUICK_SEQUENCES", 8)
    found = answer("demo", "--quick", "--steps", "3", "--out", str(tmp_path))
    assert found["problem"] is None
    assert (tmp_path / "demo.png").exists()
    done = call("demo", "--quick", "--steps", "1", "--out", str(tmp_path))
    assert "s in all, from one step timed here" in done.output
