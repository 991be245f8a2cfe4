"""Micro-batches that fail, are not differentiated, or are computed twice: right, or an error."""

import pytest
import torch
from support import parallel, ranks
from support.bounds import EXACT, SAME_SUMS
from support.loops import (
    Raising,
    batches,
    distance,
    new_weight,
    run_streaming,
    run_window,
    weight_and_grad,
)
from support.versions import FSDP2_MEAN
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fusedce import LossAccumulator, LossSum, fused_ce

WAYS = pytest.mark.parametrize("streaming", [False, True], ids=["window", "streaming"])


def out_of(weight, one, fails=False):
    hidden, labels = one
    out = fused_ce(Raising.apply(hidden * weight.mean()) if fails else hidden, weight, labels)
    return out


@pytest.mark.parametrize("by_hand", [False, True], ids=["acc.backward", "scale"])
@WAYS
def test_after_a_backward_that_raised_the_window_is_refused(streaming, by_hand):
    micro = batches([3, 5])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()

    def backward(out):
        if by_hand:
            acc.scale(out).backward()
        else:
            acc.backward(out)

    def loop():
        with pytest.raises(ZeroDivisionError):
            backward(out_of(weight, micro[0], fails=True))
        backward(out_of(weight, micro[1]))

    with pytest.raises(RuntimeError, match="can only be dropped: a backward has raised"):
        if streaming:
            loop()
        else:
            with acc.window([3, 5]):
                loop()
    if streaming:
        with pytest.raises(RuntimeError, match="can only be dropped"):
            acc.finish([weight])
    acc.discard_window()
    weight.grad = None
    (run_streaming if streaming else run_window)(acc, weight, micro)
    assert distance(weight.grad, exact) <= SAME_SUMS
    assert acc.metrics()["n_tokens"] == 8


def test_an_error_at_the_last_micro_batch_is_refused_at_the_windows_end():
    weight, acc = new_weight(), LossAccumulator()
    with pytest.raises(RuntimeError, match="can only be dropped"):
        with acc.window([3]):
            with pytest.raises(ZeroDivisionError):
                acc.backward(out_of(weight, batches([3])[0], fails=True))
    assert acc.metrics()["n_windows"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True], ids=["window", "streaming"])
def test_find_executable_batch_size(streaming):
    find = pytest.importorskip("accelerate.utils").find_executable_batch_size
    micro = batches([4, 2, 6, 1])
    weight, exact, _ = weight_and_grad(micro)
    acc, tried = LossAccumulator(), []

    def parts(size):
        for i in range(0, len(micro), size):
            yield tuple(torch.cat(x) for x in zip(*micro[i : i + size], strict=True))

    @find(starting_batch_size=4)
    def train(size):
        tried.append(size)
        acc.discard_window()
        weight.grad = None

        def loop():
            for i, one in enumerate(parts(size)):
                acc.backward(out_of(weight, one))
                if size > 1 and i == (size == 2):
                    raise RuntimeError("CUDA out of memory. Tried to allocate 3.00 GiB")

        if streaming:
            loop()
            acc.finish([weight])
        else:
            with acc.window([(y != -100).sum() for _, y in parts(size)]):
                loop()

    train()
    assert tried == [4, 3, 2, 1]  # one batch, then two that run out of memory
    assert distance(weight.grad, exact) <= SAME_SUMS
    assert acc.metrics()["n_tokens"] == 13


@WAYS
def test_a_loss_that_is_never_differentiated_does_not_count(streaming):
    micro = batches([3, 5])
    weight, exact, _ = weight_and_grad(micro[1:])
    acc = LossAccumulator()
    if streaming:
        acc.scale(out_of(weight, micro[0]))  # dropped
        acc.backward(out_of(weight, micro[1]))
        acc.finish([weight])
        assert distance(weight.grad, exact) <= SAME_SUMS
        assert acc.metrics()["n_tokens"] == 5
        return
    with pytest.raises(
        RuntimeError, match=r"2 micro-batches were declared, 1 differentiated \(1 more"
    ):
        with acc.window([3, 5]):
            acc.scale(out_of(weight, micro[0]))
            acc.backward(out_of(weight, micro[1]))


@pytest.mark.parametrize("reentrant", [False, True])
@WAYS
def test_a_checkpoint_computes_the_loss_twice_and_it_counts_once(streaming, reentrant):
    micro = batches([3, 5, 2])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()

    def loop():
        for one in micro:
            checkpoint(
                lambda w, one=one: acc.scale(out_of(w, one)), weight, use_reentrant=reentrant
            ).backward()

    if streaming:
        loop()
        acc.finish([weight])
    else:
        with acc.window([3, 5, 2]):
            loop()
    assert distance(weight.grad, exact) <= SAME_SUMS
    assert acc.metrics()["n_tokens"] == 10


@WAYS
def test_losses_differentiated_together_count_in_their_order(streaming):
    micro = batches([3, 5])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    if streaming:
        sum(acc.scale(out_of(weight, one)) for one in micro).backward()
        acc.finish([weight])
    else:
        with acc.window([3, 5]):
            sum(acc.scale(out_of(weight, one)) for one in micro).backward()
    assert distance(weight.grad, exact) <= SAME_SUMS


def test_a_later_backward_does_not_heal_one_that_raised():
    weight, acc = new_weight(), LossAccumulator()
    scaled = [acc.scale(out_of(weight, one, not i)) for i, one in enumerate(batches([3, 5]))]
    with pytest.raises(ZeroDivisionError):
        scaled[0].backward()
    scaled[1].backward()
    with pytest.raises(RuntimeError, match="can only be dropped"):
        acc.finish([weight])


def test_a_micro_batch_too_many_is_refused_before_its_gradient():
    micro = batches([3, 5])
    weight, exact, _ = weight_and_grad(micro[:1])
    with pytest.raises(RuntimeError, match="1 micro-batches were declared, this is number 2"):
        with LossAccumulator().window([3]) as acc:
            for one in micro:
                acc.backward(out_of(weight, one))
    assert distance(weight.grad, exact) <= SAME_SUMS


def test_a_loss_differentiated_twice_counts_twice():
    micro = batches([3])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    scaled = acc.scale(out_of(weight, micro[0]))
    scaled.backward(retain_graph=True)
    scaled.backward()
    acc.finish([weight])
    assert distance(weight.grad, exact) <= SAME_SUMS  # both of them, over twice the tokens
    assert acc.metrics()["n_tokens"] == 6


@pytest.mark.parametrize("counts", [[3, 1], [3]])
def test_a_loss_differentiated_twice_among_declared_counts_is_named_as_a_cause(counts):
    weight = new_weight()
    with pytest.raises(RuntimeError, match=r"differentiated twice .*counts twice"):
        with LossAccumulator().window(counts) as acc:
            scaled = acc.scale(out_of(weight, batches([3])[0]))
            scaled.backward(retain_graph=True)
            scaled.backward()


def test_a_loss_of_a_window_that_was_closed_is_refused():
    micro, weight, acc = batches([3, 2]), new_weight(), LossAccumulator()
    late = acc.scale(out_of(weight, micro[0]))
    acc.backward(out_of(weight, micro[1]))
    acc.finish([weight])
    before = weight.grad.clone()
    with pytest.raises(RuntimeError, match="after the window that has scaled it was closed"):
        late.backward()
    torch.testing.assert_close(weight.grad, before, **EXACT)


def test_gradients_of_inputs_alone_are_no_training():
    """A pipeline runs such a backward to learn shapes."""
    weight, acc = torch.nn.Parameter(new_weight().detach()), LossAccumulator()
    hidden, labels = batches([3])[0]
    hidden.requires_grad_()
    torch.autograd.grad(acc.scale(fused_ce(hidden, weight, labels)), hidden)
    with pytest.raises(RuntimeError, match="nothing to finish"):
        acc.finish([weight])


# ---- FSDP2 --------------------------------------------------------------------------------------


def fsdp_recovers(rank):
    """A window is dropped after a micro-batch whose gradients FSDP2 holds inside."""
    found = {}
    for dtype in (None, torch.float32):
        for advice in (False, True):
            policy = MixedPrecisionPolicy(reduce_dtype=dtype)
            model = fully_shard(parallel.Model(), mp_policy=policy)
            acc = LossAccumulator()
            model.set_requires_gradient_sync(False)
            acc.backward(model(*parallel.micro_batches(0, rank)[0]))
            if advice:
                acc.discard_window(model)
            else:
                model.zero_grad()
                acc.discard_window()
            found[dtype, advice] = (
                ranks.error_of(next_window, acc, model, rank),
                [
                    parallel.whole(p.grad) if p.grad is not None else None
                    for p in model.parameters()
                ],
            )
    return found


def next_window(acc, model, rank):
    micro = parallel.micro_batches(0, rank)
    with acc.window([(y != -100).sum() for _, y in micro]):
        for i, one in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            acc.backward(model(*one))


@FSDP2_MEAN
def test_gradients_inside_fsdp2_are_dropped_or_the_window_is_refused():
    exact, *_ = parallel.single_process(2)
    for found in ranks.of(ranks.run({"fsdp": fsdp_recovers}), "fsdp"):
        for (_, advice), (error, grads) in found.items():
            if advice:
                assert error is None
                for a, b in zip(grads, exact[0], strict=True):
                    assert distance(a, b) <= SAME_SUMS
            else:
                assert "call acc.discard_window(model) first" in error


def test_what_a_wrapper_has_cast_is_refused():
    for dtype in (torch.bfloat16, torch.float16):
        out = LossSum(torch.tensor(3.0, dtype=dtype, requires_grad=True), torch.tensor(2))
        for call in (LossAccumulator().backward, LossAccumulator().add):
            with pytest.raises(TypeError, match=f"must be float32 or float64, got {dtype}"):
                call(out)


def without_gradient(rank):
    weight, acc = new_weight(), LossAccumulator()

    def step():  # whichever is later notices the other's error at its loss or at its finish
        acc.backward(out_of(weight, batches([2])[0]))
        if rank == 0:
            weight.grad = None
        acc.finish([weight])

    return ranks.error_of(step)


def test_a_rank_without_gradients_does_not_leave_the_others_waiting():
    first, second = ranks.of(ranks.run({"missing": without_gradient}), "missing")
    assert "no parameter given has a .grad" in first
    assert ranks.anywhere(first) == ranks.anywhere(second)
