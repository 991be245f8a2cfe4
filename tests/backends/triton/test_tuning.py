"""Tuned configurations: announced, kept, optional, and without a trace in the user's state."""

import torch
import triton

from fusedce.backends.triton import archs as configs
from fusedce.contract.problem import Problem
from fusedce.testing import Case


def test_tuning_is_announced_kept_and_optional(monkeypatch, tmp_path, caplog):
    from fusedce.backends.triton import archs as configs
    from fusedce.backends.triton import tuning

    monkeypatch.delenv("FUSEDCE_AUTOTUNE", raising=False)
    assert not tuning.enabled()
    monkeypatch.setenv("FUSEDCE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_chosen", {})
    candidates = (configs.FORWARD["sm_90", 2], *configs.CANDIDATES["sm_90"])
    asked = []

    def measure(config):
        asked.append(config)
        if config == candidates[1]:
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
        return 1.0 if config == candidates[3] else 2.0

    assert tuning.choose("a key", candidates, measure) == candidates[3]
    assert asked == list(candidates)
    assert "cannot run here" in caplog.text
    assert "1.000 ms with ForwardConfig" in caplog.text
    for _ in range(2):  # from this process, then from the file
        assert tuning.choose("a key", candidates, measure) == candidates[3]
        tuning._chosen.clear()
    assert len(asked) == len(candidates)
    (tmp_path / "cache" / "forward.json").write_text("{broken")
    assert tuning.choose("a key", candidates, measure) == candidates[3]
    assert "not readable" in caplog.text


def test_tuning_leaves_the_random_numbers_alone(monkeypatch):
    from fusedce.backends.triton import forward as launch_forward

    hidden, weight, labels, _ = Case(dtype=torch.float16).tensors()
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(launch_forward.tuning, "enabled", lambda: True)
    monkeypatch.setattr(
        launch_forward.tuning, "choose", lambda key, all_, f: f(all_[0]) and all_[0]
    )
    monkeypatch.setattr(launch_forward.triton.testing, "do_bench", lambda call: 1.0)
    monkeypatch.setattr(launch_forward.tuning, "key_of", lambda *_: "key")
    before = torch.get_rng_state()
    launch_forward._forward_config(Problem(hidden, weight, labels))
    assert torch.equal(torch.get_rng_state(), before)
