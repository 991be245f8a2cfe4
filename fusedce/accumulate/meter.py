"""The loss of an evaluation: sum of losses / number of tokens, over batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract.groups import Ranks
from ..contract.results import MonitoredLossSum
from .arguments import unpack
from .exchange import METER, SUMS, Exchange
from .sums import Loss, Totals, copied, counts_of, means_of, sums_of


class LossMeter:
    """Loss per token of an evaluation, however it was split into batches and ranks.

    Examples:
        >>> meter = fusedce.LossMeter()
        >>> meter.update((torch.tensor(6.0), torch.tensor(4)))
        >>> meter.compute()["loss"]
        1.5

    Args:
        process_group: the ranks that hold distinct tokens, as for :class:`LossAccumulator`.
        name: tells meters of the same ranks apart, where these might compute two of them in another
            order: that raises.
    """

    def __init__(self, *, process_group: Any = None, name: str | None = None) -> None:
        self._exchange = Exchange(Ranks(process_group), name)
        self._totals = Totals({"": 1})
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._totals.reset()
        self._new: list[MonitoredLossSum] = []  # not read from their device yet

    def update(self, out: Loss) -> None:
        """Count a batch: ``loss_sum ()`` in nats, ``n_valid ()`` in tokens.

        No collective, and no wait for a device.
        """
        self._new.append(copied(unpack(out)))

    def compute(self) -> dict[str, float]:
        """The means over the batches of all ranks since the last reset.

        Collectives: one all-gather, so every rank calls it.

        Returns:
            ``loss``: nats per token (NaN without tokens); ``perplexity``: ``exp(loss)``;
            ``n_tokens``; of losses with ``monitor=``, over the monitored tokens:
            ``correct_tokens`` and ``mean_token_accuracy``, ``entropy`` and ``z_loss``.

        Raises:
            ValueError: a label was out of range, on any rank.
        """
        with self._exchange.tell_peers_on_error(METER):
            self._read()
        return means_of(self._exchange.send(METER, self._totals.sums, {}).wait()[: len(SUMS)])

    def state_dict(self) -> dict[str, Any]:
        """The sums of this rank as plain numbers; each rank saves and loads its own."""
        self._read()
        return self._totals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._totals.load_state_dict(state)
        self._new = []

    def _read(self) -> None:
        """Add the new batches to the sums; waits for their device."""
        self._totals.add(sums_of(self._new, counts_of(self._new)))
        self._new = []
