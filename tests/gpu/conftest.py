"""Promises of the Triton backend on a GPU. Without one its interpreter runs the cases, smaller.

A file is a group: `make gpu` runs each in a process of its own, so that a dead context costs one
group. Cases that only a device can run carry the marker `gpu`.
"""

import faulthandler

import pytest
import torch
from support.device import current


@pytest.fixture(scope="session")
def device():
    return current()


@pytest.fixture(autouse=True)
def at_most_a_minute_and_a_half():
    """A kernel that never ends cannot be interrupted: the process ends, with where it was."""
    if current().type == "cpu":
        yield
        return
    faulthandler.dump_traceback_later(90, exit=True)
    yield
    torch.accelerator.synchronize()  # what a kernel did wrong is this test's failure
    faulthandler.cancel_dump_traceback_later()
