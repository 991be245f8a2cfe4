"""One state serves all ranks: any rank saves it, and any number of ranks loads it."""

import copy
import functools
import pickle
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import ranks
from support.bounds import EXACT
from support.engines import accelerator
from support.loops import batches, new_weight, run_streaming, run_window

from fusedce import LossAccumulator, LossMeter, fused_ce


def trained(rank, world):
    """Two windows; ranks hold different tokens and losses."""
    acc, weight = LossAccumulator(), new_weight()
    run_window(acc, weight, batches([3 + rank, 2], rank))
    run_streaming(acc, weight, batches([5, 1 + rank], 10 + rank))
    return acc


def saves(folder, rank):
    """Save in every way; return the state of each rank, and the state it reads back."""
    world = dist.get_world_size()
    acc = trained(rank, world)
    state = acc.state_dict()
    dcp.save({"acc": acc}, checkpoint_id=f"{folder}/dcp")
    dcp.async_save({"acc": acc}, checkpoint_id=f"{folder}/async").result()
    if rank == 0:
        torch.save(acc.state_dict(), f"{folder}/zero")
    engine = accelerator(rank)
    engine.register_for_checkpointing(acc)
    engine.save_state(f"{folder}/accelerate")
    dist.barrier()
    return state, loads(folder, rank)


def loads(folder, rank):
    found = {}
    for kind in ("dcp", "async"):
        acc = LossAccumulator()
        dcp.load({"acc": acc}, checkpoint_id=f"{folder}/{kind}")
        found[kind] = acc.state_dict()
    acc = LossAccumulator()
    acc.load_state_dict(torch.load(f"{folder}/zero"))  # plain numbers: nothing to unpickle
    found["zero"] = acc.state_dict()
    acc = LossAccumulator()
    engine = accelerator(rank)
    engine.register_for_checkpointing(acc)
    engine.load_state(f"{folder}/accelerate")
    found["accelerate"] = acc.state_dict()
    acc = LossAccumulator(name="resumed")
    acc.load_state_dict(found["accelerate"])
    run_streaming(acc, new_weight(), batches([2]))
    return found, acc.metrics()["n_windows"]


def resumed(state, rank):
    """The results of three more windows after loading, without parameters, with estimates."""
    acc, weight = LossAccumulator(grad_reduction="sum", name="goes on"), new_weight()
    acc.load_state_dict(state)
    for i in range(3):
        run_streaming(acc, weight, batches([4, 2], 20 + i))
    return acc.metrics()


@functools.cache
def saved():
    """A folder that two ranks have saved to, and what each of them found."""
    folder = tempfile.TemporaryDirectory()
    return folder, ranks.shared({"saves": functools.partial(saves, folder.name)})("saves")


def test_every_way_to_save_gives_every_rank_the_same():
    (a, (loaded, windows)), (b, (loaded_too, _)) = saved()[1]
    assert a["n_valid"] == (3 + 2) + (4 + 2) + (5 + 1) + (5 + 2)
    assert windows == 3
    for state in (b, *loaded.values(), *loaded_too.values()):
        assert state == a


@pytest.mark.parametrize("world", [1, 4])
def test_another_number_of_ranks_loads_it(world):
    folder, ((state, _), _) = saved()
    cases = {
        "loads": functools.partial(loads, folder.name), "go on": functools.partial(resumed, state)
    }  # fmt: skip
    found = ranks.shared(cases, world)
    for loaded, _ in found("loads"):
        assert all(other == state for other in loaded.values())
    for m in found("go on"):
        assert m["n_tokens"] == state["n_valid"] + world * 3 * 6
        assert m["n_windows"] == 5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_by_itself(copied):
    acc = LossAccumulator(on_empty="skip", grad_reduction="sum", backward_divisor=3)
    run_streaming(acc, new_weight(), batches([3, 1]))
    other = copied(acc)
    assert other.state_dict() == acc.state_dict()
    assert repr(other) == repr(acc)
    weight, same = new_weight(), new_weight()
    run_streaming(other, weight, batches([2]))
    assert acc.metrics()["n_windows"] == 1
    run_streaming(acc, same, batches([2]))
    torch.testing.assert_close(weight.grad, same.grad, **EXACT)
    acc.backward((new_weight().sum(), torch.tensor(1)))
    with pytest.raises(RuntimeError, match="cannot copy it"):
        copied(acc)


def test_a_process_group_is_not_pickled(one_rank):
    acc = LossAccumulator(process_group=dist.group.WORLD)
    assert copy.deepcopy(acc).state_dict() == acc.state_dict()
    with pytest.raises(TypeError, match="process group cannot be pickled"):
        pickle.dumps(acc)


def test_a_process_group_that_is_gone_is_named(one_rank):
    group = dist.new_group([0])
    acc, (hidden, labels) = LossAccumulator(process_group=group), batches([3])[0]
    dist.destroy_process_group(group)
    for use in (
        lambda: acc.window([1]).__enter__(),
        lambda: LossMeter(process_group=group).compute(),
        lambda: fused_ce(hidden, new_weight(), labels, process_group=group),
    ):
        with pytest.raises(RuntimeError, match="process_group is gone: destroy_process_group"):
            use()


def test_it_says_what_it_is():
    acc = LossAccumulator(grad_reduction="sum")
    assert repr(acc) == (
        "LossAccumulator(1 rank, grad_reduction='sum', on_empty='zero', 0 windows since the reset)"
    )
    acc.backward((new_weight().sum(), torch.tensor(1)))
    assert "1 micro-batches since the last finish() are still open" in repr(acc)
