"""Windows of a small model under DeepSpeed's ZeRO, on gloo: printed as JSON by rank 0.

python -m torch.distributed.run --nproc-per-node 2 deepspeed_windows.py STAGE
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from fusedce import LossAccumulator
from support import parallel
from support.ranks import error_of

# Compiled for minutes, and gloo does without.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
RATE = 0.5


def new_engine(stage):
    model = parallel.Model()
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def whole(parameter):
    """Without ZeRO it is whole."""
    full = safe_get_full_fp32_param(parameter)
    return parameter if full is None else full


def window(acc, engine, number, *, each=True, fill=True):
    """The micro-batches of `parallel`, the last window filled up; the last step comes after it."""
    micro = parallel.micro_batches(number, dist.get_rank())
    while fill and len(micro) < 3:
        micro.append((micro[0][0], torch.full_like(micro[0][1], -100)))
    with acc.window([(y != -100).sum() for _, y in micro]):
        for i, one in enumerate(micro):
            acc.backward(engine(*one))
            if each and i < len(micro) - 1:
                engine.step()
    engine.step()


def main(stage):
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    engine = new_engine(stage)
    acc = LossAccumulator.from_deepspeed(engine)
    for number in range(len(parallel.WINDOWS)):
        window(acc, engine, number)
    found = {
        "parameters": [whole(p).tolist() for p in engine.module.parameters()],
        "metrics": acc.metrics(),
        "streaming": error_of(acc.backward, engine(*parallel.micro_batches(0, 0)[0])),
        "short": error_of(window, acc, engine, 2, fill=False),
        "once": error_of(window, acc, engine, 0, each=False),
    }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
