"""Arguments of accumulators, heads and labels, given every kind of wrong value.

Each row is a call with one argument. A value of `support.bad_inputs` is one that the argument
takes, or is refused by an error that names the argument. Afterwards a training step gives the same
bits as before. `tests/contract/test_bad_values.py` does the same for every argument of every loss.
"""

import tempfile

import pytest
import torch
from support.bad_inputs import refused
from support.heads import plain_model
from support.loops import a_loss, batches, new_weight, run_streaming
from support.tiny_trainer import FusedTrainer, llama
from transformers import TrainingArguments

import fusedce
from fusedce import LossAccumulator, LossMeter

POSITIVE = {"three", "2.5", "1e300", "2**70"}
NUMBER = {*POSITIVE, "zero", "minus one"}
STATE = LossAccumulator().state_dict()
LABELS = torch.tensor([[1, 2, 3, 4, 5, 6]])
TAKE_LOSSES = {
    "scale": LossAccumulator, "backward": LossAccumulator, "update": LossMeter
}  # fmt: skip
TINY = llama()


def entered(**given):
    """Open a window, which reads its arguments."""
    LossAccumulator().window(**given).__enter__()


def finished(parameters):
    acc = LossAccumulator()
    acc.backward(a_loss(2))
    acc.finish(parameters)


def with_auxiliary(auxiliary):
    acc = LossAccumulator()
    acc.window([2]).__enter__()
    acc.add_auxiliary(auxiliary)


def trainer(**settings):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, report_to=[], use_cpu=True)
        type("Fused", (FusedTrainer,), settings)(model=TINY, args=arguments)


def method(name, kind=LossAccumulator):
    return lambda value: getattr(kind(), name)(value)


def of_a_sum(name, kind):
    return lambda value: getattr(kind(), name)((value, torch.tensor(2)))


def of_a_count(name, kind):
    one = torch.ones((), requires_grad=True)
    return lambda value: getattr(kind(), name)((one, value))


def made(name):
    return lambda value: LossAccumulator(**{name: value})


def labelled(function, name):
    return lambda value: function(LABELS, **{name: value})


# name: (call, the word that names the argument, kinds of values that it takes)
ROWS = {
    "LossAccumulator(model)": (LossAccumulator, "model", {"None", "module"}),
    "LossAccumulator(losses)": (made("losses"), "losses", {"None"}),
    "LossAccumulator(watch)": (made("watch"), "watch", {"true"}),
    "LossAccumulator(name)": (made("name"), "name", {"None", "text"}),
    "LossAccumulator(grad_scaler)": (made("grad_scaler"), "grad_scaler", {"None"}),
    "LossMeter(process_group)": (
        lambda x: LossMeter(process_group=x), "process_group", {"None"},
    ),
    "LossMeter.load_state_dict": (method("load_state_dict", LossMeter), "state", set()),
    "from_deepspeed": (LossAccumulator.from_deepspeed, "engine", set()),
    "LossAccumulator(process_group)": (made("process_group"), "process_group", {"None"}),
    "LossAccumulator(grad_reduction)": (made("grad_reduction"), "grad_reduction", set()),
    "LossAccumulator(backward_divisor)": (made("backward_divisor"), "backward_divisor", POSITIVE),
    "LossAccumulator(on_empty)": (made("on_empty"), "on_empty", set()),
    "from_mesh(mesh)": (lambda x: LossAccumulator.from_mesh(x, "dp"), "mesh", set()),
    "from_accelerator": (LossAccumulator.from_accelerator, "accelerator", set()),
    "window(counts)": (lambda x: entered(counts=x), "counts", {"(N,) int64"}),
    "window(counts[0])": (lambda x: entered(counts=[x]), "counts[0]", {"zero", "three"}),
    **{
        f"{name}({part})": (call(name, kind), "out", set())
        for name, kind in TAKE_LOSSES.items()
        for part, call in {"out": method, "loss_sum": of_a_sum, "n_valid": of_a_count}.items()
    },
    "add_auxiliary": (with_auxiliary, "auxiliary", set()),
    "finish(parameters)": (finished, "parameters", set()),
    "finish([parameter])": (lambda x: finished([x]), "parameter", set()),
    "mask_repeated_samples(batch)": (method("mask_repeated_samples"), "batch", {"dict"}),
    "metrics(reset)": (lambda x: LossAccumulator().metrics(reset=x), "reset", {"true"}),
    "load_state_dict": (method("load_state_dict"), "state", set()),
    **{
        f"load_state_dict({key})": (
            lambda x, key=key: LossAccumulator().load_state_dict(STATE | {key: x}), key, taken,
        )
        for key, taken in {
            "loss_sum": {*NUMBER, "nan", "inf", "-inf"},
            "n_valid": {"zero", "three", "2**70"},
            "n_windows": {"zero", "three", "2**70"},
            "correct": {*NUMBER, "nan", "inf", "-inf"},
        }.items()
    },
    **{
        f"{function.__name__}({name})": (labelled(function, name), name, taken)
        for function in (fusedce.shift_labels, fusedce.count_valid)
        for name, taken in {
            "offset": {"zero", "three"},
            "position_ids": {"None"},
            "cu_seqlens": {"None", "(N,) int64"},
            "ignore_index": {"zero", "three", "minus one"},
        }.items()
    },
    "shift_labels(labels)": (fusedce.shift_labels, "labels", {"(N,) int64", "(N, H) int64"}),
    "count_valid(labels)": (fusedce.count_valid, "labels", {"(N,) int64", "(N, H) int64"}),
    "replace_loss_head(model)": (
        lambda x: fusedce.restore_loss_head(fusedce.replace_loss_head(x)), "model", {"module"},
    ),
    "replace_loss_head(memory_budget)": (
        lambda x: fusedce.replace_loss_head(plain_model(), memory_budget=x), "memory_budget",
        {"None", "three"},
    ),
    "restore_loss_head(model)": (fusedce.restore_loss_head, "model", {"module"}),
    "head_report(model)": (fusedce.head_report, "model", {"module"}),
    "FusedTrainerMixin.memory_budget": (
        lambda x: trainer(memory_budget=x), "memory_budget", {"None", "three"},
    ),
    "FusedTrainerMixin.log_token_stats": (
        lambda x: trainer(log_token_stats=x), "log_token_stats", {"true"},
    ),
    "audit(model)": (fusedce.audit, "model", {"module"}),
}  # fmt: skip


def step():
    weight, acc = new_weight(), LossAccumulator()
    run_streaming(acc, weight, batches([3, 5]))
    return weight.grad, acc.metrics()


@pytest.mark.parametrize("row", ROWS)
def test_a_wrong_value_is_refused_by_name_and_leaves_nothing_behind(row):
    function, name, taken = ROWS[row]
    grad, metrics = step()
    for kind, words in refused(function, taken):
        assert name in words, (kind, words)
    again, metrics_again = step()
    assert torch.equal(grad, again)
    assert metrics == metrics_again
