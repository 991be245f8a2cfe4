"""Each example runs, and shows what its first lines say to look at."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from support import ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


def example(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem != "tiny")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_says_how_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.startswith('"""')
    assert f"examples/{name}.py" in text.split('"""')[1]


@pytest.mark.slow
def test_the_trainer_logs_the_same_for_both_splits():
    trainer = example("hf_trainer")
    assert trainer.train(1) == pytest.approx(trainer.train(8), rel=1e-5)


@pytest.mark.slow
def test_sft_trainer_learns():
    pytest.importorskip("trl", reason="trl is not installed")
    first, second = example("sft_trainer").train()
    assert second < first


@pytest.mark.slow
def test_lightning_trains_like_the_plain_loop():
    pytest.importorskip("lightning", reason="lightning is not installed")
    history, plain = example("lightning_module").train(), example("plain").train()
    assert [m["n_tokens"] for m in history] == [m["n_tokens"] for m in plain]
    for a, b in zip(history, plain, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_every_token_of_a_long_document_is_scored_once():
    from tiny import MAX_TOKENS, TinyLM, documents

    long = example("long_document")
    document, model = torch.cat(documents(6)), TinyLM()
    assert len(document) > 3 * MAX_TOKENS
    for stride in (MAX_TOKENS, 50, 7):
        metrics = long.perplexity(model, document, stride=stride)
        assert metrics["n_tokens"] == len(document) - (
            1 if stride < MAX_TOKENS else -(-len(document) // MAX_TOKENS)
        )
    short = long.perplexity(model, document[:20], stride=50)
    assert short["n_tokens"] == 19


def test_a_vocabulary_in_parts_has_the_whole_loss():
    found = ranks.run({"parts": lambda rank: example("tensor_parallel").one_loss()})
    whole = example("tensor_parallel").whole()
    for parts in ranks.of(found, "parts"):
        assert parts == pytest.approx(whole, rel=1e-5)
