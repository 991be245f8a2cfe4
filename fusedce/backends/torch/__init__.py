"""The chunked implementation in plain torch: any device, no kernels; the default on a CPU."""

from fusedce.backends.torch.divergence import divergence_and_grads
from fusedce.backends.torch.stats_and_grads import token_grads, token_stats
from fusedce.backends.torch.training import loss, loss_and_grads
from fusedce.contract.rounding import scale_unless_one as scale_

__all__ = ["divergence_and_grads", "loss", "loss_and_grads", "scale_", "token_grads", "token_stats"]
