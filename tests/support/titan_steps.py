"""Three steps of torchtitan's Trainer on the CPUs of some ranks: what it logs, as a line of JSON.

    python -m torch.distributed.run --nproc-per-node 2 titan_steps.py '{"loss": "fused", ...}'

Other names are those of ``main`` and of torchtitan's ``ParallelismConfig``.
"""

import dataclasses
import json
import sys
import tempfile
import types

sys.path.pop(0)  # this folder has a statistics.py

import torch

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan names the GPU of a machine
torch.cpu.set_device = lambda device: None

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components import dataloader, metrics, optimizer, tokenizer  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import fusedce  # noqa: E402
from fusedce.integrations.torchtitan import FusedCELoss  # noqa: E402

V = 2048
utils.set_pg_timeouts = lambda **_: None
metrics.build_device_memory_monitor = lambda: types.SimpleNamespace(
    device_name="CPU", reset_peak_stats=lambda: None,
    get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6),
)  # fmt: skip


class Rows(dataloader.BaseDataLoader):
    """Batches whose tokens that count are few to many, other ones on each rank."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(dataloader.BaseDataLoader.Config):
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

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Words(tokenizer.BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(tokenizer.BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    decode = get_vocab_size = encode


def main(loss, seq_len=27, batches=(2, 4), tied=False, typechecked=False, **parallelism):
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model.enable_weight_tying = tied
    losses = {
        "fused": FusedCELoss.Config(),
        "chunked": ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=V), num_chunks=8
        ),
        "plain": CrossEntropyLoss.Config(global_vocab_size=V),
    }
    logged = []
    with tempfile.TemporaryDirectory() as folder:
        config = Trainer.Config(
            loss=losses[loss],
            model_spec=spec, dump_folder=folder, tokenizer=Words.Config(), dataloader=Rows.Config(),
            optimizer=optimizer.default_adamw(lr=1e-3),
            training=TrainingConfig(
                local_batch_size=batches[0], global_batch_size=batches[1], seq_len=seq_len, steps=3,
                mixed_precision_param="float32", disable_cuda_graphs=True,
            ),
            parallelism=ParallelismConfig(**parallelism),
            metrics=metrics.MetricsProcessor.Config(log_freq=1),
        )  # fmt: skip
        config.debug.seed = 0
        config.debug.spmd_typechecking = typechecked
        trainer = config.build()
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
