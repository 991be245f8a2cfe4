"""The losses with a vocabulary that is split over ranks (tensor parallelism).

Every loss takes such a head: ``weight (V_local, H)`` with ``process_group=``, or a ``DTensor``
with ``Shard(0)``. Class ``c`` is row ``c - (rows of lower ranks)``; shards may be unequal or empty,
and ``vocab_size=`` says how many rows are classes. ``hidden``, ``labels`` and weights of tokens are
the same on all ranks, or with ``tokens_sharded=True`` each rank's own (sequence parallelism; their
numbers may differ); a ``DTensor`` says by its placement which. The results are those of the whole
head. Every rank returns the same sums, or the statistics of its tokens, and must run backward: it
receives its rows of the weight and bias gradients and the whole gradient of its ``hidden``. So the
loss counts once, not once per rank: a :class:`fusedce.LossAccumulator` must not count these ranks
(``from_mesh(mesh, ["dp"])``). Label smoothing is torch's; Megatron-LM's ``label_smoothing=e`` is
``e * V / (V - 1)`` here. All ranks compute the same bits of a loss, and raise the same errors.

They replace the column-parallel output layer and cross-entropy of Megatron-LM (arXiv:1909.08053,
section 3). A rank holds the logits of a chunk of tokens for its own rows, never ``(N, V_local)``.
``sharded_ce`` is ``fused_ce``, and so on, except that a plain ``weight`` without ``process_group``
is taken as a shard of a vocabulary that is split over the default group.

Collectives on the vocabulary's ranks:

* always one all-gather of under 1 KiB, for which a GPU's host waits: it compares tokens and
  options, and shares numbers of rows and errors; before it, for a weight that is replicated over
  other dimensions of its mesh, one on each of those, over which labels must be equal;
* with sharded tokens, one all-gather each of hidden states, labels and weights of tokens;
* one all-gather of 2 float64 a token, 1 more each for entropy and the mean logit (label smoothing),
  2 more for argmax; with ``labels (..., K)`` before it one all-reduce of K numbers a token;
* a divergence, per chunk: one all-gather of a float64 a token for each head, 2 more with
  ``ce_weight``, and an all-reduce of 1, or 3 of "reverse" and "jsd";
* if ``hidden`` requires grad, one all-reduce of ``(N, H)`` in float32: in backward, or in forward
  for the sum of a divergence. With sharded tokens, N counts all ranks' tokens, and for results
  token by token one all-gather of upstream gradients comes before it;
* :func:`fusedce.fused_topk`: one all-gather of ``2 k + 1`` float64 a token, and with a gradient
  wanted what statistics of tokens take with ``labels (..., K)``.

Examples:
    >>> # every rank; alone, it holds the whole vocabulary
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    >>> weight = distribute_tensor(torch.randn(11, 4), mesh, [Shard(0)]).requires_grad_()
    >>> hidden, labels = torch.randn(3, 4), torch.tensor([1, -100, 10])
    >>> sharded_ce(hidden, weight, labels).mean().backward()
    >>> weight.grad.placements
    (Shard(dim=0),)
    >>> sharded_argmax(hidden, weight.to_local()).shape  # of the default group
    torch.Size([3])
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .contract.checks import is_sharded
from .contract.groups import Ranks
from .loss import fused_argmax, fused_ce, fused_cross_entropy, fused_logprobs

__all__ = ["sharded_argmax", "sharded_ce", "sharded_cross_entropy", "sharded_logprobs"]

F = TypeVar("F", bound=Callable[..., Any])


def _of_all_ranks(function: F) -> F:
    @functools.wraps(function)
    def over_ranks(hidden: Any, weight: Any, *labels: Any, **options: Any) -> Any:
        if not is_sharded(weight, options.get("process_group")):
            options["process_group"] = Ranks(None).group()
            if options["process_group"] is None:
                raise ValueError("process_group: torch.distributed must be initialised, it is not")
        return function(hidden, weight, *labels, **options)

    over_ranks.__name__ = over_ranks.__qualname__ = function.__name__.replace("fused", "sharded")
    return cast(F, over_ranks)


sharded_ce = _of_all_ranks(fused_ce)
sharded_cross_entropy = _of_all_ranks(fused_cross_entropy)
sharded_logprobs = _of_all_ranks(fused_logprobs)
sharded_argmax = _of_all_ranks(fused_argmax)
