"""The chunked implementation in plain torch: any device, no kernels; the default on a CPU."""

from torch import Tensor

from fusedce.backends.protocol import Summed
from fusedce.backends.torch import sharded_sum, training
from fusedce.backends.torch.divergence import divergence_and_grads
from fusedce.backends.torch.stats_and_grads import token_grads, token_stats
from fusedce.backends.torch.training import loss
from fusedce.contract.rounding import scale_unless_one as scale_
from fusedce.contract.task import Task

__all__ = ["divergence_and_grads", "loss", "loss_and_grads", "scale_", "token_grads", "token_stats"]


def loss_and_grads(task: Task, argmax: Tensor | None = None) -> Summed:
    """The sum and its wanted gradients, of a whole vocabulary or of a shard of it."""
    if task.shard is not None:
        return sharded_sum.loss_and_grads(task.problem, task.shard, task.wanted)
    return training.loss_and_grads(task.problem, task.wanted, argmax)
