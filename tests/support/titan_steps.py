"""Three steps of torchtitan's Trainer on the CPUs of some ranks: what it logs, as a line of JSON.

    python -m torch.distributed.run --nproc-per-node 2 titan_steps.py '{"loss": "fused", ...}'

Other names are those of ``main`` and of torchtitan's ``ParallelismConfig``.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2] / "bench")  # this folder has a statistics.py

from lib.titan import Loader, V, build  # noqa: E402, I001  (before torch: it sets the device)
import torch  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402

import fusedce  # noqa: E402


class Rows(Loader):
    """Batches whose tokens that count are few to many, other ones on each rank."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Loader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.rng = torch.Generator().manual_seed(dp_rank)
        self.shape = (local_batch_size, seq_len)

    def __iter__(self):
        while True:
            ids = torch.randint(V, self.shape, generator=self.rng)
            lengths = torch.randint(1, self.shape[1], (self.shape[0], 1), generator=self.rng)
            positions = torch.arange(self.shape[1]).expand(self.shape)
            labels = ids.roll(-1, 1).masked_fill(positions >= lengths, -100)
            yield {"input": ids, "positions": positions.clone()}, labels


def main(loss, seq_len=27, batches=(2, 4), tied=False, typechecked=False, **parallelism):
    size = {
        "local_batch_size": batches[0], "global_batch_size": batches[1], "seq_len": seq_len,
        "steps": 3,
    }  # fmt: skip
    logged = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(loss, Rows, folder, size, parallelism, tied, typechecked)
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply

        def keep(step, mean, largest, norm, **more):
            logged.append((mean, norm))

        trainer.metrics_processor.log = keep
        trainer.train()
        trainer.close()
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        report = fusedce.head_report(trainer.model_parts[-1].lm_head)
        counts = {"fused": report.losses_fused, "made": report.logits_made}
        print(json.dumps({"logged": logged, **counts}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
