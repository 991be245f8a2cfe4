"""The examples in the docstrings of accumulator, audit and sharded losses run as they stand."""

import doctest

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fusedce
from fusedce import sharded

OBJECTS = {
    "LossAccumulator": fusedce.LossAccumulator,
    "audit": fusedce.audit,
    "from_mesh": fusedce.LossAccumulator.from_mesh,
    "from_accelerator": fusedce.LossAccumulator.from_accelerator,
    "LossMeter": fusedce.LossMeter,
    "sharded": sharded,
}

NAMES = {
    "Accelerator": Accelerator,
    "F": torch.nn.functional,
    "Shard": Shard,
    "dist": dist,
    "distribute_tensor": distribute_tensor,
    "fusedce": fusedce,
    "init_device_mesh": init_device_mesh,
    "torch": torch,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_example(name):
    names = vars(fusedce) | vars(sharded) | NAMES
    (found,) = [
        test
        for test in doctest.DocTestFinder(recurse=False).find(OBJECTS[name], name, globs=names)
        if test.examples
    ]
    try:
        result = doctest.DocTestRunner().run(found)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert result.attempted > 1
    assert result.failed == 0
