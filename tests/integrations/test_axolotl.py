"""Axolotl's plug-in: its decisions with stand-ins, and training with the real package."""

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from support.bounds import SAME_MODEL
from support.tiny_trainer import llama
from transformers import Trainer

import fusedce

PLUGIN = "fusedce.integrations.axolotl.FusedCEPlugin"


class AxolotlTrainer(Trainer):
    """That of Axolotl has a ``compute_loss`` of its own as well."""

    compute_loss = Trainer.compute_loss


AxolotlTrainer.__module__ = "axolotl.core.trainers.base"


class Manager:
    @classmethod
    def get_instance(cls):
        return cls


@pytest.fixture
def plugin(monkeypatch):
    """A plug-in on stand-ins for what it imports of Axolotl."""
    names = {
        "axolotl": {}, "axolotl.integrations": {}, "axolotl.utils": {}, "axolotl.core": {},
        "axolotl.integrations.base": {"BasePlugin": object, "PluginManager": Manager},
        "axolotl.utils.logging": {"get_logger": importlib.import_module("logging").getLogger},
        "axolotl.core.trainers": {"AxolotlTrainer": AxolotlTrainer},
    }  # fmt: skip
    for name, values in names.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    name = PLUGIN.rpartition(".")[0]
    monkeypatch.delitem(sys.modules, name, raising=False)
    made = importlib.import_module(name).FusedCEPlugin()
    monkeypatch.setattr(Manager, "plugins", {"ours": made}, raising=False)
    yield made
    del sys.modules[name]


class yaml(dict):
    """Axolotl's configuration: keys that are not there are ``None``."""

    __getattr__ = dict.get


def test_the_trainer_counts_and_the_head_is_replaced(plugin):
    cfg, model = yaml(fusedce_memory_budget=10**6), llama()
    plugin.post_model_load(cfg, model)
    assert fusedce.head_report(model).active
    kind = plugin.get_trainer_cls(cfg)
    assert issubclass(kind, fusedce.FusedTrainerMixin)
    assert issubclass(kind, AxolotlTrainer)
    assert kind.memory_budget == 10**6


@pytest.mark.parametrize("key", ["rl", "reward_model", "process_reward_model"])
def test_another_loss_is_left_alone(plugin, key):
    cfg, model = yaml(**{key: "dpo"}), llama()
    plugin.post_model_load(cfg, model)
    assert not fusedce.head_report(model).active
    assert plugin.get_trainer_cls(cfg) is None


def test_a_trainer_that_is_named_is_kept(plugin, monkeypatch):
    assert plugin.get_trainer_cls(yaml(trainer_cls="my.Trainer")) is None
    assert plugin.get_trainer_cls(yaml(model_config_type="mamba")) is None
    other = types.SimpleNamespace(get_trainer_cls=lambda cfg: Trainer)
    monkeypatch.setattr(Manager, "plugins", {"ours": plugin, "other": other})
    assert plugin.get_trainer_cls(yaml()) is None


def test_a_model_without_a_head_loads(plugin, caplog):
    plugin.post_model_load(yaml(), llama().model)
    assert "fusedce leaves the head of LlamaModel as it is" in caplog.text


def test_the_audit_is_asked_for(plugin):
    trainer = types.SimpleNamespace(model=llama())
    assert plugin.add_callbacks_post_trainer(yaml(), trainer) == []
    assert len(plugin.add_callbacks_post_trainer(yaml(fusedce_audit=True), trainer)) == 1


# ---- the real package ---------------------------------------------------------------------------


def steps(**keys):
    tests = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-P", str(tests / "support" / "axolotl_steps.py"), json.dumps(keys)],
        capture_output=True, text=True, timeout=300, cwd=tests,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tests)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"trai')))
    return found, run.stdout + run.stderr


LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "lm_head"],
}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora on the head"])
def test_real_axolotl(adapter):
    """One micro-batch a step: Axolotl's own numbers.

    Runs where Axolotl is installed: it pins other versions than these tests do.
    """
    pytest.importorskip("axolotl", reason="Axolotl is not installed")
    stock, _ = steps(**adapter)
    ours, log = steps(plugins=[PLUGIN], **adapter)
    assert (ours["trainer"], ours["fused"] > 0, ours["made"]) == ("FusedCETrainer", True, 0)
    assert log.count("losses fused: ") == 1
    for name in ("losses", "norms"):
        assert ours[name] == pytest.approx(stock[name], rel=8 * SAME_MODEL)


@pytest.mark.slow
def test_real_axolotl_with_accumulation():
    """Axolotl averages the means of micro-batches; with the plug-in every token weighs the same."""
    pytest.importorskip("axolotl", reason="Axolotl is not installed")
    stock, _ = steps(audited=True, gradient_accumulation_steps=4)
    assert "your micro-batches are averaged" in stock["verdict"]
    _, log = steps(plugins=[PLUGIN], fusedce_audit=True, gradient_accumulation_steps=4)
    assert "every token weighs the same, and the gradient is that of the mean over all" in log
