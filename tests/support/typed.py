"""Types of the public names, as a type checker sees them: mypy reads this file in `make lint`.

Nothing runs it. An ignored error must be one, since mypy warns of unused ignores.
"""

from typing import assert_type

import torch
from transformers import Seq2SeqTrainer, Trainer
from trl import SFTTrainer

import fusedce
from fusedce.contract.results import LossSum, TokenStats, TokenStatsAndMean


class Model(torch.nn.Module): ...


hidden, labels = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)
_ = fusedce.nonsense  # type: ignore[attr-defined]
fusedce.fused_ce(hidden, hidden, labels, reduction="mean")  # type: ignore[call-arg]
fusedce.fused_ce(hidden, hidden, "labels")  # type: ignore[arg-type]
assert_type(fusedce.fused_ce(hidden, hidden, labels), LossSum)
assert_type(fusedce.fused_logprobs(hidden, hidden, labels, softcap=30.0), TokenStats)
assert_type(fusedce.fused_logprobs(hidden, hidden, labels, mean_logit=True), TokenStatsAndMean)
assert_type(fusedce.replace_loss_head(Model()), Model)
assert_type(fusedce.restore_loss_head(Model()), Model)
modules = fusedce.accumulate, fusedce.head, fusedce.loss, fusedce.recipes, fusedce.sharded

out = fusedce.fused_ce(torch.ones(1, 2), torch.ones(3, 2), torch.ones(1, dtype=torch.int64))
total = (out + 2 * out) / 3
total.mean().backward()
out.monitors["correct"]
out.backward()  # type: ignore[attr-defined]


class A(fusedce.FusedTrainerMixin, Trainer):
    log_token_stats = True


class B(fusedce.FusedTrainerMixin, Seq2SeqTrainer): ...


class C(fusedce.FusedTrainerMixin, SFTTrainer): ...


trained = A(model=torch.nn.Linear(1, 1)).train().training_loss
