"""Random programs on a replaced head do what they do on the untouched model."""

import copy
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support import programs
from support.bounds import same_model
from support.coverage import covered
from support.heads import MODES, plain_model, tokens
from torch.utils.checkpoint import CheckpointError

from fusedce import replace_loss_head, restore_loss_head

COUNT = int(os.environ.get("FUSEDCE_PROGRAMS", 300))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=COUNT, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(programs.programs)
def test_any_program(mode, program):
    covered("replace_loss_head", f"programs in mode {mode}")
    native = plain_model(bias=program[3])
    with torch.no_grad():
        native[1].weight.mul_(2)
    replaced = replace_loss_head(copy.deepcopy(native))
    x, y = tokens(3, 5), tokens(3, 5, seed=1)
    expected = programs.run(program, native, x, y, mode)
    got = programs.run(program, replaced, x, y, mode)
    if isinstance(expected, type):
        assert isinstance(got, type), f"torch refuses this with {expected}"
        return
    if got is CheckpointError and programs.writes_after_a_checkpoint(program):
        return  # torch raises in the second run, which saves other tensors than the first
    assert not isinstance(got, type), f"refused with {got}"
    same_model(got, expected)
    covered("restore_loss_head")
    restored = restore_loss_head(replaced)
    if "adamw" in program[2]:  # divides each gradient by its size: one of 1e-8 moves by its noise
        native.load_state_dict(restored.state_dict())
    logits = restored(x)
    assert type(logits) is torch.Tensor
    same_model(logits, native(x))
