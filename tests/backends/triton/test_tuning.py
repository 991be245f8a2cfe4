"""Tuning measures once, keeps the choice, and never ends a run."""

import pytest
import torch
import triton

from fusedce.backends.triton import archs, tuning
from fusedce.contract.problem import Problem
from fusedce.testing import Case

_WALKS = archs.BY_NAME["sm_90"].two_bytes
CANDIDATES = (_WALKS.forward, *_WALKS.candidates)


def test_tuning_is_announced_kept_and_optional(monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("FUSEDCE_AUTOTUNE", raising=False)
    assert not tuning.enabled()
    monkeypatch.setenv("FUSEDCE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_chosen", {})
    candidates = CANDIDATES
    asked = []

    def measure(config):
        asked.append(config)
        if config == candidates[1]:
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
        return 1.0 if config == candidates[3] else 2.0

    assert tuning.choose("a key", candidates, measure) == candidates[3]
    assert asked == list(candidates)
    assert "cannot run here" in caplog.text
    assert "1.000 ms with Blocks" in caplog.text
    for _ in range(2):  # from this process, then from the file
        assert tuning.choose("a key", candidates, measure) == candidates[3]
        tuning._chosen.clear()
    assert len(asked) == len(candidates)
    (tmp_path / "cache" / "forward.json").write_text("{broken")
    assert tuning.choose("a key", candidates, measure) == candidates[3]
    assert "not readable" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        triton.runtime.errors.PTXASError("ptxas exited with error code 255"),
        torch.OutOfMemoryError("tried to allocate 1 GiB"),
        triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory"),
        torch.OutOfMemoryError(),  # without a message
    ],
)
def test_a_candidate_that_cannot_run_is_passed_over(monkeypatch, tmp_path, caplog, error):
    monkeypatch.setenv("FUSEDCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_chosen", {})

    def measure(blocks):
        if blocks == CANDIDATES[0]:
            raise error
        return 1.0 if blocks == CANDIDATES[2] else 2.0

    assert tuning.choose("a key", CANDIDATES, measure) == CANDIDATES[2]
    assert f"{CANDIDATES[0]} cannot run here" in caplog.text


def test_an_error_of_ours_is_not_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_chosen", {})

    def measure(blocks):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        tuning.choose("a key", CANDIDATES, measure)


def test_a_choice_is_of_one_source_and_one_set_of_versions(monkeypatch, tmp_path):
    class Module:
        @staticmethod
        def get_device_name(device):
            return "a card"

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)

    def key():
        tuning.source_hash.cache_clear()
        return tuning.key_of(torch.device("cuda"), torch.bfloat16, 64, 500, False)

    first = key()
    assert key() == first
    assert torch.__version__ in first
    assert triton.__version__ in first
    for name in ("forward.py", "tile.py"):
        (tmp_path / name).write_bytes(b"a kernel")
    monkeypatch.setattr(tuning.kernels, "__file__", str(tmp_path / "__init__.py"))
    changed = key()
    assert changed != first
    (tmp_path / "tile.py").write_bytes(b"another kernel")
    assert key() not in (first, changed)
    tuning.source_hash.cache_clear()


def test_the_median_is_compared(monkeypatch):
    """One slow call, or a clock that changes, must not decide."""
    from fusedce.backends.triton import forward

    asked = []
    row = archs.BY_NAME["interpreter"]
    tunable = row._replace(two_bytes=row.two_bytes._replace(candidates=(row.two_bytes.forward,)))
    monkeypatch.setattr(archs, "architecture", lambda device: tunable)
    monkeypatch.setattr(tuning, "enabled", lambda: True)
    monkeypatch.setattr(tuning, "key_of", lambda *_: "key")
    monkeypatch.setattr(tuning, "choose", lambda key, all_, measure: measure(all_[0]) and all_[0])
    monkeypatch.setattr(
        forward.triton.testing, "do_bench", lambda call, **options: asked.append(options) or 1.0
    )
    hidden = torch.ones(4, 16, dtype=torch.bfloat16)
    forward._blocks(Problem(hidden, hidden, torch.zeros(4, dtype=torch.int64)), 8)
    assert asked == [{"return_mode": "median"}]


def test_tuning_leaves_the_random_numbers_alone(monkeypatch):
    from fusedce.backends.triton import forward

    hidden, weight, labels, _ = Case(dtype=torch.float16).tensors()
    monkeypatch.setattr(archs, "architecture", lambda device: archs.BY_NAME["sm_90"])
    monkeypatch.setattr(tuning, "enabled", lambda: True)
    monkeypatch.setattr(tuning, "choose", lambda key, all_, f: f(all_[0]) and all_[0])
    monkeypatch.setattr(forward.triton.testing, "do_bench", lambda call, **_: 1.0)
    monkeypatch.setattr(tuning, "key_of", lambda *_: "key")
    before = torch.get_rng_state()
    forward._blocks(Problem(hidden, weight, labels), 8)
    assert torch.equal(torch.get_rng_state(), before)
