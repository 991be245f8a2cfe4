"""Three steps of torchtitan's Trainer on the CPUs of some ranks: what it logs, as a line of JSON.

    torchrun --nproc-per-node 2 titan_steps.py '{"fused": true, "seq_len": 27, ...}'

``parallelism`` has fields of torchtitan's; ``tied`` ties the weights of embedding and head.
"""

import dataclasses
import json
import os
import sys
import tempfile
import types

sys.path.pop(0)  # this folder has a statistics.py

import torch  # noqa: E402

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan names the GPU of a machine
torch.cpu.set_device = lambda device: None

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components import dataloader, loss, metrics, optimizer, tokenizer  # noqa: E402
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


def main(fused, seq_len=24, tied=False, parallelism=None, batches=(2, 2)):
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model.enable_weight_tying = tied
    stock = loss.ChunkedLossWrapper.Config(
        num_chunks=4, loss_fn=loss.CrossEntropyLoss.Config(global_vocab_size=V)
    )
    plain = loss.CrossEntropyLoss.Config(global_vocab_size=V)
    ours = FusedCELoss.Config()
    logged = []
    with tempfile.TemporaryDirectory() as folder:
        config = Trainer.Config(
            loss={"fused": ours, "chunked": stock, "plain": plain}[fused],
            model_spec=spec, dump_folder=folder, tokenizer=Words.Config(), dataloader=Rows.Config(),
            optimizer=optimizer.default_adamw(lr=1e-3),
            training=TrainingConfig(
                local_batch_size=batches[0], global_batch_size=batches[1], seq_len=seq_len, steps=3,
                mixed_precision_param="float32", disable_cuda_graphs=True,
            ),
            parallelism=ParallelismConfig(**(parallelism or {})),
            metrics=metrics.MetricsProcessor.Config(log_freq=1),
        )  # fmt: skip
        config.debug.seed = 0
        config.debug.spmd_typechecking = bool(os.environ.get("TYPES"))
        trainer = config.build()
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply

        def keep(step, mean, largest, norm, **more):
            logged.append((mean, norm))
        if os.environ.get("WHAT"):
            w = trainer.model_parts[-1].lm_head.weight
            print("WHAT", type(w), w.shape, getattr(w, "device_mesh", None), getattr(w, "placements", None))

        trainer.metrics_processor.log = keep
        trainer.train()
        trainer.close()
    head = trainer.model_parts[-1].lm_head
    report = None if head is None else fusedce.head_report(head)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        found = {"logged": logged}
        if report:
            found |= {"fused": report.losses_fused, "made": report.logits_made}
        print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
