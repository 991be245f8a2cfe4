"""torchtitan's Trainer with a small Llama on CPUs; one optimizer step of it over given sequences.

torchtitan 0.3 needs torch 2.15, so this runs in an environment of its own.
"""

from __future__ import annotations

import dataclasses
import tempfile
import types
from typing import Any

import torch

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan names the GPU of a machine
torch.cpu.set_device = lambda device: None

from torch import Tensor  # noqa: E402
from torchtitan.components import dataloader, metrics, optimizer, tokenizer  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from fusedce.integrations.torchtitan import FusedCELoss  # noqa: E402

V = 2048
utils.set_pg_timeouts = lambda **_: None
metrics.build_device_memory_monitor = lambda: types.SimpleNamespace(
    device_name="CPU", reset_peak_stats=lambda: None,
    get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6),
)  # fmt: skip


class Loader(dataloader.BaseDataLoader):
    """Base of loaders, which begin anew in each run."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(dataloader.BaseDataLoader.Config):
        pass

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


def build(
    loss: str,  # "fused", "chunked" as torchtitan's own configurations, or "plain": whole logits
    rows: type[Loader],
    folder: str,
    training: dict[str, Any],
    parallelism: dict[str, Any],
    tied: bool = False,
    typechecked: bool = False,
) -> Trainer:
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
    config = Trainer.Config(
        loss=losses[loss],
        model_spec=spec, dump_folder=folder, tokenizer=Words.Config(), dataloader=rows.Config(),
        optimizer=optimizer.default_adamw(lr=1e-3),
        training=TrainingConfig(
            mixed_precision_param="float32", disable_cuda_graphs=True, **training
        ),
        parallelism=ParallelismConfig(**parallelism),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
    )  # fmt: skip
    config.debug.seed = 0
    config.debug.spmd_typechecking = typechecked
    return config.build()


def step(
    loss: str, ids: Tensor, labels: Tensor, micro_batches: int
) -> tuple[float, Tensor, float, Tensor]:
    """Token mean and its gradient by plain torch; logged loss and gradient by the Trainer.

    ``labels (B, T)`` are shifted already, as torchtitan wants them. Runs under torchrun.
    """
    positions = torch.arange(ids.shape[1]).expand_as(ids)

    class Rows(Loader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Loader.Config):
            pass

        def __init__(self, config, **_):
            pass

        def __iter__(self):
            for part in range(micro_batches):
                x, p, y = (t.chunk(micro_batches)[part] for t in (ids, positions, labels))
                yield {"input": x, "positions": p.clone()}, y

    size = {
        "local_batch_size": len(ids) // micro_batches, "global_batch_size": len(ids),
        "seq_len": ids.shape[1], "steps": 1, "max_norm": 1e9,
    }  # fmt: skip
    logged: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(loss, Rows, folder, size, {})
        (model,) = trainer.model_parts
        # The model ends in hidden states, since both losses apply its head themselves.
        logits = model(ids, positions=positions) @ model.lm_head.weight.T
        token_mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        token_mean.backward()
        exact = _flat(model)
        trainer.metrics_processor.log = lambda step, mean, *_, **__: logged.append(mean)
        trainer.optimizers.step = lambda: logged.append(_flat(model))
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()
    found, mean = logged
    return token_mean.item(), exact, mean, found


def _flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])
